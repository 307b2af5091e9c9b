"""Reading, overriding and checking a configuration; the text of every message."""

import dataclasses
import math
import re
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass
from transformers import TrainingArguments

from harmonic_sft.config import STRICT, apply_overrides, check_fields, parse, read_yaml, to_yaml


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Annealing:
    start: Annotated[float, Field(lt=0)] = -12.0
    end: float = -4.0
    schedule: Literal["linear", "constant"] = "linear"

    def __post_init__(self):
        if self.end >= 0:
            raise ValueError(f"end: expected a number below 0, got {self.end}")
        if self.start == self.end == -1:
            raise ValueError("start: expected another number\nend: expected another one too")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Dist:
    name: Literal["dist"]
    eps: float = 1e-6


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Cosine:
    name: Literal["cosine"]
    scale: Annotated[float, Field(gt=0)] = 20.0


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Source:
    path: Path
    columns: list[str] | None = None


def refuse(value: int) -> int:
    raise ValueError(f"expected a prime number, got {value}")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Run:
    h_exp: Annealing
    head: Annotated[Dist | Cosine, Field(discriminator="name")]
    either: float | Annealing = -1.0
    sources: list[Source] = dataclasses.field(default_factory=list)
    named: dict[str, Source] | None = None
    steps: Annotated[int, Field(ge=1, le=100)] = 10
    patience: Annotated[int, AfterValidator(refuse)] | None = None
    tokens: Annotated[list[int], Field(min_length=1)] = dataclasses.field(
        default_factory=lambda: [1]
    )
    push: bool = False
    revision: str = "main"
    training: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if self.steps == 13:
            raise ValueError("steps: expected a lucky number, got 13")


GIVEN = {"h_exp": {}, "head": {"name": "dist"}}


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


SCALARS = {
    "1e-4": 1e-4,
    ".inf": math.inf,
    "010": 10,
    "0o10": 8,
    "0x1F": 31,
    "TRUE": True,
    "~": None,
    "": None,
    "no": "no",
    "2026-01-01": "2026-01-01",
    "1_000": "1_000",
    "'1e-4'": "1e-4",
    "!!str 12": "12",
    "[a, 1, {b: no}]": ["a", 1, {"b": "no"}],
}


@pytest.mark.parametrize("text", SCALARS)
def test_scalars_follow_yaml_1_2(tmp_path, text):
    read = read_yaml(written(tmp_path, f"key: {text}\n"))["key"]
    assert read == SCALARS[text]
    assert type(read) is type(SCALARS[text])


ALIASES = "a0: &a0 x\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# only a comment\n", "expected a mapping of keys to values, got an empty file"),
        ("- 1\n- 2\n", "expected a mapping of keys to values, got [1, 2]"),
        ("a: 1\nb: 2\na: 3\n", "expected valid YAML, got an error in line 3: the key 'a' stands"),
        ("a: 1\n3: 2\n", "got an error in line 2: the key 3 is not a string"),
        ("a: 1\nb: c: d\n", "got an error in line 2: mapping values are not allowed here"),
        ("a: !!python/name:os.system\n", "could not determine a constructor"),
        ("a: !!int x\n", "expected valid YAML, got an error: invalid literal"),
        ("a: !!binary aGk=\n", "line 1: could not determine a constructor for the tag"),
        ("a: !!bool x\n", "line 1: could not determine a constructor for the tag"),
        (ALIASES, "an error: its aliases stand for more than 100,000 values, or for themselves"),
        ("a: &a {b: *a}\n", "its aliases stand for more than 100,000 values, or for themselves"),
        ("a: " + "[" * 1000, "expected valid YAML, got an error: it is nested too deeply"),
        ("a: caf\xe9\n", "expected valid YAML, got an error: unacceptable character"),
    ],
)
def test_a_bad_file_is_a_one_line_error(tmp_path, text, message):
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        read_yaml(path)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"config file: expected an existing file, got '.*no\.y'"):
        read_yaml(tmp_path / "no.y")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("training.note=a=b", {"training": {"max_steps": 1, "bf16": "no", "note": "a=b"}}),
        ("training.bf16=", {"training": {"max_steps": 1, "bf16": None}}),
        ("sources.1.path=x.txt", {"sources": [{"path": "a"}, {"path": "x.txt"}]}),
        ("sources.0=", {"sources": [None, {"path": "b"}]}),
        ("head={name: linear}", {"head": {"name": "linear"}}),
        ("empty.new.key=[1, 2]", {"empty": {"new": {"key": [1, 2]}}}),
    ],
)
def test_an_override_sets_one_value(override, expected):
    data = {
        "training": {"max_steps": 1, "bf16": "no"},
        "sources": [{"path": "a"}, {"path": "b"}],
        "head": {"name": "dist", "scale": math.inf},
        "empty": None,
    }
    before = repr(data)
    assert apply_overrides(data, [override]) == data | expected
    assert repr(data) == before


