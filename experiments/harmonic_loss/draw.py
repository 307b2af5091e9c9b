"""Pictures of the figures' results files."""

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean, median
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.figures import GREEN, LEGEND, PURPLE
from experiments.harmonic_loss.cells import EXPONENTS, PUBLISHED, Row
from experiments.harmonic_loss.cosets import GROUP, partitions
from experiments.harmonic_loss.data import DIVISOR, NUM_NUMBERS
from harmonic_sft.plots import CURRENT, POST_HOC, REFERENCE, TRAINING, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MODELS = {
    ("mlp", "linear"): ("MLP, cross-entropy", TRAINING),
    ("mlp", "dist"): ("MLP, harmonic", CURRENT),
    ("transformer", "linear"): ("transformer, cross-entropy", "#c9b37e"),
    ("transformer", "dist"): ("transformer, harmonic", POST_HOC),
}
SPLITS = {"released": ("released split", CURRENT), "clean": ("clean split", GREEN)}
ARMS = {
    "linear": ("linear, cross-entropy", "black"),
    "comment": ("distance, h_exp -11.3", CURRENT),
    "script": ("distance, h_exp -128", POST_HOC),
    "text": ("distance, h_exp -5.7", GREEN),
}
LAWS = {  # of Figure 6
    "linear": "dot product, softmax: standard",
    "l2": "-d, softmax",
    "l2_squared": "-d$^2$, softmax",
    "dot_harmonic": "dot product squared, harmonic law",
    "dist": "distance, harmonic law: harmonic",
}
LOSSES = {
    "contrastive": "contrastive",
    "soft_nn": "soft nearest neighbor",
    "spherical": "spherical",
}
NUM_COLUMNS = 4  # of tasks of the language model
NUM_ACROSS = 3  # panels of the five tasks
KLEIN = "left cosets of {0123, 1032, 2301, 3210}"  # the identity and the double transpositions
POINT_COLORS = [CURRENT, POST_HOC, GREEN, PURPLE, "#888888"]
# d of h_exp -1 to -10, as the paper reports it: four seeds, read from its figure.
PUBLISHED_EXPONENTS = {
    "modular_addition": (79.6, 58.8, 57.3, 44.0, 44.5, 45.2, 45.7, 47.3, 49.0, 52.1),
    "in_context": (100.0, 100.0, 99.9, 99.9, 99.9, 99.9, 99.9, 99.5, 98.9, 97.0),
}


def draw_embeddings(payload: Row, out_png: Path) -> Path:
    """Draw the tokens of the median seed on two components: a task a line, a model a column."""
    rows = _released(payload)
    tasks, models = _by_task(rows), [key for key in MODELS if any(_model(r) == key for r in rows)]
    figure = new_figure(width=1.0 + 2.9 * len(models), height=0.6 + 2.7 * len(tasks))
    panels = figure.subplots(len(tasks), len(models), squeeze=False)
    for line, (task, chosen) in zip(panels, tasks.items(), strict=True):
        classes, named = _classes(task)
        line[0].set_ylabel(f"{task.replace('_', ' ')}{named}")
        for axes, model in zip(line, models, strict=True):
            axes.set(xticks=[], yticks=[])
            colors = {"c": classes, "cmap": "Dark2"} if classes else {"color": MODELS[model][1]}
            for row in (row for row in chosen if _model(row) == model):
                x, y = zip(*row["places"], strict=True)
                axes.scatter(x, y, s=14, **colors)
                if classes is None and len(row["places"]) <= 40:
                    for token, place in enumerate(row["places"]):
                        axes.annotate(
                            str(token),
                            place,
                            xytext=(3, 3),
                            textcoords="offset points",
                            fontsize=6,
                            color="#444444",
                        )
                axes.set_aspect("equal", adjustable="datalim")
                axes.margins(0.1)
                axes.set_title(_heading(row), fontsize="x-small")
    for axes, model in zip(panels[-1], models, strict=True):
        axes.set_xlabel(MODELS[model][0])
    figure.supxlabel(
        "first two components; the median by variance of the converged seeds",
        fontsize="small",
    )
    return save_figure(figure, out_png, grid="both")


