import copy
import re
import signal

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from harmonic_sft.data import chat
from harmonic_sft.data.bad_rows import BadRow
from harmonic_sft.data.chat import Conversation
from harmonic_sft.data.encoding import Encoded
from harmonic_sft.data.files import NUMBER
from harmonic_sft.data.formats import Reader
from harmonic_sft.data.row_maker import RowMaker
from tests.data.conftest import bert_like, encode_rows

CALLS = "{% for call in message.tool_calls %}{{ call.function | tojson }}{% endfor %}"
CHATML = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}" + CALLS + "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}" + CALLS + "<|im_end|>\n{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL = {
    "type": "function",
    "function": {"name": "rate", "parameters": {"type": "object"}},
}


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


CHAT = [
    {"role": "user", "content": "hi there"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "the rate ?"},
    {"role": "assistant", "content": "", "tool_calls": [call("rate", of="usd")]},
    {"role": "tool", "content": '{"rate": 2}'},
    {"role": "assistant", "content": "it is 2"},
]
SYSTEM_FIRST = [
    {"role": "system", "content": "the rate"},
    {"role": "user", "content": "hi"},
    {"role": "user", "content": "there"},
    {"role": "assistant", "content": "wait", "tool_calls": [call("rate"), call("rate", of="usd")]},
    {"role": "tool", "content": "2"},
    {"role": "tool", "content": "it"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "is it ?"},
]


@pytest.fixture(scope="module")
def bert():
    words = "hi there hello the rate it is 2 of usd name arguments wait tool call un ##known tools"
    signs = 'user system assistant { } < > / _ " : , ? [ ] sep parameters type object'
    return bert_like([*words.split(), *signs.split()])


@pytest.fixture(scope="module")
def merges():
    """Byte-level BPE with merges, among them of two line breaks and of words with their space."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|im_start|>", "<|im_end|>", "<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = 'user\nassistant\nhello there the rate {"name": "rate"} it is\n\n\n\nhi hello'
    backend.train_from_iterator([text] * 20, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        bos_token="<s>",
        pad_token="<s>",
        additional_special_tokens=["<|im_start|>", "\u241e"],
    )


def with_template(tokenizer, template):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    return tokenizer


def encode_one(tokenizer, messages, loss_on, *, tools=(), word_ids=False):
    rows = [{"messages": messages, "tools": list(tools)}]
    (encoded,) = encode_rows(
        rows, "messages", tokenizer=tokenizer, loss_on=loss_on, word_ids=word_ids
    )
    return encoded


def starred(tokenizer, encoded):
    """Write tokens with a star before the scored ones."""
    tokens = tokenizer.convert_ids_to_tokens(encoded.input_ids)
    scored = encoded.scored or [False] * len(tokens)
    return " ".join("*" * mark + token for token, mark in zip(tokens, scored, strict=True))


def bracketed(tokenizer, encoded):
    """Write the text with brackets around what is scored."""
    edges = np.flatnonzero(np.diff(encoded.scored, prepend=False, append=False))
    parts = [tokenizer.decode(part) for part in np.split(np.asarray(encoded.input_ids), edges)]
    return "".join(f"[[{part}]]" if index % 2 else part for index, part in enumerate(parts))


# Written by hand, turn by turn.
BERT_CHAT = [
    "user : hi there [SEP]",
    "assistant : *hello *[SEP]",
    "user : the rate ? [SEP]",
    'assistant : *< *tool *_ *call *> *{ *" *name *" *: *" *rate *" *, *" *arguments *" *: *{ *" '
    '*of *" *: *" *usd *" *} *} *< */ *tool *_ *call *> *[SEP]',
    'tool : { " rate " : 2 } [SEP]',
    "assistant : *it *is *2 *[SEP]",
]
BERT_SYSTEM = [
    'tools : { " name " : " rate " , " parameters " : { " type " : " object " } } [SEP]',
    "system : the rate [SEP]",
    "user : hi [SEP]",
    "user : there [SEP]",
    'assistant : *wait *< *tool *_ *call *> *{ *" *name *" *: *" *rate *" *, *" *arguments *" *: '
    '*{ *} *} *< */ *tool *_ *call *> *< *tool *_ *call *> *{ *" *name *" *: *" *rate *" *, *" '
    '*arguments *" *: *{ *" *of *" *: *" *usd *" *} *} *< */ *tool *_ *call *> *[SEP]',
    "tool : 2 [SEP]",
    "tool : it [SEP]",
    "assistant : *hello *[SEP]",
    "user : is it ? [SEP]",
]


@pytest.mark.parametrize(
    ("messages", "tools", "expected", "last"),
    [
        (CHAT, [], BERT_CHAT, 5),
        (SYSTEM_FIRST, [TOOL], BERT_SYSTEM, 7),
        (CHAT[:2], [], BERT_CHAT[:2], 1),
    ],
)
def test_own_form_scores_what_is_written_by_hand(bert, messages, tools, expected, last):
    encoded = encode_one(bert, messages, "assistant", tools=tools)
    assert starred(bert, encoded) == " ".join(expected)
    bare = [turn.replace("*", "") for turn in expected]
    everything = encode_one(bert, messages, "all", tools=tools)
    assert everything == encoded._replace(scored=[True] * len(encoded.scored))
    bare[last] = expected[last]
    encoded = encode_one(bert, messages, "completion", tools=tools)
    assert starred(bert, encoded) == " ".join(bare)


CHATML_CHAT = (
    "<|im_start|>user\nhi there<|im_end|>\n"
    "<|im_start|>assistant\n[[hello<|im_end|>]]\n"
    "<|im_start|>user\nthe rate ?<|im_end|>\n"
    '<|im_start|>assistant\n[[{"name": "rate", "arguments": {"of": "usd"}}<|im_end|>]]\n'
    '<|im_start|>tool\n{"rate": 2}<|im_end|>\n'
    "<|im_start|>assistant\n[[it is 2<|im_end|>]]\n"
)


# The special token that ends a turn just after its mark.
ENDED = MARKED.replace("<|im_end|>\n{% endgeneration %}", "{% endgeneration %}<|im_end|>\n")


@pytest.mark.parametrize("template", [CHATML, MARKED, ENDED])
def test_chat_template_scores_what_is_written_by_hand(merges, template):
    tokenizer = with_template(merges, template)
    assert bracketed(tokenizer, encode_one(tokenizer, CHAT, "assistant")) == CHATML_CHAT
    last = CHATML_CHAT.rindex("[[")
    expected = re.sub(r"\[\[|\]\]", "", CHATML_CHAT[:last]) + CHATML_CHAT[last:]
    assert bracketed(tokenizer, encode_one(tokenizer, CHAT, "completion")) == expected
    assert all(encode_one(tokenizer, CHAT, "all").scored)


def test_chat_template_writes_tools_and_several_calls(merges):
    tokenizer = with_template(merges, CHATML)
    text = bracketed(tokenizer, encode_one(tokenizer, SYSTEM_FIRST, "assistant", tools=[TOOL]))
    assert text == (
        '<|im_start|>tools\n[{"type": "function", "function": {"name": "rate", "parameters": '
        '{"type": "object"}}}]<|im_end|>\n'
        "<|im_start|>system\nthe rate<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>user\nthere<|im_end|>\n"
        '<|im_start|>assistant\n[[wait{"name": "rate", "arguments": {}}'
        '{"name": "rate", "arguments": {"of": "usd"}}<|im_end|>]]\n'
        "<|im_start|>tool\n2<|im_end|>\n<|im_start|>tool\nit<|im_end|>\n"
        "<|im_start|>assistant\n[[hello<|im_end|>]]\n<|im_start|>user\nis it ?<|im_end|>\n"
    )


def test_token_across_the_start_of_a_turn_is_scored(merges):
    tokenizer = with_template(merges, CHATML)
    chat = [CHAT[0], {"role": "assistant", "content": "\n\n\nhi"}]
    encoded = encode_one(tokenizer, chat, "assistant")
    text = bracketed(tokenizer, encoded)
    assert text == (
        "<|im_start|>user\nhi there<|im_end|>\n<|im_start|>assistant[[\n\n\n\nhi<|im_end|>]]\n"
    )


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "user", "content": "\u00e9<s>\u4e2d"},
        {"role": "assistant", "content": "", "tool_calls": [call("a", **{"<|im_end|>": 1})]},
        {"role": "assistant", "content": "", "tool_calls": [call("a", of=["b", '<|"|>'])]},
    ],
)
def test_a_special_token_that_a_message_spells_for_a_template_makes_a_bad_row(merges, turn):
    tokenizer = with_template(merges, CHATML)
    tokenizer.add_special_tokens({"extra_special_tokens": ['<|"|>']})  # JSON would escape it
    found = encode_one(tokenizer, [CHAT[0], turn], "all")
    spelled = next(one for one in ("<s>", "<|im_end|>", '<|"|>') if one in str(turn))
    assert found == f"messages: expected text without special tokens, got {spelled!r}"
    assert isinstance(encode_one(tokenizer, CHAT, "all", tools=[TOOL]), Encoded)


def test_a_template_that_leaves_out_calls_of_tools_is_refused(merges):
    tokenizer = with_template(merges, CHATML.replace(CALLS, ""))
    found = encode_one(tokenizer, CHAT[2:], "assistant")
    assert str(found) == "chat template: expected to write the call of 'rate', got none"
    behind = MARKED.replace(
        CALLS + "<|im_end|>\\n{% endgeneration %}", "{% endgeneration %}" + CALLS
    )
    found = encode_one(with_template(merges, behind), CHAT, "assistant")
    assert tokenizer.decode(found.input_ids).endswith("it is 2<|im_end|>\n")


def test_own_form_takes_special_tokens_in_a_message_as_text(bert):
    chat = [{"role": "user", "content": "hi [SEP]"}, {"role": "assistant", "content": "[SEP] hi"}]
    assert starred(bert, encode_one(bert, chat, "assistant")) == (
        "user : hi [ sep ] [SEP] assistant : *[ *sep *] *hi *[SEP]"
    )


def test_whitespace_tokens_with_empty_offsets_belong_to_their_turn(merges):
    tokenizer = with_template(merges, CHATML)
    chat = [CHAT[0], {"role": "assistant", "content": "   x   "}]
    expected = encode_one(tokenizer, chat, "assistant")
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    assert encode_one(tokenizer, chat, "assistant") == expected
    assert bracketed(tokenizer, expected).endswith("assistant\n[[   x   <|im_end|>]]\n")


def test_unknown_word_is_a_word_in_a_chat_template(bert):
    template = "{% for message in messages %}{{ message.content }} [SEP] {% endfor %}"
    tokenizer = with_template(bert, template)
    encoded = encode_one(tokenizer, [{"role": "user", "content": "hi foo"}], "all", word_ids=True)
    assert tokenizer.convert_ids_to_tokens(encoded.input_ids) == ["hi", "[UNK]", "[SEP]"]
    assert encoded.word_ids == [0, 1, -1]


def test_template_that_rewrites_earlier_turns_is_refused(merges):
    template = (
        "{% for message in messages %}{% if loop.last or message.role == 'user' %}"
        "{{ message.role }}: {{ message.content }}<|im_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer = with_template(merges, template)
    chat = [*CHAT[:2], {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    with pytest.raises(ValueError, match=r"chat_template: expected .* got another text for the fi"):
        encode_one(tokenizer, chat, "assistant")
    assert isinstance(encode_one(tokenizer, chat, "all"), Encoded)


def test_template_that_marks_only_some_turns_is_refused(merges):
    template = MARKED.replace("message.role == 'assistant'", "loop.last")
    with pytest.raises(ValueError, match="got 1 generation marks for 3 assistant turns"):
        encode_one(with_template(merges, template), CHAT, "assistant")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for a in range(10 ** 9) %}{% endfor %}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ 1 // 0 }}", "division or modulo by zero"),
        ("{{ '%(x)s' % {} }}", "'x'"),
        ("{{ '{}'.format() }}", "index out of range"),
    ],
)
def test_a_template_that_the_sandbox_or_itself_stops_makes_a_bad_row(merges, template, reason):
    found = encode_one(with_template(merges, template), CHAT, "all")
    assert found.startswith("chat template: expected turns it can write, got: ")
    assert reason in found


def test_a_template_writes_the_same_date_every_day(merges):
    dated = with_template(merges, "{{ raise_exception(strftime_now('%d %b %Y')) }}")
    assert encode_one(dated, CHAT, "all").endswith("got: 26 Jul 2024")


def test_a_template_that_loops_is_stopped(merges, monkeypatch):
    monkeypatch.setattr(chat, "MAX_SECONDS", 0.2)
    before = signal.getsignal(signal.SIGALRM)
    loop = "{% for a in range(99999) %}"
    template = with_template(merges, 3 * loop + 3 * "{% endfor %}")
    with pytest.raises(ValueError, match=r"chat_template: expected a text within 0\.2 seconds"):
        encode_one(template, CHAT, "all")
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_an_interrupt_as_the_limit_is_set_leaves_no_alarm(monkeypatch):
    before, set_timer = signal.getsignal(signal.SIGALRM), signal.setitimer

    def interrupted(which, seconds, interval=0.0):
        set_timer(which, seconds, interval)
        if seconds:
            raise KeyboardInterrupt

    monkeypatch.setattr(signal, "setitimer", interrupted)
    with pytest.raises(KeyboardInterrupt), chat._time_limit():
        pass
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) is before


def test_first_token_that_every_row_gets_is_left_out(merges):
    tokenizer = with_template(merges, "{{ bos_token }}" + CHATML)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    assert bracketed(tokenizer, encode_one(tokenizer, CHAT, "assistant")) == CHATML_CHAT


def test_conversation_without_an_assistant_has_nothing_to_score(bert):
    for loss_on in ("assistant", "completion"):
        reason = encode_one(bert, CHAT[:1], loss_on)
        assert reason == f"loss_on {loss_on}: expected an assistant turn to score, got ['user']"
    assert isinstance(encode_one(bert, CHAT[:1], "all"), Encoded)


def test_template_that_writes_nothing_for_the_assistant_leaves_nothing_to_score(merges):
    tokenizer = with_template(merges, "{% for m in messages if m.role == 'user' %}x{% endfor %}")
    read = Reader(row_format="messages", tokenizer=tokenizer, loss_on="assistant")
    maker = RowMaker(name="s", source=0, read=read, context_length=8)
    message = "loss_on assistant: expected tokens to score, got none of 1"
    with pytest.raises(ValueError, match=message):
        maker([{"messages": CHAT[:2], NUMBER: 0}])


def test_tokenizer_that_cannot_end_a_turn_is_refused(bert):
    bare = copy.deepcopy(bert)
    bare.sep_token = None
    with pytest.raises(ValueError, match="expected a chat template, or a sep or eos token"):
        encode_one(bare, CHAT, "all")


def test_words_are_numbered_through_the_turns(bert, merges):
    chat = [{"role": "user", "content": "unknown hi"}, {"role": "assistant", "content": "unknown"}]
    encoded = encode_one(bert, chat, "assistant", word_ids=True)
    assert starred(bert, encoded) == ("user : un ##known hi [SEP] assistant : *un *##known *[SEP]")
    words = encoded.word_ids
    assert words[5] == words[10] == -1
    assert words[2] == words[3]
    assert words[8] == words[9]
    ordinary = [word for word in words if word >= 0]
    assert len(set(ordinary)) == len(ordinary) - 2
    assert ordinary == sorted(ordinary)
    tokenizer = with_template(merges, CHATML)
    encoded = encode_one(tokenizer, CHAT, "all", word_ids=True)
    special = np.isin(encoded.input_ids, tokenizer.all_special_ids)
    np.testing.assert_array_equal(np.asarray(encoded.word_ids) == -1, special)


USER = {"role": "user", "content": "word1"}
ASSISTANT = {"role": "assistant", "content": "word2"}
ANSWER = {"role": "tool", "content": "word3"}


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], r"messages: expected turns, got none"),
        ([{"content": "x"}], r"messages\[0\].role: expected one of .* got None"),
        ([{"role": "bot", "content": "x"}], r"messages\[0\].role: expected one of .* got 'bot'"),
        ([USER, {"role": "system", "content": "x"}], r"got 'system' after 'user'"),
        ([ASSISTANT, USER], r"messages\[0\].role: .* got 'assistant' at the start"),
        ([USER, ANSWER], r"messages\[1\].role: .* got 'tool' after 'user'"),
        ([{"role": "user"}], r"messages\[0\].content: expected text, got NoneType"),
        ([{"role": "user", "content": ""}], r"messages\[0\].content: expected text, got ''"),
        ([{"role": "user", "content": [1]}], r"messages\[0\].content: expected text, got list"),
        ([USER, {"role": "assistant", "content": " "}], r"\[1\].content: expected text, got ' '"),
    ],
)
def test_turns_that_cannot_be_are_refused(messages, reason):
    with pytest.raises(BadRow, match=reason):
        Conversation(messages=messages, tools=[])


def test_a_tool_may_answer_with_nothing():
    asking = ASSISTANT | {"content": "", "tool_calls": [call("save")]}
    turns = [USER, asking, ANSWER | {"content": ""}, ASSISTANT]
    assert Conversation(messages=turns, tools=[]).messages == turns


def test_columns_are_as_long_as_the_tokens_where_a_template_spells_the_prefix():
    bert = bert_like(["hi", "ho"])
    template = "[CLS] {% for message in messages %}{{ message.content }} [SEP] {% endfor %}"
    chat = [{"role": "user", "content": "hi ho"}]
    encoded = encode_one(with_template(bert, template), chat, "all", word_ids=True)
    assert encoded.had_prefix
    assert bert.convert_ids_to_tokens(encoded.input_ids) == ["hi", "ho", "[SEP]"]
    assert encoded.word_ids == [1, 2, -1]
    assert len(encoded.labels) == 3
