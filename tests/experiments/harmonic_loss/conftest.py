"""A folder of tiny texts, words and labeled sentences."""

import json
import random

import pytest

from experiments.harmonic_loss import gpt, words

NAMES = [a + b for a in ("ba", "do", "ki", "lu", "me") for b in ("r", "n", "s", "t")]


@pytest.fixture(scope="session")
def language_data(tmp_path_factory):
    """Texts of twenty words and their plurals, pairs of these in every task, and sentences."""
    folder = tmp_path_factory.mktemp("language")
    for name in ("text", "function_vectors", "probing"):
        (folder / name).mkdir()
    rng = random.Random(0)
    known = [*NAMES, *(f"{name}en" for name in NAMES)]
    for name in (*gpt.TRAINING_TEXTS, gpt.HELD_OUT_TEXT):
        text = " ".join(rng.choices(known, k=4000))
        (folder / "text" / name).write_text(f" {text}\n")
    items = [{"input": name, "output": f"{name}en"} for name in NAMES]
    for task in words.TASKS:
        kept = items[:5] if task == "country-capital" else items
        (folder / "function_vectors" / f"{task}.json").write_text(json.dumps(kept))
    for split, count in (("train", 90), ("dev", 20)):
        rows = []
        for number in range(count):
            label = number % 3 != 0
            rows.append((" ".join(rng.choices(NAMES[:10] if label else NAMES[10:], k=6)), label))
        lines = ["sentence\tlabel", *(f"{text} \t{int(label)}" for text, label in rows)]
        (folder / "probing" / f"sst2_{split}.tsv").write_text("\n".join(lines) + "\n")
        lines = [f"src\t{int(label)}\t\t{text}" for text, label in rows]
        (folder / "probing" / f"cola_in_domain_{split}.tsv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def small_language(monkeypatch):
    """Smaller models, rates and evaluations than those of the figure."""
    sizes = {"VOCAB_SIZE": 320, "WIDTH": 16, "NUM_BLOCKS": 2, "CONTEXT": 16}
    rows = {"NUM_VALIDATION": 4, "NUM_TEST": 8, "RATES": (1e-3, 3e-3)}
    for name, value in (sizes | rows).items():
        monkeypatch.setattr(gpt, name, value)
