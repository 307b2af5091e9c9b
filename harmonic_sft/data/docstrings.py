"""Real English on every machine: the docstrings of the running Python's standard library."""

import ast
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

EXCLUDED_FOLDERS = frozenset(
    {"dist-packages", "idlelib", "lib2to3", "site-packages", "test", "tests", "turtledemo"}
)
MIN_LENGTH = 40  # of a docstring, in characters


def standard_library_docstrings(root: Path | None = None) -> list[str]:
    """Collect the distinct docstrings of modules, classes and functions, without importing them.

    The docstrings of one file form one document, so that rows are full and about one thing. The
    documents follow the sorted files of `root`, by default the running Python's library.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    files = sorted(
        path
        for path in root.rglob("*.py")
        if EXCLUDED_FOLDERS.isdisjoint(path.relative_to(root).parts)
    )
    seen: set[str] = set()
    documents = []
    for path in files:
        new = [text for text in dict.fromkeys(_file_docstrings(path)) if text not in seen]
        seen.update(new)
        if new:
            documents.append("\n\n".join(new))
    return documents


def _file_docstrings(path: Path) -> Iterator[str]:
    with warnings.catch_warnings():
        # Invalid escape sequences in the library's own sources warn while they are parsed.
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # deliberately broken files and unknown encodings
            return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and len(text) >= MIN_LENGTH:
                yield text
