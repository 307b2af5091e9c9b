"""Figures of the experiments, drawn from their results files; no model is needed."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from harmonic_sft.plots import CURRENT, POST_HOC, TRAINING, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CLASSES = {"A": "#1f4e79", "B": "#c8702a", "C": "#3b8f6b", "D": "#8b4a8b"}
SHADES = ("#9aa5b1", "#6f9bc4", "#1f4e79", "#c8702a")


def draw_multi_head_toy(payload: dict[str, Any], out_png: str | Path) -> Path:
    """Draw the variance in two components over the number of heads, and one seed's tokens.

    Args:
        payload: What `multi_head_toy.run` returns.
        out_png: The picture. Its folder is made if it does not exist.

    Returns:
        The path of the picture.

    Raises:
        ValueError: matplotlib is not installed.
    """
    settings, shown = payload["settings"], payload["chosen"] or 0
    figure = new_figure(width=12.0, height=5.2)
    panels = figure.subplots(1, 3, width_ratios=[1.6, 1, 1])
    for index, setting in enumerate(settings):
        if index != shown:
            _draw_setting(panels[0], setting, payload["tolerance"])
    rows = settings[shown]["rows"]
    heads = [row["num_heads"] for row in rows]
    means = [row["mean_percent"] for row in rows]
    least = [min(row["percent"]) for row in rows]
    most = [max(row["percent"]) for row in rows]
    label = f"{_label(settings[shown])}: mean and range of {payload['num_seeds']} seeds"
    panels[0].fill_between(heads, least, most, color=CURRENT, alpha=0.18, linewidth=0)
    panels[0].plot(heads, means, "o-", color=CURRENT, linewidth=2.0, ms=5, label=label)
    blog = payload["blog_percent"]
    label = "blog: one run, settings unknown"
    panels[0].plot(list(map(int, blog)), blog.values(), "D", color=POST_HOC, ms=6, label=label)
    panels[0].set_xscale("log", base=2)
    panels[0].set_xticks(heads, [str(num_heads) for num_heads in heads])
    panels[0].set_xlabel("heads M")
    panels[0].set_ylabel("variance in two components (%)")
    panels[0].set_title("hollow: Bayes loss not reached", loc="left", fontsize="medium")
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower left", ncols=2, frameon=False
    )
    for axes, row in zip(panels[1:], [rows[0], rows[-1]], strict=True):
        _draw_tokens(axes, row)
    return save_figure(figure, out_png, grid="both")


def draw_multi_head_modular_addition(payload: dict[str, Any], out_png: str | Path) -> Path:
    """Draw accuracies over epochs, and the epochs at which they pass 0.9.

    Args:
        payload: What `multi_head_modular_addition.run` returns.
        out_png: The picture. Its folder is made if it does not exist.

    Returns:
        The path of the picture.

    Raises:
        ValueError: matplotlib is not installed.
    """
    rows = payload["rows"]
    figure = new_figure(width=11.0, height=4.4)
    curves, epochs = figure.subplots(1, 2, width_ratios=[1.3, 1])
    places = payload["evaluated_epochs"]
    for row, color in zip(rows, SHADES, strict=True):
        label = f"{row['num_heads']} head{'s' * (row['num_heads'] > 1)}"
        curves.plot(places, row["curves"]["test"], color=color, linewidth=1.8, label=label)
        curves.plot(places, row["curves"]["train"], "--", color=color, linewidth=1.0)
    curves.set_xscale("log")
    curves.set_xlabel("epoch")
    curves.set_ylabel(f"accuracy, mean of {payload['num_seeds']} seeds")
    curves.set_title("test (solid) and training (dashed)", loc="left", fontsize="medium")
    curves.legend(fontsize="small", framealpha=0.9, edgecolor="none")
    styles = [("train", TRAINING, "training"), ("test", CURRENT, "test")]
    for place, (key, color, label) in enumerate(styles):
        for column, row in enumerate(rows):
            known = [epoch for epoch in row[f"{key}_epochs"] if epoch is not None]
            columns = [column + 0.24 * place - 0.12] * len(known)
            name = label if column == 0 else None
            epochs.plot(columns, known, "o", color=color, ms=5, alpha=0.7, label=name)
            if (middle := row[f"median_{key}_epoch"]) is not None:
                epochs.plot(columns[0], middle, "_", color="black", ms=16)
    epochs.set_yscale("log")
    epochs.set_xticks(range(len(rows)), [_arrivals(row) for row in rows])
    epochs.set_xlim(-0.5, len(rows) - 0.5)
    epochs.set_xlabel("heads M, and seeds whose test accuracy arrives")
    epochs.set_ylabel("epoch at which accuracy passes 0.9")
    epochs.set_title("one dot per seed, line: median", loc="left", fontsize="medium")
    epochs.legend(fontsize="small", framealpha=0.9, edgecolor="none")
    return save_figure(figure, out_png, grid="both")


def _draw_setting(axes: "Axes", setting: dict[str, Any], tolerance: float) -> None:
    """Draw the means of a setting that is not the reported one, hollow where it misses Bayes."""
    rows = setting["rows"]
    heads = [row["num_heads"] for row in rows]
    means = [row["mean_percent"] for row in rows]
    (line,) = axes.plot(heads, means, "--", linewidth=1.0, label=_label(setting))
    for row in rows:
        reaches = max(row["excess_loss"]) <= tolerance
        face = line.get_color() if reaches else "white"
        place = (row["num_heads"], row["mean_percent"])
        axes.plot(*place, "o", ms=4, color=line.get_color(), markerfacecolor=face)


def _arrivals(row: dict[str, Any]) -> str:
    arrived = sum(epoch is not None for epoch in row["test_epochs"])
    return f"{row['num_heads']}\n{arrived} of {len(row['test_epochs'])}"


def _label(setting: dict[str, Any]) -> str:
    return (
        f"D = {setting['hidden_size']}, learning rate {setting['learning_rate']:g}, "
        f"weight decay {setting['weight_decay']:g}"
    )


def _draw_tokens(axes: "Axes", row: dict[str, Any]) -> None:
    """Draw the first seed's tokens on their two components, colored by class."""
    size = len(row["x"]) // len(CLASSES)
    for index, (name, color) in enumerate(CLASSES.items()):
        part = slice(index * size, (index + 1) * size)
        axes.plot(row["x"][part], row["y"][part], "o", color=color, ms=5, alpha=0.8, label=name)
    axes.set_aspect("equal", adjustable="datalim")
    axes.set_xlabel("first component")
    axes.set_ylabel("second component")
    percent = f"{row['percent'][0]:.1f} %"
    axes.set_title(f"M = {row['num_heads']}, seed 0: {percent}", loc="left", fontsize="medium")
    axes.legend(fontsize="x-small", framealpha=0.9, edgecolor="none")