def test_an_override_leaves_other_uses_of_a_yaml_alias_alone(tmp_path):
    data = read_yaml(written(tmp_path, "a: &x {k: 1}\nb: *x\n"))
    assert apply_overrides(data, ["a.k=2"]) == {"a": {"k": 2}, "b": {"k": 1}}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps", "override: expected key=value like training.max_steps=10, got 'steps'"),
        ("steps.x=3", "override steps.x: expected a mapping or a list around 'x', got 10"),
        ("sources.last=x", "override sources.last: expected a position below 1, got 'last'"),
        ("head={name", "override head: expected valid YAML, got an error in line 1: "),
    ],
)
def test_a_bad_override_says_what_to_write(override, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        apply_overrides({"steps": 10, "sources": ["a"]}, [override])


def test_parse_fills_defaults_and_converts():
    run = parse(Run, GIVEN | {"steps": "20", "sources": [{"path": "a.txt"}], "push": "yes"})
    head, sources = Dist(name="dist"), [Source(path=Path("a.txt"))]
    assert run == Run(h_exp=Annealing(), head=head, steps=20, sources=sources, push=True)


@pytest.mark.parametrize(
    ("change", "place", "nearest"),
    [
        ({"stepz": 1}, "stepz", "steps"),
        ({"pat": 1}, "pat", "patience"),
        ({"h_exp": {"strat": -3}}, "h_exp.strat", "start"),
        ({"head": {"name": "dist", "nam": 3}}, "head.nam", "name"),
        ({"sources": [{"path": "a", "c": []}]}, "sources.0.c", "columns"),
        ({"named": {"a": {"path": "b", "pat": 1}}}, "named.a.pat", "path"),
        ({"either": {"ends": -3}}, "either.ends", "end"),
    ],
)
def test_an_unknown_key_gets_the_nearest_one_of_its_place(change, place, nearest):
    with pytest.raises(ValueError, match="expected one of the known keys") as error:
        parse(Run, GIVEN | change)
    key = place.split(".")[-1]
    message = f"{place}: expected one of the known keys, got {key!r}. Did you mean {nearest!r}?"
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sources": [{}]}, "sources.0.path: expected a value, got nothing. Add this key"),
        ({"head": {}}, "head.name: expected a value, got nothing. Add this key"),
        ({"h_exp": {"start": 2.0}}, "h_exp.start: expected a number below 0, got 2.0"),
        ({"h_exp": {"end": 3}}, "h_exp.end: expected a number below 0, got 3.0"),
        (
            {"h_exp": {"schedule": "lin"}},
            "h_exp.schedule: expected one of ['linear', 'constant'], got 'lin'. Did you mean 'line",
        ),
        ({"head": {"name": "dit"}}, "head.name: expected one of ['dist', 'cosine'], got 'dit'. D"),
        ({"head": {"name": "cosine", "scale": 0}}, "head.scale: expected a number above 0, got 0"),
        ({"either": "x"}, "either: expected a number or a mapping, got 'x'"),
        ({"steps": 0}, "steps: expected a number of at least 1, got 0"),
        ({"steps": 1.5}, "steps: expected a whole number, got 1.5"),
        ({"steps": True}, "steps: expected a number, got True"),
        ({"steps": 13}, "steps: expected a lucky number, got 13"),
        ({"tokens": [1, False]}, "tokens.1: expected a number, got False"),
        ({"tokens": []}, "tokens: expected at least 1 item, got []"),
        ({"patience": 4}, "patience: expected a prime number, got 4"),
        ({"push": "maybe"}, "push: expected true or false, got 'maybe'"),
        ({"revision": 5424}, "revision: expected a string, got 5424. Put it in quotes"),
        ({"training": list(range(99))}, "training: expected a mapping, got [0, 1, 2, 3, 4, 5, 6"),
    ],
)
def test_a_problem_is_one_line_with_its_key(change, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}") as error:
        parse(Run, GIVEN | change)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 160


