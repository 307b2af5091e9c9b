import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from harmonic_sft.models.configuration_neobert import NeoBERTConfig
from harmonic_sft.models.modeling_neobert import NeoBERTForMaskedLM

FIXTURE = Path(__file__).parents[1] / "fixtures" / "neobert_tiny"
both_attentions = pytest.mark.parametrize("attention", ["sdpa", "eager"])


def tensors(name: str) -> dict[str, Tensor]:
    return load_file(FIXTURE / f"{name}.safetensors")


def load(attention: str = "sdpa") -> NeoBERTForMaskedLM:
    config = NeoBERTConfig.from_pretrained(FIXTURE, attn_implementation=attention)
    model = NeoBERTForMaskedLM(config).eval()
    model.load_state_dict(tensors("weights"))
    return model


def difference(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


@both_attentions
@torch.no_grad()
def test_no_mask_is_a_mask_of_ones(attention):
    model, inputs = load(attention), tensors("inputs_nopad")
    without = model(input_ids=inputs["input_ids"]).logits
    assert difference(without, model(**inputs).logits) < 1e-5
    assert difference(without, tensors("outputs_nopad")["logits"]) < 1e-4


@torch.no_grad()
def test_masks_of_any_dtype_mean_the_same():
    model, inputs = load(), tensors("inputs")
    expected = model(**inputs).logits
    for dtype in (torch.bool, torch.float32):
        mask = inputs["attention_mask"].to(dtype)
        assert torch.equal(model(inputs["input_ids"], attention_mask=mask).logits, expected)


@both_attentions
@torch.no_grad()
def test_padding_changes_nothing_but_itself(attention):
    model, inputs = load(attention), tensors("inputs")
    padded = model(**inputs).logits
    for row, length in enumerate(inputs["attention_mask"].sum(1).tolist()):
        alone = model(inputs["input_ids"][row : row + 1, :length]).logits[0]
        assert difference(padded[row, :length], alone) < 1e-5


@torch.no_grad()
def test_only_differences_of_positions_matter():
    model, inputs = load(), tensors("inputs")
    shifted = model(**inputs, position_ids=torch.arange(23)[None] + 40).logits
    assert difference(shifted, model(**inputs).logits) < 1e-4


def packed_and_padded(padding: int) -> tuple[Tensor, Tensor, Tensor, list[tuple[int, slice]]]:
    """The documents of the fixture in two rows: ids, positions, mask, and where each one lies."""
    inputs = tensors("inputs")
    lengths = inputs["attention_mask"].sum(1).tolist()
    rows = [[0, 1], [3, 2]]
    width = max(sum(lengths[document] for document in row) for row in rows) + padding
    input_ids, position_ids, mask = torch.zeros(3, 2, width, dtype=torch.long)
    places = [(0, slice(0))] * 4
    for row, documents in enumerate(rows):
        start = 0
        for document in documents:
            place = slice(start, start + lengths[document])
            input_ids[row, place] = inputs["input_ids"][document, : lengths[document]]
            position_ids[row, place] = torch.arange(lengths[document])
            mask[row, place] = 1
            places[document] = (row, place)
            start = place.stop
        position_ids[row, start:] = torch.arange(width - start)
    return input_ids, position_ids, mask, places


def attend_by_boundaries(module, query, key, value, attention_mask, scaling, **kwargs):
    """What flash attention does with documents, in plain torch."""
    assert attention_mask is None
    boundaries = kwargs["cu_seq_lens_q"].tolist()
    assert torch.equal(kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"])
    assert kwargs["max_length_q"] == kwargs["max_length_k"] == kwargs["cu_seq_lens_q"].diff().max()
    batch_size = query.shape[0]
    query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    output = torch.empty_like(query)  # [B * T, H, D / H]
    for start, stop in itertools.pairwise(boundaries):
        q, k, v = (x[start:stop].transpose(0, 1) for x in (query, key, value))
        attended = F.scaled_dot_product_attention(q, k, v, scale=scaling)
        output[start:stop] = attended.transpose(0, 1)
    return output.unflatten(0, (batch_size, -1)), None


@pytest.mark.parametrize("attention", ["sdpa", "eager", "flash"])
@pytest.mark.parametrize("with_mask", [False, True])
@torch.no_grad()
def test_packed_documents_do_not_see_each_other(attention, with_mask, monkeypatch):
    model = load("sdpa" if attention == "flash" else attention)
    expected = model(**tensors("inputs")).logits
    input_ids, position_ids, mask, places = packed_and_padded(padding=3)
    inputs = {"input_ids": input_ids, "position_ids": position_ids}
    if with_mask:
        inputs["attention_mask"] = mask
    if attention == "flash":
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "flash_loop", attend_by_boundaries)
        model.config._attn_implementation = "flash_loop"
        if with_mask:
            with pytest.raises(ValueError, match="attention_mask: expected None beside packed"):
                model(**inputs)
            return
    logits = model(**inputs).logits
    assert logits.isfinite().all()
    for document, (row, place) in enumerate(places):
        length = place.stop - place.start
        assert difference(logits[row, place], expected[document, :length]) < 1e-5


@torch.no_grad()
def test_a_packed_row_may_be_longer_than_the_model():
    model, input_ids = load(), tensors("inputs_nopad")["input_ids"]
    position_ids = torch.arange(64).repeat(2)[None]
    logits = model(input_ids.reshape(1, 128), position_ids=position_ids).logits
    assert difference(logits.view(2, 64, -1), tensors("outputs_nopad")["logits"]) < 1e-4
    with pytest.raises(ValueError, match="sequence length: expected at most 64 tokens"):
        model(input_ids.reshape(1, 128), position_ids=torch.arange(128)[None])


def test_packed_gradients_are_finite_with_padding():
    model = load()
    input_ids, position_ids, mask, _ = packed_and_padded(padding=3)
    labels = input_ids.masked_fill(mask == 0, -100)
    model(input_ids, attention_mask=mask, position_ids=position_ids, labels=labels).loss.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()
