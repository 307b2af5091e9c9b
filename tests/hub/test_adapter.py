"""The PEFT form: put on the base by PEFT itself, it computes what the trained model computes."""

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM, BertConfig, BertForMaskedLM

from harmonic_sft.hub.adapter import covering_modules, write_adapter
from harmonic_sft.models import DistLayer, HarmonicForMaskedLM, NeoBERTConfig
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


def write(folder, target, config):
    config.base_model, config.base_revision = "me/base", "abc"
    write_adapter(folder, target, config, {"format": "pt"})


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


UNFROZEN = {
    "head": UnfreezeConfig(last_blocks=0),
    "block": UnfreezeConfig(last_blocks=1),
    "parts": UnfreezeConfig(patterns=["*[nN]orm*", "*.2.*"]),
}


@pytest.mark.parametrize(
    ("family", "dtype", "what"),
    [
        ("bert", torch.float32, "parts"),
        ("bert", torch.bfloat16, "block"),
        ("neobert", torch.float32, "head"),
        ("neobert", torch.bfloat16, "parts"),
        ("neobert", torch.float32, "block"),
    ],
)
def test_peft_gives_the_logits_of_the_trained_model(bases, tmp_path, family, dtype, what):
    model = trained(bases / family, dtype, UNFROZEN[what])
    model.save_pretrained(tmp_path / "run")
    write(tmp_path / "run", tmp_path / "adapter", model.config)
    assert {p.name for p in (tmp_path / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    wrapped = put_on_base(tmp_path / "adapter", bases / family, dtype)
    expected = logits(HarmonicForMaskedLM.from_pretrained(tmp_path / "run"))
    assert torch.equal(expected, logits(model))
    assert not torch.equal(expected, logits(fresh(bases / family, dtype)))
    assert torch.equal(logits(wrapped), expected)
    merged = wrapped.merge_and_unload()
    assert type(merged.dist_head) is DistLayer
    assert torch.equal(logits(merged), expected)
    saved = {n: p.dtype for n, p in model.named_parameters()}
    assert {n: p.dtype for n, p in merged.named_parameters()} == saved
    if dtype == torch.float32:  # then PEFT needs no option
        plain = PeftModel.from_pretrained(fresh(bases / family, dtype), str(tmp_path / "adapter"))
        assert torch.equal(logits(plain), expected)


def test_blocks_trained_in_bfloat16_are_saved_in_it(bases, tmp_path):
    unfreeze = UnfreezeConfig(last_blocks=1, dtype="bfloat16")
    model = trained(bases / "neobert", torch.bfloat16, unfreeze)
    model.save_pretrained(tmp_path / "run")
    write(tmp_path / "run", tmp_path / "adapter", model.config)
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    for name, tensor in tensors.items():
        head = name == "base_model.model.dist_head.weight"
        assert tensor.dtype == (torch.float32 if head else torch.bfloat16)
    wrapped = put_on_base(tmp_path / "adapter", bases / "neobert", torch.bfloat16)
    assert torch.equal(logits(wrapped), logits(model))


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
    model.save_pretrained(tmp_path / "run", state_dict=merged_state(model))
    save_adapter(model, tmp_path / "run")
    write(tmp_path / "run", tmp_path / "adapter", model.config)
    wrapped = put_on_base(tmp_path / "adapter", bases / family, dtype)
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
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("me/base", "abc")
    assert (config["r"], config["lora_alpha"]) == (4, 16)
    assert len(config["target_modules"]) == 2 * (3 if family == "bert" else 2)
    assert config["target_modules"] == sorted(config["target_modules"])
    prefix = f"model.backbone.{BLOCK[family]}.2."
    head, *layers = config["modules_to_save"]
    assert head == "dist_head"
    assert bool(layers) == bool(last_blocks)
    assert all(name.startswith(prefix) for name in layers)


def test_weights_in_shards_give_the_same_adapter(bases, tmp_path):
    model = trained(bases / "bert", torch.float32, UNFROZEN["block"])
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert not (tmp_path / "many" / "model.safetensors").exists()
    for name in ("one", "many"):
        write(tmp_path / name, tmp_path / f"{name}_adapter", model.config)
    one, many = (tmp_path / f"{name}_adapter" for name in ("one", "many"))
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        assert (one / file).read_bytes() == (many / file).read_bytes()


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


def test_weights_without_a_trained_parameter_are_refused(bases, tmp_path):
    model = trained(bases / "bert", torch.float32, UNFROZEN["head"])
    state = {k: v for k, v in model.state_dict().items() if k != "dist_head.weight"}
    model.save_pretrained(tmp_path / "run", state_dict=state)
    with pytest.raises(ValueError, match=r"weights: expected 'dist_head.weight' in run, got none"):
        write(tmp_path / "run", tmp_path / "adapter", model.config)
    assert not (tmp_path / "adapter").exists()
