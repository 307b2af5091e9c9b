"""LoRA: what trains, what is saved, what a run continues with, and what PEFT computes with it."""

import copy
import json
import pickle

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import Linear as LoraLinear
from safetensors.torch import load_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    AutoModelForMaskedLM,
    BertConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GPT2Config,
    LlamaConfig,
    PhimoeConfig,
    PhimoeForCausalLM,
)
from transformers.pytorch_utils import Conv1D

from harmonic_sft.models import (
    DistLayer,
    HarmonicConfig,
    HarmonicForCausalLM,
    HarmonicForMaskedLM,
    HarmonicForSequenceClassification,
    NeoBERTConfig,
)
from harmonic_sft.models.backbones import blocks_without_graph, find_blocks
from harmonic_sft.models.bases import base_of
from harmonic_sft.training.adapters import (
    add_lora_,
    as_peft_config,
    covering_modules,
    load_part_,
    lora_layers,
    merged_state,
    save_adapter,
)
from harmonic_sft.training.freezing import unfreeze_
from harmonic_sft.training.loading import load_base_config
from harmonic_sft.training.preview import build_fake_model
from harmonic_sft.training.run_config import PeftConfig, UnfreezeConfig, load_run_config
from tests.encoders import save_encoder
from tests.training.conftest import prepared

# PEFT 0.21 asks transformers 5.23 for a property by its old name.
OLD_NAME = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

LORA = {"r": 4, "target_modules": ["query", "value"], "layers_to_transform": [1, 2]}
HEAD_ONLY = {"unfreeze": {"last_blocks": 0}}
IDS = torch.arange(5, 25)[None]
LAYER = "model.backbone.encoder.layer"
SIZES = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "vocab_size": 40}
LAYERS = {"bert": ["query", "output.dense"], "neobert": ["qkv", "wo"]}


def with_lora(base, *, dtype=torch.float32, last_blocks=0, **lora):
    torch.manual_seed(0)
    model = HarmonicForMaskedLM.from_base(str(base), dtype=dtype, head={"name": "dist"})
    unfreeze_(model, UnfreezeConfig(last_blocks=last_blocks))
    add_lora_(model, PeftConfig(**lora))
    return model


