import pytest

from harmonic_sft.data.chat import Conversation, check_turns, encode_conversations
from harmonic_sft.data.encoding import BadRow

USER = {"role": "user", "content": "word1"}
ASSISTANT = {"role": "assistant", "content": "word2"}
TOOL = {"role": "tool", "content": "word3"}


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], r"messages: expected turns, got none"),
        ([{"content": "x"}], r"messages\[0\].role: expected one of .* got None"),
        ([{"role": "bot", "content": "x"}], r"messages\[0\].role: expected one of .* got 'bot'"),
        ([USER, {"role": "system", "content": "x"}], r"got 'system' after 'user'"),
        ([ASSISTANT, USER], r"messages\[0\].role: .* got 'assistant' at the start"),
        ([USER, TOOL], r"messages\[1\].role: .* got 'tool' after 'user'"),
        ([TOOL], r"messages\[0\].role: .* got 'tool' at the start"),
        ([{"role": "user"}], r"messages\[0\].content: expected text, got NoneType"),
        ([{"role": "user", "content": [1]}], r"messages\[0\].content: expected text, got list"),
        (
            [USER, {"role": "assistant", "content": " "}],
            r"\[1\].content: expected text, got ' '",
        ),
    ],
)
def test_turns_that_cannot_be_are_refused(messages, reason):
    with pytest.raises(BadRow, match=reason):
        check_turns(messages)


def test_bad_rows_leave_the_others_in_their_places(tokenizer):
    good = Conversation(messages=[USER, ASSISTANT, TOOL], tools=[])
    broken = Conversation(messages=[{"role": "user", "content": "\ud83d"}], tools=[])
    encoded = encode_conversations(
        ["a reason", good, broken, good], tokenizer=tokenizer, loss_on="all"
    )
    assert encoded[0] == "a reason"
    assert encoded[2] == "messages: expected text, got surrogates"
    assert encoded[1] == encoded[3]
    assert tokenizer.decode(encoded[1].input_ids).count("[SEP]") == 3
