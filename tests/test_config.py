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
    head: Dist | Cosine
    tagged: Annotated[Dist | Cosine, Field(discriminator="name")] = Dist(name="dist")
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


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        (".inf", math.inf),
        ("010", 10),
        ("0o10", 8),
        ("0x1F", 31),
        ("true", True),
        ("", None),
        ("no", "no"),
        ("on", "on"),
        ("2026-01-01", "2026-01-01"),
        ("1_000", "1_000"),
        ("'1e-4'", "1e-4"),
        ("[a, 1, {b: no}]", ["a", 1, {"b": "no"}]),
    ],
)
def test_scalars_follow_yaml_1_2(tmp_path, text, value):
    read = read_yaml(written(tmp_path, f"key: {text}\n"))["key"]
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a mapping of keys to values, got an empty file"),
        ("# only a comment\n", "expected a mapping of keys to values, got an empty file"),
        ("- 1\n- 2\n", "expected a mapping of keys to values, got [1, 2]"),
        ("a: 1\nb: 2\na: 3\n", "expected valid YAML, got an error in line 3: the key 'a' stands"),
        ("a: 1\n3: 2\n", "got an error in line 2: the key 3 is not a string"),
        ("a: 1\nb: c: d\n", "got an error in line 2: mapping values are not allowed here"),
        ("a: !!python/name:os.system\n", "could not determine a constructor"),
        ("a: !!int x\n", "expected valid YAML, got an error: invalid literal"),
        ("a: \x07\n", "expected valid YAML, got an error: unacceptable character"),
    ],
)
def test_a_bad_file_is_a_one_line_error(tmp_path, text, message):
    path = written(tmp_path, text)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        read_yaml(path)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_utf_8_is_a_one_line_error(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_bytes(b"name: caf\xe9\n")
    with pytest.raises(
        ValueError, match=r"run\.yaml: expected valid YAML, got an error: unacceptable"
    ):
        read_yaml(path)


def test_a_missing_file_is_named(tmp_path):
    message = "config file: expected an existing file, got '.*nowhere.yaml'"
    with pytest.raises(ValueError, match=message):
        read_yaml(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("training.max_steps=10", {"training": {"max_steps": 10, "bf16": "no"}}),
        ("training.note=a=b", {"training": {"max_steps": 1, "bf16": "no", "note": "a=b"}}),
        ("training.bf16=", {"training": {"max_steps": 1, "bf16": None}}),
        ("sources.1.path=x.txt", {"sources": [{"path": "a"}, {"path": "x.txt"}]}),
        ("head={name: linear}", {"head": {"name": "linear"}}),
        ("new.key=[1, 2]", {"new": {"key": [1, 2]}}),
        ("empty.key=1", {"empty": {"key": 1}}),
    ],
)
def test_an_override_sets_one_value(override, expected):
    data = {
        "training": {"max_steps": 1, "bf16": "no"},
        "sources": [{"path": "a"}, {"path": "b"}],
        "head": {"name": "dist"},
        "empty": None,
    }
    before = repr(data)
    assert apply_overrides(data, [override]) == data | expected
    assert repr(data) == before


def test_an_override_leaves_other_uses_of_a_yaml_alias_alone(tmp_path):
    data = read_yaml(written(tmp_path, "a: &x {k: 1}\nb: *x\n"))
    assert apply_overrides(data, ["a.k=2"]) == {"a": {"k": 2}, "b": {"k": 1}}