def draw_variance(payload: Row, out_png: Path) -> Path:
    """Draw the explained variance of every seed beside what the paper reports."""
    rows = payload["rows"]
    panels, figure = _task_panels(rows, ylabel="variance in two components (%)")
    models = [key for key in MODELS if any(_model(row) == key for row in rows)]
    for axes, chosen in panels.items():
        for place, model in enumerate(models):
            for row in (row for row in chosen if _model(row) == model):
                at = place - 0.18 if row["cell"]["split"] == "released" else place + 0.02
                _dots(axes, at, row["variance_percent"], *_split(row))
            mean, least, most = PUBLISHED[chosen[0]["cell"]["task"], *model]
            spread = [[mean - least], [most - mean]]
            label = "published: mean and range"
            axes.errorbar(
                [place + 0.25],
                [mean],
                spread,
                fmt="D",
                color=POST_HOC,
                ms=5,
                capsize=3,
                label=label,
            )
        axes.axhline(
            chosen[0]["chance_percent"], color=REFERENCE, linestyle="--", label="random embedding"
        )
        names = [MODELS[model][0].replace(", ", "\n") for model in models]
        axes.set_xticks(range(len(models)), names, fontsize="x-small")
        axes.set_xlim(-0.6, len(models) - 0.4)
    next(iter(panels)).plot([], [], "_", color="black", ms=8, label="mean")
    _legend_of(figure, list(panels))
    return save_figure(figure, out_png, grid="both")


def draw_cumulative(payload: Row, out_png: Path) -> Path:
    """Draw the variance over the number of components: median and quartiles of all seeds."""
    panels, figure = _task_panels(_released(payload), "components", "explained variance (%)")
    for axes, chosen in panels.items():
        for row in chosen:
            label, color = MODELS[_model(row)]
            curves = 100 * np.asarray(row["cumulative"])  # [S, components]
            components = range(1, curves.shape[1] + 1)
            low, middle, high = np.quantile(curves, (0.25, 0.5, 0.75), axis=0)
            _band(axes, components, (low, middle, high), color, label)
        chance = 100 * np.asarray(chosen[0]["chance_cumulative"])
        axes.plot(components, chance, "--", color=REFERENCE, label="random embedding")
    _legend_of(figure, list(panels))
    return save_figure(figure, out_png, grid="both")


def draw_efficiency(payload: Row, out_png: Path) -> Path:
    """Draw test accuracy over the share of examples trained on: median and range of seeds.

    Of the clean split the median alone, dashed.
    """
    panels, figure = _task_panels(payload["rows"], "share of examples trained on", "test accuracy")
    for axes, rows in panels.items():
        for (model, (label, color)), split in product(MODELS.items(), SPLITS):
            of_split = [row for row in rows if row["cell"]["split"] == split]
            chosen = [row for row in of_split if _model(row) == model]
            if not chosen:
                continue
            fractions = [row["cell"]["train_fraction"] for row in chosen]
            low, middle, high = (
                [f(row["test_accuracies"]) for row in chosen] for f in (min, median, max)
            )
            if split == "released":
                _band(axes, fractions, (low, middle, high), color, label)
            else:
                axes.plot(fractions, middle, "--", color=color, label=f"{label}, clean split")
    _legend_of(figure, list(panels))
    return save_figure(figure, out_png, grid="both")


def draw_grokking(payload: Row, out_png: Path) -> Path:
    """Draw when test and training accuracy pass 0.9; runs that never do stand at the edges."""
    panels, figure = _task_panels(
        _released(payload),
        "training accuracy > 0.9 (epoch)",
        "test accuracy > 0.9 (epoch; line: never)",
    )
    for axes, chosen in panels.items():
        never = 2 * max(row["cell"]["num_epochs"] for row in chosen)
        for row in chosen:
            label, color = MODELS[_model(row)]
            x = [never if epoch is None else epoch for epoch in row["train_epochs"]]
            y = [never if epoch is None else epoch for epoch in row["test_epochs"]]
            axes.plot(x, y, "o", color=color, ms=5, alpha=0.6, label=label)
        axes.plot([3, never], [3, never], "--", color=REFERENCE, linewidth=1)
        axes.axhline(never, color=REFERENCE, linewidth=0.8)
        axes.set(xscale="log", yscale="log")
        lines = [
            f"{MODELS[_model(r)][0]}: {r['num_converged']} of {r['num_seeds']}" for r in chosen
        ]
        text = "converged\n" + "\n".join(lines)
        axes.text(0.97, 0.03, text, transform=axes.transAxes, fontsize=7, ha="right", va="bottom")
    _legend_of(figure, list(panels))
    return save_figure(figure, out_png, grid="both")


