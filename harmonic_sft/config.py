"""Strict reading of one YAML file into a dataclass: every problem is one line naming its key."""

import dataclasses
import difflib
import functools
import inspect
import json
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails
from yaml.constructor import ConstructorError

STRICT = ConfigDict(extra="forbid", ser_json_inf_nan="constants")  # for pydantic dataclasses
INTEGER = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
NUMBER = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan", re.I)
MAX_VALUES = 100_000
FEW_KEYS = 12  # up to so many known keys are listed in a message
PLAIN = "!plain"  # the YAML tag of a scalar that is neither quoted nor tagged
WORDS = {  # pydantic's words, and ours for a writer of YAML
    "less than or equal to": "a number of at most",
    "greater than or equal to": "a number of at least",
    "less than": "a number below",
    "greater than": "a number above",
    "a valid integer": "a whole number",
    "a valid boolean": "true or false",
    "a valid dictionary": "a mapping",
    "a dictionary": "a mapping",
    "a valid": "a",
}
OTHER_NAMES = {  # what other programs call our keys
    "base_model": "base",
    "batch_size": "per_device_train_batch_size",
    "block_size": "context_length",
    "bs": "per_device_train_batch_size",
    "dataset": "sources",
    "epochs": "num_train_epochs",
    "grad_accum": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "lora": "peft",
    "lora_r": "r",
    "lr": "learning_rate",
    "max_length": "context_length",
    "max_seq_length": "context_length",
    "micro_batch_size": "per_device_train_batch_size",
    "model_id": "repo_id",
    "model_name": "base",
    "model_name_or_path": "base",
    "num_epochs": "num_train_epochs",
    "num_workers": "dataloader_num_workers",
    "optimizer": "optim",
    "patience": "early_stopping_patience",
    "precision": "dtype",
    "rank": "r",
    "seq_length": "context_length",
    "steps": "max_steps",
    "text_column": "column",
    "torch_dtype": "dtype",
    "type": "name",
}

T = TypeVar("T")
Place = tuple[int | str, ...]


class _Loader(yaml.SafeLoader):
    """Reads scalars as YAML 1.2, so that 1e-4 is a number and `no` a string; no duplicate keys."""

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:
        is_plain = kind is yaml.ScalarNode and implicit[0]
        return PLAIN if is_plain else super().resolve(kind, value, implicit)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node)
            if not isinstance(key, str) or key in seen:
                kind = "stands twice" if isinstance(key, str) else "is not a string"
                problem = f"the key {key!r} {kind}"
                raise ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes every string that YAML 1.1 or 1.2 would read as something else."""


def _scalar(text: str) -> Any:
    """Read a plain scalar by the core schema of YAML 1.2."""
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    if text in ("true", "True", "TRUE", "false", "False", "FALSE"):
        return text.lower() == "true"
    if INTEGER.fullmatch(text):
        return int(text, 0) if text.startswith("0") and text[1:2] in "ox" else int(text)
    return float(re.sub(r"\.(?=[in])", "", text.lower())) if NUMBER.fullmatch(text) else text


def _quoted(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None if isinstance(_scalar(text), str) else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


# The types of JSON; a run has no use for the others of YAML, such as !!binary and !!set.
TAGS = tuple(f"tag:yaml.org,2002:{name}" for name in ("null", "int", "float", "str", "seq", "map"))
_Loader.yaml_constructors = {tag: yaml.SafeLoader.yaml_constructors[tag] for tag in (None, *TAGS)}
_Loader.add_constructor(PLAIN, lambda _, node: _scalar(node.value))
_Dumper.add_representer(str, _quoted)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read a YAML file that holds one mapping.

    Raises:
        ValueError: No such file, not YAML in UTF-8, a key that stands twice, or not a mapping.
    """
    if not Path(path).is_file():
        raise ValueError(f"config file: expected an existing file, got {str(path)!r}")
    data = load_text(Path(path).read_bytes(), str(path))
    if not isinstance(data, dict):
        got = "an empty file" if data is None else _show(data)
        raise ValueError(f"{path}: expected a mapping of keys to values, got {got}")
    return data


