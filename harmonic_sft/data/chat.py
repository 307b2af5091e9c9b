"""Conversations as tokens, with a mask of the tokens that may be scored."""

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from harmonic_sft.data.encoding import BadRow, Encoded, Piece, SpecialTokens, encode_pieces
from harmonic_sft.data.sections import LossOn

ROLES = ("system", "user", "assistant", "tool")
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# A noncharacter of Unicode: it never stands in exchanged text, and here keeps what a message
# spells apart from what the chat template writes.
BREAK = "\ufdd0"


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Turns of roles system, user, assistant and tool, as chat templates take them."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]  # each {"type": "function", "function": {...}}
    completion: int | None = None  # its first turn; None is the last turn of the assistant

    def scored_turns(self, loss_on: LossOn) -> list[int]:
        """Number the turns to score: the assistant's, or those of the completion among them."""
        turns = [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]
        if loss_on == "completion":
            first = self.completion
            turns = turns[-1:] if first is None else [turn for turn in turns if turn >= first]
        if not turns:
            roles = [message["role"] for message in self.messages]
            raise BadRow(f"loss_on {loss_on}: expected an assistant turn to score, got {roles}")
        return turns


def check_turns(messages: Sequence[dict[str, Any]]) -> None:
    """Refuse turns that no model could have had with a user.

    A system turn stands first only; the assistant has a turn before it to answer; a tool answers
    the assistant or stands beside another tool's answer. Two turns of one role in a row are
    allowed, as ChatML's templates do; a chat template that refuses them makes the row a bad one.

    Args:
        messages: Each with `role`, and `content` or `tool_calls`.

    Raises:
        BadRow: With the number of the turn, what was expected there and what was found.
    """
    if not messages:
        raise BadRow("messages: expected turns, got none")
    previous = None
    for index, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise BadRow(f"messages[{index}].role: expected one of {list(ROLES)}, got {role!r}")
        if (
            (role == "system" and index > 0)
            or (role == "assistant" and index == 0)
            or (role == "tool" and previous not in ("assistant", "tool"))
        ):
            place = "at the start" if previous is None else f"after {previous!r}"
            raise BadRow(
                f"messages[{index}].role: expected system first only, assistant after another "
                f"turn, tool after assistant or tool, got {role!r} {place}"
            )
        if not isinstance(content, str):
            kind = type(content).__name__
            raise BadRow(f"messages[{index}].content: expected text, got {kind}")
        if not content.strip() and not message.get("tool_calls"):
            raise BadRow(f"messages[{index}].content: expected text, got {content!r}")
        previous = role


def encode_conversations(
    conversations: Sequence[Conversation | str],
    *,
    tokenizer: PreTrainedTokenizerBase,
    loss_on: LossOn,
    word_ids: bool = False,
) -> list[Encoded | str]:
    r"""Tokenize conversations by the tokenizer's chat template, or a form of ours without one.

    Our form of a turn is its role as text, `user:\n`, its content, and an end-of-turn token: the
    tokenizer's sep token, or its eos token. Tool calls follow the content as `<tool_call>`, JSON,
    `</tool_call>`; the definitions of tools are a first turn `tools:\n`. The parts are tokenized
    one by one, so no token lies across the edge of what is scored.

    A chat template's text is tokenized as a whole. Scored is what it marks by `{% generation %}`;
    without that, what an assistant turn adds to the text before it and its header. A token across
    an edge counts as the turn's, and so does the special token that ends the turn, but not
    whitespace after it. A special token that a message spells is tokenized as text.

    Args:
        conversations: With turns that `check_turns` accepts; a string is returned as it stands.
        tokenizer: A fast one.
        loss_on: `all` scores every token, `assistant` all turns of the assistant (content, tool
            calls, end of turn), `completion` only those of the completion.
        word_ids: Whether to number the words too.

    Returns:
        One entry per conversation, a string being the reason why it cannot be used.

    Raises:
        ValueError: The tokenizer has no token for the end of a turn, or its chat template gives no
            way to tell the assistant's turns from the others.
    """
    end_of_turn = _end_of_turn(tokenizer) if tokenizer.chat_template is None else None
    special = _special_pattern(tokenizer)
    drafts: list[list[Piece] | str] = []
    for conversation in conversations:
        if isinstance(conversation, str):
            drafts.append(conversation)
            continue
        try:
            turns = [] if loss_on == "all" else conversation.scored_turns(loss_on)
            if end_of_turn is None:
                drafts.append(_template_pieces(conversation, turns, tokenizer, special))
            else:
                drafts.append(_plain_pieces(conversation, turns, end_of_turn))
        except BadRow as error:
            drafts.append(str(error))
    encoded = encode_pieces(drafts, tokenizer=tokenizer, word_ids=word_ids)
    prefix = SpecialTokens.of(tokenizer).prefix
    return [_finish(row, prefix, loss_on) for row in encoded]


def _finish(row: Encoded | str, prefix: list[int], loss_on: LossOn) -> Encoded | str:
    """Leave out a first token that every row gets anyway, and refuse a row without a score."""
    if isinstance(row, str):
        return row
    start = len(prefix) if row.input_ids[: len(prefix)] == prefix else 0
    scored = None if loss_on == "all" or row.scored is None else row.scored[start:]
    if scored is not None and not any(scored):
        return f"loss_on {loss_on}: expected tokens to score, got none of {len(scored)}"
    words = None if row.word_ids is None else row.word_ids[start:]
    return Encoded(row.input_ids[start:], scored, words)


