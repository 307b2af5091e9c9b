import numpy as np
import pytest
from pydantic import ValidationError

from harmonic_sft.data.masking import IGNORE_INDEX, MaskConfig, RowMasker, mask_tokens

KEY = (0, 1, 2, 3, 4)
MASK_TOKEN_ID = 4


def mask(input_ids, key=KEY, probability=0.2):
    return mask_tokens(
        input_ids,
        special=input_ids < 5,
        key=key,
        probability=probability,
        mask_token_id=MASK_TOKEN_ID,
    )


@pytest.fixture
def ordinary_ids():
    return np.random.default_rng(0).integers(5, 100, 50_000)


@pytest.mark.parametrize("probability", [0.01, 0.2, 0.9])
def test_share_of_masked_tokens_is_the_probability(ordinary_ids, probability):
    _, labels = mask(ordinary_ids, probability=probability)
    sigma = np.sqrt(probability * (1 - probability) / len(labels))
    assert abs((labels != IGNORE_INDEX).mean() - probability) < 3 * sigma


def test_masked_tokens_are_labels_and_all_others_stay(ordinary_ids):
    input_ids, labels = mask(ordinary_ids)
    masked = labels != IGNORE_INDEX
    assert input_ids.dtype == labels.dtype == np.int64
    assert (input_ids[masked] == MASK_TOKEN_ID).all()
    assert (labels[masked] == ordinary_ids[masked]).all()
    assert (input_ids[~masked] == ordinary_ids[~masked]).all()


def test_special_tokens_are_never_masked():
    input_ids = np.arange(5).repeat(1000)
    masked_ids, labels = mask(input_ids, probability=0.99)
    assert (masked_ids == input_ids).all()
    assert (labels == IGNORE_INDEX).all()


@pytest.mark.parametrize("position", range(5))
def test_every_part_of_the_key_changes_the_mask(ordinary_ids, position):
    other = tuple(part + (index == position) for index, part in enumerate(KEY))
    masked = mask(ordinary_ids)[1] != IGNORE_INDEX
    masked_otherwise = mask(ordinary_ids, key=other)[1] != IGNORE_INDEX
    # Independent masks agree where both or neither mask: 0.2 ** 2 + 0.8 ** 2.
    assert abs((masked == masked_otherwise).mean() - 0.68) < 0.01


def test_mask_of_a_token_does_not_depend_on_the_tokens_after_it(ordinary_ids):
    whole, part = mask(ordinary_ids), mask(ordinary_ids[:100])
    np.testing.assert_array_equal(whole[1][:100], part[1])


def test_row_masker_names_the_row_in_the_key(ordinary_ids):
    special = np.zeros(100, dtype=bool)
    special[:5] = True
    masker = RowMasker(seed=0, probability=0.2, mask_token_id=MASK_TOKEN_ID, special_tokens=special)
    row = {"input_ids": ordinary_ids.tolist(), "source": 2, "document": 3, "chunk": 4}
    masked = masker(row, 1)
    np.testing.assert_array_equal(masked["input_ids"], mask(ordinary_ids)[0])
    np.testing.assert_array_equal(masked["labels"], mask(ordinary_ids)[1])


@pytest.mark.parametrize(
    "settings", [{"probability": 0.0}, {"probability": 1.0}, {"policy": "x"}, {"probabilty": 0.1}]
)
def test_bad_mask_settings_are_refused(settings):
    with pytest.raises(ValidationError, match=next(iter(settings))):
        MaskConfig(**settings)
