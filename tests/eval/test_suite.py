"""Rows of the suite that need no file."""

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer

from harmonic_sft.eval.suite import Subject, measure
from harmonic_sft.models import HarmonicForCausalLM, HarmonicForMaskedLM


@pytest.fixture(scope="module")
def tokenizer(tiny_base):
    return AutoTokenizer.from_pretrained(tiny_base)


def rows_of(model, tokenizer, states, labels):
    subject = Subject(model.eval(), tokenizer, (states, labels), None, {}, {}, None)
    rows = measure(subject, None, size="quick")
    return {(row["set"], row.get("metric")): row for row in rows}


@pytest.mark.parametrize("longest", [64, 63])
def test_samples_are_drawn_from_the_whole_distribution(causal_base, tokenizer, longest):
    head = {"name": "linear", "bias": True}
    model = HarmonicForCausalLM.from_base(str(causal_base), head=head)
    torch.nn.init.zeros_(model.dist_head.weight)
    torch.nn.init.normal_(model.dist_head.bias, std=1e-3)  # 120 tokens, all nearly as likely
    model.config.get_text_config().max_position_embeddings = longest
    model.generation_config.min_p = 0.999  # a base's own habits
    rows = rows_of(model, tokenizer, torch.ones(1, 32), torch.tensor([5]))
    if longest == 64:
        assert rows["samples", "distinct-1"]["value"] > 110 / (16 * 64)
    else:
        assert rows["samples", None]["missing"] == "a model of 64 positions, it has 63"


def test_rotated_states_are_compared_with_the_prototypes(tiny_base, tokenizer):
    model = HarmonicForMaskedLM.from_base(str(tiny_base), head={"name": "rotation"})
    head, labels = model.dist_head, torch.arange(20)
    torch.nn.init.normal_(head.skew, generator=torch.Generator().manual_seed(0))
    states = (head.prototypes[labels] @ head.rotation).detach()
    assert F.cosine_similarity(states, head.prototypes[labels]).mean() < 0.5
    rows = rows_of(model, tokenizer, states, labels)
    assert rows["held-out data", "class-center alignment"]["value"] > 0.99


def test_hubs_are_counted_among_some_of_the_prototypes(tiny_base, tokenizer, monkeypatch):
    monkeypatch.setattr("harmonic_sft.eval.geometry.NUM_ROWS", 50)
    model = HarmonicForMaskedLM.from_base(str(tiny_base))
    rows = rows_of(model, tokenizer, torch.ones(1, 32), torch.tensor([5]))
    assert rows["prototypes", "hubness"]["n"] == 50
    assert rows["prototypes", "mean cosine"]["n"] == 109
