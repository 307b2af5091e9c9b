import copy

import datasets
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from harmonic_sft.data.bad_rows import BLANK, BadRow
from harmonic_sft.data.encoding import Encoded
from harmonic_sft.data.formats import Reader, recognize
from tests.data.conftest import encode_rows

USER = {"role": "user", "content": "word1"}
ASSISTANT = {"role": "assistant", "content": "word2"}
# The shape of Glaive's rows: a call and its result as JSON, and the tools as a JSON string.
GLAIVE = {
    "conversations": [
        {"from": "human", "value": "word1 word2"},
        {"from": "gpt", "value": "word3"},
        {"from": "human", "value": "word4"},
        {"from": "function_call", "value": '{"name": "word5", "arguments": {"a": [1, "word6"]}}'},
        {"from": "observation", "value": '{"word7": true}'},
        {"from": "gpt", "value": "word8 word9"},
    ],
    "tools": '[{"name": "word5", "description": "word10", "parameters": {"type": "object"}}]',
}
CALL = {"name": "word5", "arguments": '{"a": [1, "word6"]}'}
FUNCTION = {"name": "word5", "description": "word10", "parameters": {"type": "object"}}
AS_MESSAGES = {
    "messages": [
        {"role": "user", "content": "word1 word2"},
        {"role": "assistant", "content": "word3"},
        {"role": "user", "content": "word4"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": CALL}],
        },
        {"role": "tool", "content": '{"word7": true}', "tool_call_id": "1"},
        {"role": "assistant", "content": "word8 word9"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
}
NOTHING = Encoded([], [], [], [])
WITH_INPUT = {"instruction": "word1 {x}", "input": "word2", "output": "word3"}


def one(row, form, tokenizer, loss_on="all", **settings):
    (encoded,) = encode_rows([row], form, tokenizer=tokenizer, loss_on=loss_on, **settings)
    return encoded


def of_tokens(input_ids, scored=None, begins=False):
    return Encoded(input_ids, scored or [True] * len(input_ids), [], [], begins)


def scored_text(tokenizer, encoded):
    return tokenizer.decode(np.asarray(encoded.input_ids)[encoded.scored])


@pytest.mark.parametrize(
    ("row", "form"),
    [
        ({"text": "a", "url": "b"}, "text"),
        ({"prompt": "a", "completion": "b"}, "prompt_completion"),
        ({"prompt": [USER], "completion": [ASSISTANT]}, "prompt_completion"),
        (AS_MESSAGES, "messages"),
        ({"conversations": [USER, ASSISTANT]}, "messages"),
        (GLAIVE, "sharegpt"),
        ({"instruction": "a", "input": "", "output": "b", "text": "whole"}, "alpaca"),
        ({"instruction": "a", "context": "", "response": "b", "category": "c"}, "alpaca"),
        ({"input_ids": [1, 2], "labels": [1, 2], "text": "a"}, "tokens"),
        ({"input_ids": np.array([1, 2])}, "tokens"),
    ],
)
def test_format_is_recognized_from_columns_and_types(row, form):
    assert recognize(row) == form


@pytest.mark.parametrize(
    "row", [{"content": "a", "id": 1}, {"instruction": "a", "instances": []}, {"text": 1}, {}]
)
def test_columns_of_no_format_are_named(row):
    with pytest.raises(ValueError, match=r"format: expected the columns text, .* Name the") as e:
        recognize(row)
    assert all(f"{name!r}: {type(value).__name__!r}" in str(e.value) for name, value in row.items())


def test_text_is_tokenized_without_the_wrapping_and_without_special_tokens(tokenizer):
    rows = [{"text": "word1 [MASK] word2"}, {"text": "ab"}]
    encoded = encode_rows(rows, "text", tokenizer=tokenizer, loss_on="all")
    tokens = [tokenizer.convert_ids_to_tokens(row.input_ids) for row in encoded]
    assert tokens == [["word1", "[", "m", "##a", "##s", "##k", "]", "word2"], ["a", "##b"]]
    assert all(all(row.scored) and not row.word_ids for row in encoded)
    other = one({"content": "ab", "text": "cd"}, "text", tokenizer, column="content")
    assert other == encoded[1]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": " \n"}, BLANK),
        ({"text": "\x00"}, NOTHING),  # BERT drops control characters
        ({"text": None}, "text: expected text, got NoneType None"),
        ({"text": 5}, "text: expected text, got int 5"),
        ({"text": float("nan")}, "text: expected text, got float nan"),
        ({"text": [10] * 1000}, f"text: expected text, got list [{'10, ' * 19}..."),
        ({"other": "a"}, "text: expected a column of that name, got ['other']"),
        ({"text": "a\ud83d"}, "expected text, got a surrogate, which is no character"),
    ],
)
def test_rows_without_text_are_bad(tokenizer, row, reason):
    rows = [{"text": "word1"}, row, {"text": "word2"}]
    encoded = encode_rows(rows, "text", tokenizer=tokenizer, loss_on="all")
    assert encoded[1] == reason
    assert [tokenizer.decode(encoded[i].input_ids) for i in (0, 2)] == ["word1", "word2"]