def _end_of_turn(tokenizer: PreTrainedTokenizerBase) -> str:
    token = tokenizer.sep_token or tokenizer.eos_token
    if token is None:
        raise ValueError(
            "tokenizer: expected a chat template, or a sep or eos token to end a turn, got none. "
            "Set one of them."
        )
    return str(token)


def _special_pattern(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Match a special token, the longest one first, unless it was broken by `_broken`."""
    texts = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    ordered = sorted(texts, key=lambda text: (-len(text), text))
    alternatives = "|".join(map(re.escape, ordered)) or "(?!)"  # (?!) never matches
    return re.compile(f"(?:{alternatives})(?!{BREAK})")


def _plain_pieces(
    conversation: Conversation, turns: Sequence[int], end_of_turn: str
) -> list[Piece]:
    """Write the turns in our own form."""
    written = [
        (message["role"], _plain_body(message), index in turns)
        for index, message in enumerate(conversation.messages)
    ]
    if conversation.tools:
        tools = "\n".join(_json(tool["function"]) for tool in conversation.tools)
        written.insert(0, ("tools", tools, False))
    pieces = []
    for role, body, scored in written:
        pieces += [
            Piece(f"{role}:\n", False, False),
            Piece(body, False, scored),
            Piece(end_of_turn, True, scored),
        ]
    return pieces


def _plain_body(message: dict[str, Any]) -> str:
    calls = [
        f"<tool_call>{_json(call['function'])}</tool_call>"
        for call in message.get("tool_calls", [])
    ]
    return "\n".join([message["content"], *calls] if message["content"].strip() else calls)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _template_pieces(
    conversation: Conversation,
    turns: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    special: re.Pattern[str],
) -> list[Piece]:
    """Write the turns by the chat template, and find the characters of those to score."""
    messages = _broken(conversation.messages, special)
    tools = _broken(conversation.tools, special) or None
    template = tokenizer.get_chat_template(tools=tools)
    has_marks = bool(GENERATION.search(template))
    names: dict[str, Any] = tokenizer.special_tokens_map  # the template's variables

    def render(end: int, *, header: bool = False) -> tuple[str, list[tuple[int, int]]]:
        try:
            texts, marks = render_jinja_template(
                [messages[:end]],
                tools=tools,
                chat_template=template,
                return_assistant_tokens_mask=has_marks,
                add_generation_prompt=header,
                **names,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise BadRow(f"chat template: expected turns it can write, got: {error}") from error
        spans = [(int(start), int(end)) for start, end in marks[0]] if has_marks else []
        return str(texts[0]), spans

    text, marks = render(len(messages))
    if has_marks and turns:
        num_turns = sum(message["role"] == "assistant" for message in messages)
        if len(marks) != num_turns:
            raise _no_masks(f"{len(marks)} generation marks for {num_turns} assistant turns")
        # Turns are all the assistant's, or the last ones.
        spans = marks[-len(turns) :]
    else:
        spans = []
        for turn in turns:
            before, after = render(turn, header=True)[0], render(turn + 1)[0]
            if not (text.startswith(after) and after.startswith(before)):
                raise _no_masks(f"another text for the first {turn + 1} turns than for all of them")
            spans.append((len(before), len(after)))
    ends = [_turn_end(text, end, special, marked=has_marks) for _, end in spans]
    return _cut(text, [(start, end) for (start, _), end in zip(spans, ends, strict=True)], special)


def _no_masks(found: str) -> ValueError:
    return ValueError(
        "tokenizer.chat_template: expected a template that writes the beginning of a conversation "
        "as the beginning of the whole, or one that puts {% generation %} around each turn of the "
        f"assistant, got {found}. Add the marks, or use loss_on: all."
    )


def _turn_end(text: str, end: int, special: re.Pattern[str], *, marked: bool) -> int:
    """Move the end of a turn to that of its last special token; a mark may stop just before it."""
    last = len(text[:end].rstrip())
    # No special token is that long; the text before it need not be searched.
    if any(match.end() == last for match in special.finditer(text, max(0, last - 256), end)):
        return last
    following = special.match(text, end) if marked else None
    return following.end() if following else end


def _broken(value: Any, special: re.Pattern[str]) -> Any:
    """Put a break after every character of a special token that a message spells."""
    if isinstance(value, str):
        value = value.replace(BREAK, "")
        return special.sub(lambda match: "".join(letter + BREAK for letter in match[0]), value)
    if isinstance(value, dict):
        return {key: _broken(entry, special) for key, entry in value.items()}
    if isinstance(value, list):
        return [_broken(entry, special) for entry in value]
    return value


def _cut(text: str, spans: Sequence[tuple[int, int]], special: re.Pattern[str]) -> list[Piece]:
    """Keep the text whole, or cut it at the template's special tokens if messages spell others."""
    if BREAK not in text:
        return [Piece(text, True, list(spans))]
    edges = [0, *(edge for match in special.finditer(text) for edge in match.span()), len(text)]
    pieces = []
    for index, (start, end) in enumerate(itertools.pairwise(edges)):
        clipped = [(max(first, start), min(last, end)) for first, last in spans]
        local = [
            (len(_unbroken(text[start:first])), len(_unbroken(text[start:last])))
            for first, last in clipped
            if first < last
        ]
        pieces.append(Piece(_unbroken(text[start:end]), index % 2 == 1, local))
    return pieces


def _unbroken(text: str) -> str:
    return text.replace(BREAK, "")
