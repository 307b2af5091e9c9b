"""The measurement of decoders runs, and memory of a fused loss does not grow with T x V."""

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from experiments import decoder_cost
from experiments.__main__ import main
from harmonic_sft.results import read_results

OPTIONS = ["--rounds", "1", "--batch-size", "1", "--hidden-size", "64", "--layers", "2"]


@pytest.mark.slow
def test_the_arms_take_turns_and_the_figures_are_written(tmp_path, capsys):
    options = [*OPTIONS, "--length", "512", "--vocab-sizes", "8000", "--output", str(tmp_path)]
    assert main(["decoder_cost", *options]) == 0
    found = read_results(tmp_path / "decoder_cost.json")["vocab_sizes"]["8000"]
    assert found[decoder_cost.OWN]["time_ratio"] == 1.0
    assert all(cost["seconds"] > 0 for cost in found.values())
    growth = {name: c["peak_bytes"] - c["peak_bytes_at_half"] for name, c in found.items()}
    assert growth[decoder_cost.OWN] > 2 * 256 * 8_000 * 4  # logits, and their gradient
    for name in ("harmonic head", "linear head, fused"):
        assert growth[name] < growth[decoder_cost.OWN] / 2, name
    assert "V = 8,000" in capsys.readouterr().out


def test_bytes_are_rounded_to_the_nearest_mebibyte(tmp_path, capsys, monkeypatch):
    sizes = {"model_bytes": 3 * 2**20 - 1, "peak_bytes_at_half": 5 * 2**20 - 1}
    cost = {"seconds": 1.0, "time_ratio": 1.0, "peak_bytes": 7 * 2**20 - 1, **sizes}
    monkeypatch.setattr(decoder_cost, "compare", lambda options, vocab_size: {"arm": cost})
    assert main(["decoder_cost", "--vocab-sizes", "9", "--output", str(tmp_path)]) == 0
    assert capsys.readouterr().out.split()[-3:] == ["3", "5", "7"]


def test_with_lora_updates_and_head_train_in_16_bits(tmp_path):
    options = ["--length", "32", "--vocab-sizes", "700", "--lora", "--dtype", "bfloat16"]
    assert main(["decoder_cost", *OPTIONS, *options, "--output", str(tmp_path)]) == 0
    found = read_results(tmp_path / "decoder_cost.json")["vocab_sizes"]["700"]
    assert set(found) == {decoder_cost.OWN, "harmonic head", "linear head, fused"}
    # Embeddings and body in 16 bits; the float32 head is as large as twice the embeddings.
    table = 700 * 64 * 2
    assert found["harmonic head"]["model_bytes"] == found[decoder_cost.OWN]["model_bytes"] + table


def test_lora_trains_updates_and_head_and_nothing_else():
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
    )
    model = LlamaForCausalLM(config)
    trained = decoder_cost.unfreeze(model, lora=True)
    assert len(trained) == 1 + 2 * 2 * 7
    assert model.lm_head.weight.requires_grad
    assert not model.model.layers[1].input_layernorm.weight.requires_grad
