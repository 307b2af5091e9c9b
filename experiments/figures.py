"""Results files of the experiments, and their pictures, which need no model."""

import argparse
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from textwrap import fill
from typing import TYPE_CHECKING, Any

from harmonic_sft.plots import (
    CURRENT,
    POST_HOC,
    REFERENCE,
    TRAINING,
    new_figure,
    save_figure,
)
from harmonic_sft.results import environment, make_folder, read_results, write_results

if TYPE_CHECKING:
    from matplotlib.axes import Axes

logger = logging.getLogger(__name__)
Payload = dict[str, Any]
Row = dict[str, Any]
GREEN, PURPLE = "#3b8f6b", "#8b4a8b"
COLORS = (TRAINING, CURRENT, POST_HOC, GREEN, PURPLE)
MARKERS = "oD^s"  # lines that differ in grey too
CLASSES = {"A": CURRENT, "B": POST_HOC, "C": GREEN, "D": PURPLE}
SHADES = ("#9aa5b1", "#6f9bc4", "#1f4e79", "#c8702a")
LEGEND = {"fontsize": "small", "framealpha": 0.9, "edgecolor": "none"}
DIFFERENCE_TITLES = {"loss (nats per token)": 0.1, "accuracy (%)": 1.0}  # linear that far
COST_TITLE = "relative to linear\n+ cross-entropy"


def main(name: str, arguments: Sequence[str]) -> None:
    """Draw a results file again."""
    parser = argparse.ArgumentParser(prog=f"python -m experiments {name}", description=main.__doc__)
    parser.add_argument("figure", choices=list(FIGURES), help="what the file holds")
    parser.add_argument("results", type=Path, help="the JSON file")
    parser.add_argument("picture", type=Path, help="the PNG file")
    options = parser.parse_args(arguments)
    FIGURES[options.figure](read_results(options.results), options.picture)


