from unittest.mock import patch

from tokenizers import Tokenizer, models, processors
from transformers import EsmTokenizer, PreTrainedTokenizerFast

from harmonic_sft.data import encoding
from harmonic_sft.data.encoding import Encoded, Piece, SpecialTokens, encode_pieces


def test_texts_are_tokenized_in_groups_of_few_characters(tokenizer, monkeypatch):
    texts = ["word1 ab", "word2 " * 30, "word3", "word4 [MASK]", "xyz " * 20]
    drafts = [[Piece(text, False, [(2, 9)])] for text in texts]
    settings = {"tokenizer": tokenizer, "word_ids": True}
    known = Encoded([1], [True], [], [])
    whole = encode_pieces([known, *drafts, drafts[0]], **settings)
    monkeypatch.setattr(encoding, "BATCH_CHARACTERS", 20)
    kind = type(tokenizer)
    with patch.object(kind, "__call__", autospec=True, side_effect=kind.__call__) as called:
        assert encode_pieces([known, *drafts, drafts[0]], **settings) == whole
    assert [call.args[1] for call in called.call_args_list] == [texts[:2], texts[2:]]
    assert whole[0] is known
    assert whole[1] == whole[-1]
    assert tokenizer.convert_ids_to_tokens(whole[1].input_ids) == ["word1", "a", "##b"]
    assert whole[1].scored == [True, True, True]
    assert whole[1].word_ids == [0, 1, 1]


def test_special_tokens_of_a_tokenizer_that_knows_four_letters():
    vocabulary = {letter: index for index, letter in enumerate("ACGT")} | {"[CLS]": 4}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.post_processor = processors.TemplateProcessing(
        "[CLS] $0", special_tokens=[("[CLS]", 4)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, cls_token="[CLS]")
    assert SpecialTokens.of(tokenizer) == SpecialTokens([4], [])


def test_a_slow_tokenizer_keeps_its_added_tokens(tmp_path):
    """ESM's letters are such tokens; without them a protein would be one unknown word."""
    tokens = ["<cls>", "<pad>", "<eos>", "<unk>", *"LAGVS", "<mask>"]
    (tmp_path / "vocab.txt").write_text("\n".join(tokens))
    slow = EsmTokenizer(str(tmp_path / "vocab.txt"))
    assert not slow.is_fast
    [row] = encode_pieces([[Piece("LAGVS", False, True)]], tokenizer=slow, word_ids=False)
    assert slow.convert_ids_to_tokens(row.input_ids) == [*"LAGVS"]


def test_pieces_are_joined_and_only_some_spell_special_tokens(tokenizer):
    pieces = [Piece("word1 [SEP]", True, True), Piece("[SEP] word2", False, False)]
    (encoded,) = encode_pieces([pieces], tokenizer=tokenizer, word_ids=True)
    tokens = tokenizer.convert_ids_to_tokens(encoded.input_ids)
    assert tokens == ["word1", "[SEP]", "[", "s", "##e", "##p", "]", "word2"]
    assert encoded.scored == [True] * 2 + [False] * 6
    assert encoded.word_ids == [0, -1, 1, 2, 2, 2, 3, 4]


def test_a_label_stands_at_the_first_token_of_its_piece(tokenizer):
    pieces = [Piece("ab", True, True, "x"), Piece("", True, True, "y"), Piece("word1", True, True)]
    (encoded,) = encode_pieces([pieces], tokenizer=tokenizer, word_ids=False)
    assert encoded.labels == ["x", None, None]


def test_special_tokens_around_a_text_are_found(tokenizer, byte_tokenizer):
    assert SpecialTokens.of(tokenizer) == SpecialTokens([2], [3])
    assert SpecialTokens.of(byte_tokenizer) == SpecialTokens([0], [2])
