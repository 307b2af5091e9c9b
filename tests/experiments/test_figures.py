"""Pictures are drawn from the results files of docs/, and show what stands there."""

from pathlib import Path
from statistics import fmean

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from experiments.figures import FIGURES, main
from harmonic_sft.results import read_results

DOCS = Path(__file__).parents[2] / "docs"
FILES = {
    name: next(path for path in (DOCS, DOCS / "geometry_note") if (path / f"{name}.json").is_file())
    / f"{name}.json"
    for name in FIGURES
}


@pytest.fixture
def draw(monkeypatch, tmp_path):
    """Draw a payload, or the results file of that name, and return the figure."""
    saved: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **options: saved.append(figure))

    def drawn(name, payload=None):
        FIGURES[name](payload or read_results(FILES[name]), tmp_path / f"{name}.png")
        return saved[-1]

    return drawn


@pytest.mark.parametrize("name", FIGURES)
def test_every_results_file_can_be_drawn_again(name, tmp_path):
    main("draw", [name, str(FILES[name]), str(tmp_path / "new" / "picture.png")])
    assert (tmp_path / "new" / "picture.png").stat().st_size > 10_000


def test_a_family_has_a_panel_per_figure_and_no_row_for_what_failed(draw):
    payload = read_results(FILES["family"])
    payload["rows"] = [*payload["rows"][:3], {"name": "broken", "errors": {}}]
    payload["rows"][2]["compared_with"] = "linear_ce"  # which this row is
    figure = draw("family", payload)
    panels = {axes.get_xlabel().split("\n")[0]: axes for axes in figure.axes}
    assert list(panels) == [
        "loss (nats per token)",
        "accuracy (%)",
        "calibration error (%)",
        "error cosine",
        "Spearman, MEN-TR-3k",
        "relative to linear",
    ]
    rows = payload["rows"][:3]
    losses = panels["loss (nats per token)"]
    assert losses.get_xlabel().endswith("- linear_ce")
    assert [tick.get_text() for tick in losses.get_yticklabels()] == [row["name"] for row in rows]
    differences = [row.get("difference", {}).get("loss", {}).get("mean", 0) for row in rows]
    assert list(losses.containers[0].lines[0].get_xdata()) == pytest.approx(differences)
    assert losses.get_xscale() == "linear"  # all of them are within 0.1 nats
    errors = [100 * row["metrics"]["ece"]["mean"] for row in rows]
    calibration = panels["calibration error (%)"].containers[0].lines[0]
    assert list(calibration.get_xdata()) == pytest.approx(errors)
    payload["compared_with"] = None  # then the losses themselves
    losses = draw("family", payload).axes[0].containers[0].lines[0]
    assert list(losses.get_xdata()) == [row["metrics"]["loss"]["mean"] for row in rows]


@pytest.mark.parametrize("payload", [{"seeds": []}, {"rows": [{"name": "x", "errors": {}}]}])
def test_a_family_without_figures_is_refused(draw, payload):
    with pytest.raises(ValueError, match="rows: expected at least one with metrics, got none"):
        draw("family", payload)


def test_the_toy_language_is_hollow_where_bayes_is_missed(draw):
    payload = read_results(FILES["multi_head_toy"])
    shares, tight, _, last = draw("multi_head_toy", payload).axes
    chosen = payload["settings"][payload["chosen"]]["rows"]
    lines = {line.get_label(): line for line in shares.get_lines()}
    label = "4 classes, D = 64, learning rate 0.001, weight decay 0.01: mean and range of 10 seeds"
    assert list(lines[label].get_ydata()) == [row["mean_percent"] for row in chosen]
    points = [line for line in shares.get_lines() if len(line.get_xdata()) == 1]
    hollow = [to_hex(point.get_markerfacecolor()) == "#ffffff" for point in points]
    others = [one for place, one in enumerate(payload["settings"]) if place != payload["chosen"]]
    assert hollow == [max(row["excess_loss"]) > 1e-3 for one in others for row in one["rows"]]
    assert [line.get_label() for line in last.get_lines()] == ["A", "B", "C", "D"]
    means = [fmean(row["silhouette"]) for row in chosen]
    assert list(tight.get_lines()[0].get_ydata()) == pytest.approx(means)


def test_modular_addition_is_drawn_without_the_seeds_that_never_arrive(draw):
    payload = read_results(FILES["multi_head_modular_addition"])
    _, epochs = draw("multi_head_modular_addition", payload).axes
    ticks = [label.get_text() for label in epochs.get_xticklabels()]
    assert ticks == ["1\n10 of 10", "2\n1 of 10", "4\n0 of 10", "8\n0 of 10"]
    dots = [line for line in epochs.get_lines() if line.get_marker() == "o"]
    arrived = [[e for e in row["test_epochs"] if e is not None] for row in payload["rows"]]
    assert [list(line.get_ydata()) for line in dots[4:]] == arrived


def test_parts_of_the_note_show_their_numbers(draw):
    rows = read_results(FILES["overhead"])["rows"]
    bars = [bar.get_width() for axes in draw("overhead").axes for bar in axes.patches]
    assert bars == pytest.approx([100 * row["overhead"] for row in rows])
    (axes,) = draw("tokens").axes
    payload = read_results(FILES["tokens"])
    assert len(axes.get_lines()) == 4 * len(payload["seeds"]) + len(payload["levels"])
    first, _ = draw("subwords").axes
    for place in range(3):
        assert sum(bar[place].get_width() for bar in first.containers) == pytest.approx(100)
    panels = draw("sweep").axes
    assert [tick.get_text() for tick in panels[0].get_xticklabels()][:2] == ["0", "0.02"]
    assert [tick.get_text() for tick in panels[4].get_xticklabels()][:2] == ["0", "0.01"]


def test_a_benchmark_has_a_panel_per_size_and_bare_products_as_a_line(draw):
    payload = read_results(FILES["benchmark_ops"])
    row = payload["rows"][0]
    arms = row["arms"]
    other = {**row, "floor": None, "arms": {payload["baseline"]: arms[payload["baseline"]]}}
    first, second = draw("benchmark_ops", {**payload, "rows": [row, other]}).axes
    names = [name for name in arms if name != row["floor"]]  # others, then ours, as measured
    assert [text.get_text() for text in first.get_yticklabels()] == names
    ratios = [arms[name]["median_ratio"] for name in names]
    assert [bar.get_width() for bar in first.patches] == ratios
    assert [line.get_xdata()[0] for line in first.get_lines()] == [
        arms[row["floor"]]["median_ratio"]
    ]
    assert [bar.get_width() for bar in second.patches] == [1.0]
    assert not second.get_lines()
    assert first.get_title() == "1,638 x 768 x 30,522"