@pytest.mark.parametrize("loss_on", ["assistant", "completion"])
def test_plain_text_has_no_turns_to_score(tokenizer, loss_on):
    with pytest.raises(ValueError, match=f"data.loss_on: expected 'all' .* got '{loss_on}'"):
        one({"text": "a"}, "text", tokenizer, loss_on)


@pytest.mark.parametrize("loss_on", ["all", "completion", "assistant"])
def test_sharegpt_and_messages_are_the_same_conversation(tokenizer, loss_on):
    encoded = one(GLAIVE, "sharegpt", tokenizer, loss_on)
    assert encoded == one(AS_MESSAGES, "messages", tokenizer, loss_on)
    moved = {"conversations": AS_MESSAGES["messages"], "tools": AS_MESSAGES["tools"]}
    assert encoded == one(moved, "messages", tokenizer, loss_on)


def test_glaive_scores_answers_calls_and_ends_of_turns(tokenizer):
    encoded = one(GLAIVE, "sharegpt", tokenizer, "assistant")
    tokens = np.asarray(tokenizer.convert_ids_to_tokens(encoded.input_ids))
    scored = " ".join(token for token in tokens[encoded.scored] if token != "[UNK]")
    # Quotes, braces and digits are no pieces of this tokenizer.
    tag, names, argument = "t ##o ##o ##l c ##a ##l ##l", "n ##a ##m ##e", "a ##r ##g ##u ##m ##e"
    assert scored == (
        f"word3 [SEP] {tag} {names} word5 {argument} ##n ##t ##s a [ word6 ] {tag} [SEP] "
        "word8 word9 [SEP]"
    )
    assert list(tokens).count("[SEP]") == 7  # six turns and the tools
    last = one(GLAIVE, "sharegpt", tokenizer, "completion")
    assert scored_text(tokenizer, last) == "word8 word9 [SEP]"


def test_keys_that_a_table_fills_with_none_are_dropped(tokenizer):
    calls = [{"function": {"name": "word4", "arguments": {"b": 1}}}]
    other = {"messages": [USER, ASSISTANT | {"tool_calls": calls}]}
    plain = {"messages": [USER, ASSISTANT]}
    rows = [other, plain, {"messages": AS_MESSAGES["messages"][:3]}]
    table = datasets.Dataset.from_list(rows)
    assert table[1]["messages"][1]["tool_calls"] is None
    encoded = encode_rows(list(table), "messages", tokenizer=tokenizer, loss_on="assistant")
    assert encoded == encode_rows(rows, "messages", tokenizer=tokenizer, loss_on="assistant")
    assert scored_text(tokenizer, encoded[1]) == "word2 [SEP]"


def test_alpaca_takes_the_prompts_of_stanford(byte_tokenizer):
    encoded = one(WITH_INPUT, "alpaca", byte_tokenizer, "assistant")
    assert byte_tokenizer.decode(encoded.input_ids) == (
        "user:\nBelow is an instruction that describes a task, paired with an input that provides "
        "further context. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nword1 {x}\n\n### Input:\nword2\n\n### Response:</s>"
        "assistant:\nword3</s>"
    )
    assert scored_text(byte_tokenizer, encoded) == "word3</s>"
    encoded = one(WITH_INPUT | {"input": ""}, "alpaca", byte_tokenizer, "completion")
    assert byte_tokenizer.decode(encoded.input_ids) == (
        "user:\nBelow is an instruction that describes a task. Write a response that appropriately "
        "completes the request.\n\n### Instruction:\nword1 {x}\n\n### Response:</s>"
        "assistant:\nword3</s>"
    )
    assert scored_text(byte_tokenizer, encoded) == "word3</s>"


