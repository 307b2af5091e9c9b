"""The page of the public names."""

import harmonic_sft
from scripts import api_page


def test_the_page_is_what_the_docstrings_say():
    assert api_page.PAGE.read_text() == api_page.page(), "run: python scripts/api_page.py"


def test_every_public_name_is_on_the_page_once():
    lines = api_page.PAGE.read_text().splitlines()
    named = [line.removeprefix("### ").strip("`") for line in lines if line.startswith("### ")]
    assert sorted(named) == sorted(harmonic_sft.__all__)


def test_arguments_and_methods_are_on_the_page():
    text = api_page.page()
    assert "- `train_dataset`: A data set of the datasets library" in text
    assert "| `h_exp` | `None` | Exponent on the squared distance" in text
    assert "- `from_base(name, *, revision=None" in text
    assert "\n    h_exp: float" in text
