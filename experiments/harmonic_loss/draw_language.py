"""Pictures of the small GPT-2 and of the probes."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.figures import GREEN, LEGEND
from harmonic_sft.plots import CURRENT, POST_HOC, REFERENCE, TRAINING, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = dict[str, Any]
ARMS = {
    "linear": ("linear, cross-entropy", "black"),
    "comment": ("distance, h_exp -11.3", CURRENT),
    "script": ("distance, h_exp -128", POST_HOC),
    "text": ("distance, h_exp -5.7", GREEN),
}
NUM_COLUMNS = 4
MODELS = {"MiniLM": TRAINING, "GPT-2, linear": "black", "GPT-2, comment": CURRENT}


def draw_language(payload: Row, out_png: Path) -> Path:
    """Draw loss curves, parallelograms by layer, and the scores' distributions by task."""
    tasks, rows = list(payload["num_pairs"]), payload["rows"]
    arms = [arm for arm in ARMS if any(row["arm"] == arm for row in rows)]
    num_lines = -(-len(tasks) // NUM_COLUMNS)
    figure = new_figure(width=11.0, height=3.6 + 2.5 * num_lines)
    grid = figure.add_gridspec(num_lines + 1, NUM_COLUMNS)
    _draw_losses(figure.add_subplot(grid[0, :2]), payload, arms)
    _draw_layers(figure.add_subplot(grid[0, 2:]), rows, arms, tasks)
    for place, task in enumerate(tasks):
        axes = figure.add_subplot(grid[1 + place // NUM_COLUMNS, place % NUM_COLUMNS])
        _draw_scores(axes, rows, arms, task)
        axes.set_title(f"{task}: {payload['num_pairs'][task]} pairs", fontsize="medium")
        axes.set_xlabel("score in two components", fontsize="small")
        if place % NUM_COLUMNS == 0:
            axes.set_ylabel("share of quadruples below")
    figure.supxlabel(
        "mean of the seeds; dashed: the same with shuffled outputs; 0 is a parallelogram",
        fontsize="small",
    )
    return save_figure(figure, out_png, grid="both")


def _draw_losses(axes: "Axes", payload: Row, arms: Sequence[str]) -> None:
    for arm in arms:
        label, color = ARMS[arm]
        chosen = [row for row in payload["rows"] if row["arm"] == arm]
        curves = np.array([row["curve"] for row in chosen])  # [S, points, 2]
        thousands = curves[0, :, 0] / curves[0, -1, 0] * chosen[0]["num_tokens"] / 1000
        axes.plot(thousands, curves[..., 1].mean(0), "o-", color=color, ms=4, label=label)
        for curve in curves:
            axes.plot(thousands, curve[:, 1], color=color, linewidth=0.6, alpha=0.6)
    loss = payload["unigram_loss"]
    axes.axhline(loss, color=REFERENCE, linestyle="--", label="unigram frequencies (test)")
    axes.set(xlabel="thousand tokens read", ylabel="validation loss (nats a token)")
    axes.legend(**LEGEND)


def _draw_layers(
    axes: "Axes", rows: Sequence[Row], arms: Sequence[str], tasks: Sequence[str]
) -> None:
    for arm in arms:
        label, color = ARMS[arm]
        found = np.array(
            [[row["layers"][task] for task in tasks] for row in rows if row["arm"] == arm]
        )  # [S, tasks, layers, 2]
        ratios = (found[..., 0] / found[..., 1]).mean(1)
        axes.plot(ratios.mean(0), "o-", color=color, ms=4, label=label)
        axes.plot(ratios.T, color=color, linewidth=0.6, alpha=0.6)
    axes.axhline(1, color=REFERENCE, linestyle="--", label="shuffled outputs")
    axes.set(xlabel="after block", ylabel=f"loss / shuffled, mean of {len(tasks)} tasks")
    axes.set_title("all dimensions, by layer", fontsize="medium")
    axes.set_xticks(range(ratios.shape[1]))
    axes.legend(**LEGEND)


def _draw_scores(axes: "Axes", rows: Sequence[Row], arms: Sequence[str], task: str) -> None:
    edge = 0.0
    for arm in arms:
        color = ARMS[arm][1]
        chosen = [row["tasks"][task] for row in rows if row["arm"] == arm]
        for key, style in (("quantiles", "-"), ("quantiles_shuffled", "--")):
            quantiles = np.mean([one[key] for one in chosen], axis=0)
            axes.plot(quantiles, np.linspace(0, 1, len(quantiles)), style, color=color, lw=1.4)
            edge = max(edge, float(quantiles[int(0.9 * len(quantiles))]))
    axes.set(xlim=(0, edge), ylim=(0, 1))


def draw_probes(payload: Row, out_png: Path) -> Path:
    """Draw the accuracy of every probe: values, mean, and that of the commoner class."""
    rows = payload["rows"]
    panels = [(task, probe) for task in payload["chance"] for probe in ("logistic", "mlp")]
    figure = new_figure(width=9.5, height=6.4)
    grid = figure.subplots(len(payload["chance"]), 2, squeeze=False).flat
    for axes, (task, probe) in zip(grid, panels, strict=True):
        for shift, (model, color) in enumerate(MODELS.items()):
            chosen = [
                row
                for row in rows
                if (row["task"], row["probe"], row["model"]) == (task, probe, model)
            ]
            for place, row in enumerate(chosen):
                values = [100 * value for value in row["accuracy"]["values"]]
                x = place + 0.2 * (shift - 1)
                axes.plot([x] * len(values), values, "o", color=color, ms=4, alpha=0.5, label=model)
                axes.plot(x, fmean(values), "_", color=color, ms=14)
        chance = 100 * payload["chance"][task]["accuracy"]
        axes.axhline(chance, color=REFERENCE, linestyle="--", label="the commoner class")
        axes.set_xticks(range(3), ["first layer", "middle", "last"])
        axes.set_xlim(-0.5, 2.5)
        names = {"logistic": "logistic regression", "mlp": "MLP of width 16"}
        axes.set_title(f"{task}, {names[probe]}", fontsize="medium")
        axes.set_ylabel("accuracy (%)")
    found: dict[str, Any] = {}
    for handle, label in zip(*figure.axes[0].get_legend_handles_labels(), strict=True):
        found.setdefault(label, handle)
    figure.legend(found.values(), found.keys(), loc="outside upper center", ncols=4, frameon=False)
    return save_figure(figure, out_png, grid="both")
