"""The PEFT form: put on the base by PEFT itself, it computes what the trained model computes."""

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import Linear as LoraLinear
from transformers import AutoModelForMaskedLM, BertConfig, BertForMaskedLM

from harmonic_sft.hub.adapter import covering_modules
from harmonic_sft.models import HarmonicForMaskedLM, NeoBERTConfig, NeoBERTForMaskedLM
from harmonic_sft.training.adapters import add_lora_, lora_layers, merged_state, save_adapter
from harmonic_sft.training.freezing import unfreeze_
from harmonic_sft.training.run_config import PeftConfig, UnfreezeConfig

# PEFT 0.21 asks transformers 5.23 for a property by its old name.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
SIZES = {
    "vocab_size": 110,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
}
IDS = torch.randint(5, 110, (3, 12), generator=torch.Generator().manual_seed(0))
BLOCK = {"bert": "encoder.layer", "neobert": "transformer_encoder"}
LAYERS = {"bert": ["query", "output.dense"], "neobert": ["qkv", "wo"]}
HEAD = {"name": "dist", "h_exp": -6.0, "unit_sphere": True, "eps": 1e-6}


@pytest.fixture(scope="session")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter_bases")
    torch.manual_seed(0)
    BertForMaskedLM(BertConfig(**SIZES)).save_pretrained(folder / "bert")
    AutoModelForMaskedLM.from_config(NeoBERTConfig(**SIZES)).save_pretrained(folder / "neobert")
    return folder


def fresh(base, dtype):
    return HarmonicForMaskedLM.from_base(str(base), head=HEAD, dtype=dtype)


def trained(base, dtype, unfreeze, lora=None):
    """As after training: every parameter that trains has moved."""
    torch.manual_seed(0)
    model = fresh(base, dtype)
    unfreeze_(model, unfreeze)
    if lora is not None:
        add_lora_(model, lora)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    model.renormalize_prototypes_()
    return model


def put_on_base(adapter, base, dtype):
    # Without it PEFT rounds float32 blocks to the dtype of the body.
    return PeftModel.from_pretrained(fresh(base, dtype), str(adapter), low_cpu_mem_usage=True)


def save(model, folder):
    """As a run saves it; the folder of its adapter."""
    model.config.base_model, model.config.base_revision = "me/base", "abc"
    model.save_pretrained(folder, state_dict=merged_state(model))
    save_adapter(model, folder)
    return folder / "adapter"


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize(
    ("family", "dtype", "last_blocks"),
    [
        ("bert", torch.float32, 1),
        ("bert", torch.bfloat16, 0),
        ("neobert", torch.float32, 0),
        ("neobert", torch.bfloat16, 1),
    ],
)
def test_lora_round_trip(bases, tmp_path, family, dtype, last_blocks):
    lora = PeftConfig(r=4, target_modules=LAYERS[family], layers_to_transform=[0, 1])
    model = trained(bases / family, dtype, UnfreezeConfig(last_blocks=last_blocks), lora)
    expected = logits(model)
    adapter = save(model, tmp_path / "run")
    wrapped = put_on_base(adapter, bases / family, dtype)
    assert torch.equal(logits(wrapped), expected)
    # On a bfloat16 body the merged weights are rounded once, the two terms apart otherwise.
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    for merged in (
        HarmonicForMaskedLM.from_pretrained(tmp_path / "run"),
        wrapped.merge_and_unload(),
    ):
        assert (logits(merged) - expected).abs().mean() < tolerance
    for layer in lora_layers(model).values():
        layer.lora_B.requires_grad_(False)["default"].weight.zero_()
    assert (logits(model) - expected).abs().mean() > 0.05  # what merging must not lose
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("me/base", "abc")
    assert (config["r"], config["lora_alpha"]) == (4, 16)
    assert len(config["target_modules"]) == 2 * (3 if family == "bert" else 2)
    assert config["target_modules"] == sorted(config["target_modules"])
    prefix = f"model.backbone.{BLOCK[family]}.2."
    head, *layers = config["modules_to_save"]
    assert head == "dist_head"
    assert bool(layers) == bool(last_blocks)
    assert all(name.startswith(prefix) for name in layers)


def test_the_head_is_saved_whole_and_of_the_body_what_trained():
    layer = "model.backbone.encoder.layer"
    names = ["dist_head.inner.weight", f"{layer}.1.output.dense.bias", f"{layer}.2.norm.weight"]
    assert covering_modules(names) == ["dist_head", f"{layer}.1.output.dense", f"{layer}.2.norm"]
    assert covering_modules([*names, f"{layer}.1.scale"]) == [
        "dist_head",
        f"{layer}.1",
        f"{layer}.2.norm",
    ]
    assert covering_modules([]) == ["dist_head"]


def test_peft_refuses_the_base_as_others_load_it(tmp_path):
    """More layers than the 20 names that PEFT shortens to what tells them apart."""
    torch.manual_seed(0)
    for family, auto, config in (
        ("bert", BertForMaskedLM, BertConfig(**SIZES | {"num_hidden_layers": 4})),
        ("neobert", NeoBERTForMaskedLM, NeoBERTConfig(**SIZES | {"num_hidden_layers": 6})),
    ):
        folder = tmp_path / family
        auto(config).save_pretrained(folder / "base")
        lora = PeftConfig(r=2, target_modules="all-linear")
        model = trained(folder / "base", torch.float32, UnfreezeConfig(last_blocks=0), lora)
        assert len(lora_layers(model)) == 24
        adapter = save(model, folder / "run")
        plain = AutoModelForMaskedLM.from_pretrained(folder / "base")
        with pytest.raises(ValueError, match=r"Target modules .* not found in the base model"):
            PeftModel.from_pretrained(plain, str(adapter))
        wrapped = put_on_base(adapter, folder / "base", torch.float32)
        assert torch.equal(logits(wrapped), logits(model))


def test_peft_itself_adapts_all_linear_layers_but_the_head(bases, tmp_path):
    model = fresh(bases / "bert", torch.float32)
    settings = LoraConfig(target_modules="all-linear", modules_to_save=["dist_head"])
    wrapped = get_peft_model(model, settings)
    adapted = [n for n, m in wrapped.named_modules() if isinstance(m, LoraLinear)]
    assert len(adapted) == 3 * 6
    assert all(".model.backbone.encoder.layer." in name for name in adapted)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter += 0.1
    assert any("dist_head" in n for n, p in wrapped.named_parameters() if p.requires_grad)
    wrapped.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(fresh(bases / "bert", torch.float32), str(tmp_path))
    assert torch.equal(logits(again), logits(wrapped))