def test_later_overrides_win():
    assert apply_overrides({}, ["a.b=1", "a.b=2", "a.c=3"]) == {"a": {"b": 2, "c": 3}}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps", "override: expected key=value like training.max_steps=10, got 'steps'"),
        ("steps.x=3", "override steps.x: expected a mapping or a list around 'x', got 10"),
        ("sources.1=x", "override sources.1: expected a position below 1, got '1'"),
        ("sources.last=x", "override sources.last: expected a position below 1, got 'last'"),
        ("head={name", "override head: expected valid YAML, got an error in line 1: "),
    ],
)
def test_a_bad_override_says_what_to_write(override, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        apply_overrides({"steps": 10, "sources": ["a"]}, [override])


def test_parse_fills_defaults_and_converts():
    run = parse(Run, GIVEN | {"steps": "20", "sources": [{"path": "a.txt"}], "push": "yes"})
    assert run == Run(
        h_exp=Annealing(),
        head=Dist(name="dist"),
        steps=20,
        sources=[Source(path=Path("a.txt"))],
        push=True,
    )


@pytest.mark.parametrize(
    ("change", "place", "key", "nearest"),
    [
        ({"stepz": 1}, "stepz", "stepz", "Did you mean 'steps'?"),
        ({"patient_for": 1}, "patient_for", "patient_for", "Did you mean 'patience'?"),
        ({"hidden": 1}, "hidden", "hidden", "The nearest is 'patience'"),
        ({"h_exp": {"strat": -3}}, "h_exp.strat", "strat", "Did you mean 'start'?"),
        ({"head": {"name": "cosine", "s": 3}}, "head.s", "s", "Did you mean 'scale'?"),
        ({"tagged": {"name": "dist", "epz": 3}}, "tagged.epz", "epz", "Did you mean 'eps'?"),
        ({"sources": [{"path": "a", "c": []}]}, "sources.0.c", "c", "Did you mean 'columns'?"),
        ({"named": {"a": {"path": "b", "pat": 1}}}, "named.a.pat", "pat", "Did you mean 'path'?"),
        ({"either": {"ends": -3}}, "either.ends", "ends", "Did you mean 'end'?"),
    ],
)
def test_an_unknown_key_gets_the_nearest_one_of_its_place(change, place, key, nearest):
    with pytest.raises(ValueError, match="expected one of the known keys") as error:
        parse(Run, GIVEN | change)
    message = f"{place}: expected one of the known keys, got {key!r}. {nearest}"
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sources": [{}]}, "sources.0.path: expected a value, got nothing. Add this key"),
        ({"tagged": {}}, "tagged.name: expected a value, got nothing. Add this key"),
        ({"h_exp": {"start": 2.0}}, "h_exp.start: expected a number below 0, got 2.0"),
        ({"h_exp": {"start": "x"}}, "h_exp.start: expected a number, got 'x'"),
        ({"h_exp": {"end": 3}}, "h_exp.end: expected a number below 0, got 3.0"),
        (
            {"h_exp": {"schedule": "x"}},
            "h_exp.schedule: expected one of ['linear', 'constant'], got",
        ),
        (
            {"head": {"name": "dit"}},
            "head.name: expected one of ['dist', 'cosine'], got 'dit'. Did",
        ),
        ({"tagged": {"name": "x"}}, "tagged.name: expected one of ['dist', 'cosine'], got 'x'"),
        ({"tagged": 3}, "tagged: expected a mapping, got 3"),
        ({"head": {"name": "cosine", "scale": 0}}, "head.scale: expected a number above 0, got 0"),
        ({"either": "x"}, "either: expected a number or a mapping"),
        ({"steps": 0}, "steps: expected a number of at least 1, got 0"),
        ({"steps": 101}, "steps: expected a number of at most 100, got 101"),
        ({"steps": 1.5}, "steps: expected a whole number, got 1.5"),
        ({"steps": None}, "steps: expected a whole number, got None"),
        ({"steps": True}, "steps: expected a number, got True"),
        ({"steps": 13}, "steps: expected a lucky number, got 13"),
        ({"tokens": [1, False]}, "tokens.1: expected a number, got False"),
        ({"tokens": []}, "tokens: expected at least 1 item after validation, not 0, got []"),
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


def test_all_problems_are_reported_at_once():
    with pytest.raises(ValueError, match="expected") as error:
        parse(Run, {"h_exp": {"start": 1, "stop": 2}, "push": 3})
    assert str(error.value).splitlines() == [
        "h_exp.start: expected a number below 0, got 1",
        "h_exp.stop: expected one of the known keys, got 'stop'. The nearest is 'start'",
        "head: expected a value, got nothing. Add this key",
        "push: expected true or false, got 3",
    ]


def test_the_top_level_must_be_a_mapping():
    with pytest.raises(ValueError, match=r"^configuration: expected a mapping, got 3$"):
        parse(Run, 3)


def test_yaml_reads_back_to_the_same_instance(tmp_path):
    run = parse(
        Run,
        {
            "h_exp": {"start": -1e-7, "schedule": "constant"},
            "head": {"name": "cosine", "scale": math.inf},
            "sources": [{"path": "a.txt", "columns": ["no", "on", "1e-4", "0o7", "null", "~"]}],
            "revision": "2026-01-01",
            "training": {"eval_strategy": "no", "lr": 1e20, "text": "a: b\n#", "empty": ""},
        },
    )
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
    derived: int = dataclasses.field(init=False, default=0)

    def __post_init__(self):
        raise AssertionError("must not be built")


def test_fields_are_checked_without_building_the_dataclass():
    values = {
        "rate": "1e-4",
        "color": "blue",
        "spelled": "blue",
        "colors": ["red"],
        "count": 3.0,
        "options": {"a": "2"},
        "text": None,
    }
    assert check_fields(Ordinary, values, "section") == values | {
        "rate": 1e-4,
        "colors": [Color.RED],
        "count": 3,
        "options": {"a": 2.0},
    }


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rates": 1}, "section.rates: expected one of the known keys, got 'rates'. Did you mean"),
        ({"derived": 1}, "section.derived: expected one of the known keys, got 'derived'"),
        ({"rate": "fast"}, "section.rate: expected a number, got 'fast'"),
        ({"count": True}, "section.count: expected a number, got True"),
        ({"color": "rad"}, "section.color: expected one of ['red', 'blue'], got 'rad'. Did you"),
        ({"spelled": "r"}, "section.spelled: expected one of ['red', 'blue'], got 'r'. Did you"),
        ({"options": {"a": "x"}}, "section.options.a: expected a number, got 'x'"),
    ],
)
def test_fields_that_do_not_fit_are_named(values, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        check_fields(Ordinary, values, "section")


def test_training_arguments_take_what_yaml_gives(tmp_path):
    text = "learning_rate: 1e-4\neval_strategy: no\nmax_steps: 10\nreport_to: [none]\nbf16: false\n"
    values = read_yaml(written(tmp_path, text)) | {"adam_beta1": "0.95", "seed": "3"}
    checked = check_fields(TrainingArguments, values, "training")
    assert checked == {
        "learning_rate": 1e-4,
        "eval_strategy": "no",
        "max_steps": 10,
        "report_to": ["none"],
        "bf16": False,
        "adam_beta1": 0.95,
        "seed": 3,
    }
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **checked)
    assert arguments.learning_rate == 1e-4


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"eval_strategy": "x"},
            "training.eval_strategy: expected one of ['no', 'steps', 'epoch']",
        ),
        ({"report_to": [1]}, "training.report_to.0: expected a string, got 1. Put it in quotes"),
        ({"lr_scheduler_kwargs": 4}, "training.lr_scheduler_kwargs: expected a mapping or a str"),
        ({"learning_rate": None}, "training.learning_rate: expected a number, got None"),
    ],
)
def test_training_arguments_refuse_what_does_not_fit(values, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        check_fields(TrainingArguments, values, "training")


def test_training_arguments_have_no_other_keys():
    with pytest.raises(ValueError, match="expected") as error:
        check_fields(TrainingArguments, {"max_stepz": 3, "warmup_ratio": 0.1}, "training")
    assert str(error.value).splitlines() == [
        "training.max_stepz: expected one of the known keys, got 'max_stepz'. "
        "Did you mean 'max_steps'?",
        "training.warmup_ratio: expected one of the known keys, got 'warmup_ratio'. "
        "Did you mean 'warmup_steps'?",
    ]


def test_every_training_argument_can_be_checked():
    names = [field.name for field in dataclasses.fields(TrainingArguments) if field.init]
    for name in names:
        with pytest.raises(ValueError, match=rf"^training\.{name}: expected "):
            check_fields(TrainingArguments, {name: object()}, "training")