def positive(text: str) -> int:
    """Return the number of an option, at least 1; argparse prints the error in one line."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {number}")
    return number


def check_output(folder: Path) -> None:
    """Make the folder of results, before the work that they take.

    Raises:
        ValueError: It cannot be made, or not written.
    """
    make_folder(folder, f"output: expected a folder for files, got {str(folder)!r}")


def keep(name: str, payload: Payload, output: Path) -> Path:
    """Write what an experiment found, `NAME.json`, and its picture, `NAME.png`.

    Args:
        name: One of `FIGURES`.
        payload: What was found.
        output: The folder, made if it does not exist. Files of these names are replaced.

    Returns:
        The path of the results file.

    Raises:
        ValueError: matplotlib is not installed, which shows after the results are written.
    """
    payload = {"experiment": name, **payload, "environment": environment()}
    path = write_results(output, name, payload)
    logger.info("Results: %s", path)
    logger.info("Figure: %s", FIGURES[name](payload, path.with_suffix(".png")))
    return path


def draw_family(payload: Payload, out_png: Path) -> Path:
    """Draw every row of a family, with its interval over seeds.

    Loss and accuracy are differences to the row it is compared with, if there is one.

    Raises:
        ValueError: No row with metrics, or matplotlib is not installed.
    """
    rows = [row for row in payload.get("rows", []) if "metrics" in row]
    if not rows:
        raise ValueError("rows: expected at least one with metrics, got none")
    compared_with = payload.get("compared_with")
    panels = [
        (title, [(label, found) for label, found in series if any(found)])
        for title, series in _family_panels(rows, payload.get("rated"), compared_with)
    ]
    panels = [(title, series) for title, series in panels if series]
    lines = -(-len(panels) // 3)
    figure = new_figure(width=10.0, height=lines * (1.6 + 0.3 * len(rows)))
    all_axes = figure.subplots(lines, -(-len(panels) // lines), sharey=True, squeeze=False).flat
    for axes in all_axes[len(panels) :]:
        axes.set_visible(False)
    for axes, (title, series) in zip(all_axes, panels, strict=False):
        for (label, found), color, marker in zip(series, (CURRENT, POST_HOC), "oD", strict=False):
            draw_spread(axes, found, label, color, marker)
        axes.set_xlabel(title)
        if len(series) > 1:
            place = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "frameon": False}
            axes.legend(fontsize="small", **place)
        if title in DIFFERENCE_TITLES and compared_with is not None:
            limit, unit = DIFFERENCE_TITLES[title], ""
            if max(abs(edge) for edge in axes.dataLim.intervalx) > limit:
                axes.set_xscale("symlog", linthresh=limit, subs=range(2, 10))
                axes.xaxis.set_major_formatter("{x:g}")
                axes.xaxis.set_minor_formatter(
                    lambda x, _: f"{x:g}" if f"{x:g}"[-1] in "25" else ""
                )
                axes.tick_params(axis="x", which="both", labelsize="small", pad=4)
                unit = f"\nlogarithmic beyond ±{limit:g}"
            axes.axvline(0, color="#888888", linewidth=1)
            axes.set_xlabel(f"{title}\n- {fill(compared_with, 24)}{unit}")
        if title == COST_TITLE:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:g}")
    all_axes[0].set_yticks(range(len(rows)), [row["name"] for row in rows])
    all_axes[0].set_ylim(len(rows) - 0.5, -0.5)
    return save_figure(figure, out_png, grid="both")


def describe_setting(setting: Row) -> str:
    """Return a setting of the toy language in a few words."""
    return (
        f"{setting['num_classes']} classes, D = {setting['hidden_size']}, learning rate "
        f"{setting['learning_rate']:g}, weight decay {setting['weight_decay']:g}"
    )


def draw_multi_head_toy(payload: Payload, out_png: Path) -> Path:
    """Draw the variance in two components over the number of heads, and one seed's tokens."""
    from experiments.harmonic_loss.bench import chance_cumulative  # which imports this module

    settings, shown = payload["settings"], payload["chosen"] or 0
    figure = new_figure(width=12.0, height=8.4)
    panels = figure.subplots(2, 2).flat
    for index, setting in enumerate(settings):
        if index != shown:
            _draw_setting(panels[0], setting, payload["tolerance"])
    rows = settings[shown]["rows"]
    heads = [row["num_heads"] for row in rows]
    means = [row["mean_percent"] for row in rows]
    label = f"{describe_setting(settings[shown])}: mean and range of {payload['num_seeds']} seeds"
    _draw_range(panels[0], heads, [row["percent"] for row in rows], means, CURRENT, label)
    blog = payload["blog_percent"]
    label = "blog: one run, settings unknown"
    panels[0].plot(list(map(int, blog)), blog.values(), "D", color=POST_HOC, ms=6, label=label)
    num_tokens, hidden_size = len(rows[0]["x"]), settings[shown]["hidden_size"]
    chance = 100 * chance_cumulative(num_tokens, hidden_size)[1]
    label = f"random numbers, {num_tokens} x {hidden_size}"
    panels[0].axhline(chance, color=REFERENCE, linestyle="--", label=label)
    panels[0].set_ylabel("variance in two components (%)")
    panels[0].set_title("hollow: Bayes loss not reached", loc="left", fontsize="medium")
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower left", ncols=2, frameon=False
    )
    for index, color in ((shown, CURRENT), (len(settings) - 1, POST_HOC)):
        values = [row["silhouette"] for row in settings[index]["rows"]]
        label = f"{settings[index]['num_classes']} classes"
        _draw_range(panels[1], heads, values, [fmean(one) for one in values], color, label)
    panels[1].set_ylabel("silhouette of the classes")
    panels[1].set_title("mean and range of the seeds", loc="left", fontsize="medium")
    panels[1].legend(**LEGEND)
    for axes, row in zip(panels[2:], [rows[0], rows[-1]], strict=True):
        _draw_tokens(axes, row)
    return save_figure(figure, out_png, grid="both")


def draw_multi_head_modular_addition(payload: Payload, out_png: Path) -> Path:
    """Draw accuracies over epochs, and the epochs at which they pass 0.9."""
    rows = payload["rows"]
    figure = new_figure(width=11.0, height=4.4)
    curves, epochs = figure.subplots(1, 2, width_ratios=[1.3, 1])
    places = payload["evaluated_epochs"]
    for row, color in zip(rows, SHADES, strict=True):
        label = f"{row['num_heads']} head{'s' * (row['num_heads'] > 1)}"
        curves.plot(places, row["curves"]["test"], color=color, linewidth=1.8, label=label)
        curves.plot(places, row["curves"]["train"], "--", color=color, linewidth=1.0)
    curves.set(xscale="log", xlabel="epoch")
    curves.set_ylabel(f"accuracy, mean of {payload['num_seeds']} seeds")
    curves.set_title("test (solid) and training (dashed)", loc="left", fontsize="medium")
    curves.legend(**LEGEND)
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
    epochs.set(
        xlabel="heads M, and seeds whose test accuracy arrives",
        ylabel="epoch at which accuracy passes 0.9",
    )
    epochs.set_title("one dot per seed, line: median", loc="left", fontsize="medium")
    epochs.legend(**LEGEND)
    return save_figure(figure, out_png, grid="both")


