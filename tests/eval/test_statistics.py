"""Intervals against scipy, Holm's rule by hand, and cases with a known answer."""

import tracemalloc

import numpy as np
import pytest
from scipy import stats

from harmonic_sft.eval.statistics import (
    document_interval,
    holm,
    show_interval,
    t_interval,
    verdict,
)


def test_the_interval_is_that_of_student():
    values = [0.3, 0.1, 0.4, 0.15, 0.2]
    found = t_interval(values)
    test = stats.ttest_1samp(values, 0)
    low, high = test.confidence_interval(0.95)
    assert found["mean"] - found["half_width"] == pytest.approx(low)
    assert found["mean"] + found["half_width"] == pytest.approx(high)
    assert found["p"] == pytest.approx(test.pvalue)
    assert found["seeds"] == 5
    assert show_interval(found) == "0.230 ± 0.150"
    assert show_interval(found, scale=100, digits=1) == "23.0 ± 15.0"


def test_resamples_of_many_documents_are_not_all_in_memory():
    values, documents = np.random.default_rng(0).random(20_000), np.arange(20_000)
    tracemalloc.start()
    low, high = document_interval(values, documents)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert low < values.mean() < high
    assert peak < 200e6  # all 2,000 resamples would take 20,000 x 2,000 x 8 x 3 bytes


def test_a_single_seed_decides_nothing():
    found = t_interval([0.5])
    assert found == {"mean": 0.5, "half_width": None, "p": None, "seeds": 1}
    assert verdict(found, None) == "undecided"
    assert show_interval(found) == "0.500"
    with pytest.raises(ValueError, match="values: expected finite numbers of at least one seed"):
        t_interval([])


def test_holm_multiplies_the_smallest_most():
    found = holm([0.01, 0.04, None, 0.03, 0.005])
    assert found == pytest.approx([0.03, 0.06, None, 0.06, 0.02])


def test_inside_the_interval_the_word_is_undecided():
    sure, unsure = t_interval([1.0, 1.1, 0.9, 1.0]), t_interval([-1.0, 1.1, 0.9, 1.0])
    assert verdict(sure, sure["p"]) == "higher"
    assert verdict(t_interval([-1.0, -1.1, -0.9]), 0.01) == "lower"
    assert verdict(sure, 0.2) == "undecided"  # after Holm
    assert verdict(unsure, unsure["p"]) == "undecided"
    for same in (0.0, 1e-9):  # nothing says how sure it is
        assert verdict(t_interval([same] * 5), t_interval([same] * 5)["p"]) == "undecided"


def test_documents_are_resampled_whole():
    """Ten documents of 100 equal values are ten observations, not a thousand."""
    generator = np.random.default_rng(0)
    means = generator.normal(size=10)
    low, high = document_interval(np.repeat(means, 100), np.repeat(np.arange(10), 100))
    level = 1 - 2 * stats.norm.sf((10 / 9) ** 0.5 * stats.t.ppf(0.975, 9))  # 0.983
    expected = stats.bootstrap(
        (means,), np.mean, method="percentile", confidence_level=level, rng=1
    ).confidence_interval
    assert low == pytest.approx(expected.low, abs=0.08)
    assert high == pytest.approx(expected.high, abs=0.08)
    assert high - low > 5 * 2 * 1.96 * means.std() / 1000**0.5
    assert document_interval(means, np.arange(10) % 4) is None
    assert document_interval(means, np.arange(10) % 5) is not None


def test_few_documents_have_an_interval_that_holds_the_mean():
    generator = np.random.default_rng(0)
    held = 0
    for _ in range(200):
        low, high = document_interval(generator.normal(size=6), np.arange(6))
        held += low <= 0 <= high
    assert held >= 175  # percentiles of the level itself hold 168


@pytest.mark.parametrize("values", [[0.1] * 3, [0.3 - 0.2, 0.4 - 0.3, 0.5 - 0.4], [0.7] * 5])
def test_seeds_that_differ_by_rounding_alone_decide_nothing(values):
    found = t_interval(values)
    assert found["half_width"] == 0
    assert found["p"] is None
    assert verdict(found, found["p"]) == "undecided"
