"""How near wrong predictions are, against one token at a time."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModel

from harmonic_sft.eval import score
from harmonic_sft.eval.ruler import Ruler, judge, read_ruler, semantic_errors
from harmonic_sft.models import DistLayer, HarmonicForMaskedLM

N, D, V, WIDTH = 60, 8, 20, 5


def judged(ruler, head, states, labels):
    """What the ruler says of the predictions of `[N]` tokens, each a row of its own."""
    model = SimpleNamespace(dist_head=head, class_embeddings=lambda: head.weight)
    scores = score(model, [(states[:, None], labels[:, None])])
    return judge(ruler, head, (states, labels), scores)


def cosine(one, other):
    return float(one @ other / one.norm() / other.norm())


def test_what_all_models_get_wrong_is_judged_by_the_ruler_alone():
    torch.manual_seed(0)
    ruler = Ruler(F.normalize(torch.randn(V, WIDTH), dim=-1), np.arange(V) % 3 > 0)
    labels = torch.randint(V, (N,))
    documents = np.arange(N) // 10
    models = [DistLayer(D, V, h_exp=-8.0), DistLayer(D, V, h_exp=-8.0)]
    states = [F.normalize(m.weight.detach()[labels] + 0.5 * torch.randn(N, D)) for m in models]
    pairs = list(zip(models, states, strict=True))
    logits = [head(some).detach() for head, some in pairs]
    found = semantic_errors(
        ruler, [judged(ruler, head, some, labels) for head, some in pairs], documents
    )
    guesses = [one.argmax(-1) for one in logits]
    items = [
        n
        for n in range(N)
        if int(labels[n]) % 3 and all(int(guess[n]) != int(labels[n]) for guess in guesses)
    ]
    assert 5 < len(items) < N
    assert [one["tokens"] for one in found] == [one["expected_tokens"] for one in found]
    for one, guess, values in zip(found, guesses, logits, strict=True):
        assert one["tokens"] == len(items)
        near = [cosine(ruler.vectors[guess[n]], ruler.vectors[labels[n]]) for n in items]
        assert one["guess"] == pytest.approx(np.mean(near), abs=1e-6)
        expected = [
            cosine(values[n].softmax(-1) @ ruler.vectors, ruler.vectors[labels[n]]) for n in items
        ]
        assert one["expected"] == pytest.approx(np.mean(expected), abs=1e-5)
        low, high = one["interval"]
        assert low < one["guess"] < high
    assert found[0]["difference"] == [0.0, 0.0]
    low, high = found[1]["difference"]
    assert low <= found[1]["guess"] - found[0]["guess"] <= high


def test_guesses_that_are_near_are_told_from_the_shuffled_ones():
    """Every guess is the label's twin; twins point the same way for the ruler."""
    torch.manual_seed(0)
    vectors = F.normalize(torch.randn(V // 2, 64), dim=-1).repeat_interleave(2, 0)
    head = DistLayer(D, V)
    labels = torch.arange(V)
    states = F.normalize(head.weight.detach()[labels ^ 1], dim=-1)
    ruler = Ruler(vectors, np.ones(V, bool))
    (found,) = semantic_errors(ruler, [judged(ruler, head, states, labels)], np.arange(V))
    assert found["guess"] == pytest.approx(1.0)
    assert found["guess_shuffled"] < 0.5
    assert found["expected"] > found["expected_shuffled"] + 0.5


def test_nothing_wrong_is_no_number():
    head = DistLayer(D, V)
    labels = torch.arange(V)
    ruler = Ruler(F.normalize(torch.randn(V, WIDTH), dim=-1), np.ones(V, bool))
    states = head.weight.detach()
    (found,) = semantic_errors(ruler, [judged(ruler, head, states, labels)], np.zeros(V))
    assert found["tokens"] == 0
    assert np.isnan(found["guess"])
    assert found["interval"] is None


def test_tokens_are_read_alone_and_pieces_are_no_words(tiny_base, tokenizer):
    ruler = read_ruler(str(tiny_base), tokenizer, len(tokenizer) + 3)
    token = tokenizer("ab", add_special_tokens=False)["input_ids"][0]
    with torch.no_grad():
        states = AutoModel.from_pretrained(tiny_base)(**tokenizer("ab", return_tensors="pt"))
    mean = F.normalize(states.last_hidden_state[0].mean(0), dim=-1)
    torch.testing.assert_close(ruler.vectors[token], mean, atol=1e-5, rtol=1e-5)
    assert ruler.vectors[len(tokenizer) :].count_nonzero() == 0
    assert ruler.is_word[token]
    assert not ruler.is_word[tokenizer.mask_token_id]


def test_a_model_of_ours_is_a_ruler_too(tiny_base, tokenizer, tmp_path):
    HarmonicForMaskedLM.from_base(str(tiny_base)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    ours, plain = (read_ruler(str(one), tokenizer, len(tokenizer)) for one in (tmp_path, tiny_base))
    torch.testing.assert_close(ours.vectors, plain.vectors)