def test_an_alpaca_answer_follows_its_prompt_in_a_decoder(byte_tokenizer):
    settings = {"tokenizer": byte_tokenizer, "loss_on": "completion", "is_causal": True}
    text, end = Reader(row_format="alpaca", **settings)(WITH_INPUT).content
    assert text.text.endswith("word2\n\n### Response:word3")
    assert end.text == "</s>"
    [(start, stop)] = text.scored
    assert text.text[start:stop] == "word3"


def test_dolly_is_alpaca_by_other_names(tokenizer):
    dolly = {"instruction": "word1 {x}", "context": "word2", "response": "word3"}
    assert one(dolly, "alpaca", tokenizer) == one(WITH_INPUT, "alpaca", tokenizer)


def test_prompt_and_completion_are_turns(byte_tokenizer):
    texts = {"prompt": "word1", "completion": "word2"}
    encoded = one(texts, "prompt_completion", byte_tokenizer, "completion")
    assert byte_tokenizer.decode(encoded.input_ids) == "user:\nword1</s>assistant:\nword2</s>"
    assert scored_text(byte_tokenizer, encoded) == "word2</s>"
    turns = {"prompt": [USER], "completion": [ASSISTANT]}
    assert one(turns, "prompt_completion", byte_tokenizer, "completion") == encoded


def test_only_the_assistant_of_the_completion_is_scored(byte_tokenizer):
    row = {"prompt": [USER, ASSISTANT, USER], "completion": [ASSISTANT, USER, ASSISTANT]}
    encoded = one(row, "prompt_completion", byte_tokenizer, "completion")
    assert scored_text(byte_tokenizer, encoded) == "word2</s>word2</s>"
    encoded = one(row, "prompt_completion", byte_tokenizer, "assistant")
    assert scored_text(byte_tokenizer, encoded) == "word2</s>word2</s>word2</s>"


def test_sharegpt_may_have_a_column_of_the_system_turn(byte_tokenizer):
    row = {"system": "word0", "conversations": GLAIVE["conversations"][:2], "tools": "[]"}
    encoded = one(row, "sharegpt", byte_tokenizer, "assistant")
    assert byte_tokenizer.decode(encoded.input_ids) == (
        "system:\nword0</s>user:\nword1 word2</s>assistant:\nword3</s>"
    )


def turn(speaker, value):
    return {"conversations": [{"from": "human", "value": "a"}, {"from": speaker, "value": value}]}


@pytest.mark.parametrize(
    ("row", "form", "reason"),
    [
        ({"x": 1}, "messages", "messages: expected a column of that name, got ['x']"),
        ({"x": 1}, "sharegpt", "conversations: expected a column of that name, got ['x']"),
        ({"messages": "a"}, "messages", "messages: expected a list of turns, got str 'a'"),
        (
            {"messages": [USER | {"tool_calls": [{"name": "f"}]}]},
            "messages",
            "messages[0].tool_calls: expected none but the assistant's, got the role 'user'",
        ),
        (
            {"messages": [USER, ASSISTANT | {"tool_calls": [{"function": {"arguments": {}}}]}]},
            "messages",
            "messages[1].tool_calls: expected the name and arguments of a function, got dict",
        ),
        (
            {"messages": [ASSISTANT | {"tool_calls": 3}]},
            "messages",
            "messages[0].tool_calls: expected a list of calls, got int 3",
        ),
        (turn(["gpt"], "b"), "sharegpt", "conversations[1].from: expected one of ['system', 'hum"),
        (
            turn("function_call", "[" * 100_000),
            "sharegpt",
            "conversations[1].value: expected JSON, got",
        ),
        (turn("bing", "b"), "sharegpt", "conversations[1].from: expected one of ['system', 'hum"),
        (turn("function_call", "f(x)"), "sharegpt", "conversations[1].value: expected JSON, got"),
        (
            turn("function_call", '{"name": "f", "arguments": 3}'),
            "sharegpt",
            "conversations[1].value.arguments: expected an object, got int 3",
        ),
        (turn("gpt", "b") | {"tools": "9" * 5000}, "sharegpt", "tools: expected JSON, got str '99"),
        (turn("gpt", "b") | {"tools": "f(x)"}, "sharegpt", "tools: expected JSON, got str 'f(x)'"),
        (turn("gpt", "b") | {"tools": ["f"]}, "sharegpt", "tools: expected definitions of func"),
        (WITH_INPUT | {"output": ""}, "alpaca", "output: expected text, got str ''"),
        (WITH_INPUT | {"input": 3}, "alpaca", "input: expected text, got int 3"),
        ({"instruction": "a"}, "alpaca", "output: expected a column of that name, got ['instru"),
        (
            {"prompt": "a", "completion": " "},
            "prompt_completion",
            "completion: expected text or a list of turns, got str ' '",
        ),
        ({"prompt": ["a"], "completion": "b"}, "prompt_completion", "prompt: expected a list of t"),
    ],
)
def test_bad_conversations_say_what_was_found(tokenizer, row, form, reason):
    encoded = one(row, form, tokenizer)
    assert isinstance(encoded, str)
    assert encoded.startswith(reason)


