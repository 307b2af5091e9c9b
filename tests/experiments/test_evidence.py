"""Verdicts and crossings against numbers made by hand."""

import pytest

from experiments.evidence import (
    paired_difference,
    show_difference,
    show_spread,
    spread,
    tokens_to_reach,
)


@pytest.mark.parametrize(
    ("values", "baseline", "mean", "error", "verdict"),
    [
        ([3.0, 5.0, 7.0], [1.0, 2.0, 3.0], 3.0, 1 / 3**0.5, "higher"),  # differences 2, 3, 4
        ([1.0, 2.0, 3.0], [3.0, 5.0, 7.0], -3.0, 1 / 3**0.5, "lower"),
        ([1.0, 5.0], [1.0, 3.0], 1.0, 1.0, "undecided"),  # just one standard error
        ([2.0, 0.0], [0.0, 0.0], 1.0, 1.0, "undecided"),
        ([4.0], [1.0], 3.0, None, "undecided"),  # one seed says nothing
        ([1.0, 1.0], [1.0, 1.0], 0.0, 0.0, "undecided"),
        ([1.5, 2.5], [1.0, 2.0], 0.5, 0.0, "higher"),
    ],
)
def test_a_verdict_needs_two_standard_errors(values, baseline, mean, error, verdict):
    found = paired_difference(values, baseline)
    assert found["mean"] == pytest.approx(mean)
    assert found["standard_error"] == (None if error is None else pytest.approx(error))
    assert found["verdict"] == verdict


def test_seeds_are_paired_so_their_own_spread_does_not_count():
    """The seeds lie 10 apart, the arms 0.1: enough, since every seed agrees."""
    assert paired_difference([10.1, 20.11, 30.1], [10.0, 20.0, 30.0])["verdict"] == "higher"
    assert paired_difference([10.1, 30.1, 20.11], [10.0, 20.0, 30.0])["verdict"] == "undecided"


@pytest.mark.parametrize(("values", "baseline"), [([1.0], [1.0, 2.0]), ([], [])])
def test_runs_without_a_partner_are_refused(values, baseline):
    with pytest.raises(ValueError, match="values: expected one for each of the baseline's seeds"):
        paired_difference(values, baseline)


def test_a_difference_is_shown_with_its_error_and_verdict():
    found = {"mean": -0.0123, "standard_error": 0.004, "verdict": "lower"}
    assert show_difference(found, scale=100) == "-1.23 +- 0.40 (lower)"
    one = {"mean": 2.0, "standard_error": None, "verdict": "undecided"}
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


def test_spread_is_the_standard_deviation_of_a_sample():
    found = spread([1.0, 2.0, 6.0])
    assert found["mean"] == pytest.approx(3.0)
    assert found["std"] == pytest.approx(7**0.5)
    assert show_spread(found, digits=1) == "3.0 +- 2.6"
    assert show_spread(spread([0.25]), scale=100, digits=0) == "25"
    assert show_spread(None) is None
