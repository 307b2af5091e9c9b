"""GPT-2 small with both heads: a rehearsal with a tiny shape."""

import json
import math
from pathlib import Path

import pytest
import torch

from experiments import gpt2_small
from experiments.evidence import paired_difference, show_spread

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def texts(monkeypatch):
    """Stand for the packages' files; two parts share one."""

    def sources(packages):
        shared = "def shared():\n    return 1\n" * 40
        return [shared] + [f"{name} = {name} + {k}\n" * 60 for name in packages for k in range(9)]

    monkeypatch.setattr(gpt2_small, "sources", sources)


def test_both_heads_are_tuned_and_compared(tmp_path):
    gpt2_small.main("gpt2_small", ["--small", "--seconds", "0", "--output", str(tmp_path)])
    found = json.loads((tmp_path / "gpt2_small.json").read_text())
    assert found["steps"] == 2 * gpt2_small.TUNING_SHARE
    for run in found["runs"].values():
        assert [rate for rate, _ in run["rates"]] == list(gpt2_small.RATES)
        assert run["rate"] == min(run["rates"], key=lambda pair: pair[1])[0]
        assert all(map(math.isfinite, run["test"]))
    linear, distance = (found["runs"][arm]["test"] for arm in ("linear", "distance"))
    means = [sum(losses) / 4 for losses in (distance, linear)]
    assert found["difference"]["mean"] == pytest.approx(means[0] - means[1])


def test_heads_start_from_the_same_weights_and_read_the_same_rows(monkeypatch):
    bodies = [gpt2_small.build(arm, gpt2_small.SMALL, 3, CPU)[0] for arm in gpt2_small.ARMS]
    pairs = zip(*(body.state_dict().values() for body in bodies), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    read = []
    stepper = lambda *_: lambda index, rows: read.append(rows)  # noqa: E731
    monkeypatch.setattr(gpt2_small, "stepper", stepper)
    for body in bodies:
        gpt2_small.fit(body, 0.1, 5, torch.arange(20)[:, None], 4, 3)
    assert torch.equal(torch.cat(read[:4]), torch.cat(read[4:]))
    assert len(torch.cat(read[:4]).unique()) == 12


def test_no_held_out_file_is_trained_on(tmp_path, monkeypatch):
    learned, encoded = [], []

    class Tokenizer:
        def train_from_iterator(self, sample, *_, **__):
            learned.extend(sample)

        def encode(self, text):
            encoded.append(text)
            return type("Encoding", (), {"ids": [1] * 40})

    monkeypatch.setattr(gpt2_small, "ByteLevelBPETokenizer", Tokenizer)
    gpt2_small.read_rows(tmp_path, gpt2_small.SMALL, CPU, small=True)
    assert learned
    assert not any("shared" in text for text in learned)
    assert sum("shared" in text for text in encoded) == 1  # of the validation text alone


@pytest.mark.parametrize("name", ["gpt2_small", "gpt2_small_67_steps"])
def test_the_page_has_the_differences_of_the_files(name):
    page = " ".join((ROOT / "experiments" / "README.md").read_text().split())
    runs = json.loads((ROOT / "docs" / "gpu" / f"{name}.json").read_text())["runs"]
    difference = paired_difference(runs["distance"]["test"], runs["linear"]["test"])
    shown, place = show_spread(difference), page.index(f"`docs/gpu/{name}.json`")
    assert shown in page[place - 100 : place + 150]
