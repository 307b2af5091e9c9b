"""Language metrics recomputed token by token."""

import copy
import json
import math

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordPiece
from tokenizers.processors import TemplateProcessing
from transformers import ByT5Tokenizer, CTRLTokenizer, PreTrainedTokenizerFast
from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

from harmonic_sft.eval import TokenScores, score
from harmonic_sft.eval.calibration import LOG_SCALES
from harmonic_sft.eval.language import (
    bits_per_byte,
    frequency_name,
    loss_by_frequency,
    minimal_pairs,
    pseudo_log_likelihood,
)
from harmonic_sft.models import HarmonicForCausalLM, HarmonicForMaskedLM
from tests.decoders import save_decoder


@pytest.fixture(scope="module")
def model(tiny_base):
    return HarmonicForMaskedLM.from_base(str(tiny_base))


def masked_one_by_one(model, tokenizer, ids):
    """The log-probability of every token but the first and the last, from all others."""
    total = 0.0
    for place in range(1, len(ids) - 1):
        masked = torch.tensor([ids])
        masked[0, place] = tokenizer.mask_token_id
        with torch.no_grad():
            total += float(model(masked).logits[0, place].log_softmax(-1)[ids[place]])
    return total


def test_every_token_is_predicted_from_all_others(model, tokenizer):
    sentence, other = "aa bb cc", "aa bb dd"
    expected = masked_one_by_one(model, tokenizer, tokenizer(sentence)["input_ids"])
    found = pseudo_log_likelihood(model, tokenizer, sentence)
    assert found == pytest.approx(expected, rel=1e-5)
    single = pseudo_log_likelihood(model, tokenizer, sentence, batch_size=1)
    assert single == pytest.approx(expected, rel=1e-5)
    first_wins = found > pseudo_log_likelihood(model, tokenizer, other)
    share = minimal_pairs(model, tokenizer, [(sentence, other)])
    assert share == first_wins
    assert minimal_pairs(model, tokenizer, [(other, sentence)]) == 1 - share


@pytest.mark.parametrize("is_fast", [True, False])
def test_unknown_words_are_predicted_too(model, tokenizer, tiny_base, is_fast):
    tokenizer = tokenizer if is_fast else BertTokenizerLegacy(str(tiny_base / "vocab.txt"))
    ids = tokenizer("aa zzzz")["input_ids"]
    assert (len(ids), ids[2]) == (4, tokenizer.unk_token_id)
    expected = masked_one_by_one(model, tokenizer, ids)
    assert pseudo_log_likelihood(model, tokenizer, "aa zzzz") == pytest.approx(expected, rel=1e-5)


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
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.bos_token = "[CLS]"  # not added a second time
    ids = torch.tensor([tokenizer("aa bb cc")["input_ids"]])  # the tokenizer adds the ends
    with torch.no_grad():
        log_probs = decoder(ids).logits[0, :-2].log_softmax(-1)
    expected = float(log_probs[range(3), ids[0, 1:-1]].sum())
    found = pseudo_log_likelihood(decoder, tokenizer, "aa bb cc")
    assert found == pytest.approx(expected, rel=1e-5)


def bytes_of(tokens, model, decoder):
    """How many bytes these tokens of a vocabulary stand for, by the bits per byte of 1 nat each."""
    backend = Tokenizer(model)
    backend.decoder = decoder
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    tokenizer.add_tokens([AddedToken("<|reserved|>", special=True), AddedToken("<\u00e9>")])
    return bytes_counted(np.array(tokenizer.convert_tokens_to_ids(tokens)), tokenizer)


def bytes_counted(ids, tokenizer):
    zeros = np.zeros(len(ids), np.int64)
    ones = np.ones((len(ids), len(LOG_SCALES)))
    scores = TokenScores(zeros, ids, zeros, zeros, zeros, zeros, ones, 1)
    return len(ids) / math.log(2) / bits_per_byte(scores, tokenizer)


def vocabulary(*tokens):
    return {token: index for index, token in enumerate(["[UNK]", *tokens])}


