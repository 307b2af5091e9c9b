"""The `head:` section of a run: every head of `HEADS`, its keys taken from its own arguments."""

import functools
import inspect
import operator
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import Field
from pydantic.dataclasses import dataclass

from harmonic_sft.config import STRICT, check_fields
from harmonic_sft.models import HEADS, Head

# Of a head's arguments: the h_exp section decides them.
EXPONENT = {"h_exp", "learn_h_exp"}
Init = Literal["input_embeddings", "output_embeddings", "base_head", "class_means", "random"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class HeadConfig:
    """The output head: name and fields of one head of `HEADS`, and where its weights start."""

    name: str
    init: Init = Field("input_embeddings", description="Where the prototypes start")
    tie: bool = Field(False, description="Share the weight with the input embeddings")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class InnerHeadConfig:
    """A head inside another one: name and fields of one head of `HEADS`."""

    name: str


def _config_of(name: str, head: type[Head], base: type) -> type:
    """Make the section's dataclass for one head from the arguments of its class."""
    hints = get_type_hints(head.__init__)
    signature = inspect.signature(head.__init__).parameters
    own = {
        key: parameter.default
        for key, parameter in signature.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and key not in EXPONENT
    }
    tag = Literal[name]  # ty: ignore[invalid-type-form]
    annotations = {"name": tag, **{key: hints[key] for key in own}}
    made = type(f"{head.__name__}Config", (base,), {"__annotations__": annotations, **own})
    return dataclass(frozen=True, kw_only=True, config=STRICT)(made)


def one_of(classes: Sequence[type]) -> Any:
    """Return the type of a section that is one of these dataclasses, told apart by its name."""
    union: Any = functools.reduce(operator.or_, classes)
    return Annotated[union, Field(discriminator="name")]


_CONFIGS = tuple(_config_of(name, head, HeadConfig) for name, head in HEADS.items())
_INNER = {name: _config_of(name, head, InnerHeadConfig) for name, head in HEADS.items()}
HeadSection: Any = one_of(_CONFIGS)


def head_settings(section: HeadConfig, *, h_exp: float | None, learn_h_exp: bool) -> dict[str, Any]:
    """Return what `build_head` takes, with the exponent in the dist head wherever it stands.

    Args:
        section: The checked section.
        h_exp: The exponent to start with.
        learn_h_exp: Whether it is trained.

    Raises:
        ValueError: A head inside the head has a name or a field that is not one.
    """
    own = {key: value for key, value in asdict(section).items() if key not in ("init", "tie")}
    if own.get("inner") is not None:
        own["inner"] = _checked_inner(own["inner"], "head.inner")
    return _with_exponent(own, {"h_exp": h_exp, "learn_h_exp": learn_h_exp})


def measures_distances(settings: Mapping[str, Any]) -> bool:
    """Whether a head is a dist head, or one around it."""
    inner = settings.get("inner")
    return settings.get("name") == "dist" or (bool(inner) and measures_distances(inner))


def _checked_inner(inner: dict[str, Any], place: str) -> dict[str, Any]:
    """Check the section of a head inside another one, all the way down."""
    name = inner.get("name")
    if name not in _INNER:
        raise ValueError(f"{place}.name: expected one of {sorted(_INNER)}, got {name!r}")
    fields = check_fields(_INNER[name], inner, place)
    if fields.get("inner") is not None:
        fields["inner"] = _checked_inner(fields["inner"], f"{place}.inner")
    return fields


def _with_exponent(settings: Mapping[str, Any], exponent: dict[str, Any]) -> dict[str, Any]:
    found = {key: value for key, value in settings.items() if value is not None}
    if isinstance(found.get("inner"), dict):
        found["inner"] = _with_exponent(found["inner"], exponent)
    if found["name"] != "dist" or exponent["h_exp"] is None:
        return found
    return {**found, **{key: value for key, value in exponent.items() if value is not False}}
