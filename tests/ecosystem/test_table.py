"""docs/ecosystem.md names a test for every row, and the versions that the tests install."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "ecosystem.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.split("| client |")[1].split("\n\n")[0].splitlines()[2:]
]


def names_of(name):
    return set(re.findall(r"^def (test_\w+)", (ROOT / name).read_text(), re.MULTILINE))


def test_every_test_of_a_client_has_a_row_and_every_row_a_test():
    """The text of a link is the name of a test in its file, or of the file."""
    link = re.compile(r"\[`(test_\w+(?:\.py)?)`\]\(\.\./(tests/[\w/]+\.py)\)")
    clients = "tests/ecosystem/test_clients.py"
    named = [link.findall(row[-1]) for row in ROWS]
    assert all(len(links) == 1 for links in named)
    assert {name for [(name, path)] in named if path == clients} == names_of(clients)
    for name, path in link.findall(PAGE):
        assert name in {Path(path).name, *names_of(path)}, name


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_the_versions_are_those_that_are_installed(row):
    client, versions = row[0].split(",")[0].split()[0], row[1].split(", ")
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    assert versions[-1] == pins[client.lower()]
