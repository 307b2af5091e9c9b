"""Formats of data: recognizing one from a row, and turning its rows into tokens."""

import itertools
import json
import operator
import re
from collections.abc import Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeGuard

import numpy as np
from transformers import PreTrainedTokenizerBase

from harmonic_sft.data.bad_rows import BLANK, BadRow
from harmonic_sft.data.chat import Conversation, ConversationWriter, plain_body
from harmonic_sft.data.encoding import Encoded, Piece, SpecialTokens
from harmonic_sft.data.masking import IGNORE_INDEX
from harmonic_sft.data.sections import LossOn

Format = Literal[
    "text",
    "prompt_completion",
    "messages",
    "alpaca",
    "sharegpt",
    "tokens",
    "labeled_text",
    "labeled_words",
]
LABELED: dict[str, Format] = {  # by the task of a classifier
    "sequence_classification": "labeled_text",
    "token_classification": "labeled_words",
}
SURROGATE = re.compile("[\ud800-\udfff]")  # no tokenizer takes one
PROMPTED = ("prompt", "completion")
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
}
ALPACA = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:"
)
ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
)


def recognize(row: Mapping[str, Any]) -> Format:
    """Tell the format of a source from the columns and values of its first row.

    Formats with more structure go first: an Alpaca row that also has the column `text` is Alpaca.

    Raises:
        ValueError: No format has these columns and types.
    """
    if _is_list(row.get("input_ids")):
        return "tokens"
    for column in ("messages", "conversations"):
        turns = row.get(column)
        if _is_list(turns) and len(turns) and isinstance(turns[0], Mapping):
            if "role" in turns[0]:
                return "messages"
            if "from" in turns[0]:
                return "sharegpt"
    if all(isinstance(row.get(name), str) or _is_list(row.get(name)) for name in PROMPTED):
        return "prompt_completion"
    is_answered = any(isinstance(row.get(name), str) for name in ("output", "response"))
    if is_answered and isinstance(row.get("instruction"), str):
        return "alpaca"
    if isinstance(row.get("text"), str):
        return "text"
    found = {name: type(value).__name__ for name, value in row.items()}
    raise ValueError(
        "format: expected the columns text, prompt and completion, messages (role, content), "
        "conversations (from, value), instruction and output, or input_ids, got "
        f"{found}. Name the column of text by `column` of the source, in Python by "
        "`text_column`."
    )


def _is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, list | tuple | np.ndarray)


class Draft(NamedTuple):
    """A document before it is tokenized."""

    content: list[Piece] | Encoded
    text: str  # the whole text; for rows of `input_ids`, the ids
    own: str  # the text without prompts, templates and turns other than the assistant's


