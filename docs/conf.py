"""Sphinx's settings: `make docs` builds a site of README and the guides."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONTENTS = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")

project = "Harmonic SFT"
extensions = ["myst_parser"]
root_doc = "README"
include_patterns = [
    "*.md",
    "docs/*.md",
    "experiments/README.md",
    "experiments/*/README.md",
    "contrib/*/README.md",
]
exclude_patterns = [".*", "build", "runs", "tests"]
myst_heading_anchors = 4
html_theme = "furo"
html_title = project
html_show_copyright = False


def add_navigation(_: object, name: str, source: list[str]) -> None:
    """Give the first page the pages that docs/README.md lists, in its order and by its headings."""
    if name == root_doc:
        source[0] += "\n```{toctree}\n:hidden:\n\ndocs/README\n```\n"
        for section in CONTENTS.split("\n## ")[1:]:
            caption, table = section.split("\n", 1)
            linked = re.findall(r"^\| \[.*?\]\(([\w./]+)\.md\)", table, re.MULTILINE)
            paths = [(ROOT / "docs" / page).resolve().relative_to(ROOT) for page in linked]
            listed = "\n".join(map(str, paths))
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{listed}\n```\n"


def setup(app: object) -> None:
    """Connect what runs when a page is read."""
    app.connect("source-read", add_navigation)
