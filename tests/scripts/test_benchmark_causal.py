"""The benchmark of decoders runs, and memory of a fused loss does not grow with T x V."""

import json

from scripts import benchmark_causal


def test_the_arms_take_turns_and_the_figures_are_written(tmp_path, capsys):
    path = tmp_path / "causal.json"
    options = ["--rounds", "1", "--batch-size", "1", "--length", "512", "--hidden-size", "64"]
    options += ["--layers", "2", "--vocab-sizes", "20000", "--json", str(path)]
    results = benchmark_causal.main(options)
    saved = json.loads(path.read_text())
    assert saved["vocab_sizes"] == results
    assert saved["layers"] == 2
    found = results["20000"]
    assert found[benchmark_causal.OWN]["median_ratio"] == 1.0
    assert all(arm["tokens_per_second"] > 0 for arm in found.values())
    growth = {
        name: arm["peak_bytes"]["512"] - arm["peak_bytes"]["256"] for name, arm in found.items()
    }
    assert growth[benchmark_causal.OWN] > 2 * 256 * 20_000 * 4  # logits, and their gradient
    for name in ("harmonic head", "linear head, fused"):
        assert growth[name] < growth[benchmark_causal.OWN] / 2, name
    assert "V = 20,000" in capsys.readouterr().out