@dataclass(kw_only=True)
class Reader:
    """Reads documents of one format, and raises `BadRow` for what it cannot use.

    `text`, `tokens` and the labeled formats are taken as they are. Rows of every other format
    become conversations, see `ConversationWriter`. Text that spells a
    special token, such as `[MASK]`, is tokenized as text. In labeled text it becomes the token;
    under a chat template it makes the row a bad one.

    Raises:
        ValueError: The settings fit no document of the format.
    """

    row_format: Format  # of all documents
    tokenizer: PreTrainedTokenizerBase  # a fast one
    loss_on: LossOn = "all"  # what is scored, within the labels and masks of `tokens` rows
    column: str = "text"  # of the text or words, in `text` and the labeled formats
    word_ids: bool = False  # whether words will be numbered, for masks of whole words
    label_column: str | None = None  # for labeled formats; None reads no labels
    class_names: tuple[str, ...] | None = None  # of numbers in that column; None keeps the numbers
    is_causal: bool = False  # the rows are a decoder's

    def __post_init__(self) -> None:
        if self.row_format == "text" and self.loss_on != "all":
            raise ValueError(
                f"data.loss_on: expected 'all' for plain text, got {self.loss_on!r}. Plain text "
                "has no turns to tell apart. Set data.loss_on: all"
            )
        if self.row_format == "tokens" and self.word_ids:
            raise ValueError(
                "data.mask.whole_word: expected text to find words in, got rows of input_ids. "
                "Mask tokens, or give the text."
            )
        self._write = ConversationWriter(self.tokenizer, self.loss_on, is_causal=self.is_causal)
        self.special = SpecialTokens.of(self.tokenizer)  # around a row
        eos = self.tokenizer.eos_token_id
        # The end of a decoder's text stands once, after its last chunk, and may be predicted.
        self.ending = self.special.suffix or ([] if eos is None else [eos])
        if self.is_causal:
            self.special = SpecialTokens(self.special.prefix, [])
        # Only byte-level tokenizers need the space before a word in the text.
        word = self.tokenizer("a", add_special_tokens=False)["input_ids"]
        self._gap = "" if " " in str(self.tokenizer.decode(word + word)).strip() else " "

    @property
    def is_labeled(self) -> bool:
        """Whether documents have labels of classes."""
        return self.row_format in LABELED.values()

    def __call__(self, row: Mapping[str, Any]) -> Draft:
        """Read one document."""
        readers = {
            "text": self._text,
            "labeled_text": self._text,
            "labeled_words": self._words,
            "tokens": self._tokens,
        }
        draft = readers.get(self.row_format, self._conversation)(row)
        pieces = [] if isinstance(draft.content, Encoded) else draft.content
        texts = [draft.text, *(piece.text for piece in pieces)]  # templates drop and add text
        if any(not text.isascii() and SURROGATE.search(text) for text in texts):
            raise BadRow("expected text, got a surrogate, which is no character")
        return draft

    def _text(self, row: Mapping[str, Any]) -> Draft:
        text, label = row.get(self.column), None
        if not isinstance(text, str):
            raise BadRow(_missing(row, self.column))
        if not text.strip():
            raise BadRow(BLANK)
        if self.is_labeled and self.label_column is not None:
            label = _label(row.get(self.label_column), self.class_names)
        return Draft([Piece(text, self.is_labeled, True, label)], text, text)

    def _words(self, row: Mapping[str, Any]) -> Draft:
        words = row.get(self.column)
        if not _is_list(words) or not all(isinstance(word, str) for word in words):
            raise BadRow(f"expected a list of words, got {type(words).__name__}")
        if not "".join(words).strip():
            raise BadRow(BLANK)
        is_read = self.label_column is not None
        labels = row.get(self.label_column) if is_read else [IGNORE_INDEX] * len(words)
        if not _is_list(labels) or len(labels) != len(words):
            got = len(labels) if _is_list(labels) else type(labels).__name__
            raise BadRow(f"expected a label for each of {len(words)} words, got {got}")
        pieces = []
        for word, label in zip(words, labels, strict=True):
            name = None if label == IGNORE_INDEX else _label(label, self.class_names)
            pieces.append(Piece(self._gap * bool(pieces) + word, True, True, name))
        if is_read and all(piece.label is None for piece in pieces):
            expected = f"a label for one of {len(words)} words"
            raise BadRow(f"expected {expected}, got {IGNORE_INDEX} for all")
        text = " ".join(words)
        return Draft(pieces, text, text)

    def _conversation(self, row: Mapping[str, Any]) -> Draft:
        conversation = _read_conversation(row, self.row_format)
        bodies = [plain_body(message) for message in conversation.messages]
        first = conversation.completion or 0
        answers = [
            body
            for body, message in zip(bodies[first:], conversation.messages[first:], strict=True)
            if message["role"] == "assistant"
        ]
        return Draft(self._write(conversation), "\n".join(bodies), "\n".join(answers))

    def _tokens(self, row: Mapping[str, Any]) -> Draft:
        if isinstance(given := row.get("input_ids"), Sized) and not len(given):
            raise BadRow(BLANK)
        input_ids = _integers(row, "input_ids", None)
        if input_ids.min() < 0 or input_ids.max() >= len(self.tokenizer):
            largest = max(self.tokenizer.get_vocab().values())  # above the length if ids have gaps
            outside = input_ids[(input_ids < 0) | (input_ids > largest)]
            if len(outside):
                raise BadRow(f"input_ids: expected ids from 0 to {largest}, got {outside[0]}")
        is_token = np.ones(len(input_ids), dtype=bool)  # False for padding
        if row.get("attention_mask") is not None:
            is_token = _integers(row, "attention_mask", len(input_ids)) != 0
        _check_one_document(row, is_token)
        _check_token_types(row)
        scored = _scored(row, input_ids, self.loss_on)
        scored = None if scored is None else scored[is_token]
        encoded = _unwrapped(input_ids[is_token], scored, self.special)
        own = itertools.compress(encoded.input_ids, encoded.scored)
        texts = [" ".join(map(str, part)) for part in (encoded.input_ids, own)]
        return Draft(encoded, *texts)


