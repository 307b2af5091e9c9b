"""Pictures: what is drawn for which history, and what is refused."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from harmonic_sft.plots import plot_comparison, plot_family, plot_loss_benchmark, plot_run
from harmonic_sft.results import write_results

HISTORY = [
    {"step": 1, "loss": 5.7, "learning_rate": 2e-5, "h_exp": -12.0},
    {"step": 10, "loss": 4.9, "learning_rate": 2e-4, "h_exp": -8.0},
    {"step": 10, "eval_loss": 4.8, "eval_post_hoc_loss": 4.7},
    {"step": 20, "loss": 5.2, "learning_rate": 0.0, "h_exp": -4.0},
    {"step": 20, "eval_loss": 5.3, "eval_post_hoc_loss": 4.6},
]
RUN = {"run": "demo", "history": HISTORY, "unigram_loss": 6.31}
FINALS = [
    {"run": "demo", "final": {"loss": 6.26, "post_hoc_loss": 5.13, "accuracy": 0.254}},
    {"run": "linear", "final": {"loss": 4.15, "accuracy": 0.281}, "unigram_loss": 6.31},
]
BENCHMARK = {
    "baseline": "full",
    "rows": [
        {
            "num_tokens": 1638,
            "hidden_size": 768,
            "vocab_size": 30522,
            "floor": "products",
            "arms": {
                "ours": {"group": "ours", "median_ratio": 0.45},
                "full": {"group": "peer", "median_ratio": 1.0},
                "products": {"group": "floor", "median_ratio": 0.43},
            },
        },
        {
            "num_tokens": 256,
            "hidden_size": 4096,
            "vocab_size": 32000,
            "floor": None,
            "arms": {"full": {"group": "peer", "median_ratio": 1.0}},
        },
    ],
}

FAMILY = {
    "rated": "MEN",
    "rows": [
        {
            "name": "dist",
            "metrics": {
                "loss": {"mean": 4.5, "std": 0.1},
                "post_hoc_loss": {"mean": 4.25, "std": 0.05},
                "accuracy": {"mean": 0.25, "std": 0.01},
                "ece": {"mean": 0.125, "std": None},
                "error_cosine": {"mean": 0.2, "std": 0.0},
            },
            "word_similarity": {
                "MEN": {"spearman_cosine": {"mean": 0.7, "std": 0.0}},
                "RG": {"spearman_cosine": {"mean": 0.5, "std": 0.0}},
            },
            "cost": {"time_ratio": 1.25, "memory_ratio": 1.0},
        },
        {"name": "broken", "errors": {"seed 42": "ValueError: no"}},
        {
            "name": "linear",
            "metrics": {
                "loss": {"mean": 4.0, "std": 0.1},
                "post_hoc_loss": {"mean": 4.0, "std": 0.1},
                "accuracy": {"mean": 0.5, "std": 0.02},
                "error_cosine": {"mean": 0.1, "std": 0.0},
            },
        },
    ],
}


@pytest.fixture
def figures(monkeypatch) -> list[Figure]:
    """The figures that are saved while a test runs."""
    saved: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, path: Path, **options: Any) -> None:
        saved.append(figure)
        save(figure, path, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    return saved


def without(*keys: str) -> list[dict[str, float]]:
    return [{key: value for key, value in entry.items() if key not in keys} for entry in HISTORY]


def test_a_run_is_drawn_in_three_panels_over_its_steps(tmp_path, figures):
    path = plot_run(RUN, tmp_path / "new" / "run.png")
    assert imread(path).shape[:2] > (400, 800)
    losses, rates, h_exps = figures[0].axes
    lines = {line.get_label(): line for line in losses.get_lines()}
    assert list(lines) == [
        "training",
        "evaluation at the current h_exp",
        "evaluation at the best post-hoc h_exp",
        "unigram baseline",
    ]
    assert list(lines["training"].get_xdata()) == [1, 10, 20]
    assert list(lines["evaluation at the best post-hoc h_exp"].get_ydata()) == [4.7, 4.6]
    assert list(rates.get_lines()[0].get_ydata()) == [2e-5, 2e-4, 0.0]
    assert list(h_exps.get_lines()[0].get_ydata()) == [-12.0, -8.0, -4.0]
    assert losses.get_ylabel() == "loss (nats per token)"
    assert h_exps.get_xlabel() == "optimizer step"


def test_a_run_without_h_exp_has_no_panel_for_it(tmp_path, figures):
    history = without("h_exp", "eval_post_hoc_loss")
    plot_run({"run": "linear", "history": history}, tmp_path / "run.png")
    losses, rates = figures[0].axes
    assert [line.get_label() for line in losses.get_lines()] == ["training", "evaluation"]
    assert rates.get_xlabel() == "optimizer step"


def test_a_results_file_draws_as_its_payload(tmp_path):
    path = write_results(tmp_path, "train", RUN)
    plot_run(path, tmp_path / "from_file.png")
    plot_run(RUN, tmp_path / "from_payload.png")
    assert (tmp_path / "from_file.png").read_bytes() == (tmp_path / "from_payload.png").read_bytes()


@pytest.mark.parametrize("payload", [{"run": "demo"}, {"run": "demo", "history": []}])
def test_a_run_without_history_is_refused(tmp_path, payload):
    with pytest.raises(ValueError, match="history: expected at least one logged step, got "):
        plot_run(payload, tmp_path / "run.png")


def test_a_comparison_has_a_bar_per_known_number(tmp_path, figures):
    path = plot_comparison(FINALS, tmp_path / "comparison.png")
    assert imread(path).shape[:2] > (300, 1000)
    losses, accuracies = figures[0].axes
    assert sorted(bar.get_width() for bar in losses.patches) == [4.15, 5.13, 6.26]
    assert [bar.get_width() for bar in accuracies.patches] == pytest.approx([25.4, 28.1])
    assert [text.get_text() for text in losses.get_yticklabels()] == ["demo", "linear"]
    assert {text.get_text() for text in losses.texts} == {"6.26", "5.13", "4.15"}
    assert [line.get_label() for line in losses.get_lines()] == ["unigram baseline"]


def test_a_comparison_of_plain_runs_needs_no_post_hoc_loss(tmp_path, figures):
    plot_comparison([{"run": "linear", "final": FINALS[1]["final"]}], tmp_path / "one.png")
    assert len(figures[0].axes[0].patches) == 1


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([], "results: expected at least one run, got none"),
        ([{"run": "demo"}], "demo: expected final loss and accuracy, got no ['accuracy', 'loss']"),
        ([{"final": {"loss": 1.0}}], "run: expected final loss and accuracy, got no ['accuracy']"),
    ],
)
def test_a_comparison_needs_final_numbers(tmp_path, results, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        plot_comparison(results, tmp_path / "comparison.png")


def test_a_loss_benchmark_has_a_panel_per_size_and_the_floor_as_a_line(tmp_path, figures):
    path = plot_loss_benchmark(BENCHMARK, tmp_path / "new" / "ops.png")
    assert imread(path).shape[:2] > (200, 800)
    first, second = figures[0].axes
    assert [text.get_text() for text in first.get_yticklabels()] == ["full", "ours"]
    assert [bar.get_width() for bar in first.patches] == [1.0, 0.45]
    assert [line.get_xdata()[0] for line in first.get_lines()] == [0.43]
    assert [bar.get_width() for bar in second.patches] == [1.0]
    assert not second.get_lines()
    assert first.get_title() == "1,638 x 768 x 30,522"


@pytest.mark.parametrize("payload", [{}, {"rows": []}])
def test_a_loss_benchmark_without_rows_is_refused(tmp_path, payload):
    with pytest.raises(ValueError, match="rows: expected at least one measured size, got "):
        plot_loss_benchmark(payload, tmp_path / "ops.png")


def test_a_family_has_a_panel_per_known_figure_and_no_row_for_what_failed(tmp_path, figures):
    path = plot_family(FAMILY, tmp_path / "new" / "family.png")
    assert imread(path).shape[:2] > (200, 1000)
    panels = {axes.get_xlabel().replace("\n", " "): axes for axes in figures[0].axes}
    assert list(panels) == [
        "loss (nats per token)",
        "accuracy (%)",
        "calibration error (%)",
        "error cosine",
        "Spearman, MEN",
        "relative to linear + cross-entropy",
    ]
    losses = panels["loss (nats per token)"]
    assert [text.get_text() for text in losses.get_yticklabels()] == ["dist", "linear"]
    trained, post_hoc = (list(bars.lines[0].get_xdata()) for bars in losses.containers)
    assert (trained, post_hoc) == ([4.5, 4.0], [4.25, 4.0])
    ends = losses.containers[0].lines[2][0].get_segments()
    assert [segment[:, 0].tolist() for segment in ends] == [[4.4, 4.6], [3.9, 4.1]]
    assert list(panels["accuracy (%)"].containers[0].lines[0].get_xdata()) == [25, 50]
    (calibration,) = panels["calibration error (%)"].containers  # no post-hoc one is known
    assert list(calibration.lines[0].get_xdata()) == [12.5]
    assert list(panels["Spearman, MEN"].containers[0].lines[0].get_xdata()) == [0.7]


def test_a_family_is_drawn_next_to_the_row_it_is_compared_with(tmp_path, figures):
    rows = [dict(row) for row in FAMILY["rows"] if "metrics" in row]
    difference = {"mean": 0.5, "standard_error": 0.25, "verdict": "undecided"}
    rows[0]["difference"] = {"loss": difference, "post_hoc_loss": difference}
    rows[1]["compared_with"] = rows[1]["name"]
    payload = {**FAMILY, "rows": rows, "compared_with": rows[1]["name"]}
    plot_family(payload, tmp_path / "family.png")
    losses = figures[0].axes[0]
    assert losses.get_xlabel() == f"loss (nats per token)\n- {rows[1]['name']}"
    assert list(losses.containers[0].lines[0].get_xdata()) == [0.5, 0.0]
    ends = losses.containers[0].lines[2][0].get_segments()
    assert ends[0][:, 0].tolist() == [0.25, 0.75]
    assert losses.get_xscale() == "symlog"
    small = {"mean": 0.02, "standard_error": 0.01, "verdict": "undecided"}
    rows[0]["difference"] = {"loss": small, "post_hoc_loss": small}
    plot_family(payload, tmp_path / "small.png")
    assert figures[1].axes[0].get_xscale() == "linear"


@pytest.mark.parametrize("payload", [{}, {"rows": [FAMILY["rows"][1]]}])
def test_a_family_without_figures_is_refused(tmp_path, payload):
    with pytest.raises(ValueError, match="rows: expected at least one with metrics, got none"):
        plot_family(payload, tmp_path / "family.png")


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"pip install 'harmonic-sft\[plots\]'"):
        plot_run(RUN, tmp_path / "run.png")


def test_drawing_leaves_pyplot_alone(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    plot_run(RUN, tmp_path / "run.png")
    assert "matplotlib.pyplot" not in sys.modules
