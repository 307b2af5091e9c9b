"""Pictures of what the parts found; no model is needed."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.figures import draw_spread, name_rows, scaled
from harmonic_sft.plots import CURRENT, POST_HOC, REFERENCE, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ARMS = {  # in words
    "dist -12": "distance, h_exp -12",
    "dist -12, prior": "distance, h_exp -12, prior",
    "frozen": "untrained encoder",
    "euclid": "distance off the sphere",
    "dist -24": "distance, h_exp -24",
    "annealed": "distance, h_exp -12 to -4",
    "linear, means": "linear, from class means",
}


def draw_classes(payload: dict[str, Any], out_png: Path) -> Path:
    """Draw the gains over the best linear read-out, a panel a cell, and the margin."""
    rows = [row for row in payload["rows"] if row["arm"] != "linear"]
    cells = list(dict.fromkeys((row["cell"], row["rates_of"]) for row in rows))
    figure = new_figure(width=9.0, height=1.2 + 2.3 * len(cells))
    panels = figure.subplots(len(cells), 2, squeeze=False)
    for (cell, tuned), line in zip(cells, panels, strict=True):
        same = [row for row in rows if (row["cell"], row["rates_of"]) == (cell, tuned)]
        is_other = cell != tuned and cell.startswith(tuned.split(",")[0])
        note = f"\n(learning rates chosen on {tuned})" if is_other else ""
        for axes, key, scale in zip(line, ("gain", "auroc_gain"), (100, 1), strict=True):
            _draw_gains(axes, same, key, scale)
        title = f"{cell}{note}".replace("% wrong", " % wrong labels").replace(
            "a class", "of a class"
        )
        line[0].set_title(title.replace("all,", "all examples,"), loc="left", fontsize="medium")
        line[0].set_xlabel("accuracy over the best linear, points")
        line[1].set_xlabel("AUROC out of scope, over linear")
        line[1].set_yticklabels([])
    figure.supxlabel("mean and 95 % interval over seeds; dashed: margin", fontsize="medium")
    return save_figure(figure, out_png, grid="x")


def _draw_gains(
    axes: "Axes", rows: list[dict[str, Any]], key: str, scale: float = 1, margin: float = 0.01
) -> None:
    """Draw means with intervals, a line at no gain and a dashed one at the margin."""
    draw_spread(axes, [scaled(row[key], scale) for row in rows], None, CURRENT, "o")
    axes.axvline(0, color=REFERENCE, linewidth=1)
    axes.axvline(margin * scale, color=POST_HOC, linewidth=1, linestyle="--")
    name_rows(axes, [ARMS.get(row["arm"], row["arm"]) for row in rows])


def draw_bottleneck(payload: dict[str, Any], out_png: Path) -> Path:
    """Draw share and alignment of every head, a panel a width."""
    rows = payload["rows"]
    widths = sorted({row["width"] for row in rows})
    figure = new_figure(width=9.0, height=3.2)
    panels = figure.subplots(1, 2 * len(widths), sharey=True, squeeze=False)[0]
    heads = list(dict.fromkeys(row["head"] for row in rows))
    pairs = [(width, key) for key in ("share", "alignment") for width in widths]
    for axes, (width, key) in zip(panels, pairs, strict=True):
        for target, color, marker in ((4.0, CURRENT, "o"), (2.0, POST_HOC, "D")):
            same = [row for row in rows if (row["width"], row["target"]) == (width, target)]
            places = [heads.index(row["head"]) for row in same]
            means = [row[key]["mean"] for row in same]
            axes.plot(means, places, marker, color=color, label=f"at {target:g} nats")
        axes.set_yticks(range(len(heads)), heads)
        axes.set_xlim(left=0)
        axes.set_xlabel(f"{key}, D {width}")
    panels[0].invert_yaxis()
    panels[0].legend(loc="center left", fontsize="small")
    return save_figure(figure, out_png, grid="x")


def draw_masked(payload: dict[str, Any], out_png: Path) -> Path:
    """Draw the gains over the linear head in nats, a panel a base, and the margin of 0.02."""
    rows = [row for row in payload["rows"] if "gain" in row and row["base"] != "both"]
    bases = list(dict.fromkeys(row["base"] for row in rows))
    most = max((sum(row["base"] == base for row in rows) for base in bases), default=1)
    figure = new_figure(width=9.0, height=1.4 + 0.3 * most)
    panels = figure.subplots(1, max(1, len(bases)), sharex=True, squeeze=False)[0]
    for axes, base in zip(panels, bases, strict=False):
        same = [row for row in rows if row["base"] == base]
        _draw_gains(axes, same, "gain", margin=0.02)
        axes.set_title(f"base made with a {base} head", loc="left", fontsize="medium")
        axes.set_xlabel("nats over the linear head (higher is better; dashed: margin)")
    return save_figure(figure, out_png, grid="x")


def draw_language(payload: dict[str, Any], out_png: Path) -> Path:
    """Draw the loss of every arm of the tiny language model at its best exponent."""
    figure = new_figure(width=9.0, height=1.2 + 0.3 * len(payload["rows"]))
    axes = figure.subplots()
    rows = payload["rows"]
    draw_spread(axes, [scaled(row["best_loss"]) for row in rows], None, CURRENT, "o")
    name_rows(axes, [row["arm"] for row in rows])
    axes.set_xlabel("held-out loss at the best exponent or temperature, nats (lower is better)")
    return save_figure(figure, out_png, grid="x")
