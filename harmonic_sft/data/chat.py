"""Conversations as pieces of text, with the characters that may be scored."""

import json
import re
import signal
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from harmonic_sft.data.bad_rows import BadRow
from harmonic_sft.data.encoding import Piece
from harmonic_sft.data.sections import LossOn

MAX_SECONDS = 20  # for a chat template to write one text
# Templates get this as today's date, or rows would change daily. Llama's default to it too.
TODAY = datetime(2024, 7, 26)
DATE = re.compile(r"""strftime_now\(\s*(["'])(?P<format>.*?)\1\s*\)""")
TEMPLATE_ERRORS = (  # what rendering can raise: Python evaluates a template's expressions
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TemplateError,
    TypeError,
    ValueError,
)
ROLES = ("system", "user", "assistant", "tool")
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Turns of roles system, user, assistant and tool, as chat templates take them.

    Raises:
        BadRow: The turns are no conversation. A system turn stands first only; an assistant turn
            has a turn before it to answer; a tool turn follows the assistant or another tool. Two
            turns of one role in a row are allowed, as in ChatML's templates; a chat template that
            refuses them makes the row a bad one.
    """

    messages: list[dict[str, Any]]  # each with `role`, and `content` or `tool_calls`
    tools: list[dict[str, Any]]  # each {"type": "function", "function": {...}}
    completion: int | None = None  # index of its first turn; None: it is the assistant's last turn
    is_text: bool = False  # a prompt and an answer that were given as text, not as turns

    def __post_init__(self) -> None:
        if not self.messages:
            raise BadRow("messages: expected turns, got none")
        previous = None
        for index, message in enumerate(self.messages):
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
            may_be_empty = role == "tool" or message.get("tool_calls")
            if not isinstance(content, str) or not (content.strip() or may_be_empty):
                found = repr(content) if isinstance(content, str) else type(content).__name__
                raise BadRow(f"messages[{index}].content: expected text, got {found}")
            previous = role


class ConversationWriter:
    r"""Writes conversations by the tokenizer's chat template, or in a form of ours without one.

    Our form of a turn is its role as text, `user:\n`, its content, and an end-of-turn token: the
    tokenizer's sep token, or its eos token. Tool calls follow the content as `<tool_call>`, JSON,
    `</tool_call>`; the definitions of tools are a first turn `tools:\n`. The parts are tokenized
    one by one, so no token crosses the edge of a scored part. A decoder's prompt and answer that
    are plain text are joined without roles and tokenized as one text.

    A chat template's text is tokenized as a whole. In each turn to score, `{% generation %}` marks
    the scored part; without marks it is what the turn adds after its header. A token that crosses
    an edge counts as the turn's, and so does the special token that ends the turn, but not
    whitespace after it.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, loss_on: LossOn, *, is_causal: bool = False
    ):
        self.tokenizer, self.loss_on, self.is_causal = tokenizer, loss_on, is_causal
        added = [
            token.content for token in tokenizer.added_tokens_decoder.values() if token.special
        ]
        longest_first = sorted(added, key=lambda content: (-len(content), content))
        self._special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")  # no match

    def __call__(self, conversation: Conversation) -> list[Piece]:
        """Write one conversation.

        Raises:
            BadRow: There is no turn to score, the chat template refuses the turns, or a text in
                them spells a special token.
            ValueError: The tokenizer has no token for the end of a turn, or its chat template gives
                no way to tell the assistant's turns from the others.
        """
        turns = [] if self.loss_on == "all" else self._scored_turns(conversation)
        if self.tokenizer.chat_template is None:
            return self._plain_pieces(conversation, turns)
        for text in _texts([conversation.messages, conversation.tools]):
            if found := self._special.search(text):
                raise BadRow(f"messages: expected text without special tokens, got {found[0]!r}")
        return self._template_pieces(conversation, turns)

    def _scored_turns(self, conversation: Conversation) -> list[int]:
        roles = [message["role"] for message in conversation.messages]
        turns = [index for index, role in enumerate(roles) if role == "assistant"]
        if self.loss_on == "completion":
            first = conversation.completion
            turns = turns[-1:] if first is None else [turn for turn in turns if turn >= first]
        if not turns:
            raise BadRow(
                f"loss_on {self.loss_on}: expected an assistant turn to score, got {roles}"
            )
        return turns

    def _plain_pieces(self, conversation: Conversation, turns: Sequence[int]) -> list[Piece]:
        end_of_turn = self.tokenizer.sep_token or self.tokenizer.eos_token
        if end_of_turn is None:
            raise ValueError(
                "tokenizer: expected a chat template, or a sep or eos token to end a turn, got "
                "none. Set one of them."
            )
        everything = self.loss_on == "all"
        if self.is_causal and conversation.is_text:  # without roles, as a decoder will be prompted
            prompt = conversation.messages[0]["content"]
            text = prompt + conversation.messages[1]["content"]
            scored = True if everything else [(len(prompt), len(text))]
            return [Piece(text, False, scored), Piece(str(end_of_turn), True, True)]
        written = [
            (message["role"], plain_body(message), index in turns or everything)
            for index, message in enumerate(conversation.messages)
        ]
        if conversation.tools:
            tools = "\n".join(_json(tool["function"]) for tool in conversation.tools)
            written.insert(0, ("tools", tools, everything))
        pieces = []
        for role, body, scored in written:
            pieces += [
                Piece(f"{role}:\n", False, everything),
                Piece(body, False, scored),
                Piece(str(end_of_turn), True, scored),
            ]
        return pieces

    def _template_pieces(self, conversation: Conversation, turns: Sequence[int]) -> list[Piece]:
        messages, tools = conversation.messages, conversation.tools or None
        text, marks = self._render(messages, tools)
        spans = []
        if marks is not None and turns:
            num_turns = sum(message["role"] == "assistant" for message in messages)
            if len(marks) != num_turns:
                raise _no_masks(f"{len(marks)} generation marks for {num_turns} assistant turns")
            spans = marks[-len(turns) :]  # the turns to score are the last, or all
        elif turns:
            for turn in turns:
                before, _ = self._render(messages[:turn], tools, header=True)
                after, _ = self._render(messages[: turn + 1], tools)
                if not (text.startswith(after) and after.startswith(before)):
                    found = f"another text for the first {turn + 1} turns than for all of them"
                    raise _no_masks(found)
                spans.append((len(before), len(after)))
        is_marked = marks is not None
        # A template may write a call after the mark of its turn: search up to the next one.
        ends = [start for start, _ in spans[1:]] + [len(text)]
        ends = ends if is_marked else [end for _, end in spans]
        for turn, (start, _), end in zip(turns, spans, ends, strict=False):
            for call in messages[turn].get("tool_calls") or []:
                if (name := call["function"]["name"]) not in text[start:end]:
                    raise BadRow(f"chat template: expected to write the call of {name!r}, got none")
        if self.loss_on == "all":
            return [Piece(text, True, True)]
        spans = [(start, self._turn_end(text, end, is_marked)) for start, end in spans]
        return [Piece(text, True, spans)]

    def _render(
        self, messages: list[dict[str, Any]], tools: Any, *, header: bool = False
    ) -> tuple[str, list[tuple[int, int]] | None]:
        """Return the text and its marked spans, None for a template without marks."""
        template = self.tokenizer.get_chat_template(tools=tools)
        template = DATE.sub(lambda call: repr(TODAY.strftime(call["format"])), template)
        has_marks = bool(GENERATION.search(template))
        names: dict[str, Any] = self.tokenizer.special_tokens_map  # the template's variables
        try:
            with _time_limit():
                texts, marks = render_jinja_template(
                    [messages],
                    tools=tools,
                    chat_template=template,
                    return_assistant_tokens_mask=has_marks,
                    add_generation_prompt=header,
                    **names,
                )
        except TimeoutError as error:  # not a bad row: a clock must not decide which rows exist
            raise ValueError(
                f"tokenizer.chat_template: expected a text within {MAX_SECONDS} seconds, got none. "
                "Repair the template, which seems to loop"
            ) from error
        except TEMPLATE_ERRORS as error:
            raise BadRow(f"chat template: expected turns it can write, got: {error}") from error
        return str(texts[0]), [(int(a), int(b)) for a, b in marks[0]] if has_marks else None

    def _turn_end(self, text: str, end: int, is_marked: bool) -> int:
        """Return where a turn's last special token ends; a mark may stop just before that token."""
        last = len(text[:end].rstrip())
        # The last 256 characters are enough: no special token is longer.
        nearby = self._special.finditer(text, max(0, last - 256), end)
        if any(match.end() == last for match in nearby):
            return last
        following = self._special.match(text, end) if is_marked else None
        return following.end() if following else end


def _texts(value: Any) -> Iterator[str]:
    """Yield the strings in a JSON value, including the keys of objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _texts([*value, *value.values()])
    elif isinstance(value, list):
        for entry in value:
            yield from _texts(entry)


@contextmanager
def _time_limit() -> Generator[None]:
    """Raise TimeoutError after `MAX_SECONDS` in the main thread; others have no limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise TimeoutError

    timer = signal.getitimer(signal.ITIMER_REAL)
    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, MAX_SECONDS)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)  # the caller's timer, if one was set
        signal.signal(signal.SIGALRM, before)


def plain_body(message: dict[str, Any]) -> str:
    """Return what a turn says: its content and its tool calls."""
    calls = [
        f"<tool_call>{_json(call['function'])}</tool_call>"
        for call in message.get("tool_calls", [])
    ]
    return "\n".join([message["content"], *calls] if message["content"].strip() else calls)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _no_masks(found: str) -> ValueError:
    return ValueError(
        "tokenizer.chat_template: expected a template that writes the beginning of a conversation "
        "as the beginning of the whole, or one that puts {% generation %} around each turn of the "
        f"assistant, got {found}. Add the marks, or use loss_on: all."
    )
