"""The benchmark runs, and its arms do what they say."""

import json

from scripts import benchmark_losses


def test_the_arms_take_turns_and_the_figures_are_written(tmp_path, capsys, use_small_demo):
    use_small_demo(benchmark_losses)
    path = tmp_path / "losses.json"
    options = ["--steps", "2", "--batch-size", "4", "--vocab-sizes", "1000", "--json", str(path)]
    results = benchmark_losses.main(options)
    saved = json.loads(path.read_text())
    assert saved["vocab_sizes"] == results
    assert saved["steps"] == 2
    found = results["1000"]
    assert found["neighbor_table_seconds"] > 0
    assert found["num_tokens"] > 10
    for kind in ("step", "head"):
        assert list(found[kind]) == list(benchmark_losses.ARMS)
        assert found[kind]["linear, cross_entropy"]["median_ratio_to_linear"] == 1.0
        assert found[kind]["dist, harmonic"]["median_ratio_to_harmonic"] == 1.0
        assert all(arm["median_seconds"] > 0 for arm in found[kind].values())
    # A moving ground gets gradients, and keeps the probabilities for them.
    peaks = {name: arm["peak_bytes"] for name, arm in found["head"].items()}
    name = "dist, harmonic + 0.1 W2"
    assert peaks["dist, harmonic"] < peaks[f"{name}, fixed ground"] < peaks[name]
    printed = capsys.readouterr().out
    assert "The head alone, 1000 classes" in printed
    assert "Table of neighbors" in printed
