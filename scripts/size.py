"""Print the lines of every unit beside its budget; nothing fails where they are more."""

from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "harmonic_sft"
SUFFIXES = (".py", ".c", ".h")
REST = "rest"  # the modules beside the units
BUDGETS = {
    "ops": 2000,
    "data": 3000,
    "models": 3200,
    "training": 2600,
    "integrations": None,
    "losses": 1200,
    "hub": 1300,
    "eval": 350,
    REST: 850,
}
TESTS_BUDGET = 14_000  # without those of the experiments
BESIDE = ("experiments", "scripts")


def num_lines(paths: Iterable[Path]) -> int:
    """Return the lines of all code files among the paths."""
    return sum(
        len(path.read_bytes().splitlines())
        for path in paths
        if path.is_file() and path.suffix in SUFFIXES
    )


def sizes_of_package(root: Path) -> dict[str, int]:
    """Return the lines of every unit of the package; what is no unit with a budget is the rest."""
    package = root / PACKAGE
    sizes = {unit: num_lines((package / unit).rglob("*")) for unit in BUDGETS if unit != REST}
    everything = num_lines([*package.rglob("*"), *root.glob(f"{PACKAGE}*.py")])
    return {**sizes, REST: everything - sum(sizes.values())}


def sizes_of_tests(root: Path) -> dict[str, int]:
    """Return the lines of the tests of every unit; files beside the folders are the rest."""
    tests = root / "tests"
    folders = sorted(path for path in tests.glob("[!_.]*") if path.is_dir())
    sizes = {path.name: num_lines(path.rglob("*")) for path in folders}
    return {**sizes, REST: num_lines(tests.glob("*"))}


def table(root: Path) -> str:
    """Return the whole table."""
    lines = [row("package", "lines", "budget")]
    package = sizes_of_package(root)
    lines += [row(f"  {unit}", size, BUDGETS[unit]) for unit, size in package.items()]
    budget = sum(value or 0 for value in BUDGETS.values())
    lines += [row("  total", sum(package.values()), budget), ""]
    lines += [row(name, num_lines((root / name).rglob("*")), None) for name in BESIDE]
    tests = sizes_of_tests(root)
    apart = tests.pop("experiments", 0)
    lines += ["", row("tests", "lines", "budget")]
    lines += [row(f"  {unit}", size, None) for unit, size in tests.items()]
    lines.append(row("  total", sum(tests.values()), TESTS_BUDGET))
    lines.append(row("tests/experiments", apart, None))
    return "\n".join(lines)


def row(name: str, lines: int | str, budget: int | str | None) -> str:
    """Return one line of the table."""
    numbers = ("-" if n is None else n if isinstance(n, str) else f"{n:,}" for n in (lines, budget))
    return f"{name:<20}" + "".join(f"{number:>10}" for number in numbers)


if __name__ == "__main__":
    print(table(ROOT))
