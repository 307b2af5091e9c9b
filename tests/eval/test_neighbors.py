"""Neighbors against all distances written out."""

import torch
from transformers import AutoTokenizer

from harmonic_sft.eval import nearest_prototypes
from harmonic_sft.models import DistLayer, HarmonicForMaskedLM


def test_neighbors_are_the_closest_prototypes(minilm_path):
    tokenizer = AutoTokenizer.from_pretrained(minilm_path)
    torch.manual_seed(0)
    head = DistLayer(8, len(tokenizer))
    found = nearest_prototypes(head, tokenizer, ["king", "antidisestablishment"], num_neighbors=3)
    king = tokenizer.convert_tokens_to_ids("king")
    weight = head.weight.detach()
    distances = [(float((w - weight[king]).norm()), i) for i, w in enumerate(weight)]
    expected = [i for _, i in sorted(distances) if i != king][:3]
    assert found == {"king": tokenizer.convert_ids_to_tokens(expected)}


def test_minilm_knows_what_a_king_is(minilm_path):
    """The prototypes are the input embeddings: neighbors in meaning from the first step."""
    tokenizer = AutoTokenizer.from_pretrained(minilm_path)
    model = HarmonicForMaskedLM.from_base(str(minilm_path))
    found = nearest_prototypes(model.dist_head, tokenizer, ["king", "monday"])
    assert {"kings", "queen", "monarch"} <= set(found["king"])
    assert {"tuesday", "sunday", "wednesday"} <= set(found["monday"])
