"""Figures of the geometry note: what is drawn of which results."""

import pytest
from matplotlib.figure import Figure

from harmonic_sft.experiments import geometry_figures
from tests.experiments.note_payloads import PAYLOADS


@pytest.fixture
def draw(monkeypatch, tmp_path):
    """Draw a part and return its figure."""
    saved: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: saved.append(figure))

    def drawn(name: str) -> Figure:
        getattr(geometry_figures, f"draw_{name}")(PAYLOADS[name], tmp_path / f"{name}.png")
        return saved[-1]

    return drawn


def lines(axes):
    return {line.get_label(): line for line in axes.get_lines()}


def test_overhead_has_a_panel_for_each_vocabulary(draw):
    panels = draw("overhead").axes
    assert [axes.get_title("left") for axes in panels] == ["V = 30,522", "V = 50,257"]
    assert [bar.get_width() for bar in panels[1].patches] == pytest.approx([0.0, 8.5])


def test_calibration_has_a_mark_for_each_arm_and_kind(draw):
    (axes,) = draw("calibration").axes
    trained, post_hoc = (container.lines[0] for container in axes.containers)
    assert list(trained.get_xdata()) == pytest.approx([2.5, 2.5, 5.5])
    assert list(post_hoc.get_xdata()) == pytest.approx([1.0, 1.0, 1.0])
    assert axes.get_yticklabels()[2].get_text() == "rotation_wasserstein"


def test_tokens_are_drawn_as_a_curve_for_each_seed(draw):
    (axes,) = draw("tokens").axes
    assert list(lines(axes)["dist_harmonic"].get_xdata()) == [0, 1, 2]
    assert list(lines(axes)["dist_harmonic"].get_ydata()) == [5.0, 4.0, 3.0]
    assert len(axes.get_lines()) == 2 * 2 + 1
    assert axes.get_lines()[-1].get_ydata()[0] == 3.5  # the level


def test_refresh_shows_the_drift_and_where_it_ends(draw):
    drift, losses = draw("refresh").axes
    assert list(lines(drift)["refresh_never"].get_ydata()) == pytest.approx([100, 55])
    assert list(drift.get_lines()[1].get_ydata()) == pytest.approx([100, 90])
    dots, mean = losses.get_lines()[:2]
    assert list(dots.get_ydata()) == [0.5, 0.52]
    assert mean.get_ydata()[0] == pytest.approx(0.51)
    assert [tick.get_text() for tick in losses.get_xticklabels()] == ["never", "100"]


def test_subwords_are_stacked_to_a_hundred(draw):
    (axes,) = draw("subwords").axes
    for place in (0, 1):
        assert sum(bars[place].get_width() for bars in axes.containers) == pytest.approx(100)
    assert axes.containers[1][0].get_x() == pytest.approx(70)  # pieces start where words end


def test_the_sweep_starts_every_row_at_the_plain_arm(draw):
    panels = draw("sweep").axes
    assert len(panels) == 8
    assert [tick.get_text() for tick in panels[0].get_xticklabels()] == ["0", "0.1"]
    assert [tick.get_text() for tick in panels[4].get_xticklabels()] == ["0", "1"]
    assert list(panels[5].get_lines()[2].get_ydata()) == pytest.approx([60, 62])  # accuracy, %