def draw_overhead(payload: Payload, out_png: Path) -> Path:
    """Draw what every arm adds to a training step, a panel for each vocabulary."""
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


def draw_calibration(payload: Payload, out_png: Path) -> Path:
    """Draw the calibration errors of every arm, with their intervals over seeds."""
    figure = new_figure(width=7.5, height=3.4)
    axes = figure.subplots()
    rows = payload["rows"]
    kinds = [("ece", "as trained", CURRENT), ("post_hoc_ece", "best post hoc", POST_HOC)]
    for shift, marker, (key, label, color) in zip((-0.12, 0.12), "oD", kinds, strict=True):
        found = [scaled(row[key], 100) for row in rows]
        draw_spread(axes, found, label, color, marker, shift=shift)
    name_rows(axes, [row["name"] for row in rows])
    axes.set_xlabel(f"calibration error (%), {len(payload['seeds'])} seeds")
    axes.legend(**LEGEND)
    return save_figure(figure, out_png, grid="both")


def draw_tokens(payload: Payload, out_png: Path) -> Path:
    """Draw every run's validation loss over the tokens it has seen, and the levels."""
    figure = new_figure(width=8.0, height=4.4)
    axes = figure.subplots()
    for row, color, marker in zip(payload["rows"], COLORS, MARKERS, strict=False):
        for index, curve in enumerate(row["curves"]):
            label = row["name"] if index == 0 else None
            places = [count / 1000 for count in curve["tokens"]]
            (line,) = axes.plot(places, curve["losses"], f"{marker}-", ms=4, label=label)
            line.set(color=color, linewidth=1.2)
    for level in payload["levels"]:
        axes.axhline(level, color=REFERENCE, linestyle="--", linewidth=0.9)
    axes.set(xlabel="thousands of tokens seen", ylabel="validation loss (nats), best post hoc")
    axes.legend(**LEGEND)
    return save_figure(figure, out_png, grid="both")


def draw_refresh(payload: Payload, out_png: Path) -> Path:
    """Draw how many of the first neighbors are left, and the loss that each interval ends at."""
    figure = new_figure(width=10.0, height=4.0)
    drift, losses = figure.subplots(1, 2, width_ratios=[1.5, 1])
    rows = payload["rows"]
    for row, color, marker in zip(rows, COLORS, MARKERS, strict=False):
        for kind, line in (("weighted", f"{marker}-"), ("all", f"{marker}--")):
            means = [100 * value["mean"] for value in row["kept"][kind]]
            label = row["name"] if kind == "weighted" else None
            drift.plot(row["steps"], means, line, ms=4, color=color, linewidth=1.3, label=label)
    drift.set(xlabel="optimizer step", ylabel="first neighbors left (%)")
    drift.set_title("tokens of the text (solid), all (dashed)", loc="left", fontsize="medium")
    drift.legend(**LEGEND)
    names = [str(row["refresh_every"] or "never") for row in rows]
    _draw_values(losses, names, [row["post_hoc_loss"] for row in rows])
    losses.set(xlabel="steps between refreshes", ylabel="post-hoc loss (nats)")
    return save_figure(figure, out_png, grid="both")


def draw_subwords(payload: Payload, out_png: Path) -> Path:
    """Draw the kinds of every kind's neighbors, before and after training."""
    figure = new_figure(width=11.0, height=3.4)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, when in zip(panels, ("before", "after"), strict=True):
        rows = [row["neighbors"] for row in payload[when].values()]
        left = [0.0] * len(rows)
        for kind, color in zip(rows[0], COLORS, strict=False):
            widths = [100 * row[kind]["mean"] for row in rows]
            axes.barh(list(payload[when]), widths, left=left, height=0.6, color=color, label=kind)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        axes.set_title(f"{when} training", loc="left", fontsize="medium")
        axes.set_xlabel("neighbors of each kind (%)")
    panels[0].invert_yaxis()
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper right", ncols=len(handles[0]), frameon=False)
    return save_figure(figure, out_png, grid="x")


def draw_sweep(payload: Payload, out_png: Path) -> Path:
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
            axes.set(xlabel=knob, ylabel=title)
    return save_figure(figure, out_png, grid="both")


