"""Write docs/api.md, the public names of the package with their docstrings."""

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, TrainingArguments

import harmonic_sft

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
GROUPS = {
    "Training": ("HarmonicTrainer", "HarmonicTrainingArguments", "train", "load_run_config"),
    "Models": ("HarmonicForMaskedLM", "Harmonic(For|Model|Config)", "NeoBERT"),
    "Heads": ("HEADS", "build_head", "^Head$", "DistLayer", "Head$"),
    "Losses": ("LOSSES", "HarmonicLoss", "Loss$"),
    "Loss functions without the matrix of logits": ("_cross_entropy$", "^LossOptions$"),
    "Other": ("",),
}
SECTION = re.compile(r"(Args|Attributes|Returns|Raises|Source|Note):")
HEADER = """# API

What `import harmonic_sft` offers; a name is imported when you first use it.
`python scripts/api_page.py` writes this page from the docstrings. B are rows, T positions, N scored
tokens, D the hidden size, V the vocabulary or the classes, H attention heads, M output heads, K
neighbors. A method stands under the first class that has it. [Python](python.md) shows how the
names go together.
"""


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """Return the page: every name of `__all__` once, under the first group that takes it."""
    left, seen = list(harmonic_sft.__all__), set()
    parts = [HEADER]
    for title, patterns in GROUPS.items():
        found = [name for pattern in patterns for name in left if re.search(pattern, name)]
        found = list(dict.fromkeys(found))
        left = [name for name in left if name not in found]
        parts += [f"## {title}\n"] if found else []
        parts += [line for name in found for line in _entry(name, seen)]
    return "\n".join(parts)


def _entry(name: str, seen: set[Any]) -> Iterator[str]:
    """Yield one name: its signature and text, for a class those of its methods."""
    value = getattr(harmonic_sft, name)
    yield f"### `{name}`\n"
    if isinstance(value, dict):
        yield f"Class by its name in a configuration: {', '.join(f'`{key}`' for key in value)}.\n"
        return
    if not inspect.isclass(value):
        yield _signature(name, value)
        yield _text(value)
        return
    if not issubclass(value, TrainingArguments | PreTrainedConfig):  # they have dozens of fields
        yield _signature(name, value)
    yield _text(value)
    if is_dataclass(value):
        yield from _fields(value)
    methods = [pair for pair in _methods(value) if pair[1] not in seen]
    seen.update(function for _, function in methods)
    if methods:
        yield "**Methods**\n"
    for method, function in methods:
        arguments = ", ".join(_parameters(function, types=False))
        yield f"- `{method}({arguments})`: {_sentence(function)}"
    if methods:
        yield ""


def _methods(value: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the public methods that this package adds; those that it overrides are known."""
    for index, owner in enumerate(value.__mro__):
        if not owner.__module__.startswith("harmonic_sft."):
            continue
        known = {name for base in value.__mro__[index + 1 :] for name in vars(base)}
        for name, member in vars(owner).items():
            function = getattr(member, "__func__", member)
            if not name.startswith("_") and name not in known and inspect.isfunction(function):
                yield name, function


def _sentence(value: Any) -> str:
    """Return the first line of a docstring, which may wrap."""
    return " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())


def _signature(name: str, value: Any) -> str:
    """Return name, arguments, types and defaults as a block of code."""
    given = _parameters(value, types=True)
    line = f"{name}({', '.join(given)})"
    if len(line) > 88:
        line = "\n    ".join([f"{name}(", *(f"{text}," for text in given)]) + "\n)"
    return f"```py\n{line}\n```\n"


def _parameters(value: Any, *, types: bool) -> list[str]:
    """Return the arguments, types without their modules."""
    found = []
    for parameter in inspect.signature(value).parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if not types:
            parameter = parameter.replace(annotation=parameter.empty)
        if parameter.kind == parameter.KEYWORD_ONLY and not any(t.startswith("*") for t in found):
            found.append("*")
        text = re.sub(r"([A-Za-z_]\w*\.)+(?=[A-Za-z_])", "", str(parameter))
        # Python 3.14 writes X | None for Optional[X].
        found.append(re.sub(r"Optional\[(.+)\](?= = |$)", r"\1 | None", text))
    return found


def _text(value: Any) -> str:
    """Return a docstring of Google's style as Markdown."""
    lines, section = [], ""
    for line in (inspect.getdoc(value) or "").splitlines():
        if found := SECTION.fullmatch(line):
            section = found[1]
            lines.append(f"**{section}**\n")
        elif not section or not line.strip():
            lines.append(line)
        elif named := re.match(r"    ([\w*]+): (.*)", line):
            lines.append(f"- `{named[1]}`: {named[2]}")
        else:
            lines.append(line.strip() if not line.startswith("     ") else f"  {line.strip()}")
    return "\n".join(lines).strip() + "\n"


def _fields(value: Any) -> Iterator[str]:
    """Yield the fields that are explained beside their default, not in the docstring."""
    explained = [one for one in fields(value) if one.metadata.get("help") and one.init]
    inherited = {one.name for one in fields(TrainingArguments)}
    own = [one for one in explained if one.name not in inherited or _is_changed(one)]
    if own:
        yield "| field | default | |\n|---|---|---|"
    for one in own:
        default = one.default if one.default is not MISSING else "..."
        text = " ".join(str(one.metadata["help"]).split()).replace("|", "\\|")
        yield f"| `{one.name}` | `{default!r}` | {text} |"
    if own:
        yield ""


def _is_changed(own: Field) -> bool:
    """Tell whether a field of transformers has another text or default here."""
    theirs = TrainingArguments.__dataclass_fields__[own.name]
    return own.metadata.get("help") != theirs.metadata.get("help")


if __name__ == "__main__":
    main()