def test_pretokenized_rows_lose_the_wrapping_that_every_row_gets(tokenizer):
    wrapped = tokenizer("word1 word2")["input_ids"]
    assert one({"input_ids": wrapped}, "tokens", tokenizer) == of_tokens(wrapped[1:-1], begins=True)
    bare = {"input_ids": np.asarray(wrapped[1:-1])}
    assert one(bare, "tokens", tokenizer) == of_tokens(wrapped[1:-1])


def test_labels_of_the_wrapping_do_not_double_it(tokenizer):
    row = {"input_ids": [2, 10, 11, 3], "labels": [2, 10, 11, 3]}
    assert one(row, "tokens", tokenizer) == of_tokens([10, 11], begins=True)
    read = Reader(row_format="tokens", tokenizer=tokenizer, is_causal=True)
    assert read(row).content == of_tokens([10, 11, 3], begins=True)


def test_a_pair_of_tokenized_texts_is_refused(tokenizer):
    row = {"input_ids": [10, 11, 12], "token_type_ids": [0, 0, 0]}
    assert one(row, "tokens", tokenizer) == of_tokens([10, 11, 12])
    reason = one({**row, "token_type_ids": [0, 0, 1]}, "tokens", tokenizer)
    assert reason.startswith("token_type_ids: expected 0 alone, got a pair of texts (your own da")


@pytest.mark.parametrize("packed", [{"position_ids": [0, 1, 0]}, {"seq_lengths": [2, 1]}])
def test_rows_that_were_packed_before_are_refused(tokenizer, packed):
    reason = one({"input_ids": [10, 11, 12], **packed}, "tokens", tokenizer)
    assert reason.startswith("position_ids: expected one document, got 2 packed into a row")
    whole = {"input_ids": [10, 11, 12], "position_ids": [0, 1, 2], "seq_lengths": [3]}
    assert one(whole, "tokens", tokenizer) == of_tokens([10, 11, 12])
    padded = {"input_ids": [0, 0, 10, 11], "position_ids": [0, 0, 0, 1]}
    row = {**padded, "attention_mask": [0, 0, 1, 1]}
    assert one(row, "tokens", tokenizer) == of_tokens([10, 11])


def pieces_of(content, label, row_format, tokenizer, **settings):
    settings = {"row_format": row_format, "column": "w", "label_column": "l", **settings}
    return Reader(tokenizer=tokenizer, **settings)({"w": content, "l": label}).content


@pytest.mark.parametrize(
    ("label", "names", "expected"),
    [("x", None, '"x"'), (np.int64(1), None, "1"), (torch.tensor(1), None, "1"), (1, "ab", '"b"')],
    ids=["string", "numpy", "torch", "number of a name"],
)
def test_a_label_is_a_string_an_integer_or_the_number_of_a_name(tokenizer, label, names, expected):
    [piece] = pieces_of("a", label, "labeled_text", tokenizer, class_names=names)
    assert piece.label == expected
    pieces = pieces_of(["a", "b"], [-100, label], "labeled_words", tokenizer, class_names=names)
    assert [piece.label for piece in pieces] == [None, expected]


