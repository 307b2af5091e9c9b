"""The measurement of decoders runs, and memory of a fused loss does not grow with T x V."""

from experiments import decoder_cost
from experiments.__main__ import main
from harmonic_sft.results import read_results


def test_the_arms_take_turns_and_the_figures_are_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(decoder_cost, "NUM_LAYERS", 2)
    options = ["--rounds", "1", "--batch-size", "1", "--length", "512", "--hidden-size", "64"]
    options += ["--vocab-sizes", "8000", "--output", str(tmp_path)]
    assert main(["decoder_cost", *options]) == 0
    found = read_results(tmp_path / "decoder_cost.json")["vocab_sizes"]["8000"]
    assert found[decoder_cost.OWN]["time_ratio"] == 1.0
    assert all(cost["seconds"] > 0 for cost in found.values())
    growth = {name: c["peak_bytes"] - c["peak_bytes_at_half"] for name, c in found.items()}
    assert growth[decoder_cost.OWN] > 2 * 256 * 8_000 * 4  # logits, and their gradient
    for name in ("harmonic head", "linear head, fused"):
        assert growth[name] < growth[decoder_cost.OWN] / 2, name
    assert "V = 8,000" in capsys.readouterr().out