def test_only_a_text_is_taken_for_a_mistyped_one():
    with pytest.raises(ValueError, match=r"^head\.name: expected one of .*, got None$"):
        parse(Run, GIVEN | {"head": {"name": None}})


def test_all_problems_are_reported_at_once():
    with pytest.raises(ValueError, match="expected") as error:
        parse(
            Run, {"h_exp": {"start": 1, "stop": 2}, "push": 3, "either": {"start": -1, "end": -1}}
        )
    assert str(error.value).splitlines() == [
        "h_exp.start: expected a number below 0, got 1",
        "h_exp.stop: expected one of the known keys, got 'stop'. They are start, end, schedule",
        "head: expected a value, got nothing. Add this key",
        "either.start: expected another number",
        "either.end: expected another one too",
        "push: expected true or false, got 3",
    ]


def test_the_top_level_must_be_a_mapping():
    with pytest.raises(ValueError, match=r"^configuration: expected a mapping, got 3$"):
        parse(Run, 3)


def test_yaml_reads_back_to_the_same_instance(tmp_path):
    ambiguous = ["no", "on", "1e-4", "54e8", "0o7", "null", "~", "1_000", "", "a: b\n#"]
    given = {
        "h_exp": {"start": -1e-7, "schedule": "constant"},
        "head": {"name": "cosine", "scale": math.inf},
        "sources": [{"path": "a.txt", "columns": ambiguous}],
        "revision": "2026-01-01",
        "training": {"eval_strategy": "no", "lr": 1e20},
    }
    run = parse(Run, given)
    text = to_yaml(run)
    assert parse(Run, read_yaml(written(tmp_path, text))) == run
    assert text.index("h_exp") < text.index("head") < text.index("training")


class Color(Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass
class Ordinary:
    rate: float
    color: Color = Color.RED
    spelled: Color | str = "red"
    colors: list[Color] | None = None
    count: int = 1
    options: dict[str, float] | None = None
    text: str | None = None
    metric: Literal["euclidean"] = "euclidean"
    hidden_size: int = 0
    derived: int = dataclasses.field(init=False, default=0)

    def __post_init__(self):
        raise AssertionError("must not be built")


def test_fields_are_checked_without_building_the_class():
    values = {"color": "blue", "spelled": "blue", "text": None, "metric": "its own to refuse"}
    given = {"rate": "1e-4", "colors": ["red"], "count": 3.0, "options": {"a": "2"}}
    converted = {"rate": 1e-4, "colors": [Color.RED], "count": 3, "options": {"a": 2.0}}
    assert check_fields(Ordinary, values | given, "section") == values | converted


class Untyped:
    def __init__(self, *, scale=1.0):
        raise AssertionError("must not be built")


def test_an_argument_without_a_type_takes_anything():
    """As one of a head of the user's own may be."""
    assert check_fields(Untyped, {"scale": 2.0}, "head") == {"scale": 2.0}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rates": 1}, "section.rates: expected one of the known keys, got 'rates'. Did you mean"),
        ({"derived": 1}, "section.derived: expected one of the known keys, got 'derived'"),
        ({"hidden_size": 1}, "section.hidden_size: expected one of the known keys"),
        ({"metric": 1}, "section.metric: expected a string, got 1"),
        ({"color": "rad"}, "section.color: expected one of ['red', 'blue'], got 'rad'. Did you"),
    ],
)
def test_fields_that_do_not_fit_are_named(values, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        check_fields(Ordinary, values, "section", without=["hidden_size"])


def test_every_training_argument_can_be_checked():
    names = [field.name for field in dataclasses.fields(TrainingArguments) if field.init]
    with pytest.raises(ValueError, match="expected") as error:
        check_fields(TrainingArguments, dict.fromkeys(names, object()), "training")
    lines = str(error.value).splitlines()
    assert {line.split(":")[0] for line in lines} == {f"training.{name}" for name in names}
