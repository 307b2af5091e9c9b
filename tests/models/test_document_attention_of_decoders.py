"""Documents of one row of a decoder have the hidden states that they have alone."""

import pytest
import torch

from harmonic_sft.models import HarmonicForCausalLM
from harmonic_sft.models.document_attention import PACKABLE_DECODERS
from tests.decoders import FAMILIES, V, save_decoder

LENGTHS = (5, 12, 1, 8)


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("decoders")
    return {family: save_decoder(family, folder / family) for family in FAMILIES}


@pytest.fixture
def documents():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, V, (length,), generator=generator) for length in LENGTHS]


def hidden_states(model, **inputs):
    with torch.no_grad():
        return model.model(**inputs).last_hidden_state


CASES = [
    (family, attention, 3 * ((row + column) % 2))
    for row, family in enumerate(PACKABLE_DECODERS)
    for column, attention in enumerate(("sdpa", "eager"))
    if (family, attention) != ("gemma2", "sdpa")  # which transformers refuses
]


@pytest.mark.parametrize(("family", "attention", "padding"), CASES)
def test_documents_do_not_see_each_other(bases, documents, family, attention, padding):
    model = HarmonicForCausalLM.from_base(str(bases[family]))
    model.model.backbone.config._attn_implementation = attention
    row = torch.cat([*documents, torch.zeros(padding, dtype=torch.int64)])[None]
    positions = torch.cat([*(torch.arange(n) for n in LENGTHS), torch.zeros(padding).long()])[None]
    mask = torch.ones_like(row)
    mask[:, sum(LENGTHS) :] = 0
    found = hidden_states(model, input_ids=row, position_ids=positions, attention_mask=mask)
    if family == "llama":  # the whole model without labels, which keeps a cache elsewhere
        whole = model(input_ids=row, position_ids=positions, attention_mask=mask)
        assert whole.past_key_values is None
        torch.testing.assert_close(whole.logits[0], model.dist_head(found[0]))
    start = 0
    for document in documents:
        alone = hidden_states(model, input_ids=document[None])
        stop = start + len(document)
        torch.testing.assert_close(found[:, start:stop], alone, atol=1e-4, rtol=1e-4)
        start = stop
    leaking = hidden_states(model, input_ids=row, attention_mask=mask)
    assert not torch.allclose(found[:, 6:17], leaking[:, 6:17], atol=1e-2)


def test_other_families_refuse_several_documents_but_not_padding(bases):
    model = HarmonicForCausalLM.from_base(str(bases["phi"]))
    row = torch.arange(3, 11)[None]
    compiled = torch.compile(model.model, backend="eager", fullgraph=True)
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    message = "expected one document per row for a backbone of type"
    with pytest.raises(ValueError, match=message):
        model.model(input_ids=row, position_ids=packed)
    with pytest.raises(RuntimeError, match=message):
        compiled(input_ids=row, position_ids=packed)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])
    positions = torch.tensor([[1, 1, 0, 1, 2, 3, 4, 5]])  # as generate counts them
    inputs = {"input_ids": row, "position_ids": positions, "attention_mask": mask}
    alone = hidden_states(model, input_ids=row[:, 2:])
    for found in (hidden_states(model, **inputs), compiled(**inputs).last_hidden_state):
        torch.testing.assert_close(found[:, 2:], alone, atol=1e-4, rtol=1e-4)