def draw_small_gpt(payload: Payload, out_png: Path) -> Path:
    """Draw the differences between arms, and reward against what was forgotten."""
    figure = new_figure(width=11.0, height=4.0)
    axes, leash = figure.subplots(1, 2, width_ratios=[1.4, 1])
    found = [*payload["differences"], *payload["controls"]]
    draw_spread(axes, [scaled(one) for one in found], "95 % interval", CURRENT, "o")
    labels = {"best_loss": "", "few_shot": ", after 8 rows"}
    name_rows(axes, [f"{one['arm']} - {one['against']}{labels[one['value']]}" for one in found])
    axes.axvline(0, color=REFERENCE, linewidth=1.0)
    axes.set_xlabel(f"difference in loss (nats a token), {payload['num_seeds']} seeds")
    for penalty, color, marker in (("kl", TRAINING, "o"), ("w2", POST_HOC, "D")):
        for number, points in enumerate(payload["leash"]["points"]):
            curve = sorted(
                (one["reward"], one["forgotten"]) for one in points if one["penalty"] == penalty
            )
            label = penalty.upper() if number == 0 else None
            line = zip(*curve, strict=True)
            leash.plot(*line, f"{marker}-", ms=4, color=color, label=label)
    leash.set(xlabel="reward (cosine), a line for each seed", ylabel="forgotten (nats a token)")
    leash.legend(**LEGEND)
    return save_figure(figure, out_png, grid="both")


def draw_benchmark_ops(payload: Payload, out_png: Path) -> Path:
    """Draw the time of each loss next to the baseline's, in a panel for each size."""
    rows = payload["rows"]
    groups = {name: arm["group"] for row in rows for name, arm in row["arms"].items()}
    names = [name for group in ("peer", "ours") for name in groups if groups[name] == group]
    figure = new_figure(width=3.0 + 2.6 * len(rows), height=1.5 + 0.28 * len(names))
    panels = figure.subplots(1, len(rows), sharey=True, squeeze=False)[0]
    for axes, row in zip(panels, rows, strict=True):
        _draw_ratios(axes, row, names)
    panels[0].set_yticks(range(len(names)), names)
    panels[0].set_ylim(len(names) - 0.4, -0.6)
    figure.supxlabel(f"time relative to: {payload['baseline']}", fontsize="medium")
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper right", ncols=3, frameon=False)
    return save_figure(figure, out_png, grid="x")


FIGURES: dict[str, Callable[[Payload, Path], Path]] = {
    "family": draw_family,
    "causal_family": draw_family,
    "multi_head_toy": draw_multi_head_toy,
    "multi_head_modular_addition": draw_multi_head_modular_addition,
    "overhead": draw_overhead,
    "calibration": draw_calibration,
    "tokens": draw_tokens,
    "refresh": draw_refresh,
    "subwords": draw_subwords,
    "sweep": draw_sweep,
    "small_gpt": draw_small_gpt,
    "benchmark_ops": draw_benchmark_ops,
}


Spreads = list[tuple[float, float] | None]


def _family_panels(
    rows: Sequence[Row], rated: str | None, compared_with: str | None
) -> list[tuple[str, list[tuple[str, Spreads]]]]:
    """Return the panels: a title, and what is drawn of every row under which name."""

    def metric(key: str, scale: float = 1) -> Spreads:
        return [scaled(row["metrics"].get(key), scale) for row in rows]

    def similarity(key: str) -> Spreads:
        sets = [row.get("word_similarity", {}).get(rated, {}) for row in rows]
        return [scaled(one.get(key)) for one in sets]

    def cost(key: str) -> Spreads:
        return [(row["cost"][key], 0.0) if "cost" in row else None for row in rows]

    def difference(key: str, scale: float = 1) -> Spreads:
        return [_difference(row, key, scale) for row in rows]

    value = metric if compared_with is None else difference
    loss, accuracy = DIFFERENCE_TITLES
    calibration = [("as trained", "ece"), ("best post hoc", "post_hoc_ece")]
    return [
        (loss, [("as trained", value("loss")), ("best post hoc", value("post_hoc_loss"))]),
        (accuracy, [("accuracy", value("accuracy", 100))]),
        ("calibration error (%)", [(label, metric(key, 100)) for label, key in calibration]),
        ("error cosine", [("error cosine", metric("error_cosine"))]),
        (
            f"Spearman, {rated}",
            [("cosine", similarity("spearman_cosine")), ("-L2", similarity("spearman_l2"))],
        ),
        (COST_TITLE, [("time", cost("time_ratio")), ("memory", cost("memory_ratio"))]),
    ]


def _difference(row: Row, key: str, scale: float) -> tuple[float, float] | None:
    """Return the difference of a row and half of its interval; 0 of the row compared with."""
    if row["name"] == row.get("compared_with"):
        return 0.0, 0.0
    return scaled(row.get("difference", {}).get(key), scale)


def scaled(value: dict[str, Any] | None, scale: float = 1) -> tuple[float, float] | None:
    """Return mean and half of the interval, 0 where one seed has none."""
    return None if value is None else (scale * value["mean"], scale * (value["half_width"] or 0.0))