@pytest.mark.parametrize(
    ("content", "label", "names", "reason"),
    [
        *(
            ("a", bad, None, f"a class as label, got {bad!r}, which stands for none")
            for bad in (-100, "-100", " -100 ", "", " ")  # a CSV file has them as text
        ),
        *(("a", bad, "ab", f"the number of one of 2 classes, got {bad}") for bad in (2, -1)),
        ("a", "yes", "ab", "the number of one of 2 classes, got 'yes'"),
        ("a", None, None, "a string or an integer as label, got None"),
        ("a", "\ud83d", None, r"a class as label, got '\\ud83d', which is no text"),
        ("a", True, None, r"a string or an integer as label, got True \(write it as a string\)"),
        (
            "a",
            1.0,
            None,
            r"a string or an integer as label, got 1.0 \(write an integer: one missing",
        ),
        ("a", 0.5, None, r"a string or an integer as label, got 0.5 \(for several classes or a n"),
        ("a", np.float64(0.5), None, "a string or an integer as label, got"),
        ("a", torch.tensor(0.5), None, "a string or an integer as label, got"),
        (["a", "b"], [-100, -100], None, "a label for one of 2 words, got -100 for all"),
        (["a"], ["x", "y"], None, "a label for each of 1 words, got 2"),
        (["a"], "x", None, "a label for each of 1 words, got str"),
        ([1], ["x"], None, "a list of words, got list"),
    ],
)
def test_bad_labels_say_what_was_found(tokenizer, content, label, names, reason):
    row_format = "labeled_words" if isinstance(content, list) else "labeled_text"
    with pytest.raises(BadRow, match=f"expected {reason}"):
        pieces_of(content, label, row_format, tokenizer, class_names=names)


def test_words_are_apart_where_the_tokenizer_keeps_spaces(tokenizer, byte_tokenizer):
    for given, expected in ((tokenizer, ["ab", "c"]), (byte_tokenizer, ["ab", " c"])):
        pieces = pieces_of(["ab", "c"], ["x", "y"], "labeled_words", given)
        assert [piece.text for piece in pieces] == expected


def test_words_are_not_apart_twice_where_the_tokenizer_puts_a_space_before_every_text():
    """As the one of Llama 1 and 2 does."""
    backend = Tokenizer(models.BPE({"\u2581": 0, "a": 1, "b": 2}, []))
    spaces = normalizers.Replace(" ", "\u2581")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), spaces])
    backend.decoder = decoders.Metaspace()
    given = PreTrainedTokenizerFast(tokenizer_object=backend)
    pieces = pieces_of(["ab", "b"], ["x", "y"], "labeled_words", given)
    assert [piece.text for piece in pieces] == ["ab", "b"]


def test_labels_and_the_mask_of_loss_on_are_joined(tokenizer):
    row = {
        "input_ids": [10, 11, 12, 13],
        "labels": [-100, 11, 12, 13],
        "completion_mask": [0, 0, 1, 1],
        "assistant_masks": [True, True, False, True],
    }
    expected = {
        "all": [False, True, True, True],
        "completion": [False, False, True, True],
        "assistant": [False, True, False, True],
    }
    for loss_on, scored in expected.items():
        encoded = one(row, "tokens", tokenizer, loss_on)
        assert encoded == of_tokens([10, 11, 12, 13], scored)
    del row["labels"]
    assert all(one(row, "tokens", tokenizer).scored)
    assert one(row, "tokens", tokenizer, "completion").scored == [False, False, True, True]


