"""Intervals, verdicts and crossings against numbers made by hand."""

import pytest

from experiments.evidence import (
    decide,
    paired_difference,
    show_difference,
    show_spread,
    spread,
    tokens_to_reach,
)

# Of Student's t with 2 degrees of freedom, from a printed table.
T_97_5 = 4.303


def test_seeds_are_paired_so_their_own_spread_does_not_count():
    """The seeds lie 10 apart, the arms 0.1: enough, since every seed agrees."""
    clear = paired_difference([10.1, 20.11, 30.1], [10.0, 20.0, 30.0])
    unclear = paired_difference([10.1, 30.1, 20.11], [10.0, 20.0, 30.0])
    decide([clear, unclear])
    assert (clear["verdict"], unclear["verdict"]) == ("higher", "undecided")
    error = 0.01 / 3  # deviations of -1/3, 2/3 and -1/3 hundredths
    assert clear["half_width"] == pytest.approx(T_97_5 * error, rel=1e-3)
    with pytest.raises(ValueError, match="longer"):
        paired_difference([1.0], [1.0, 2.0])


def test_a_verdict_is_corrected_for_all_of_its_table():
    """The same difference, p = 0.02, alone and beside two of p = 0.5."""
    difference = [2.0, 3.0, 4.3], [0.0, 0.0, 0.0]
    alone = paired_difference(*difference)
    decide([alone])
    among = [paired_difference(*difference), *(paired_difference([1.0, -2.0, 4.0], [0.0] * 3),) * 2]
    decide(among)
    assert 0.02 < alone["p"] < 0.05
    assert (alone["verdict"], among[0]["verdict"]) == ("higher", "undecided")


def test_a_difference_is_shown_with_its_interval_and_verdict():
    found = {"mean": -0.0123, "half_width": 0.004, "verdict": "lower"}
    assert show_difference(found, scale=100) == "-1.23 ± 0.40 (lower)"
    one = {"mean": 2.0, "half_width": None, "verdict": "undecided"}
    assert show_difference(one, digits=0) == "+2 (undecided)"


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        (4.5, 50.0),  # half way from 5 to 4
        (4.0, 100.0),
        (3.25, 175.0),  # down to 3 at 200, although it was there no more at 300
        (6.0, 0.0),
        (5.0, 0.0),
        (2.5, 300 + 100 * 1.0 / 1.5),
        (1.9, None),
    ],
)
def test_a_level_is_reached_between_two_evaluations(level, expected):
    tokens, losses = [0, 100, 200, 300, 400], [5.0, 4.0, 3.0, 3.5, 2.0]
    found = tokens_to_reach(tokens, losses, level)
    assert found == (None if expected is None else pytest.approx(expected))


def test_a_spread_is_an_interval_with_its_values():
    found = spread([1.0, 2.0, 6.0])
    assert found["mean"] == pytest.approx(3.0)
    assert found["half_width"] == pytest.approx(T_97_5 * (7 / 3) ** 0.5, rel=1e-3)
    assert found["values"] == [1.0, 2.0, 6.0]
    assert show_spread(found, digits=1) == "3.0 ± 6.6"
    assert show_spread(spread([0.25]), scale=100, digits=0) == "25"
    assert show_spread(None) is None
