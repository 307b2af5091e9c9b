import numpy as np
import pytest

from harmonic_sft.data.keyed_random import permutation, random_bits


def test_bits_depend_on_the_key_alone_and_never_change():
    """Golden values: published runs must keep their masks under any later version of numpy."""
    assert random_bits("mlm mask", (0, 0, 0, 0, 0), 3).tolist() == [
        1502450153452187466,
        3894130111554529353,
        6716816518560770501,
    ]


@pytest.mark.parametrize(
    ("purpose", "key"), [("other", (1, 2)), ("use", (2, 1)), ("use", (1,)), ("use", (1, -2))]
)
def test_another_purpose_or_key_gives_other_bits(purpose, key):
    assert not np.any(random_bits(purpose, key, 8) == random_bits("use", (1, 2), 8))


def test_permutation_holds_every_integer_once():
    order = permutation("use", (1,), 1000)
    assert sorted(order.tolist()) == list(range(1000))
    assert order.tolist() != list(range(1000))