def _label(value: Any, class_names: Sequence[str] | None) -> str:
    """Return a label as JSON: the name, if the data set has names for its numbers."""
    with suppress(TypeError):  # integers of NumPy and torch too
        value = value if isinstance(value, str | bool) else operator.index(value)
    if isinstance(value, bool) or not isinstance(value, str | int):
        hint = " (for several classes or a number give rows of input_ids and a data_collator)"
        if isinstance(value, bool):
            hint = " (write it as a string)"
        elif isinstance(value, float) and value.is_integer():
            hint = " (write an integer: one missing value makes a column of pandas float)"
        raise BadRow(f"expected a string or an integer as label, got {value!r}{hint}")
    if str(value).strip() in ("", str(IGNORE_INDEX)):
        raise BadRow(f"expected a class as label, got {value!r}, which stands for none")
    if isinstance(value, str) and SURROGATE.search(value):
        raise BadRow(f"expected a class as label, got {value!r}, which is no text")
    if class_names is not None:
        if not isinstance(value, int) or not 0 <= value < len(class_names):
            raise BadRow(f"expected the number of one of {len(class_names)} classes, got {value!r}")
        value = class_names[value]
    return json.dumps(value)


def _missing(row: Mapping[str, Any], column: str, what: str = "text") -> str:
    if column not in row:
        return f"{column}: expected a column of that name, got {sorted(row)}"
    return f"{column}: expected {what}, got {_short(row[column])}"


def _short(value: Any) -> str:
    shown = repr(value)
    return f"{type(value).__name__} {shown if len(shown) <= 80 else shown[:77] + '...'}"


def _read_conversation(row: Mapping[str, Any], row_format: Format) -> Conversation:
    tools = [] if row_format == "alpaca" else _parsed(row.get("tools"), "tools")
    completion, is_text = None, False
    if row_format == "prompt_completion":
        messages, completion = _prompted(row)
        is_text = all(isinstance(row[name], str) for name in PROMPTED)
    elif row_format == "alpaca":
        messages, is_text = _alpaca(row), True
    elif row_format == "sharegpt":
        messages = _sharegpt(row)
    else:
        _, turns = _turns(row, "messages", "conversations")
        messages = [_message(turn, i) for i, turn in enumerate(turns)]
    return Conversation(
        messages=messages,
        tools=[_tool(tool) for tool in tools],
        completion=completion,
        is_text=is_text and not tools,
    )


def _column(row: Mapping[str, Any], *names: str) -> str:
    """Return the first of several column names that the row has, else the first one."""
    return next((name for name in names if name in row), names[0])


def _turns(row: Mapping[str, Any], *names: str) -> tuple[str, list[dict[str, Any]]]:
    """Read a column of turns, which has one of several names; the name is returned too."""
    column = _column(row, *names)
    turns = row.get(column)
    if not _is_list(turns) or not all(isinstance(turn, Mapping) for turn in turns):
        raise BadRow(_missing(row, column, "a list of turns"))
    return column, [_without_none(turn) for turn in turns]


