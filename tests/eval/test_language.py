"""Language metrics recomputed token by token."""

import math

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from harmonic_sft.eval import score
from harmonic_sft.eval.language import (
    bits_per_byte,
    loss_by_frequency,
    minimal_pairs,
    pseudo_log_likelihood,
)
from harmonic_sft.models import HarmonicForCausalLM, HarmonicForMaskedLM
from tests.decoders import save_decoder


@pytest.fixture(scope="module")
def tokenizer(tiny_base):
    return AutoTokenizer.from_pretrained(tiny_base)


@pytest.fixture(scope="module")
def model(tiny_base):
    return HarmonicForMaskedLM.from_base(str(tiny_base))


def test_every_token_is_predicted_from_all_others(model, tokenizer):
    sentence = "aa bb cc"
    ids = tokenizer(sentence)["input_ids"]
    expected = 0.0
    for place in range(1, len(ids) - 1):
        masked = torch.tensor([ids])
        masked[0, place] = tokenizer.mask_token_id
        with torch.no_grad():
            expected += float(model(masked).logits[0, place].log_softmax(-1)[ids[place]])
    found = pseudo_log_likelihood(model, tokenizer, sentence)
    assert found == pytest.approx(expected, rel=1e-5)
    single = pseudo_log_likelihood(model, tokenizer, sentence, batch_size=1)
    assert single == pytest.approx(expected, rel=1e-5)
    other = "aa bb dd"
    first_wins = found > pseudo_log_likelihood(model, tokenizer, other)
    share = minimal_pairs(model, tokenizer, [(sentence, other)])
    assert share == first_wins
    assert minimal_pairs(model, tokenizer, [(other, sentence)]) == 1 - share


def test_bits_per_byte_and_losses_by_frequency(model, tokenizer):
    labels = torch.tensor([[5] * 12 + [6, 7]])
    states = torch.randn(1, 14, 32, generator=torch.Generator().manual_seed(0))
    scores = score(model, [(states, labels)])
    with torch.no_grad():
        losses = model.dist_head.nll(states[0], labels[0]).numpy()
    # Every token stands for two letters; there are no sub-words, so no space is missing.
    assert bits_per_byte(scores, tokenizer) == pytest.approx(
        losses.sum() / math.log(2) / (2 * 14), rel=1e-5
    )
    rare, frequent = loss_by_frequency(scores)
    assert (rare["least"], rare["tokens"], frequent["least"], frequent["tokens"]) == (1, 2, 10, 12)
    assert rare["loss"] == pytest.approx(np.mean(losses[12:]), rel=1e-5)
    assert frequent["loss"] == pytest.approx(np.mean(losses[:12]), rel=1e-5)


def test_a_decoder_predicts_from_what_stands_before(tokenizer, tmp_path):
    decoder = HarmonicForCausalLM.from_base(str(save_decoder("llama", tmp_path)))
    ids = torch.tensor([tokenizer("aa bb cc")["input_ids"]])
    with torch.no_grad():
        expected = -decoder(ids, labels=ids).loss.item() * (ids.shape[1] - 1)
    found = pseudo_log_likelihood(decoder, tokenizer, "aa bb cc")
    assert found == pytest.approx(expected, rel=1e-5)