def draw_spread(
    axes: "Axes", values: Spreads, label: str | None, color: str, marker: str, *, shift: float = 0
) -> None:
    """Draw means and spreads, one row for each value that is known."""
    known = [(place + shift, *value) for place, value in enumerate(values) if value is not None]
    places, means, spreads = zip(*known, strict=True)
    axes.errorbar(
        means, places, xerr=spreads, fmt=marker, color=color, ms=5, capsize=3, label=label
    )


def name_rows(axes: "Axes", names: Sequence[str]) -> None:
    """Name the rows that `draw_spread` draws, the first on top."""
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()


def _draw_values(
    axes: "Axes", names: list[str], values: list[dict[str, Any]], *, scale: float = 1
) -> None:
    """Draw one column per name: every seed a dot, the mean a line."""
    for place, value in enumerate(values):
        seeds = [scale * one for one in value["values"]]
        axes.plot([place] * len(seeds), seeds, "o", color=CURRENT, ms=4, alpha=0.6)
        axes.plot(place, fmean(seeds), "_", color="black", ms=14)
    axes.set_xticks(range(len(names)), names)


def _draw_setting(axes: "Axes", setting: Row, tolerance: float) -> None:
    """Draw the means of a setting that is not the reported one, hollow where it misses Bayes."""
    rows = setting["rows"]
    heads = [row["num_heads"] for row in rows]
    means = [row["mean_percent"] for row in rows]
    (line,) = axes.plot(heads, means, "--", linewidth=1.0, label=describe_setting(setting))
    for row in rows:
        reaches = max(row["excess_loss"]) <= tolerance
        face = line.get_color() if reaches else "white"
        place = (row["num_heads"], row["mean_percent"])
        axes.plot(*place, "o", ms=4, color=line.get_color(), markerfacecolor=face)


def _draw_range(
    axes: "Axes",
    heads: Sequence[int],
    values: Sequence[Sequence[float]],
    means: Sequence[float],
    color: str,
    label: str,
) -> None:
    """Draw mean and range of the seeds over the number of heads."""
    least, most = zip(*((min(one), max(one)) for one in values), strict=True)
    axes.fill_between(heads, least, most, color=color, alpha=0.18, linewidth=0)
    axes.plot(heads, means, "o-", color=color, linewidth=2.0, ms=5, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(heads, [str(num_heads) for num_heads in heads])
    axes.set_xlabel("heads M")


def _draw_tokens(axes: "Axes", row: Row) -> None:
    """Draw the first seed's tokens on their two components, colored by class."""
    size = len(row["x"]) // len(CLASSES)
    for index, (name, color) in enumerate(CLASSES.items()):
        part = slice(index * size, (index + 1) * size)
        axes.plot(row["x"][part], row["y"][part], "o", color=color, ms=5, alpha=0.8, label=name)
    axes.set_aspect("equal", adjustable="datalim")
    axes.set(xlabel="first component", ylabel="second component")
    percent = f"{row['percent'][0]:.1f} %"
    axes.set_title(f"M = {row['num_heads']}, seed 0: {percent}", loc="left", fontsize="medium")
    axes.legend(fontsize="x-small", framealpha=0.9, edgecolor="none")


def _arrivals(row: Row) -> str:
    arrived = sum(epoch is not None for epoch in row["test_epochs"])
    return f"{row['num_heads']}\n{arrived} of {len(row['test_epochs'])}"


def _draw_ratios(axes: "Axes", row: Row, names: list[str]) -> None:
    """Draw the arms of one size; a name that was not measured there stays without a bar."""
    arms = row["arms"]
    for group, color, label in [("peer", TRAINING, "others"), ("ours", CURRENT, "this package")]:
        chosen = [name for name in names if name in arms and arms[name]["group"] == group]
        ratios = [arms[name]["median_ratio"] for name in chosen]
        places = [names.index(name) for name in chosen]
        bars = axes.barh(places, ratios, height=0.62, color=color, label=label)
        axes.bar_label(bars, fmt="{:.2f}", padding=3, fontsize="small")
    if row["floor"] is not None:
        ratio = arms[row["floor"]]["median_ratio"]
        label = "matrix products alone"
        axes.axvline(ratio, color=REFERENCE, linestyle="--", linewidth=1.2, label=label)
    sizes = [f"{row[key]:,}" for key in ("num_tokens", "hidden_size", "vocab_size")]
    axes.set_title(" x ".join(sizes), fontsize="medium")
    axes.margins(x=0.18)