def _without_none(value: Any) -> Any:
    """Drop keys whose value is None: a table adds every key of one row to all rows."""
    if isinstance(value, Mapping):
        return {key: _without_none(entry) for key, entry in value.items() if entry is not None}
    return [_without_none(entry) for entry in value] if _is_list(value) else value


def _message(turn: Mapping[str, Any], index: int) -> dict[str, Any]:
    if not turn.get("tool_calls"):
        return {key: entry for key, entry in turn.items() if key != "tool_calls"}
    name, calls = f"messages[{index}].tool_calls", turn["tool_calls"]
    if not _is_list(calls):
        raise BadRow(f"{name}: expected a list of calls, got {_short(calls)}")
    calls = [_call(call, name) for call in calls]
    if turn.get("role") != "assistant":
        raise BadRow(
            f"messages[{index}].tool_calls: expected none but the assistant's, "
            f"got the role {turn.get('role')!r}"
        )
    return {"content": "", **turn, "tool_calls": calls}


def _parsed(value: Any, name: str) -> list[Any]:
    """Read a list that may be written in JSON; a single object counts as a list of one."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else []
        except (ValueError, RecursionError) as error:
            raise BadRow(f"{name}: expected JSON, got {_short(value)}") from error
    if value is None:
        return []
    return list(value) if _is_list(value) else [value]


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise BadRow(f"tools: expected definitions of functions, got {_short(tool)}")
    tool = _without_none(tool)
    return tool if "function" in tool else {"type": "function", "function": tool}


def _call(call: Any, name: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadRow(f"{name}: expected the name and arguments of a function, got {_short(call)}")
    # Templates write arguments as JSON themselves: a string would come out quoted twice.
    arguments = _parsed(function.get("arguments"), f"{name}.arguments") or [{}]
    if len(arguments) > 1 or not isinstance(arguments[0], Mapping):
        raise BadRow(f"{name}.arguments: expected an object, got {_short(function['arguments'])}")
    called = {"name": function["name"], "arguments": dict(arguments[0])}
    extra = {"id": call["id"]} if "function" in call and "id" in call else {}
    return {**extra, "type": "function", "function": called}


def _sharegpt(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    column, turns = _turns(row, "conversations", "messages")
    messages: list[dict[str, Any]] = []
    if row.get("system"):
        messages.append({"role": "system", "content": row["system"]})
    for index, turn in enumerate(turns):
        name = f"{column}[{index}]"
        speaker, value = turn.get("from"), turn.get("value")
        if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
            raise BadRow(f"{name}.from: expected one of {list(SHAREGPT_ROLES)}, got {speaker!r}")
        message: dict[str, Any] = {"role": SHAREGPT_ROLES[speaker], "content": value}
        if speaker == "function_call":
            calls = [_call(call, f"{name}.value") for call in _parsed(value, f"{name}.value")]
            message |= {"content": "", "tool_calls": calls}
        messages.append(message)
    return messages


def _alpaca(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    # Dolly has the same columns by other names.
    context_column = _column(row, "input", "context")
    answer_column = _column(row, "output", "response")
    for name in ("instruction", answer_column):
        if not isinstance(row.get(name), str) or not row[name].strip():
            raise BadRow(_missing(row, name))
    context = row.get(context_column) or ""
    if not isinstance(context, str):
        raise BadRow(_missing(row, context_column))
    prompt = ALPACA_WITH_INPUT if context.strip() else ALPACA
    content = prompt.format(instruction=row["instruction"], input=context)
    return [
        {"role": "user", "content": content},
        {"role": "assistant", "content": row[answer_column]},
    ]


def _prompted(row: Mapping[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """Join a prompt and its completion, and return the index of the completion's first turn."""
    parts = []
    for name, role in zip(PROMPTED, ("user", "assistant"), strict=True):
        value = row.get(name)
        if isinstance(value, str) and value.strip():
            parts.append([{"role": role, "content": value}])
        elif _is_list(value) and len(value):
            parts.append([_message(turn, i) for i, turn in enumerate(_turns(row, name)[1])])
        else:
            raise BadRow(_missing(row, name, "text or a list of turns"))
    return parts[0] + parts[1], len(parts[0])