def test_tokens_stand_for_their_bytes_with_every_kind_of_vocabulary():
    special = ["<|endoftext|>", "<|reserved|>"]
    # U+0120 is a space; the two others are the first two bytes of a character of three.
    pieces = ["\u0120the", "\u00e6\u0139", "##", *special, "<\u00e9>"]
    found = bytes_of(pieces, BPE(vocabulary(*pieces[:3]), []), decoders.ByteLevel())
    assert found == pytest.approx(4 + 2 + 2 + 4)
    pieces = ["\u2581the", "<0xE6>", "\u00e9", "##", *special]
    found = bytes_of(pieces, BPE(vocabulary(*pieces[:4]), []), decoders.Metaspace())
    assert found == pytest.approx(4 + 1 + 2 + 2)
    pieces = ["the", "##re", ".", *special]
    model = WordPiece(vocabulary(*pieces[:3]), unk_token="[UNK]")
    assert bytes_of(pieces, model, decoders.WordPiece()) == pytest.approx(3 + 2 + 1)
    pieces = ["the", "re</w>", "@@", *special]
    model = BPE(vocabulary(*pieces[:3]), [], end_of_word_suffix="</w>")
    assert bytes_of(pieces, model, decoders.BPEDecoder()) == pytest.approx(3 + 2)


@pytest.mark.parametrize("text", ["aa bb", "zzzz bb"])
def test_the_first_token_of_a_text_is_predicted_too(tokenizer, tmp_path, text):
    decoder = HarmonicForCausalLM.from_base(str(save_decoder("llama", tmp_path)))
    plain = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        eos_token="[SEP]",
        pad_token="[PAD]",
        unk_token="[UNK]",
    )
    plain.backend_tokenizer.post_processor = TemplateProcessing(single="$A")  # like GPT-2's
    numbers = plain(text)["input_ids"]
    assert len(numbers) == 2
    ids = torch.tensor([[plain.eos_token_id, *numbers]])
    with torch.no_grad():
        log_probs = decoder(ids).logits[0, :-1].log_softmax(-1)
    expected = float(log_probs[[0, 1], numbers].sum())
    assert pseudo_log_likelihood(decoder, plain, text) == pytest.approx(expected, rel=1e-5)


def test_sentences_longer_than_the_positions_are_refused(model, tokenizer):
    with pytest.raises(ValueError, match=r"text: expected at most 64 tokens, got 72. Shorten it"):
        pseudo_log_likelihood(model, tokenizer, "aa " * 70)
    with pytest.raises(ValueError, match=r"^pair 2: text: expected at most 64 tokens, got 72"):
        minimal_pairs(model, tokenizer, [("aa", "bb"), ("aa", "aa " * 70)])
    # Nothing to predict would be likelier than any sentence.
    with pytest.raises(ValueError, match=r"^pair 2: sentence: expected at least one token, got ''"):
        minimal_pairs(model, tokenizer, [("aa", "bb"), ("", "aa")])


def test_the_bins_of_frequencies_have_names():
    assert [frequency_name(n) for n in (1, 10)] == ["1 to 9", "10 to 99"]
    assert frequency_name(1_000_000).endswith(" or more")


def test_bits_per_byte_of_a_slow_tokenizer_are_those_of_the_fast_one(tokenizer, tiny_base):
    model = HarmonicForMaskedLM.from_base(str(tiny_base))
    slow = BertTokenizerLegacy(str(tiny_base / "vocab.txt"))
    states = torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(0))
    scores = score(model, [(states, torch.tensor([[5, 6, 7]]))])
    assert bits_per_byte(scores, slow) == bits_per_byte(scores, tokenizer)


def test_slow_tokenizers_print_bytes_and_marks_that_are_no_text(tmp_path):
    (tmp_path / "vocab.json").write_text(json.dumps({"<unk>": 0, "re@@": 1, "do": 2}))
    (tmp_path / "merges.txt").write_text("#version\nd o</w>\nr e\n")
    ctrl = CTRLTokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    for tokenizer, text, expected in [
        (ctrl, "redo do", 6),
        (ByT5Tokenizer(), "na\u00efve \u65e5", 10),
    ]:
        ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"])
        assert bytes_counted(ids, tokenizer) == pytest.approx(expected)
