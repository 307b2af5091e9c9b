"""Rows of the suite that need no file."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from harmonic_sft.eval import score
from harmonic_sft.eval.suite import Subject, measure
from harmonic_sft.models import HarmonicForCausalLM, HarmonicForMaskedLM


def rows_of(model, tokenizer, states, labels, sets=None):
    held_out = score(model.eval(), [(states[None], labels[None])]), np.zeros(1)
    subject = Subject(
        model, tokenizer, held_out, (states, labels), None, None, lambda path: held_out
    )
    rows = measure(subject, sets, size="quick")
    return {(row["set"], row.get("metric")): row for row in rows}


@pytest.mark.parametrize("longest", [64, 63])
def test_samples_are_drawn_from_the_whole_distribution(causal_base, tokenizer, longest):
    head = {"name": "linear", "bias": True}
    model = HarmonicForCausalLM.from_base(str(causal_base), head=head)
    torch.nn.init.zeros_(model.dist_head.weight)
    torch.nn.init.normal_(model.dist_head.bias, std=1e-3)  # 120 tokens, all nearly as likely
    model.config.get_text_config().max_position_embeddings = longest
    model.generation_config.min_p = 0.999  # a base's own habits
    rows = rows_of(model, tokenizer, torch.ones(1, 32), torch.tensor([5]))
    if longest == 64:
        assert rows["samples", "distinct-1"]["value"] > 110 / (16 * 64)
    else:
        assert rows["samples", None]["missing"] == "a model of 64 positions, it has 63"


def test_rotated_states_are_compared_with_the_prototypes(tiny_base, tokenizer):
    model = HarmonicForMaskedLM.from_base(str(tiny_base), head={"name": "rotation"})
    head, labels = model.dist_head, torch.arange(20)
    torch.nn.init.normal_(head.skew, generator=torch.Generator().manual_seed(0))
    states = (head.prototypes[labels] @ head.rotation).detach()
    assert F.cosine_similarity(states, head.prototypes[labels]).mean() < 0.5
    rows = rows_of(model, tokenizer, states, labels)
    assert rows["held-out data", "class-center alignment"]["value"] > 0.99


def test_hubs_are_counted_among_some_of_the_prototypes(tiny_base, tokenizer, monkeypatch):
    monkeypatch.setattr("harmonic_sft.eval.geometry.NUM_ROWS", 50)
    model = HarmonicForMaskedLM.from_base(str(tiny_base))
    rows = rows_of(model, tokenizer, torch.ones(1, 32), torch.tensor([5]))
    assert rows["prototypes", "hubness"]["n"] == 50
    assert "skewness" in rows["prototypes", "hubness"]["note"]
    assert rows["prototypes", "mean cosine"]["n"] == 109


@pytest.mark.parametrize("num_known", [2, 4])
def test_unknown_words_are_counted_and_all_listed(num_known, tiny_base, tokenizer, tmp_path):
    (tmp_path / "wordsim").mkdir()
    known = [f"aa\tb{letter}\t{place}" for place, letter in enumerate("abcd"[:num_known])]
    unknown = [f"unknown{place}" for place in range(7)]
    lines = ["word1\tword2\tscore", *known, *(f"{word}\taa\t1" for word in unknown)]
    (tmp_path / "wordsim" / "tiny.tsv").write_text("\n".join(lines))
    model = HarmonicForMaskedLM.from_base(str(tiny_base))
    rows = rows_of(model, tokenizer, torch.ones(1, 32), torch.tensor([5]), tmp_path)
    row = rows["tiny", "Spearman, cosine, single tokens" if num_known == 4 else None]
    assert row["unknown"] == unknown
    assert row["note"] == f"7 words left out: {', '.join(unknown[:5])}, ..."


def test_without_a_folder_none_is_opened(tiny_base, tokenizer, tmp_path, monkeypatch):
    (tmp_path / "none" / "minimal_pairs").mkdir(parents=True)
    (tmp_path / "none" / "minimal_pairs" / "pairs.jsonl").write_text("[]")
    monkeypatch.chdir(tmp_path)
    model = HarmonicForMaskedLM.from_base(str(tiny_base))
    rows = rows_of(model, tokenizer, torch.ones(1, 32), torch.tensor([5]))
    assert rows["minimal pairs", None]["missing"] == "minimal_pairs/*.jsonl in --data"
