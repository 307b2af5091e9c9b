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
    named = set(re.findall(r"\((?:`)(test_\w+)`\)", PAGE))
    found = names_of("tests/ecosystem/test_clients.py")
    assert named == found
    for client, _, _, result in ROWS:
        assert re.search(r"\(`(test_\w+|tests/[\w/]+\.py)`", result), client


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_the_versions_are_those_that_are_installed(row):
    client, versions = row[0].split(",")[0].split()[0], row[1].split(", ")
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    assert versions[-1] == pins[client.lower()]
