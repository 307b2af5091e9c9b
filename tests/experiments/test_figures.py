"""Figures of the experiments: what is drawn of which results."""

from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from harmonic_sft.experiments.figures import draw_multi_head_modular_addition, draw_multi_head_toy

TOKENS = {"x": [float(i) for i in range(40)], "y": [float(-i) for i in range(40)]}


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


def toy_setting(hidden_size: int, excess: float) -> dict[str, Any]:
    rows = [
        {
            "num_heads": 1,
            "mean_percent": 50.0,
            "percent": [40.0, 60.0],
            "excess_loss": [0.0],
            **TOKENS,
        },
        {
            "num_heads": 2,
            "mean_percent": 70.0,
            "percent": [65.0, 75.0],
            "excess_loss": [excess],
            **TOKENS,
        },
    ]
    fields = {"hidden_size": hidden_size, "learning_rate": 0.001, "weight_decay": 0.01}
    return {**fields, "rows": rows}


def test_the_toy_language_is_drawn_with_spread_and_the_blogs_run(tmp_path, figures):
    payload = {
        "num_seeds": 2,
        "tolerance": 1e-3,
        "blog_percent": {"1": 59.59, "2": 64.34},
        "settings": [toy_setting(32, 0.15), toy_setting(64, 0.0)],
        "chosen": 1,
    }
    draw_multi_head_toy(payload, tmp_path / "new" / "toy.png")
    shares, first, last = figures[0].axes
    lines = {line.get_label(): line for line in shares.get_lines()}
    chosen = lines["D = 64, learning rate 0.001, weight decay 0.01: mean and range of 2 seeds"]
    assert list(chosen.get_ydata()) == [50.0, 70.0]
    assert list(lines["blog: one run, settings unknown"].get_ydata()) == [59.59, 64.34]
    assert list(lines["blog: one run, settings unknown"].get_xdata()) == [1, 2]
    assert "D = 32, learning rate 0.001, weight decay 0.01" in lines
    (band,) = shares.collections
    assert band.get_datalim(shares.transData).intervaly.tolist() == [40.0, 75.0]
    points = [line for line in shares.get_lines() if len(line.get_xdata()) == 1]
    hollow = [to_hex(point.get_markerfacecolor()) == "#ffffff" for point in points]
    assert hollow == [False, True]  # D = 32 misses the Bayes loss with two heads only
    assert [line.get_label() for line in last.get_lines()] == ["A", "B", "C", "D"]
    assert list(first.get_lines()[1].get_xdata()) == [float(i) for i in range(10, 20)]
    assert last.get_title("left") == "M = 2, seed 0: 65.0 %"


def test_modular_addition_is_drawn_without_the_seeds_that_never_arrive(tmp_path, figures):
    def row(num_heads: int, test_epochs: list[int | None], middle: float | None) -> dict[str, Any]:
        return {
            "num_heads": num_heads,
            "train_epochs": [5, 10],
            "test_epochs": test_epochs,
            "median_train_epoch": 7.5,
            "median_test_epoch": middle,
            "curves": {"train": [0.5, 1.0], "test": [0.1, 0.8]},
        }

    rows = [row(1, [10, 5], 7.5), row(2, [None, 5], None), row(4, [None, None], None)]
    payload = {"num_seeds": 2, "evaluated_epochs": [5, 10], "rows": [*rows, row(8, [5, 5], 5)]}
    draw_multi_head_modular_addition(payload, tmp_path / "addition.png")
    curves, epochs = figures[0].axes
    labels = [line.get_label() for line in curves.get_lines()]
    assert [label for label in labels if not label.startswith("_")] == [
        "1 head",
        "2 heads",
        "4 heads",
        "8 heads",
    ]
    assert list(curves.get_lines()[0].get_xdata()) == [5, 10]
    assert list(curves.get_lines()[0].get_ydata()) == [0.1, 0.8]
    dots = [line for line in epochs.get_lines() if line.get_marker() == "o"]
    assert [list(line.get_ydata()) for line in dots[4:]] == [[10, 5], [5], [], [5, 5]]
    ticks = [label.get_text() for label in epochs.get_xticklabels()]
    assert ticks == ["1\n2 of 2", "2\n1 of 2", "4\n0 of 2", "8\n2 of 2"]
    medians = [line for line in epochs.get_lines() if line.get_marker() == "_"]
    assert len(medians) == 6