def move_(model):
    """Change everything that trains, so that no LoRA weight is zero."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


def trained(model):
    return {name for name, p in model.named_parameters() if p.requires_grad}


def weights(folder):
    return load_file(folder / "model.safetensors")


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_only_lora_and_the_head_train(tiny_base, dtype):
    model = with_lora(tiny_base, dtype=dtype, **LORA)
    targets = [f"{LAYER}.{i}.attention.self.{n}" for i in (1, 2) for n in ("query", "value")]
    expected = {f"{t}.lora_{side}.default.weight" for t in targets for side in "AB"}
    assert trained(model) == expected | {"dist_head.weight"}
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if name in trained(model) else dtype)
    assert type(model) is HarmonicForMaskedLM
    assert [type(m) for m in model.modules()].count(DistLayer) == 1
    merged = [f"{target}.weight" for target in targets]
    assert model.config.trained_parameters == ["dist_head.weight", *merged]
    kept = sorted(name.removeprefix("model.backbone.") for name in merged)
    assert model.config.float32_modules == (None if dtype == torch.float32 else kept)
    plain = HarmonicForMaskedLM.from_base(str(tiny_base), dtype=dtype, head={"name": "dist"})
    assert torch.equal(logits(model), logits(plain))  # LoRA starts as nothing


def test_all_linear_layers_that_stay_frozen(tiny_base, bases):
    layers = lora_layers(with_lora(tiny_base, last_blocks=1))
    kinds = ("attention.self.query", "attention.self.key", "attention.self.value")
    kinds += ("attention.output.dense", "intermediate.dense", "output.dense")
    assert set(layers) == {f"{LAYER}.{i}.{kind}" for i in (0, 1) for kind in kinds}
    model = with_lora(bases / "neobert", target_modules=["qkv", "wo"], layers_to_transform=[1])
    layers = lora_layers(model)
    path = "model.backbone.transformer_encoder.1"
    assert set(layers) == {f"{path}.qkv", f"{path}.wo"}


def test_lora_goes_on_the_layers_beside_experts_and_not_on_these():
    """PEFT would move it to the experts from what is called as their layers once were."""
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
    widths = {"intermediate_size": 24, "moe_intermediate_size": 12}
    sizes = {**SIZES, **experts, **widths, "num_hidden_layers": 2, "head_dim": 8}
    config = Glm4MoeConfig(**sizes, num_key_value_heads=2)
    base = base_of(Glm4MoeForCausalLM(config), dtype=torch.float32, is_causal=True)
    model = HarmonicForCausalLM.on_base(copy.deepcopy(base))
    unfreeze_(model, UnfreezeConfig(last_blocks=0))
    expected = {n for n, m in model.model.named_modules() if isinstance(m, nn.Linear)}
    add_lora_(model, PeftConfig(r=2))
    assert {name.removeprefix("model.") for name in lora_layers(move_(model))} == expected
    model.train()(input_ids=IDS, labels=IDS).loss.backward()
    assert all(
        parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad
    )
    plain = HarmonicForCausalLM.on_base(base)
    plain.load_state_dict(merged_state(model))
    torch.testing.assert_close(logits(plain.eval()), logits(model.eval()), atol=1e-5, rtol=1e-5)


def test_lora_leaves_out_a_router_that_gives_more_than_scores():
    sizes = {**SIZES, "num_hidden_layers": 2, "num_key_value_heads": 2}
    config = PhimoeConfig(**sizes, num_local_experts=4, num_experts_per_tok=2)
    base = base_of(PhimoeForCausalLM(config), dtype=torch.float32, is_causal=True)
    model = HarmonicForCausalLM.on_base(base)
    unfreeze_(model, UnfreezeConfig(last_blocks=0))
    add_lora_(model, PeftConfig(r=2))
    kinds = ("q_proj", "k_proj", "v_proj", "o_proj")
    assert {n.rpartition(".")[2] for n in lora_layers(move_(model))} == set(kinds)
    model.train()(input_ids=IDS, labels=IDS).loss.backward()


def test_blocks_below_the_first_lora_run_without_a_graph(tiny_base):
    model = with_lora(tiny_base, lora_dropout=0.5, **LORA)
    blocks = list(find_blocks(model.model.backbone)[1])
    assert blocks_without_graph(model.model.backbone) == blocks[:1]
    model.train()
    assert [block.training for block in blocks] == [False, True, True]
    model.gradient_checkpointing_enable()
    assert [block.gradient_checkpointing for block in blocks] == [False, True, True]
    assert not torch.equal(logits(move_(model)), logits(model))  # dropout
    assert torch.equal(logits(model.eval()), logits(model))


def test_checkpointing_changes_no_gradient(tiny_base):
    gradients = []
    for checkpointing in (False, True):
        model = move_(with_lora(tiny_base, **LORA)).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(input_ids=IDS, labels=IDS).loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() == trained(model)
    for name, gradient in gradients[0].items():
        assert gradient.abs().max() > 0
        assert torch.equal(gradient, gradients[1][name])


def test_lora_goes_on_a_model_without_memory(make_yaml):
    run = load_run_config(make_yaml(model={**HEAD_ONLY, "dtype": "bfloat16"}, peft=LORA))
    with FakeTensorMode():
        model = build_fake_model(run, load_base_config(run.model))
        output = model.train().model(input_ids=torch.zeros(2, 8, dtype=torch.int64))
        output.last_hidden_state.float().sum().backward()
    lora = [p for name, p in model.named_parameters() if ".lora_" in name]
    assert len(lora) == 8
    assert all(p.dtype == torch.float32 and p.grad.shape == p.shape for p in lora)


@pytest.mark.parametrize(
    ("family", "dtype"), [("bert", torch.bfloat16), ("neobert", torch.float32)]
)
def test_merging_is_exact_and_leaves_the_live_model(bases, dtype, family):
    """Against B @ A in float64."""
    base, targets = bases / family, ["value"] if family == "bert" else ["qkv", "ffn.w3"]
    model = move_(with_lora(base, dtype=dtype, r=3, lora_alpha=5, target_modules=targets))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    merged = merged_state(model)
    after = model.state_dict()
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    plain = HarmonicForMaskedLM.from_base(str(base), dtype=dtype, head={"name": "dist"})
    assert merged.keys() == plain.state_dict().keys()
    state = plain.state_dict()
    layers = lora_layers(model)
    for name, value in merged.items():
        layer = layers.get(name.removesuffix(".weight"))
        if layer is None:
            expected = model.dist_head.weight if name.startswith("dist_head") else state[name]
            assert torch.equal(value, expected)
            continue
        side_a, side_b = (after[f"{name[:-7]}.lora_{side}.default.weight"] for side in "AB")
        expected = state[name].double() + 5 / 3 * side_b.double() @ side_a.double()
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), expected, rtol=1e-6, atol=1e-7)
    assert len(layers) == (3 if family == "bert" else 6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_saves_an_ordinary_model_and_an_adapter(make_yaml, tmp_path, dtype):
    trainer = prepared(make_yaml(model={**HEAD_ONLY, "dtype": dtype}, peft=LORA))
    model = trainer.model
    base = {name: value.clone() for name, value in model.state_dict().items()}
    trainer.train()
    trainer.save_model()
    moved = {
        name for name, value in model.state_dict().items() if not torch.equal(value, base[name])
    }
    assert moved == trained(model)
    assert all(".lora_" in n for n in trainer.get_decay_parameter_names(model) if n in moved)
    assert "dist_head.weight" not in trainer.get_decay_parameter_names(model)
    for folder in (tmp_path / "run", tmp_path / "run" / "checkpoint-6"):
        assert not (folder / "adapter_config.json").exists()  # transformers would load it
        saved = weights(folder)
        torch.testing.assert_close(saved, merged_state(model), rtol=0, atol=0)
        again = HarmonicForMaskedLM.from_pretrained(folder)
        assert {n: p.dtype for n, p in again.named_parameters()} == {
            n: p.dtype for n, p in saved.items()
        }
        tolerance = 1e-5 if dtype == "float32" else 0.1
        torch.testing.assert_close(logits(again), logits(model.eval()), rtol=0, atol=tolerance)
        adapter = load_file(folder / "adapter" / "adapter_model.safetensors")
        names = {name.replace(".default.", ".") for name in trained(model)}
        assert {name.removeprefix("base_model.model.") for name in adapter} == names
    assert {path.name for path in (tmp_path / "run" / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }


def test_a_model_saves_itself_merged_and_so_do_its_copies(tiny_base, tmp_path):
    model = move_(with_lora(tiny_base, **LORA))
    expected = {name: value.clone() for name, value in merged_state(model).items()}
    copies = (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model)))
    for number, one in enumerate(copies):
        folder = tmp_path / str(number)
        one.save_pretrained(folder, state_dict=one.state_dict() if number else None)
        torch.testing.assert_close(weights(folder), expected, rtol=0, atol=0)
        move_(one)  # which the next one has not seen


def test_an_adapter_of_another_run_is_refused(tiny_base, tmp_path):
    model = move_(with_lora(tiny_base, **LORA))
    save_adapter(model, tmp_path)
    other = with_lora(tiny_base, **LORA)
    load_part_(other, tmp_path)
    assert torch.equal(logits(other), logits(model))
    other = with_lora(tiny_base, **{**LORA, "layers_to_transform": [1]})
    with pytest.raises(ValueError, match="resume: expected the tensors that this run trains, got"):
        load_part_(other, tmp_path)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (
            {"target_modules": ["qurey"]},
            r"peft.target_modules: expected names of .* such as \['.*dense'\], .*'qurey'",
        ),
        ({"target_modules": ["LayerNorm"]}, "got 'LayerNorm', which matches none"),
        (
            {"layers_to_transform": [1, 3, -1]},
            r"peft.layers_to_transform: expected blocks from 0 to 2, got \[-1, 3\]",
        ),
        (
            {"layers_to_transform": [1, 2]},
            r"expected blocks whose targets model.unfreeze leaves frozen, got encoder.layer.2.att",
        ),
    ],
)
def test_lora_that_fits_nothing_is_refused(tiny_base, lora, message):
    with pytest.raises(ValueError, match=message):
        with_lora(tiny_base, last_blocks=1, **lora)


def put_on_base(adapter, base, dtype=torch.float32):
    model = HarmonicForMaskedLM.from_base(str(base), dtype=dtype, head={"name": "dist"})
    # Without it PEFT rounds float32 blocks to the dtype of the body.
    place = {"low_cpu_mem_usage": True, "torch_device": str(model.device)}
    return PeftModel.from_pretrained(model, str(adapter), **place)


def save(model, folder):
    """Save as a run does, and return the folder of the adapter."""
    model.config.base_model, model.config.base_revision = "me/base", "a" * 40
    model.save_pretrained(folder, state_dict=merged_state(model))
    save_adapter(model, folder)
    return folder / "adapter"


@OLD_NAME
@pytest.mark.parametrize(
    ("family", "dtype", "last_blocks"),
    [
        ("bert", torch.float32, 1),
        ("bert", torch.bfloat16, 0),
        ("neobert", torch.float32, 0),
        ("neobert", torch.bfloat16, 1),
    ],
)
def test_an_adapter_on_its_base_computes_what_the_trained_model_does(
    bases, tmp_path, family, dtype, last_blocks
):
    lora = {"r": 4, "target_modules": LAYERS[family], "layers_to_transform": [0, 1]}
    model = move_(with_lora(bases / family, dtype=dtype, last_blocks=last_blocks, **lora))
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
    assert (config["base_model_name_or_path"], config["revision"]) == ("me/base", "a" * 40)
    assert (config["r"], config["lora_alpha"]) == (4, 16)
    assert len(config["target_modules"]) == 2 * (3 if family == "bert" else 2)
    assert config["target_modules"] == sorted(config["target_modules"])
    block = LAYER if family == "bert" else "model.backbone.transformer_encoder"
    head, *layers = config["modules_to_save"]
    assert head == "dist_head"
    assert bool(layers) == bool(last_blocks)
    assert all(name.startswith(f"{block}.2.") for name in layers)


def test_the_head_is_saved_whole_and_of_the_body_what_trained():
    names = ["dist_head.inner.weight", f"{LAYER}.1.output.dense.bias", f"{LAYER}.2.norm.weight"]
    assert covering_modules(names) == ["dist_head", f"{LAYER}.1.output.dense", f"{LAYER}.2.norm"]
    names.append(f"{LAYER}.1.scale")
    assert covering_modules(names) == ["dist_head", f"{LAYER}.1", f"{LAYER}.2.norm"]
    assert covering_modules([]) == ["dist_head"]


@OLD_NAME
@pytest.mark.parametrize(("family", "num_layers"), [("bert", 4), ("neobert", 6)])
def test_peft_refuses_the_base_as_others_load_it(tmp_path, family, num_layers):
    """More layers than the 20 names that PEFT shortens to what tells them apart."""
    base = save_encoder(family, tmp_path / "base", num_hidden_layers=num_layers)
    model = move_(with_lora(base, r=2, target_modules="all-linear"))
    assert len(lora_layers(model)) == 24
    adapter = save(model, tmp_path / "run")
    plain = AutoModelForMaskedLM.from_pretrained(base)
    with pytest.raises(ValueError, match=r"Target modules .* not found in the base model"):
        PeftModel.from_pretrained(plain, str(adapter))
    assert torch.equal(logits(put_on_base(adapter, base)), logits(model))


@OLD_NAME
@pytest.mark.filterwarnings("ignore:Could not find a config file")  # of PEFT 0.19
def test_peft_itself_trains_and_saves_the_head_whole(bases, tmp_path):
    model = HarmonicForMaskedLM.from_base(str(bases / "bert"))
    settings = LoraConfig(target_modules="all-linear", modules_to_save=["dist_head"])
    wrapped = get_peft_model(model, settings)
    adapted = [n for n, m in wrapped.named_modules() if isinstance(m, LoraLinear)]
    assert len(adapted) == 3 * 6  # all linear layers but the head
    assert all(f".{LAYER}." in name for name in adapted)
    move_(wrapped)
    assert any("dist_head" in name for name in trained(wrapped))
    wrapped.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(
        HarmonicForMaskedLM.from_base(str(bases / "bert")), str(tmp_path)
    )
    assert torch.equal(logits(again), logits(wrapped))


BODIES = {
    "bert": (HarmonicForMaskedLM, BertConfig(**SIZES)),
    "neobert": (HarmonicForMaskedLM, NeoBERTConfig(**SIZES)),
    "llama": (HarmonicForCausalLM, LlamaConfig(**SIZES)),
    "gpt2": (HarmonicForCausalLM, GPT2Config(**SIZES)),
    "classes": (HarmonicForSequenceClassification, BertConfig(**SIZES)),
}


@OLD_NAME
@pytest.mark.parametrize("name", BODIES)
def test_peft_alone_adapts_all_linear_layers_of_the_body(name):
    model_class, body = BODIES[name]
    config = HarmonicConfig(text_config=body, is_causal=model_class.is_causal)
    model, linear = model_class(config), nn.Linear | Conv1D
    expected = [f"model.{n}" for n, m in model.model.named_modules() if isinstance(m, linear)]
    wrapped = get_peft_model(model, LoraConfig(fan_in_fan_out=name == "gpt2"))
    adapted = [n for n, m in wrapped.named_modules() if isinstance(m, LoraLinear)]
    assert [n.removeprefix("base_model.model.") for n in adapted] == expected  # not the head


def test_a_lora_of_peft_without_targets_is_said_to_be_on_all_linear_layers(caplog):
    assert as_peft_config(LoraConfig(r=2)).target_modules == "all-linear"
    assert "LoRA goes to all linear layers" in caplog.text
