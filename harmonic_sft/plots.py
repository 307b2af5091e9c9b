"""Pictures of results files; no model is needed to draw them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TRAINING = "#9aa5b1"
CURRENT = "#1f4e79"
POST_HOC = "#c8702a"
REFERENCE = "#5f6b76"
WITHOUT_H_EXP = {CURRENT: "", POST_HOC: "at the best temperature"}
LABELS = {CURRENT: "at the current h_exp", POST_HOC: "at the best h_exp or temperature"}


def plot_run(results: dict[str, Any], out_png: Path) -> Path:
    """Draw loss, learning rate and h_exp of one run over its optimizer steps.

    Args:
        results: `run` (the name) and `history`, a list of `{"step": int}` with any of `loss`,
            `eval_loss`, `eval_post_hoc_loss` (nats), `learning_rate` and `h_exp`; `unigram_loss`
            (nats) if known.
        out_png: The picture, whose path is returned. Its folder is made if it does not exist.
    """
    history = results["history"]
    logged = [key for key in ("learning_rate", "h_exp") if _series(history, key)[0]]
    heights = [2.4, *(1.0 for _ in logged)]
    figure = new_figure(width=8.0, height=1.4 + 1.3 * sum(heights))
    panels = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)[
        :, 0
    ]
    _draw_losses(panels[0], results)
    panels[0].set_title(results["run"], loc="left", fontweight="bold")
    for axes, key in zip(panels[1:], logged, strict=True):
        axes.plot(*_series(history, key), ".-", color=CURRENT, ms=4, linewidth=1.6)
        axes.set_ylabel(key.replace("learning_rate", "learning rate"))
        if key == "learning_rate":
            axes.ticklabel_format(axis="y", style="scientific", scilimits=(0, 0))
            axes.set_ylim(bottom=0)
    panels[-1].set_xlabel("optimizer step")
    panels[-1].xaxis.get_major_locator().set_params(integer=True)
    figure.align_ylabels()
    return save_figure(figure, out_png, grid="both")


def plot_comparison(results: Sequence[dict[str, Any]], out_png: Path) -> Path:
    """Draw the final evaluation losses and accuracies of several runs side by side.

    Args:
        results: `run` (the name) and `final` with `loss`, if known `post_hoc_loss` (both in nats)
            and `accuracy` (0 to 1); `unigram_loss` (nats) if known.
        out_png: The picture, whose path is returned. Its folder is made if it does not exist.
    """
    names = [run["run"] for run in results]
    finals = [run["final"] for run in results]
    figure = new_figure(width=10.0, height=1.5 + 0.7 * len(names))
    losses, accuracies = figure.subplots(1, 2, sharey=True, width_ratios=[3, 2])
    paired = [row for row, final in enumerate(finals) if final.get("post_hoc_loss") is not None]
    rows = [row - 0.2 if row in paired else row for row in range(len(names))]
    has_h_exp = any("h_exp" in final for final in finals)
    labels = (LABELS if has_h_exp else WITHOUT_H_EXP) | {CURRENT: "as trained"}
    _draw_bars(losses, rows, [final["loss"] for final in finals], CURRENT, labels, "{:.2f}")
    if paired:
        post_hoc = [finals[row]["post_hoc_loss"] for row in paired]
        _draw_bars(losses, [row + 0.2 for row in paired], post_hoc, POST_HOC, labels, "{:.2f}")
    _draw_unigram(losses.axvline, results)
    percents = [100 * final["accuracy"] for final in finals]
    _draw_bars(accuracies, list(range(len(names))), percents, CURRENT, labels, "{:.1f}")
    losses.set_xlabel("evaluation loss, nats")
    accuracies.set_xlabel("accuracy, %")
    losses.set_yticks(range(len(names)), names)
    losses.set_ylim(len(names) - 0.5, -0.5)
    figure.legend(
        *losses.get_legend_handles_labels(), loc="outside upper right", ncols=3, frameon=False
    )
    return save_figure(figure, out_png, grid="x")


def new_figure(width: float, height: float) -> "Figure":
    """Return a figure outside pyplot, which would switch the backend for the whole process."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            "matplotlib: expected an installed package, got none. "
            "Install it with: pip install matplotlib"
        ) from error
    return Figure(figsize=(width, height), dpi=150, layout="constrained")


def save_figure(figure: "Figure", path: Path, grid: Literal["both", "x"]) -> Path:
    """Give all axes the house look, write the picture as its suffix says, and return its path."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis=grid, color="#e3e7eb", linewidth=0.8)
        axes.set_axisbelow(True)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _series(history: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Return the steps at which something was logged, and its values."""
    entries = [entry for entry in history if entry.get(key) is not None]
    return [entry["step"] for entry in entries], [entry[key] for entry in entries]


def _draw_losses(axes: "Axes", results: dict[str, Any]) -> None:
    history = results["history"]
    has_h_exp = any("h_exp" in entry or "eval_h_exp" in entry for entry in history)
    steps, values = _series(history, "loss")
    if values:
        axes.plot(steps, values, ".-", color=TRAINING, ms=4, linewidth=1.2, label="training")
    labels = LABELS if has_h_exp else WITHOUT_H_EXP
    for key, color, marker in [("eval_loss", CURRENT, "o"), ("eval_post_hoc_loss", POST_HOC, "D")]:
        steps, values = _series(history, key)
        label = f"evaluation {labels[color]}".strip()
        if values:
            axes.plot(steps, values, f"{marker}-", color=color, ms=5, linewidth=0.8, label=label)
    _draw_unigram(axes.axhline, [results])
    axes.set_ylabel("loss, nats")
    axes.legend(fontsize="small", framealpha=0.9, edgecolor="none")


def _draw_unigram(line_fn: Callable[..., Any], results: Sequence[dict[str, Any]]) -> None:
    """Draw the loss of the text's word frequencies, which a model has to beat."""
    known = [run["unigram_loss"] for run in results if run.get("unigram_loss") is not None]
    if known:
        line_fn(
            known[0], color=REFERENCE, linestyle="--", linewidth=1.2, label="guessing by frequency"
        )


def _draw_bars(
    axes: "Axes",
    rows: list[float],
    values: list[float],
    color: str,
    labels: dict[str, str],
    number: str,
) -> None:
    """Draw one bar per run with its number, which stays readable where a line crosses it."""
    bars = axes.barh(rows, values, height=0.36, color=color, label=labels[color])
    texts = [number.format(value) for value in values]
    background = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
    axes.bar_label(bars, texts, padding=4, bbox=background)
    axes.margins(x=0.14)