def apply_overrides(data: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return a configuration with single values replaced, as on a command line.

    An override is `key.key=value`, as in `training.max_steps=10` or `data.sources.0.path=x.txt`.
    The value is YAML: `head={name: linear}`.

    Raises:
        ValueError: An override that has no key or no `=`, or that leads through a plain value.
    """
    result = json.loads(json.dumps(data))  # a deep copy; YAML aliases share values
    for override in overrides:
        key, equals, text = override.partition("=")
        *steps, last = key.split(".")
        if not equals or not all([*steps, last]):
            what = f"expected key=value like training.max_steps=10, got {override!r}"
            raise ValueError(f"override: {what}")
        node = result
        for step in steps:
            index = _index(node, step, key)
            if isinstance(node, dict) and node.get(index) is None:
                node[index] = {}
            node = node[index]
        node[_index(node, last, key)] = load_text(text, f"override {key}")
    return result


def parse(cls: type[T], data: object, prefix: str = "") -> T:
    """Check a mapping and build a pydantic dataclass with `config=STRICT` from it.

    Messages begin with `prefix`, the mapping's place in the configuration.

    Raises:
        ValueError: One line per problem, `h_exp.start: expected a number below 0, got 2.0`.
    """
    instance, problems = _validated(cls, data, prefix)
    if problems:
        raise ValueError("\n".join(problems))
    return instance


def check_fields(
    cls: type[Any],
    values: Mapping[str, Any],
    prefix: str,
    *,
    without: Sequence[str] = (),
    elsewhere: Callable[[], Sequence[str]] = tuple,
) -> dict[str, Any]:
    """Check keyword arguments of a class that must not be built yet, such as TrainingArguments.

    No argument has to be given, and those in `without` are refused. See `parse` and `unknown_key`.

    Returns:
        The same keys, each value with the type of its argument; members of an enum by value.

    Raises:
        ValueError: One line per unknown key and per value of a wrong type.
    """
    hints = get_type_hints(cls.__init__)
    known = [name for name in inspect.signature(cls).parameters if name not in without]
    checked, problems = {}, []
    for key, value in values.items():
        name = _dotted(prefix, (key,))
        if key not in known:
            problems.append(unknown_key(name, key, known, elsewhere))
            continue
        result, new_problems = _validated(_type_of(hints.get(key, Any)), value, name)
        problems += new_problems
        checked[key] = result.value if isinstance(result, Enum) else result
    if problems:
        raise ValueError("\n".join(problems))
    return checked


def to_plain(instance: object) -> dict[str, Any]:
    """Turn a pydantic dataclass into plain dicts, lists and scalars, ready for JSON or YAML."""
    return TypeAdapter(type(instance)).dump_python(instance, mode="json")


def to_yaml(instance: object) -> str:
    """Write a pydantic dataclass as YAML, every field in its order, that reads back to it."""
    data = to_plain(instance)
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def load_text(text: str | bytes, name: str) -> Any:
    """Read a text as YAML 1.2.

    Raises:
        ValueError: It is not valid.
    """
    try:
        data = yaml.load(text, Loader=_Loader)
        if _size(data, {}) <= MAX_VALUES:
            return data
        problem = f": its aliases stand for more than {MAX_VALUES:,} values, or for themselves"
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        problem = f" in line {line}: {error.problem}"
    except (yaml.YAMLError, ValueError) as error:
        problem = f": {' '.join(str(error).split())}"
    except RecursionError:
        problem = ": it is nested too deeply"
    raise ValueError(f"{name}: expected valid YAML, got an error{problem}")


def _size(data: Any, known: dict[int, float]) -> float:
    """Count the values in data, an alias wherever it is used; infinite for a loop."""
    if not isinstance(data, dict | list):
        return 1
    if id(data) not in known:
        known[id(data)] = math.inf
        values = data.values() if isinstance(data, dict) else data
        known[id(data)] = 1 + sum(_size(value, known) for value in values)
    return known[id(data)]


def _index(node: Any, step: str, key: str) -> Any:
    """Return what `step` of an override's key selects in a mapping or a list."""
    if isinstance(node, dict):
        return step
    if not isinstance(node, list):
        what = f"expected a mapping or a list around {step!r}, got {_show(node)}"
        raise ValueError(f"override {key}: {what}")
    if not step.isdecimal() or int(step) >= len(node):
        raise ValueError(f"override {key}: expected a position below {len(node)}, got {step!r}")
    return int(step)


def _validated(hint: Any, value: Any, name: str) -> tuple[Any, list[str]]:
    """Return the value with the hinted type, and the lines that describe its problems."""
    adapter = TypeAdapter(hint)
    try:
        result = adapter.validate_python(value)
    except ValidationError as error:
        return None, _explain(error.errors(), hint, value, name)
    return result, list(_booleans_as_numbers(value, adapter.dump_python(result), name))


def _booleans_as_numbers(given: Any, result: Any, name: str) -> Iterator[str]:
    """Yield a problem for each boolean that pydantic took as a number, as in `max_steps: true`."""
    pairs = []
    if isinstance(given, dict) and isinstance(result, dict):
        pairs = [(key, given[key], result[key]) for key in given if key in result]
    elif isinstance(given, list) and isinstance(result, list):
        pairs = zip(range(len(given)), given, result, strict=True)
    elif isinstance(given, bool) and type(result) in (int, float):
        yield f"{name}: expected a number, got {given}"
    for step, inner, inner_result in pairs:
        yield from _booleans_as_numbers(inner, inner_result, _dotted(name, (step,)))


def _explain(errors: Sequence[ErrorDetails], hint: Any, data: Any, prefix: str) -> list[str]:
    """Return one line per place in the data that has a problem."""
    places: dict[Place, list[ErrorDetails]] = {}
    for error in errors:
        places.setdefault(_place(error, data), []).append(error)
    # One member of a union may refuse a whole value, another a key in it: show only the key.
    around = {place[:depth] for place in places for depth in range(len(place))}
    return [
        _line(problems, place, hint, data, prefix)
        for place, problems in places.items()
        if place not in around
    ]


def _place(error: ErrorDetails, data: Any) -> Place:
    """Return the keys that lead to an error, without the union members pydantic adds to them."""
    place: Place = ()
    for step in error["loc"]:
        is_position = isinstance(data, list) and isinstance(step, int)
        if is_position or (isinstance(data, dict) and step in data):
            data = data[step]
            place += (step,)
    if error["type"] == "missing":
        place += (error["loc"][-1],)
    elif error["type"].startswith("union_tag") and isinstance(data, dict):
        place += (error["ctx"]["discriminator"].strip("'"),)
    return place


def _line(errors: Sequence[ErrorDetails], place: Place, hint: Any, data: Any, prefix: str) -> str:
    """Describe the problems of one place, `name: expected WHAT, got VALUE. What to do`."""
    name = _dotted(prefix, place)
    errors = sorted(errors, key=lambda error: error["type"] != "value_error")
    kind = errors[0]["type"]
    if kind == "unexpected_keyword_argument":
        known = _known_keys(hint, place[:-1], data)
        return unknown_key(name, str(place[-1]), known, getattr(hint, "key_names", tuple))
    if kind == "value_error":  # raised by our own check; it may start with the name of a field
        lines = str(errors[0]["ctx"]["error"]).splitlines()
        start = f"{name}." if re.match(r"[\w.]+: ", lines[0]) else f"{name}: "
        return "\n".join(f"{start if name else ''}{line}" for line in lines)
    if kind in ("missing", "union_tag_not_found"):
        return f"{name}: expected a value, got nothing. Add this key"
    value = functools.reduce(operator.getitem, place, data)
    expected = " or ".join(dict.fromkeys(_expected(error) for error in errors))
    line = f"{name or 'configuration'}: expected {expected}, got {_show(value)}"
    if expected == "a string" and isinstance(value, int | float):
        return f"{line}. Put it in quotes, on a command line in two kinds: '...=\"{value}\"'"
    known = re.findall(r"'([^']*)'", expected)
    return line + did_you_mean(value, known) if isinstance(value, str) else line


def _expected(error: ErrorDetails) -> str:
    """Return pydantic's message as `a number below 0` or `one of ['linear', 'learned']`."""
    context = error.get("ctx", {})
    if allowed := context.get("expected_tags", context.get("expected")):
        return f"one of [{allowed.replace(' or ', ', ')}]"
    pattern = r"^\w+ should (be |have )?| or (object|(an )?instance) .*| after validation|, .*"
    what = re.sub(pattern, "", error["msg"])
    start = next((words for words in WORDS if what.startswith(words)), "")
    return WORDS.get(start, "") + what.removeprefix(start)


def unknown_key(
    name: str, key: str, known: Sequence[str], elsewhere: Callable[[], Sequence[str]] = tuple
) -> str:
    """Return the message for an unknown key, which names the nearest of the `known` ones.

    If no known key is spelled much alike, `elsewhere` is asked for the keys of the whole file, such
    as `training.max_steps`. A class for `parse` may have that function as `key_names`.
    """
    places, word = {name: name for name in known}, OTHER_NAMES.get(key, "")
    near = difflib.get_close_matches(key, known, 1, cutoff=0.76)
    if word or not near:
        places = {place.rpartition(".")[2]: place for place in reversed(elsewhere())} | places
    if word not in places:
        near = near or difflib.get_close_matches(key, places, 1, cutoff=0.76)
        word = near[0] if near else _nearest(key, known)
    place = " at the top level" if word not in known and "." not in places.get(word, ".") else ""
    nearest = f". Did you mean {places[word]!r}{place}?" if word else ""
    if not word and 0 < len(known) <= FEW_KEYS:
        nearest = f". They are {', '.join(known)}"
    return f"{name}: expected one of the known keys, got {key!r}{nearest}"


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """Return a last sentence that names the nearest known word; empty if none is near."""
    nearest = _nearest(word, known)
    return f". Did you mean {nearest!r}?" if nearest else ""


def _nearest(word: str, known: Sequence[str]) -> str:
    """Return the known word that is spelled most alike; empty if none is near."""
    longer = [name for name in known if word and name.startswith(word)]
    longer = longer or [n for n in known if word in n and len(word) > max(3, len(n) / 3)]
    return min(longer, key=len, default="") or next(
        iter(difflib.get_close_matches(word, known, 1, cutoff=0.6)), ""
    )


def _known_keys(hint: Any, place: Place, data: Any) -> list[str]:
    """Return the fields of the dataclass at a place; for a union, of the member named in data."""
    if get_origin(hint) in (Union, UnionType):
        return [key for member in get_args(hint) for key in _known_keys(member, place, data)]
    if not dataclasses.is_dataclass(hint):
        args = get_args(hint)
        return _known_keys(args[-1], place[1:], data[place[0]]) if args and place else []
    hints = get_type_hints(hint)
    names = get_args(hints["name"]) if get_origin(hints.get("name")) is Literal else ()
    if names and data.get("name", names[0]) not in names:
        return []
    return _known_keys(hints[str(place[0])], place[1:], data[place[0]]) if place else list(hints)


def _type_of(hint: Any) -> Any:
    """Return the type that `check_fields` asks for, simpler than the hint in two cases."""
    if get_origin(hint) is Literal:
        return str  # the constructor checks the choices, and knows renamed ones
    members = [member for member in get_args(hint) if member is not str]
    has_enum = any(isinstance(member, type) and issubclass(member, Enum) for member in members)
    # In `SomeEnum | str` the string only spells a member of the enum.
    return functools.reduce(operator.or_, members) if has_enum else hint


def _dotted(prefix: str, place: Place) -> str:
    return ".".join(map(str, (prefix, *place) if prefix else place))


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