def draw_cells(payload: Row, out_png: Path) -> Path:
    """Draw explained variance and test accuracy of every cell: seeds, mean, chance level."""
    tasks = _by_task(payload["rows"])
    longest = max(map(len, tasks.values())) / len(SPLITS)
    figure = new_figure(width=9.5, height=1.2 + len(tasks) * (0.8 + 0.42 * longest))
    panels = figure.subplots(len(tasks), 2, squeeze=False, sharey="row")
    keys = (("variance_percent", 1), ("test_accuracies", 100))
    for line, (task, chosen) in zip(panels, tasks.items(), strict=True):
        names = list(dict.fromkeys(_settings(row, payload["figure"]) for row in chosen))
        for row in chosen:
            label, color = _split(row)
            place = names.index(_settings(row, payload["figure"]))
            place += -0.17 if row["cell"]["split"] == "released" else 0.17
            for axes, (key, scale) in zip(line, keys, strict=True):
                values = [scale * value for value in row[key]]
                places = [place] * len(values)
                axes.plot(values, places, "o", color=color, ms=4, alpha=0.5, label=label)
                axes.plot(fmean(values), place, "|", color="black", ms=11)
        line[0].axvline(chosen[0]["chance_percent"], color=REFERENCE, linestyle="--")
        line[1].axvline(100 * chosen[0]["chance_accuracy"], color=REFERENCE, linestyle="--")
        line[0].set_yticks(range(len(names)), names)
        line[0].set_ylim(len(names) - 0.5, -0.5)
        line[0].set_title(
            f"{task.replace('_', ' ')}: variance in\ntwo components (%)", fontsize="medium"
        )
        line[1].set_title("test accuracy (%)", fontsize="medium")
    figure.supxlabel("dots: seeds; bar: mean; dashed: chance", fontsize="small")
    _legend_of(figure, [panels[0, 0]])
    return save_figure(figure, out_png, grid="x")


def draw_exponents(payload: Row, out_png: Path) -> Path:
    """Draw explained variance and test accuracy over the exponent: seeds, and their mean."""
    tasks = _by_task(payload["rows"])
    figure = new_figure(width=10.5, height=0.8 + 2.9 * len(tasks))
    panels = figure.subplots(len(tasks), 2, squeeze=False, sharex=True)
    for (left, right), (task, chosen) in zip(panels, tasks.items(), strict=True):
        for row in chosen:
            place = -row["cell"]["h_exp"]
            place += 0.0 if row["cell"]["split"] == "released" else 0.2
            _dots(left, place, row["variance_percent"], *_split(row))
            accuracies = [100 * value for value in row["test_accuracies"]]
            _dots(right, place, accuracies, *_split(row))
        published = PUBLISHED_EXPONENTS[task]
        places = [-0.2 - h for h in EXPONENTS[1:]]  # beside our seeds
        left.plot(places, published, "D", color=POST_HOC, ms=5, label="published")
        left.axhline(chosen[0]["chance_percent"], color=REFERENCE, ls="--", label="chance")
        right.axhline(100 * chosen[0]["chance_accuracy"], color=REFERENCE, ls="--", label="chance")
        left.set(ylabel="variance in two components (%)", title=task.replace("_", " "))
        right.set(ylabel="test accuracy (%)")
    for axes in panels[-1]:
        axes.set_xlabel("-h_exp (on the squared distance); 0.5: the text's literal n = 1")
    panels[0, 0].plot([], [], "_", color="black", ms=8, label="mean")
    _legend_of(figure, panels[0])
    return save_figure(figure, out_png, grid="both")


def draw_cosets(payload: Row, out_png: Path) -> Path:
    """Draw each head's seed of the best silhouette, colored by coset, and all silhouettes."""
    rows = payload["rows"]
    figure = new_figure(width=9.0, height=8.6)
    grid = figure.add_gridspec(2, len(rows), height_ratios=[3, 2])
    silhouettes = figure.add_subplot(grid[1, :])
    for place, row in enumerate(rows):
        name, color = MODELS[_model(row)]
        best = max(row["cosets"], key=lambda one: one["silhouette"])
        axes = figure.add_subplot(grid[0, place])
        _draw_partition(axes, best)
        axes.set_title(f"{name}: silhouette {best['silhouette']:.2f}\n{fill(best['name'], 40)}")
        _dots(silhouettes, place, [one["silhouette"] for one in row["cosets"]], name, color)
        quantile = [one["chance"] for one in row["cosets"]]
        silhouettes.plot(place + 0.1, fmean(quantile), "_", color=REFERENCE, ms=20)
    silhouettes.set_xticks(range(len(rows)), [MODELS[_model(row)][0] for row in rows])
    silhouettes.set_xlim(-0.5, len(rows) - 0.5)
    silhouettes.set(ylabel="best silhouette", title="all seeds; gray: 95 % of shuffles")
    return save_figure(figure, out_png, grid="both")


