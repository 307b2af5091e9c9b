"""Copies NeoBERT into a checkout of transformers and names it in the tables there."""

import argparse
import re
import shutil
from pathlib import Path

FOLDER = Path(__file__).parent
MODELS = "src/transformers/models"
PAIR = r'^        \("([^"]+)"'
# Files, what stands before the list there, how its lines begin, and the line that is new.
LINES = [
    (
        f"{MODELS}/__init__.py",
        r"^if TYPE_CHECKING:\n",
        r"^    from \.(\w+) import",
        "    from .neobert import *\n",
    ),
    (
        "docs/source/en/_toctree.yml",
        r"^      - local: model_doc/nemotron\n",
        r"^      - local: model_doc/(\w+)",
        "      - local: model_doc/neobert\n        title: NeoBERT\n",
    ),
]
TABLES = {
    "auto_mappings.py": {"CONFIG_MAPPING_NAMES": '"NeoBertConfig"'},
    "tokenization_auto.py": {
        "TOKENIZER_MAPPING_NAMES": '"BertTokenizer" if is_tokenizers_available() else None'
    },
    "modeling_auto.py": {
        "MODEL_MAPPING_NAMES": '"NeoBertModel"',
        "MODEL_FOR_MASKED_LM_MAPPING_NAMES": '"NeoBertForMaskedLM"',
        "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES": '"NeoBertForQuestionAnswering"',
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": '"NeoBertForSequenceClassification"',
        "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES": '"NeoBertForTokenClassification"',
    },
}
LINES += [
    (
        f"{MODELS}/auto/{name}",
        rf"^{table} = [^\n]*\n    \[\n",
        PAIR,
        f'        ("neobert", {value}),\n',
    )
    for name, tables in TABLES.items()
    for table, value in tables.items()
]


def inserted(text: str, start: str, entry: str, line: str) -> str:
    """Return a text with a line at its place in a sorted list, unless it is there.

    Args:
        text: Of the file.
        start: Pattern of what stands before the list, which ends at an empty line or at a `]`.
        entry: Pattern of a line of the list, whose group is what the list is sorted by.
        line: The new one.

    Raises:
        ValueError: The file has no such list.
    """
    found = re.search(rf"{start}(.*?)(?=\n\n|\n    \]|\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(
            f"{start}: expected a list after it, got none. Add by hand: {line.strip()}"
        )
    if line in found[0]:
        return text
    name = re.search(entry, line, re.MULTILINE)[1]
    later = (m.start() for m in re.finditer(entry, found[1], re.MULTILINE) if m[1].lower() > name)
    place = found.start(1) + next(later, len(found[1]) + 1)
    return text[:place] + line + text[place:]


def install(checkout: Path) -> None:
    """Copy the files and edit the lists of a checkout; a second call changes nothing.

    Raises:
        ValueError: The folder is no checkout, or its lists have another form.
    """
    if not (checkout / MODELS).is_dir():
        raise ValueError(f"checkout: expected a folder with {MODELS}, got {checkout}")
    for name, start, entry, line in LINES:
        path = checkout / name
        if path.exists():  # the source distribution has no documentation
            path.write_text(inserted(path.read_text(), start, entry, line))
    for part in ("src", "tests", "docs"):
        if (checkout / part).is_dir():
            shutil.copytree(FOLDER / part, checkout / part, dirs_exist_ok=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    install(parser.parse_args().checkout)
