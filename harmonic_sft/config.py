"""Strict reading of one YAML file into a dataclass: every problem is one line naming its key."""

import dataclasses
import difflib
import functools
import operator
import re
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails
from yaml.constructor import ConstructorError

STRICT = ConfigDict(extra="forbid", ser_json_inf_nan="constants")  # for pydantic dataclasses
MAX_VALUE_LENGTH = 80

T = TypeVar("T")
Location = tuple[int | str, ...]

# pydantic's error types in the words of a person who writes YAML.
EXPECTED = {
    **dict.fromkeys(("bool_parsing", "bool_type"), "true or false"),
    **dict.fromkeys(("int_parsing", "int_type", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_parsing", "float_type"), "a number"),
    **dict.fromkeys(("list_type", "tuple_type", "set_type"), "a list"),
    **dict.fromkeys(("dict_type", "dataclass_type", "model_attributes_type"), "a mapping"),
    "finite_number": "a finite number",
    "string_type": "a string",
}
BOUNDS = {
    "less_than": ("below", "lt"),
    "less_than_equal": ("of at most", "le"),
    "greater_than": ("above", "gt"),
    "greater_than_equal": ("of at least", "ge"),
}


class _Loader(yaml.SafeLoader):
    """The scalars of YAML 1.2, so that 1e-4 is a number and `no` a string; no key twice."""

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

    def construct_integer(self, node: yaml.ScalarNode) -> int:
        text = self.construct_scalar(node)
        return int(text, 0) if text.startswith(("0o", "0x")) else int(text)

    def construct_number(self, node: yaml.ScalarNode) -> float:
        return float(re.sub(r"\.(?=inf|nan)", "", self.construct_scalar(node).lower()))


class _Dumper(yaml.SafeDumper):
    """Quotes every string that YAML 1.1 or 1.2 would read as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


SCALARS = {  # YAML 1.2, core schema: pattern, first characters
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
}
_Loader.yaml_implicit_resolvers = {}
for _name, (_pattern, _first) in SCALARS.items():
    for _class in (_Loader, _Dumper):
        _regexp = re.compile(f"^(?:{_pattern})$")
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", _regexp, _first)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_integer)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_number)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read a YAML file that holds one mapping.

    Args:
        path: A UTF-8 file.

    Returns:
        Plain dicts, lists, strings, numbers, booleans and None.

    Raises:
        ValueError: No such file, not YAML, a key that stands twice, empty, or not a mapping.
    """
    if not Path(path).is_file():
        raise ValueError(f"config file: expected an existing file, got {str(path)!r}")
    data = _load(Path(path).read_bytes(), str(path))
    if not isinstance(data, dict):
        found = "an empty file" if data is None else _show(data)
        raise ValueError(f"{path}: expected a mapping of keys to values, got {found}")
    return data


def apply_overrides(data: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Set single values, as on a command line.

    Args:
        data: A configuration as `read_yaml` returns it. It is left as it is.
        overrides: Each `key.key=value`, as in `training.max_steps=10` or
            `data.sources.0.path=x.txt`. The value is YAML: `head={name: linear}`.

    Returns:
        A new mapping; the parts without an override are shared with `data`.

    Raises:
        ValueError: An override that has no key or no `=`, or that leads through a plain value.
    """
    for override in overrides:
        key, equals, text = override.partition("=")
        steps = key.split(".")
        if not equals or not all(steps):
            what = f"expected key=value like training.max_steps=10, got {override!r}"
            raise ValueError(f"override: {what}")
        data = _replaced(data, steps, _load(text, f"override {key}"), key)
    return data


def parse(cls: type[T], data: object) -> T:
    """Check a mapping and build the dataclass from it.

    Args:
        cls: A pydantic dataclass with `config=STRICT`; its fields may be such dataclasses too.
        data: What `read_yaml` returned.

    Returns:
        The instance.

    Raises:
        ValueError: One line per problem, `h_exp.start: expected a number below 0, got 2.0`.
    """
    instance, problems = _validated(cls, data, "")
    if problems:
        raise ValueError("\n".join(problems))
    return instance


def check_fields(cls: type[Any], values: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Check a mapping against a dataclass that must not be built yet, such as TrainingArguments.

    Args:
        cls: An ordinary dataclass. Keys without a value are not looked for.
        values: Field names and values.
        prefix: Where the mapping stands in the configuration, for the messages.

    Returns:
        The same keys, each value with the type of its field; members of an enum by value.

    Raises:
        ValueError: One line per unknown key and per value of a wrong type.
    """
    hints = get_type_hints(cls, include_extras=True)
    known = [field.name for field in dataclasses.fields(cls) if field.init]
    checked, problems = {}, []
    for key, value in values.items():
        location = f"{prefix}.{key}" if prefix else key
        if key not in known:
            problems.append(_unknown_key(location, key, known))
            continue
        result, found = _validated(_without_spelling(hints[key]), value, location)
        problems += found
        checked[key] = result.value if isinstance(result, Enum) else result
    if problems:
        raise ValueError("\n".join(problems))
    return checked


def to_plain(instance: object) -> dict[str, Any]:
    """Turn a pydantic dataclass into plain dicts, lists and scalars, ready for JSON or YAML."""
    return TypeAdapter(type(instance)).dump_python(instance, mode="json")


def to_yaml(instance: object) -> str:
    """Write a configuration as YAML that reads back to the same instance.

    Args:
        instance: A pydantic dataclass.

    Returns:
        YAML text, every field with its value, in the order of the fields.
    """
    data = to_plain(instance)
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def _load(text: str | bytes, name: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        problem = f" in line {line}: {error.problem}"
    except (yaml.YAMLError, ValueError) as error:
        problem = f": {' '.join(str(error).split())}"
    raise ValueError(f"{name}: expected valid YAML, got an error{problem}")


def _replaced(node: Any, steps: list[str], value: Any, key: str) -> Any:
    """Return a copy of the tree with one leaf exchanged, so that YAML aliases stay apart."""
    if not steps:
        return value
    step, *rest = steps
    if node is None or isinstance(node, dict):
        node = node or {}
        return {**node, step: _replaced(node.get(step), rest, value, key)}
    if not isinstance(node, list):
        what = f"expected a mapping or a list around {step!r}, got {_show(node)}"
        raise ValueError(f"override {key}: {what}")
    if not step.isdecimal() or int(step) >= len(node):
        raise ValueError(f"override {key}: expected a position below {len(node)}, got {step!r}")
    index = int(step)
    return [*node[:index], _replaced(node[index], rest, value, key), *node[index + 1 :]]


def _validated(hint: Any, value: Any, location: str) -> tuple[Any, list[str]]:
    """Return the value with the hinted type, and the lines that describe its problems."""
    adapter = TypeAdapter(hint)
    try:
        result = adapter.validate_python(value)
    except ValidationError as error:
        return None, _explain(error.errors(), hint, value, location)
    return result, list(_booleans_as_numbers(value, adapter.dump_python(result), location))


def _booleans_as_numbers(given: Any, result: Any, name: str) -> Iterator[str]:
    """Refuse what pydantic lets pass: nobody means one step by `max_steps: true`."""
    pairs = []
    if isinstance(given, dict) and isinstance(result, dict):
        pairs = [(key, given[key], result[key]) for key in given if key in result]
    elif isinstance(given, list) and isinstance(result, list):
        pairs = zip(range(len(given)), given, result, strict=True)
    elif isinstance(given, bool) and type(result) in (int, float):
        yield f"{name}: expected a number, got {given}"
    for step, inner, inner_result in pairs:
        yield from _booleans_as_numbers(inner, inner_result, _dotted(name, (step,)))


@dataclasses.dataclass(frozen=True)
class _Problem:
    """One pydantic error, its place in the data, and the union branches (depth, name) there."""

    place: Location
    branches: tuple[tuple[int, int | str], ...]
    error: ErrorDetails


def _explain(errors: list[ErrorDetails], hint: Any, data: Any, location: str) -> list[str]:
    """Return one line per place in the data that has a problem."""
    places: dict[Location, list[ErrorDetails]] = {}
    for problem in _nearest_branches([_located(error, data) for error in errors]):
        places.setdefault(problem.place, []).append(problem.error)
    return [_line(found, place, hint, data, location) for place, found in places.items()]


def _located(error: ErrorDetails, data: Any) -> _Problem:
    """Tell the keys of the data from the union branches that pydantic puts between them."""
    place: Location = ()
    branches = []
    for step in error["loc"]:
        is_position = isinstance(data, list) and isinstance(step, int)
        if is_position or (isinstance(data, dict) and step in data):
            data = data[step]
            place += (step,)
        else:
            branches.append((len(place), step))
    if error["type"] == "missing":
        place += (branches.pop()[1],)
    elif error["type"].startswith("union_tag"):
        place += (error["ctx"]["discriminator"].strip("'"),)
    return _Problem(place, tuple(branches), error)


def _nearest_branches(problems: list[_Problem]) -> list[_Problem]:
    """Keep, of every union, the branches that the value misses by least."""
    kept = []
    unions: dict[Location, dict[int | str, list[_Problem]]] = {}
    for problem in problems:
        if not problem.branches:
            kept.append(problem)
            continue
        (depth, name), *rest = problem.branches
        inner = _Problem(problem.place, tuple(rest), problem.error)
        unions.setdefault(problem.place[:depth], {}).setdefault(name, []).append(inner)
    for place, branches in unions.items():
        misses = {name: _miss(found, len(place)) for name, found in branches.items()}
        nearest = [name for name, miss in misses.items() if miss == min(misses.values())]
        kept += _nearest_branches([problem for name in nearest for problem in branches[name]])
    return kept


def _miss(problems: list[_Problem], depth: int) -> tuple[int, int, int]:
    """Wrong as a whole is worse than a wrong name field, and that worse than other problems."""
    whole = sum(len(problem.place) == depth for problem in problems)
    names = sum(problem.error["type"] == "literal_error" for problem in problems)
    return whole, names, len(problems)


def _line(errors: list[ErrorDetails], place: Location, hint: Any, data: Any, location: str) -> str:
    """Describe the problems of one place, `name: expected WHAT, got VALUE. What to do`."""
    name = _dotted(location, place) or "configuration"
    types = [error["type"] for error in errors]
    if "unexpected_keyword_argument" in types:
        return _unknown_key(name, str(place[-1]), _known_keys(hint, place[:-1], data))
    if "value_error" in types or "assertion_error" in types:
        text = str(errors[0]["ctx"]["error"])
        separator = "." if re.match(r"[\w.]+: ", text) else ": "  # "start: ..." names a field
        return f"{name}{separator}{text}" if location or place else text
    if "missing" in types or "union_tag_not_found" in types:
        return f"{name}: expected a value, got nothing. Add this key"
    value = functools.reduce(operator.getitem, place, data)
    choices = list(dict.fromkeys(choice for error in errors for choice in _choices(error)))
    whats = [_expected(error) for error in errors if not _choices(error)]
    if choices:
        whats.append(f"one of [{', '.join(choices)}]")
    line = f"{name}: expected {' or '.join(dict.fromkeys(whats))}, got {_show(value)}"
    if types == ["string_type"] and isinstance(value, int | float):
        return f"{line}. Put it in quotes"
    return line + _did_you_mean(str(value), [choice.strip("'") for choice in choices])


def _expected(error: ErrorDetails) -> str:
    if error["type"] in BOUNDS:
        words, bound = BOUNDS[error["type"]]
        return f"a number {words} {error['ctx'][bound]:g}"
    return EXPECTED.get(error["type"], re.sub(r"^\w+ should (be |have )?", "", error["msg"]))


def _choices(error: ErrorDetails) -> list[str]:
    """Return the allowed values, each as Python writes it."""
    context = error.get("ctx", {})
    allowed = context.get("expected_tags", context.get("expected", ""))
    is_choice = error["type"] in ("literal_error", "enum", "union_tag_invalid")
    return re.split(r", | or ", allowed) if is_choice else []


def _unknown_key(name: str, key: str, known: list[str]) -> str:
    line = f"{name}: expected one of the known keys, got {key!r}"
    if (nearest := _did_you_mean(key, known)) or not known:
        return line + nearest
    return f"{line}. The nearest is {difflib.get_close_matches(key, known, 1, cutoff=0)[0]!r}"


def _did_you_mean(word: str, known: list[str]) -> str:
    longer = [name for name in known if word and name.startswith(word)]
    matches = longer or difflib.get_close_matches(word, known, 1)
    return f". Did you mean {matches[0]!r}?" if matches else ""


def _known_keys(hint: Any, place: Location, data: Any) -> list[str]:
    """Return the fields of the dataclasses that the mapping at this place can become."""
    if get_origin(hint) is Annotated:
        return _known_keys(get_args(hint)[0], place, data)
    if get_origin(hint) in (Union, UnionType):
        return [key for member in get_args(hint) for key in _known_keys(member, place, data)]
    hints = get_type_hints(hint, include_extras=True) if dataclasses.is_dataclass(hint) else {}
    if not all(_admits(inner, data, key) for key, inner in hints.items()):
        return []
    if not place:
        return [field.name for field in dataclasses.fields(hint) if field.init] if hints else []
    inner = hints.get(str(place[0])) if hints else next(reversed(get_args(hint)), None)
    return _known_keys(inner, place[1:], data[place[0]])


def _admits(hint: Any, data: dict[str, Any], key: str) -> bool:
    """Whether a field that only takes certain names takes the one given, if one is given."""
    names = get_args(hint) if get_origin(hint) is Literal else ()
    return not names or key not in data or data[key] in names


def _without_spelling(hint: Any) -> Any:
    """Take `str` out of `SomeEnum | str`: the string only spells a member of the enum."""
    members = [member for member in get_args(hint) if member is not str]
    has_enum = any(isinstance(member, type) and issubclass(member, Enum) for member in members)
    return functools.reduce(operator.or_, members) if has_enum else hint


def _dotted(location: str, place: Location) -> str:
    return ".".join(map(str, (location, *place) if location else place))


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_VALUE_LENGTH else f"{text[:MAX_VALUE_LENGTH]}..."
