"""Pictures: what is drawn for which history, and what is refused."""

import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from harmonic_sft.plots import plot_comparison, plot_run

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
        "evaluation at the best h_exp or temperature",
        "guessing by frequency",
    ]
    assert list(lines["training"].get_xdata()) == [1, 10, 20]
    assert list(lines["evaluation at the best h_exp or temperature"].get_ydata()) == [4.7, 4.6]
    assert list(rates.get_lines()[0].get_ydata()) == [2e-5, 2e-4, 0.0]
    assert list(h_exps.get_lines()[0].get_ydata()) == [-12.0, -8.0, -4.0]
    assert losses.get_ylabel() == "loss, nats"
    assert h_exps.get_xlabel() == "optimizer step"


def test_a_run_without_h_exp_has_no_panel_for_it_and_one_entry_per_line(tmp_path, figures):
    plot_run({"run": "linear", "history": without("h_exp")}, tmp_path / "run.png")
    losses, rates = figures[0].axes
    lines = ["training", "evaluation", "evaluation at the best temperature"]
    assert [line.get_label() for line in losses.get_lines()] == lines
    assert [text.get_text() for text in losses.get_legend().get_texts()] == lines
    assert rates.get_xlabel() == "optimizer step"


def test_what_was_never_logged_has_no_panel_and_no_entry(tmp_path, figures):
    """A run of fewer steps than `logging_steps` has its two evaluations."""
    history = [
        {"step": 0, "eval_loss": 4.8, "eval_post_hoc_loss": 4.7, "eval_h_exp": -12.0},
        {"step": 2, "eval_loss": 4.6, "eval_post_hoc_loss": 4.5, "eval_h_exp": -4.0},
        {"step": 2, "train_loss": 4.9},
    ]
    plot_run({"run": "short", "history": history}, tmp_path / "run.png")
    [losses] = figures[0].axes
    labels = [line.get_label() for line in losses.get_lines()]
    assert labels == [
        "evaluation at the current h_exp",
        "evaluation at the best h_exp or temperature",
    ]
    assert losses.get_xlabel() == "optimizer step"


def test_what_was_logged_once_is_seen(tmp_path, figures):
    plot_run({"run": "short", "history": HISTORY[1:3]}, tmp_path / "run.png")
    for axes in figures[0].axes:
        assert all(line.get_marker() not in ("", "None") for line in axes.get_lines())


def test_a_comparison_has_a_bar_per_known_number(tmp_path, figures):
    path = plot_comparison(FINALS, tmp_path / "comparison.png")
    assert imread(path).shape[:2] > (300, 1000)
    losses, accuracies = figures[0].axes
    assert sorted(bar.get_width() for bar in losses.patches) == [4.15, 5.13, 6.26]
    assert [bar.get_width() for bar in accuracies.patches] == pytest.approx([25.4, 28.1])
    assert [text.get_text() for text in losses.get_yticklabels()] == ["demo", "linear"]
    assert {text.get_text() for text in losses.texts} == {"6.26", "5.13", "4.15"}
    assert [line.get_label() for line in losses.get_lines()] == ["guessing by frequency"]
    assert losses.get_xlabel() == "evaluation loss, nats"
    assert accuracies.get_xlabel() == "accuracy, %"


@pytest.mark.parametrize("h_exp", [{}, {"h_exp": -12.0}])
def test_a_comparison_speaks_of_h_exp_where_a_run_has_one(h_exp, tmp_path, figures):
    runs = [FINALS[1], {"run": "dist", "final": FINALS[0]["final"] | h_exp}]
    plot_comparison(runs, tmp_path / "comparison.png")
    names = [text.get_text() for text in figures[0].legends[0].get_texts()]
    fitted = "at the best h_exp or temperature" if h_exp else "at the best temperature"
    assert names == ["guessing by frequency", "as trained", fitted]


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match="pip install matplotlib"):
        plot_run(RUN, tmp_path / "run.png")