def _draw_partition(axes: "Axes", best: Row) -> None:
    """Draw a seed's permutations on two components, and which coset has which color."""
    places, numbers = np.array(best["places"]), np.array(best["partition"])
    for number in range(max(numbers) + 1):
        members = np.flatnonzero(numbers == number)
        label = " ".join("".join(map(str, GROUP[member])) for member in members)
        color, marker = f"C{number % 10}", "os"[number // 10]
        axes.plot(*places[members].T, marker, color=color, ms=7, label=label)
    axes.set(xlabel="first component", ylabel="second component")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), fontsize="small", frameon=False)


def draw_toy(payload: Row, out_png: Path) -> Path:
    """Draw points and the weights of seed 0, and the norms over training."""
    rows = payload["rows"]
    sets = list(dict.fromkeys(row["points"] for row in rows))
    figure = new_figure(width=12.5, height=0.6 + 3.4 * len(sets))
    panels = figure.subplots(len(sets), 3, squeeze=False)
    for line, points in zip(panels, sets, strict=True):
        chosen = [row for row in rows if row["points"] == points]
        for axes, row in zip(line, chosen, strict=False):
            name, color = MODELS["mlp", row["head"]]
            name = name.removeprefix("MLP, ")
            for (x, y), (u, v), shade in zip(
                row["places"], row["weights"], POINT_COLORS, strict=False
            ):
                axes.plot(x, y, "o", color=shade, ms=12, alpha=0.4)
                axes.plot(u, v, "x", color=shade, ms=9, mew=2.5)
            axes.set_title(f"{name}: points (discs), weights (crosses)", fontsize="medium")
            axes.set(xlabel="first coordinate", ylabel="second coordinate")
            axes.set_aspect("equal", adjustable="datalim")
            axes.margins(0.15)
            line[2].plot(row["steps"], row["norms"], color=color, linewidth=2, label=name)
        line[2].set(xlabel="step", ylabel="norm of the weights (mean of seeds)")
        line[2].legend(**LEGEND)
    return save_figure(figure, out_png, grid="both")


def draw_mnist(payload: Row, out_png: Path) -> Path:
    """Draw the weights of seed 0 as images, above the mean image of every class."""
    lines = {"cross-entropy": payload["weights"]["linear"]}
    lines |= {"harmonic": payload["weights"]["dist"], "class means": payload["class_means"]}
    figure = new_figure(width=10.0, height=3.4)
    panels = figure.subplots(len(lines), 10)
    for line, (name, images) in zip(panels, lines.items(), strict=True):
        limit = np.abs(images).max()
        for axes, image in zip(line, images, strict=True):
            pixels = np.asarray(image).reshape(28, 28)
            shown = axes.imshow(pixels, cmap="RdBu_r", vmin=-limit, vmax=limit)
            axes.set(xticks=[], yticks=[])
        figure.colorbar(shown, ax=line, pad=0.01)
        line[0].set_ylabel(name, fontsize="small")
    figure.suptitle("weights of one layer on MNIST; white: 0", fontsize="medium")
    return save_figure(figure, out_png, grid="both")


