"""Neighbors against all distances written out."""

import pytest
import torch
import torch.nn.functional as F
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from harmonic_sft.eval import explain, nearest_prototypes
from harmonic_sft.eval.neighbors import _texts
from harmonic_sft.models import DistLayer, HarmonicForCausalLM, HarmonicForMaskedLM
from tests.decoders import save_decoder


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


def test_rows_that_pad_the_vocabulary_are_named_by_their_numbers(tokenizer):
    head = DistLayer(8, len(tokenizer) + 1)
    near = tokenizer.convert_tokens_to_ids("aa")
    with torch.no_grad():
        head.weight[-1] = head.weight[near]
    found = nearest_prototypes(head, tokenizer, ["aa"], num_neighbors=1)
    assert found == {"aa": [f"[{len(tokenizer)}]"]}


def test_predictions_are_explained_by_distance(tiny_base, tokenizer):
    model = HarmonicForMaskedLM.from_base(str(tiny_base), head={"name": "dist"})
    places = explain(model, tokenizer, "aa [MASK] bb [MASK]", top=3, num_neighbors=2)
    assert [len(tokens) for tokens in places] == [3, 3]
    ids = tokenizer("aa [MASK] bb [MASK]", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        state = F.normalize(model.model(ids).last_hidden_state[0, 4], dim=-1)
        probabilities = model(ids).logits[0, 4].softmax(-1)
    distances = (state - model.dist_head.prototypes.detach()).norm(dim=-1)
    assert [found["token"] for found in places[1]] == tokenizer.convert_ids_to_tokens(
        distances.argsort()[:3].tolist()
    )
    first = places[1][0]
    assert first["distance"] == pytest.approx(distances.min().item(), abs=1e-5)
    assert first["probability"] == pytest.approx(float(probabilities.max()), abs=1e-6)
    assert len(first["neighbors"]) == 2
    assert first["token"] not in first["neighbors"]
    with pytest.raises(ValueError, match=r"text: expected \[MASK\] where a token is"):
        explain(model, tokenizer, "aa bb")
    with pytest.raises(ValueError, match="--top: expected 1 to 109 tokens, got 500"):
        explain(model, tokenizer, "aa [MASK]", top=500)
    with pytest.raises(ValueError, match=r"text: expected at most 64 tokens, got 73. Shorten it"):
        explain(model, tokenizer, "aa " * 70 + "[MASK]")


def test_a_decoder_is_asked_for_the_next_token(tokenizer, tmp_path):
    model = HarmonicForCausalLM.from_base(
        str(save_decoder("gpt2", tmp_path)), head={"name": "linear"}
    )
    for template, num_around in (("[CLS] $A [SEP]", 1), ("$A [SEP]", 0), ("$A", 0)):
        special = [(name, tokenizer.convert_tokens_to_ids(name)) for name in ("[CLS]", "[SEP]")]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=template, special_tokens=special
        )
        ids = tokenizer("aa bb", return_tensors="pt")["input_ids"][:, : num_around + 2]
        with torch.no_grad():  # without what ends every text
            probabilities = model(ids).logits[0, -1].softmax(-1)
        ((found, _),) = explain(model, tokenizer, "aa bb", top=2)
        token = int(probabilities.argmax())  # the model has more than the tokenizer
        assert found["token"] == (tokenizer.convert_ids_to_tokens(token) or f"[{token}]")
        assert found["probability"] == pytest.approx(float(probabilities.max()), rel=1e-5)
        assert found["distance"] is None
    with pytest.raises(ValueError, match=r"^text: expected a text, got ''"):  # like GPT-2's
        explain(model, tokenizer, "")


def test_tokens_of_bytes_are_shown_as_text(byte_level):
    tokenizer, vocab = byte_level, byte_level.get_vocab()
    head = DistLayer(8, len(vocab))
    with torch.no_grad():  # in a circle, so that each is near the ones before and after it
        angles = torch.linspace(0, 3, len(vocab))
        head.weight[:, 0], head.weight[:, 1], head.weight[:, 2:] = angles.cos(), angles.sin(), 0
    found = nearest_prototypes(head, tokenizer, [" st", "!"], num_neighbors=1)
    assert found[" st"] == ["s"]
    found = nearest_prototypes(head, tokenizer, ["st"], num_neighbors=1)
    assert found["st"] == ["s"]  # as it is cut in a text, after a space
    last = tokenizer.convert_ids_to_tokens(vocab["Ġs"] - 1)  # a byte that is no character
    found = nearest_prototypes(head, tokenizer, [" s"], num_neighbors=2)
    assert set(found[" s"]) == {"st", last}


def test_what_a_terminal_would_obey_is_spelled_out(byte_level):
    ids = [byte_level.get_vocab()[token] for token in ("ě", "a", "Ġ")]  # ě: the byte 0x1b, escape
    assert _texts(byte_level, ids) == [r"\x1b", "a", "Ġ"]


def test_words_that_the_tokenizer_does_not_know_are_left_out(tokenizer):
    head = DistLayer(8, len(tokenizer))
    assert list(nearest_prototypes(head, tokenizer, ["aa", "unheard"])) == ["aa"]
