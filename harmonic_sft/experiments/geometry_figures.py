"""Figures of the geometry note, drawn from its results files; no model is needed."""

from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from harmonic_sft.experiments.subwords import KINDS
from harmonic_sft.plots import CURRENT, POST_HOC, REFERENCE, TRAINING, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Payload = dict[str, Any]
COLORS = (TRAINING, CURRENT, POST_HOC, "#3b8f6b", "#8b4a8b")
LEGEND = {"fontsize": "small", "framealpha": 0.9, "edgecolor": "none"}


def draw_overhead(payload: Payload, out_png: str | Path) -> Path:
    """Draw what every arm adds to a training step, a panel for each vocabulary.

    Raises:
        ValueError: matplotlib is not installed, as in all of these.
    """
    sizes = list(dict.fromkeys(row["vocab_size"] for row in payload["rows"]))
    figure = new_figure(width=4.0 + 3.0 * len(sizes), height=3.6)
    panels = figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0]
    for axes, size in zip(panels, sizes, strict=True):
        rows = [row for row in payload["rows"] if row["vocab_size"] == size]
        percents = [100 * row["overhead"] for row in rows]
        bars = axes.barh([row["name"] for row in rows], percents, height=0.6, color=CURRENT)
        axes.bar_label(bars, fmt="{:+.1f}", padding=3, fontsize="small")
        axes.axvline(0, color=REFERENCE, linewidth=1.0)
        axes.set_title(f"V = {size:,}", loc="left", fontsize="medium")
        axes.set_xlabel("added to a step of dist, harmonic (%)")
        axes.margins(x=0.2)
    panels[0].invert_yaxis()
    return save_figure(figure, out_png, grid="x")


def draw_calibration(payload: Payload, out_png: str | Path) -> Path:
    """Draw the calibration errors of every arm, with their spread over seeds."""
    figure = new_figure(width=7.5, height=3.4)
    axes = figure.subplots()
    rows = payload["rows"]
    kinds = [("ece", "as trained", CURRENT), ("post_hoc_ece", "best post hoc", POST_HOC)]
    for shift, (key, label, color) in zip((-0.12, 0.12), kinds, strict=True):
        places = [place + shift for place in range(len(rows))]
        means = [100 * row[key]["mean"] for row in rows]
        spreads = [100 * (row[key]["std"] or 0) for row in rows]
        axes.errorbar(means, places, xerr=spreads, fmt="o", color=color, capsize=3, label=label)
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel(f"calibration error (%), {len(payload['seeds'])} seeds")
    axes.legend(**LEGEND)
    return save_figure(figure, out_png, grid="both")


def draw_tokens(payload: Payload, out_png: str | Path) -> Path:
    """Draw every run's validation loss over the tokens it has seen, and the levels."""
    figure = new_figure(width=8.0, height=4.4)
    axes = figure.subplots()
    for row, color in zip(payload["rows"], COLORS, strict=False):
        for index, curve in enumerate(row["curves"]):
            label = row["name"] if index == 0 else None
            places = [count / 1000 for count in curve["tokens"]]
            axes.plot(places, curve["losses"], "o-", ms=3, color=color, linewidth=1.2, label=label)
    for level in payload["levels"]:
        axes.axhline(level, color=REFERENCE, linestyle="--", linewidth=0.9)
    axes.set_xlabel("thousands of tokens seen")
    axes.set_ylabel("validation loss (nats), best post hoc")
    axes.legend(**LEGEND)
    return save_figure(figure, out_png, grid="both")


def draw_refresh(payload: Payload, out_png: str | Path) -> Path:
    """Draw how many of the first neighbors are left, and the loss that each interval ends at."""
    figure = new_figure(width=10.0, height=4.0)
    drift, losses = figure.subplots(1, 2, width_ratios=[1.5, 1])
    rows = payload["rows"]
    for row, color in zip(rows, COLORS, strict=False):
        for kind, line in (("weighted", "o-"), ("all", "--")):
            means = [100 * value["mean"] for value in row["kept"][kind]]
            label = row["name"] if kind == "weighted" else None
            drift.plot(row["steps"], means, line, ms=4, color=color, linewidth=1.3, label=label)
    drift.set_xlabel("optimizer step")
    drift.set_ylabel("first neighbors left (%)")
    drift.set_title("tokens of the text (solid), all (dashed)", loc="left", fontsize="medium")
    drift.legend(**LEGEND)
    names = [str(row["refresh_every"] or "never") for row in rows]
    _draw_values(losses, names, [row["post_hoc_loss"] for row in rows])
    losses.set_xlabel("steps between refreshes")
    losses.set_ylabel("post-hoc loss (nats)")
    return save_figure(figure, out_png, grid="both")


def draw_subwords(payload: Payload, out_png: str | Path) -> Path:
    """Draw the kinds of every kind's neighbors, before and after training."""
    times = [when for when in ("before", "after") if payload[when] is not None]
    figure = new_figure(width=3.0 + 4.0 * len(times), height=3.4)
    panels = figure.subplots(1, len(times), sharey=True, squeeze=False)[0]
    for axes, when in zip(panels, times, strict=True):
        kinds = list(payload[when])
        left = [0.0] * len(kinds)
        for kind, color in zip(KINDS, COLORS, strict=False):
            widths = [100 * payload[when][one]["neighbors"][kind] for one in kinds]
            axes.barh(kinds, widths, left=left, height=0.6, color=color, label=kind)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        axes.set_title(f"{when} training", loc="left", fontsize="medium")
        axes.set_xlabel("neighbors of each kind (%)")
    panels[0].invert_yaxis()
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper right", ncols=len(KINDS), frameon=False)
    return save_figure(figure, out_png, grid="x")


def draw_sweep(payload: Payload, out_png: str | Path) -> Path:
    """Draw loss, accuracy, calibration and error cosine over epsilon and lambda."""
    kinds = [
        ("post_hoc_loss", "post-hoc loss (nats)", 1),
        ("accuracy", "accuracy (%)", 100),
        ("ece", "ECE (%)", 100),
        ("error_cosine", "error cosine", 1),
    ]
    figure = new_figure(width=12.0, height=5.6)
    panels = figure.subplots(2, len(kinds), sharey="col")
    zero = payload["rows"][0]
    for line, knob in zip(panels, ("epsilon", "lambda"), strict=True):
        rows = [zero, *(row for row in payload["rows"] if row["knob"] == knob)]
        for axes, (key, title, scale) in zip(line, kinds, strict=True):
            names = [f"{row['value']:g}" for row in rows]
            _draw_values(axes, names, [row[key] for row in rows], scale=scale)
            axes.set_xlabel(knob)
            axes.set_ylabel(title)
    return save_figure(figure, out_png, grid="both")


def _draw_values(
    axes: "Axes", names: list[str], values: list[dict[str, Any]], *, scale: float = 1
) -> None:
    """Draw one column per name: every seed a dot, the mean a line."""
    for place, value in enumerate(values):
        seeds = [scale * one for one in value["values"]]
        axes.plot([place] * len(seeds), seeds, "o", color=CURRENT, ms=4, alpha=0.6)
        axes.plot(place, fmean(seeds), "_", color="black", ms=14)
    axes.set_xticks(range(len(names)), names)
