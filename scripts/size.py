"""Print the lines of every unit beside its budget; nothing fails where they are more."""

from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
SUFFIXES = (".py", ".c", ".cpp", ".h")
BUDGETS = {
    "ops": 2000,
    "data": 3000,
    "models": 3200,
    "training": 2600,
    "integrations": 0,  # has none
    "losses": 1200,
    "hub": 1300,
    "eval": 350,
    "rest": 850,  # the modules beside the units
    "package": 14_500,
    "tests": 14_000,  # without those of the experiments
}


def num_lines(paths: Iterable[Path]) -> int:
    """Return the lines of all code files among the paths."""
    files = (path for path in paths if path.is_file() and path.suffix in SUFFIXES)
    return sum(len(path.read_bytes().splitlines()) for path in files)


def sizes(root: Path) -> dict[str, int]:
    """Return the lines of every unit of the package, of the tests, and of what is beside them."""
    package, tests = root / "harmonic_sft", root / "tests"
    found = {unit: num_lines((package / unit).rglob("*")) for unit in list(BUDGETS)[:-3]}
    total = num_lines([*package.rglob("*"), *root.glob("harmonic_sft*.py")])
    found |= {"rest": total - sum(found.values()), "package": total}
    folders = sorted(path for path in tests.glob("[!_.]*") if path.is_dir())
    parts = {f"tests/{path.name}": num_lines(path.rglob("*")) for path in folders}
    beside = {"tests/experiments": parts.pop("tests/experiments", 0)}
    parts["tests/*.py"] = num_lines(tests.glob("*"))
    beside |= {name: num_lines((root / name).rglob("*")) for name in ("experiments", "scripts")}
    return {**found, **parts, "tests": sum(parts.values()), **beside}


if __name__ == "__main__":
    for name, lines in sizes(ROOT).items():
        print(f"{name:<20}{lines:>10,}{BUDGETS.get(name, 0) or '-':>10}")
