"""What trains, in which precision, and the table that says so."""

import pytest
import torch

from harmonic_sft.models import HarmonicForMaskedLM
from harmonic_sft.training.adapters import add_lora_
from harmonic_sft.training.freezing import parts, unfreeze_
from harmonic_sft.training.run_config import PeftConfig, UnfreezeConfig
from tests.encoders import save_encoder


@pytest.fixture
def model(tiny_base):
    return HarmonicForMaskedLM.from_base(str(tiny_base), head={"name": "dist"})


def trained(model):
    return {name for name, p in model.named_parameters() if p.requires_grad}


def test_last_blocks_and_the_head(model):
    unfreeze_(model, UnfreezeConfig(last_blocks=2))
    expected = {n for n, _ in model.named_parameters() if ".layer.1." in n or ".layer.2." in n}
    assert trained(model) == expected | {"dist_head.weight"}


def test_what_an_earlier_run_trained_is_still_named(model):
    unfreeze_(model, UnfreezeConfig(last_blocks=1))
    earlier = set(model.config.trained_parameters)
    unfreeze_(model, UnfreezeConfig(patterns=["encoder.layer.0.output.dense.bias"]))
    now = {"dist_head.weight", "model.backbone.encoder.layer.0.output.dense.bias"}
    assert trained(model) == now
    assert set(model.config.trained_parameters) == earlier | now
    assert len(model.config.trained_parameters) == len(earlier | now)


def test_blocks_of_parts_or_shared_ones_are_trained_by_name(tmp_path):
    sizes = {"emb_dim": 32, "n_layers": 3, "n_heads": 4, "max_position_embeddings": 40}
    save_encoder("xlm", tmp_path / "xlm", **sizes)
    save_encoder("albert", tmp_path / "albert", embedding_size=32)
    for family, lists in (("xlm", "'attentions', 'layer_norm1', 'ffns'"), ("albert", "")):
        model = HarmonicForMaskedLM.from_base(str(tmp_path / family))
        with pytest.raises(ValueError, match=rf"one list of 3 blocks, got \[{lists}.*patterns"):
            unfreeze_(model, UnfreezeConfig(last_blocks=1))
        unfreeze_(model, UnfreezeConfig(patterns=["*"]))
        ids = torch.tensor([[5, 6, 7]])
        model.train()(input_ids=ids, labels=ids).loss.backward()
        assert model.get_input_embeddings().weight.grad.any()
        assert {part.name for part in parts(model)} >= {"token embeddings", "head"}


def test_what_fits_no_parameter_is_refused(model):
    with pytest.raises(ValueError, match=r"model.unfreeze.last_blocks: expected at most 3, got 4"):
        unfreeze_(model, UnfreezeConfig(last_blocks=4))
    with pytest.raises(ValueError, match=r"model.unfreeze.patterns: expected a pattern of param"):
        unfreeze_(model, UnfreezeConfig(patterns=["blocks.*"]))


def test_patterns_name_parameters(model):
    unfreeze_(model, UnfreezeConfig(patterns=["*.LayerNorm.*", "encoder.layer.0.*.dense.bias"]))
    names = trained(model) - {"dist_head.weight"}
    assert "model.backbone.embeddings.LayerNorm.weight" in names
    assert "model.backbone.encoder.layer.0.output.dense.bias" in names
    assert all("LayerNorm" in name or name.endswith("dense.bias") for name in names)


def test_blocks_beside_which_adapters_train_are_named_so(model):
    unfreeze_(model, UnfreezeConfig(last_blocks=1))
    add_lora_(model, PeftConfig(layers_to_transform=[0, 1]))
    names = [row.name for row in parts(model)]
    assert names[2:4] == ["blocks 0-1, frozen, LoRA", "block 2, trained"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_table_adds_up_with_the_masters_of_16_bit_weights(tiny_base, dtype):
    model = HarmonicForMaskedLM.from_base(
        str(tiny_base), head={"name": "dist"}, dtype=getattr(torch, dtype)
    )
    unfreeze_(model, UnfreezeConfig(last_blocks=1, dtype=dtype))
    rows = parts(model)
    names = [row.name for row in rows]
    assert names == [
        "token embeddings",
        "other (norms, positions)",
        "blocks 0-1, frozen",
        "block 2, trained",
        "head",
    ]
    assert sum(row.parameters for row in rows) == sum(p.numel() for p in model.parameters())
    assert sum(row.trainable for row in rows) == sum(
        p.numel() for p in model.parameters() if p.requires_grad
    )
    block, head = rows[-2:]
    size, master = (4, 0) if dtype == "float32" else (2, 4)
    assert block.bytes == size * block.parameters
    assert block.training_bytes == (4 + 8 + master) * block.parameters
    assert head.bytes == 4 * head.parameters
    assert head.training_bytes == 12 * head.parameters  # gradient and two moments


def test_a_tied_head_is_counted_once(tiny_base):
    model = HarmonicForMaskedLM.from_base(str(tiny_base), head={"name": "linear"}, tie=True)
    unfreeze_(model, UnfreezeConfig(patterns=["*"]))
    rows = {row.name: row for row in parts(model)}
    assert rows["head (tied)"].parameters == 109  # the bias alone
    assert sum(r.parameters for r in rows.values()) == sum(p.numel() for p in model.parameters())


def test_float32_on_a_bfloat16_body_is_remembered(tiny_base, tmp_path):
    model = HarmonicForMaskedLM.from_base(
        str(tiny_base), head={"name": "dist"}, dtype=torch.bfloat16
    )
    unfreeze_(model, UnfreezeConfig(last_blocks=1, dtype="float32"))
    model.save_pretrained(tmp_path)
    again = HarmonicForMaskedLM.from_pretrained(tmp_path)
    assert {n: p.dtype for n, p in again.named_parameters()} == {
        n: p.dtype for n, p in model.named_parameters()
    }
    input_ids = torch.arange(5, 25)[None]
    assert torch.equal(again(input_ids=input_ids).logits, model(input_ids=input_ids).logits)


def test_float32_embeddings_on_a_bfloat16_body_are_refused(tiny_base):
    model = HarmonicForMaskedLM.from_base(
        str(tiny_base), head={"name": "dist"}, dtype=torch.bfloat16
    )
    with pytest.raises(ValueError, match="expected no token embeddings on a bfloat16 body"):
        unfreeze_(model, UnfreezeConfig(patterns=["*embeddings*"]))
