"""What every key of a run's YAML file means, from the descriptions beside the fields."""

import dataclasses
import inspect
import re
import textwrap
from dataclasses import dataclass, field, replace
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from harmonic_sft.config import unknown_key
from harmonic_sft.losses import LOSSES
from harmonic_sft.models import HEADS
from harmonic_sft.training.arguments import HarmonicTrainingArguments, default_of, their_names
from harmonic_sft.training.run_config import NOT_IN_HEAD, RunConfig
from harmonic_sft.training.training_section import REFUSED, check_refused

WORDS = {bool: "true or false", int: "whole number", float: "number", str: "text", dict: "mapping"}
WIDTH = 80


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key of the file."""

    text: str  # what it means
    kind: str = ""  # what values it takes
    default: str = ""  # the value of a file without it; empty if it has to be given
    below: "dict[str, Key]" = field(default_factory=dict)  # the keys in this section


def explain(name: str | None = None) -> str:
    """Explain one key of a configuration, and those below it.

    Args:
        name: A key such as `data`, `data.mask.policy`, `training.max_steps` or, for a head or a
            loss, `head.dist`. Positions in a list are ignored. None explains all sections.
    """
    key = _root()
    path = [step for step in (name or "").split(".") if step and not step.isdecimal()]
    if path[:1] == ["training"]:
        check_refused(dict.fromkeys(path[1:], "a value"))
    for depth, step in enumerate(path):
        if step not in key.below:
            place = ".".join(path[:depth]) or "config"
            raise ValueError(unknown_key(place, step, list(key.below), key_names))
        key = key.below[step]
    parts = [_paragraph(f"{name}: {_facts(key)}" if name else key.text)]
    parts += [_paragraph(f"{step}: {_facts(inner)}", "  ") for step, inner in key.below.items()]
    if not path:
        parts.append("harmonic-sft config KEY explains one, such as data, head.dist or data.mask.")
    return "\n".join(parts)


def key_names() -> list[str]:
    """Return all keys of a file, such as `training.max_steps`, sections before what is in them."""
    found = list(_sections_of_file().items())
    for name, key in found:  # the list grows by what is in each section
        found += [(f"{name}.{step}", inner) for step, inner in key.below.items()]
    return [name for name, _ in found]


def _root() -> Key:
    """Return the whole file; heads and losses stand below their sections by name."""
    keys = _sections_of_file()
    heads = {name: _of_class(head, _options(head)) for name, head in HEADS.items()}
    losses = {name: _of_class(loss, _fields(loss)) for name, loss in LOSSES.items()}
    keys["head"] = replace(keys["head"], below=keys["head"].below | heads)
    keys["loss"] = replace(keys["loss"], text="What is minimized, by name", below=losses)
    return Key(text="One YAML file describes one run. Its keys:", below=keys)


def _sections_of_file() -> dict[str, Key]:
    """Return the sections, without the options that only one head or loss has."""
    keys = _fields(RunConfig)
    return keys | {"training": replace(keys["training"], below=_training())}


def _facts(key: Key) -> str:
    """Return the meaning of a key with its type and its default."""
    known = [key.kind, f"default {key.default}" if key.default else ""]
    facts = "; ".join(fact for fact in known if fact)
    return f"{key.text} ({facts})" if facts else key.text


def _paragraph(text: str, indent: str = "") -> str:
    return textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=f"{indent}    ")


def _fields(section: Any) -> dict[str, Key]:
    """Return the keys of a pydantic section."""
    keys = {}
    for name, info in section.__pydantic_fields__.items():
        default = info.get_default(call_default_factory=True)
        sections = _sections(info.annotation)
        below = _fields(sections[0]) if len(sections) == 1 else {}
        has_default = default is not PydanticUndefined and not below
        keys[name] = Key(
            text=info.description or (_summary(sections[0]) if sections else ""),
            kind="" if below else _kind(info.annotation),
            default=_show(default) if has_default else "",
            below=below,
        )
    return keys


def _of_class(cls: type, keys: dict[str, Key]) -> Key:
    return Key(text=_summary(cls), below={k: v for k, v in keys.items() if k != "name"})


def _options(head: type) -> dict[str, Key]:
    """Return the arguments of a head's constructor, explained as in its docstring."""
    texts = dict(re.findall(r"^    (\w+): ((?:.|\n {8})+)", inspect.getdoc(head) or "", re.M))
    return {
        p.name: Key(
            text=" ".join(texts.get(p.name, "").split()),
            kind=_kind(p.annotation),
            default=_show(p.default),
        )
        for p in inspect.signature(head).parameters.values()
        if p.name not in NOT_IN_HEAD
    }


def _training() -> dict[str, Key]:
    """Return transformers' arguments, with our defaults and without those that are refused."""
    refused = {key for keys in REFUSED.values() for key in keys}
    arguments = HarmonicTrainingArguments.__dataclass_fields__
    return {
        name: Key(
            text=" ".join(arguments[name].metadata["help"].split()),
            kind=_kind(arguments[name].type),
            default=_show(default_of(name)),
        )
        for name in their_names()
        if name not in refused
    }


def _sections(annotation: Any) -> list[Any]:
    """Return the classes with keys of their own in a type."""
    if not isinstance(annotation, type):
        return [cls for inner in get_args(annotation) for cls in _sections(inner)]
    is_section = dataclasses.is_dataclass(annotation) or issubclass(annotation, BaseModel)
    return [annotation] if is_section else []


def _kind(annotation: Any) -> str:
    """Return a type in words."""
    origin, members = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "one of " + ", ".join(map(str, members))
    if origin in (Union, UnionType):
        words = [_kind(member) for member in members if member is not NoneType]
        named = [word for word in dict.fromkeys(words) if word]
        return " or ".join([*named, "null"] if named and NoneType in members else named)
    if origin is list:
        return f"list of {_kind(members[0])}"
    return WORDS.get(origin or annotation, "")


def _show(value: Any) -> str:
    """Return a default as YAML writes it."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(_show, value))}]"
    return str(value) if value == value else ""  # nan stands for "has to be given"


def _summary(cls: type) -> str:
    """Return the first sentence of a class."""
    return " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split())