@pytest.mark.parametrize(
    ("row", "loss_on", "reason"),
    [
        ({}, "all", "input_ids: expected a column of that name, got []"),
        ({"input_ids": []}, "all", "expected text, got a blank one"),
        ({"input_ids": np.array([])}, "all", "expected text, got a blank one"),
        ({"input_ids": [1.5]}, "all", "input_ids: expected a list of integers, got list [1.5]"),
        ({"input_ids": "a"}, "all", "input_ids: expected a list of integers, got str 'a'"),
        ({"input_ids": [10, 9999]}, "all", "input_ids: expected ids from 0 to 258, got 9999"),
        ({"input_ids": [-1]}, "all", "input_ids: expected ids from 0 to 258, got -1"),
        ({"input_ids": [2, 3]}, "all", "expected text, got a blank one"),
        (
            {"input_ids": [10, 11], "labels": [10]},
            "all",
            "labels: expected 2 entries, as input_ids has, got 1",
        ),
        (
            {"input_ids": [10, 11], "labels": [11, -100]},
            "all",
            "labels[0]: expected -100 or the token at that place, 10, got 11",
        ),
        (
            {"input_ids": [10, 11], "labels": [-100, -100]},
            "all",
            "labels: expected tokens to score, got none of 2",
        ),
        (
            {"input_ids": [10, 11]},
            "assistant",
            "loss_on assistant: expected assistant_masks or labels, got ['input_ids']",
        ),
    ],
)
def test_bad_pretokenized_rows_say_what_was_found(tokenizer, row, loss_on, reason):
    assert max(tokenizer.get_vocab().values()) == 258
    encoded = one(row, "tokens", tokenizer, loss_on)
    assert isinstance(encoded, str)
    assert encoded.startswith(reason)


def test_pretokenized_rows_have_no_words(tokenizer):
    with pytest.raises(ValueError, match=r"data\.mask\.whole_word: expected text to find words in"):
        one({"input_ids": [10]}, "tokens", tokenizer, word_ids=True)


def test_tokenizer_without_places_is_refused(tokenizer, monkeypatch):
    monkeypatch.setattr(PreTrainedTokenizerFast, "is_fast", False)
    with pytest.raises(ValueError, match="tokenizer: expected a fast tokenizer for masks"):
        one({"text": "a"}, "text", tokenizer, word_ids=True)


@pytest.mark.parametrize("left", [False, True])
def test_padding_of_rows_of_tokens_is_left_out(tokenizer, left):
    def padded(values, filler):
        return [filler] * 3 + values if left else values + [filler] * 3

    row = {"input_ids": padded([2, 10, 11, 3], 0), "attention_mask": padded([1] * 4, 0)}
    assert one(row, "tokens", tokenizer) == of_tokens([10, 11], begins=True)
    row["labels"] = padded([-100, -100, 11, -100], -100)
    assert one(row, "tokens", tokenizer) == of_tokens([10, 11], [False, True], begins=True)
    row["attention_mask"] = [0] * 7
    assert "got a blank one" in one(row, "tokens", tokenizer)


@pytest.mark.parametrize(
    ("row", "form", "whole", "own"),
    [
        ({"body": "one two"}, "text", "one two", "one two"),
        (
            {"messages": [{"role": "system", "content": "Be kind."}, USER, ASSISTANT, USER]},
            "messages",
            "Be kind.\nword1\nword2\nword1",
            "word2",
        ),
        (WITH_INPUT, "alpaca", None, "word3"),
        ({"prompt": "one", "completion": "two"}, "prompt_completion", "one\ntwo", "two"),
        (
            {"prompt": [USER, ASSISTANT, USER], "completion": [ASSISTANT]},
            "prompt_completion",
            "word1\nword2\nword1\nword2",
            "word2",
        ),
        ({"input_ids": [5, 6, 7]}, "tokens", "5 6 7", "5 6 7"),
        ({"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, "tokens", "5 6 7", "6 7"),
    ],
)
def test_prompts_and_templates_are_not_a_rows_own(tokenizer, row, form, whole, own):
    draft = Reader(row_format=form, tokenizer=tokenizer, column="body")(row)
    assert draft.own == own
    assert whole is None or draft.text == whole


def test_a_surrogate_in_a_turn_that_a_template_shortens_makes_a_bad_row(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    shown = "{{ message.content.split('|')[-1] }}"
    tokenizer.chat_template = f"{{% for message in messages %}}{shown}[SEP]{{% endfor %}}"
    row = {"messages": [USER, {"role": "assistant", "content": "\ud83d|word2"}]}
    (found,) = encode_rows([row], "messages", tokenizer=tokenizer, loss_on="all")
    assert found == "expected text, got a surrogate, which is no character"


def test_a_call_of_a_tool_is_the_assistants_own(tokenizer):
    _, whole, own = Reader(row_format="sharegpt", tokenizer=tokenizer)(GLAIVE)
    assert own.split("\n")[0] == "word3"
    assert own.split("\n")[-1] == "word8 word9"
    assert '"word5"' in own
    assert "word7" not in own
    assert "word7" in whole
