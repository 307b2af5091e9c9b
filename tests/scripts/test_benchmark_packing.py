"""The benchmark runs, and its arms hold the same rows."""

import json

import numpy as np
import pytest

from scripts import benchmark_packing


@pytest.mark.slow
def test_the_arms_take_turns_and_the_figures_are_written(tmp_path, capsys):
    path = tmp_path / "packing.json"
    arguments = ["--steps", "3", "--rows", "100", "--layers", "1", "--hidden-size", "32"]
    results = benchmark_packing.main([*arguments, "--json", str(path)])
    saved = json.loads(path.read_text())
    assert saved["arms"] == results
    padded = results[benchmark_packing.PADDED]
    assert padded["median_ratio"] == 1.0
    assert padded["fill_rate"] < 0.6
    assert results[benchmark_packing.PADDING_FREE]["fill_rate"] == 1.0
    # Both take the same rows, and a pack of 1024 tokens has hardly a free place.
    free = results[benchmark_packing.PADDING_FREE]
    assert free["mean_tokens_per_step"] == padded["mean_tokens_per_step"]
    assert results[benchmark_packing.PACKED]["fill_rate"] > 0.9
    assert "ratio" in capsys.readouterr().out


@pytest.mark.parametrize("suffix", ["json", "jsonl"])
def test_lengths_are_those_of_a_file(tmp_path, suffix):
    records = [{"instruction": "one two", "output": "three"}, {"text": "word " * 600, "number": 4}]
    lines = [json.dumps(record) for record in records]
    path = tmp_path / f"rows.{suffix}"
    path.write_text("\n".join(lines) if suffix == "jsonl" else f"[{','.join(lines)}]")
    assert benchmark_packing.read_lengths(path).tolist() == [5, benchmark_packing.MAX_LENGTH]


def test_drawn_lengths_resemble_alpaca():
    """Of 5,000 of its rows: mean 76, median 62, and 455 in 1,000 places of padded batches used."""
    lengths = benchmark_packing.draw_lengths(5_000)
    assert lengths.mean() == pytest.approx(76, rel=0.05)
    assert np.median(lengths) == pytest.approx(62, rel=0.08)
    batches = lengths.reshape(-1, benchmark_packing.ROWS_PER_BATCH)
    assert lengths.sum() / (batches.max(1).sum() * 8) == pytest.approx(0.455, abs=0.04)
