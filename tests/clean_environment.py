"""A fresh virtual environment with a few of the installed distributions, linked, not copied."""

import sysconfig
import venv
from collections.abc import Sequence
from importlib.metadata import Distribution, PackagePath, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def clean_environment(folder: Path, packages: Sequence[str]) -> Path:
    """Make a virtual environment that holds `packages` and what they require, nothing else.

    Args:
        folder: Where to make it; must not exist.
        packages: Requirements such as `torch` or `httpx[http2]`, all installed here.

    Returns:
        The path of its python. Call it with `-I`, which keeps PYTHONPATH and the working folder
        out.
    """
    installed: dict[str, Distribution] = {}
    for distribution in distributions():  # the first on sys.path is the one that is imported
        installed.setdefault(canonicalize_name(distribution.metadata["Name"]), distribution)
    wanted = closure(packages, installed)
    files = [  # inside site-packages; scripts lie outside
        (name, file)
        for name, distribution in installed.items()
        for file in distribution.files
        if ".." not in file.parts
    ]
    venv.create(folder, with_pip=False, symlinks=True)
    variables = {"base": str(folder), "platbase": str(folder)}
    site_packages = Path(sysconfig.get_path("purelib", "venv", variables))
    _link(site_packages, Path(), files, {name: installed[name] for name in wanted})
    return folder / "bin" / "python"


def closure(packages: Sequence[str], installed: dict[str, Distribution]) -> set[str]:
    """Return the names of all distributions that `packages` require here, themselves included."""
    waiting = [Requirement(package) for package in packages]
    seen: set[tuple[str, str]] = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        for extra in {"", *requirement.extras}:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            needed = map(Requirement, installed[name].requires or [])
            waiting += [n for n in needed if not n.marker or n.marker.evaluate({"extra": extra})]
    return {name for name, _ in seen}


def _link(
    site_packages: Path,
    folder: Path,
    files: list[tuple[str, PackagePath]],
    wanted: dict[str, Distribution],
) -> None:
    """Link what lies in `folder`: whole entries, but no folder shared with what is not wanted.

    `files` are those of every installed distribution below `folder`, each with its owner.
    """
    entries: dict[str, list[tuple[str, PackagePath]]] = {}
    for name, file in files:
        entries.setdefault(file.parts[len(folder.parts)], []).append((name, file))
    (site_packages / folder).mkdir(exist_ok=True)
    for entry, inside in entries.items():
        owners = {name for name, _ in inside}
        path = folder / entry
        if not owners & wanted.keys():
            continue
        sources = [str(wanted[name].locate_file(str(path))) for name in owners & wanted.keys()]
        is_file = any(len(file.parts) == len(path.parts) for _, file in inside)
        if is_file or (owners <= wanted.keys() and len(set(sources)) == 1):
            (site_packages / path).symlink_to(sources[0])
        else:
            _link(site_packages, path, inside, wanted)