def draw_language(payload: Row, out_png: Path) -> Path:
    """Draw loss curves, parallelograms by layer, and the scores' distributions by task."""
    tasks, rows = list(payload["num_pairs"]), payload["rows"]
    arms = [arm for arm in ARMS if any(row["arm"] == arm for row in rows)]
    num_lines = -(-len(tasks) // NUM_COLUMNS)
    figure = new_figure(width=11.0, height=3.6 + 2.5 * num_lines)
    grid = figure.add_gridspec(num_lines + 1, NUM_COLUMNS)
    curves, layers = figure.add_subplot(grid[0, :2]), figure.add_subplot(grid[0, 2:])
    _draw_losses(curves, payload, arms)
    _draw_layers(layers, rows, arms, tasks)
    _legend_of(figure, [curves, layers])
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
    axes.set(xlabel="after block", ylabel="loss / shuffled")
    axes.set_title(f"all dimensions, mean of {len(tasks)} tasks", fontsize="medium")
    axes.set_xticks(range(ratios.shape[1]))


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


DRAW: dict[str, Callable[[Row, Path], Path]] = {
    "1": draw_toy,
    "2": draw_embeddings,
    "3a": draw_cumulative,
    "3b": draw_efficiency,
    "3c": draw_grokking,
    "4": draw_cells,
    "4-mnist": draw_mnist,
    "5": draw_language,
    "6": draw_cells,
    "7": draw_variance,
    "10": draw_cells,
    "12": draw_exponents,
    "B": draw_cosets,
}


def _released(payload: Row) -> list[Row]:
    return [row for row in payload["rows"] if row["cell"]["split"] == "released"]


def _by_task(rows: Sequence[Row]) -> dict[str, list[Row]]:
    tasks: dict[str, list[Row]] = {}
    for row in rows:
        tasks.setdefault(row["cell"]["task"], []).append(row)
    return tasks


def _model(row: Row) -> tuple[str, str]:
    return row["cell"]["model"], row["cell"]["head"]


def _split(row: Row) -> tuple[str, str]:
    """Return the name of a row's split in a legend, and its color."""
    return SPLITS[row["cell"]["split"]]


def _heading(row: Row) -> str:
    return (
        f"{row['shown_percent']:.0f} % variance (chance {row['chance_percent']:.0f})\n"
        f"{row['num_converged']} of {row['num_seeds']} converged"
    )


def _settings(row: Row, figure: str) -> str:
    """Return what tells the cells of one task apart, as the figure's table names it."""
    cell = row["cell"]
    if figure == "6":
        return LAWS[cell["head"]]
    name, own = {"linear": ("standard", "cross-entropy"), "dist": ("harmonic", "harmonic loss")}[
        cell["head"]
    ]
    if figure == "4":
        return f"{name} MLP, weight decay {cell['weight_decay']:g}"
    return f"{name} head, {LOSSES.get(cell['loss'], own)}"


def _classes(task: str) -> tuple[Sequence[int] | None, str]:
    """Return a class for every token where tokens of a class lie on each other, and its name."""
    if task == "equivalence":
        return [token % DIVISOR for token in range(NUM_NUMBERS)], "\n(color: modulo 5)"
    if task == "permutation":
        named = {name: partition for partition, name in partitions().items()}
        return named[KLEIN], "\n(color: coset)"
    return None, ""


def _task_panels(
    rows: Sequence[Row], xlabel: str = "", ylabel: str = ""
) -> tuple[dict["Axes", list[Row]], Any]:
    """Return one panel for the rows of each task, and the figure they are in."""
    tasks = _by_task(rows)
    num_lines, columns = -(-len(tasks) // NUM_ACROSS), min(len(tasks), NUM_ACROSS)
    figure = new_figure(width=max(8.0, 3.3 * columns), height=0.8 + 3.2 * num_lines)
    panels = figure.subplots(num_lines, columns, sharey=True, squeeze=False).flatten()
    for axes in panels[len(tasks) :]:
        axes.remove()
    for axes, task in zip(panels, tasks, strict=False):
        axes.set_title(task.replace("_", " "), fontsize="medium")
        axes.tick_params(labelleft=True)
    figure.supxlabel(xlabel, fontsize="medium")
    figure.supylabel(ylabel, fontsize="medium")
    return dict(zip(panels, tasks.values(), strict=False)), figure


def _band(axes: "Axes", x: Sequence[float], curves: Sequence[Any], color: str, label: str) -> None:
    """Draw a curve and the band about it: the lower edge, the curve, the upper edge."""
    low, middle, high = curves
    axes.plot(x, middle, "o-", color=color, ms=3, label=label)
    axes.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)


def _dots(axes: "Axes", place: float, values: Sequence[float], label: str, color: str) -> None:
    """Draw every seed as a dot and the mean as a line."""
    axes.plot([place] * len(values), values, "o", color=color, ms=4, alpha=0.5, label=label)
    axes.plot(place, fmean(values), "_", color="black", ms=8)


def _legend_of(figure: Any, panels: Sequence["Axes"]) -> None:
    """Put every label of the panels once above the figure."""
    found: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    figure.legend(
        found.values(),
        found.keys(),
        loc="outside upper center",
        ncols=4,
        frameon=False,
        fontsize="small",
    )