def _check_one_document(row: Mapping[str, Any], is_token: np.ndarray) -> None:
    """Refuse a row that packs several documents: they would attend to each other."""
    lengths, positions = row.get("seq_lengths"), row.get("position_ids")
    starts = [0]
    if positions is not None:
        positions = _integers(row, "position_ids", len(is_token))
        starts = np.flatnonzero(positions[is_token] == 0).tolist()
    count = max(len(starts), len(lengths) if _is_list(lengths) else 1)
    if count > 1:
        raise BadRow(
            f"position_ids: expected one document, got {count} packed into a row (give them one by "
            "one; data.packing packs them)"
        )


def _check_token_types(row: Mapping[str, Any]) -> None:
    """Refuse token types that mark a pair of texts: batches have no such column."""
    name = "token_type_ids"
    if row.get(name) is not None and _integers(row, name, None).any():
        raise BadRow(
            "token_type_ids: expected 0 alone, got a pair of texts (your own data_collator gets "
            "rows as they are)"
        )


def _integers(row: Mapping[str, Any], name: str, length: int | None) -> np.ndarray:
    value = row.get(name)
    try:
        array = np.asarray(value) if _is_list(value) else np.zeros(0)
    except ValueError:  # lists of different lengths
        array = np.zeros(0)
    if array.ndim != 1 or array.dtype.kind not in "iub" or not len(array):
        raise BadRow(_missing(row, name, "a list of integers"))
    if length is not None and len(array) != length:
        raise BadRow(f"{name}: expected {length} entries, as input_ids has, got {len(array)}")
    return array.astype(np.int64)


def _scored(row: Mapping[str, Any], input_ids: np.ndarray, loss_on: LossOn) -> np.ndarray | None:
    """Join the labels and the mask that `loss_on` asks for; None if there are neither."""
    scored = []
    if row.get("labels") is not None:
        labels = _integers(row, "labels", len(input_ids))
        wrong = np.flatnonzero((labels != IGNORE_INDEX) & (labels != input_ids))
        if len(wrong):
            raise BadRow(
                f"labels[{wrong[0]}]: expected {IGNORE_INDEX} or the token at that place, "
                f"{input_ids[wrong[0]]}, got {labels[wrong[0]]}"
            )
        scored.append(labels != IGNORE_INDEX)
    mask = {"all": None, "completion": "completion_mask", "assistant": "assistant_masks"}[loss_on]
    if mask is not None and row.get(mask) is not None:
        scored.append(_integers(row, mask, len(input_ids)) != 0)
    if mask is not None and not scored:
        raise BadRow(f"loss_on {loss_on}: expected {mask} or labels, got {sorted(row)}")
    return np.logical_and.reduce(scored) if scored else None


def _unwrapped(input_ids: np.ndarray, scored: np.ndarray | None, special: SpecialTokens) -> Encoded:
    """Remove the special tokens around a row: every row gets them, and none is predicted."""
    start, end = len(special.prefix), len(input_ids) - len(special.suffix)
    if input_ids[:start].tolist() != special.prefix:
        start = 0
    if input_ids[end:].tolist() != special.suffix:
        end = len(input_ids)
    if end <= start:
        raise BadRow(BLANK)
    if scored is None:
        scored = np.ones(len(input_ids), dtype=bool)
    if not scored.any():
        raise BadRow(f"labels: expected tokens to score, got none of {len(scored)}")
    kept = slice(start, end)
    return Encoded(input_ids[kept].tolist(), scored[kept].tolist(), [], [], had_prefix=start > 0)
