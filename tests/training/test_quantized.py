"""Runs on quantized bodies; `make test-quantized` installs what they need."""

import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    TorchAoConfig,
)
from transformers.quantizers import AutoQuantizationConfig

from harmonic_sft import HarmonicTrainer, HarmonicTrainingArguments
from harmonic_sft.hub.linear_export import export_linear
from harmonic_sft.hub.run_folder import Destination, read_trained
from harmonic_sft.hub.staging import check_form, stage
from harmonic_sft.models import HarmonicForCausalLM
from harmonic_sft.models.backbones import is_quantized, settle_quantized_
from harmonic_sft.models.bases import check_embeddings
from harmonic_sft.training import load_run_config
from harmonic_sft.training.checkpoints import check_frozen, frozen_sha256, write_manifest
from harmonic_sft.training.evaluation import evaluate_folder
from harmonic_sft.training.freezing import parts
from harmonic_sft.training.loading import load_base_config
from harmonic_sft.training.preview import dry_run, estimate_step
from harmonic_sft.training.run import prepare, train
from tests import decoders

pytestmark = [
    pytest.mark.quantized,
    pytest.mark.skipif(sys.platform != "linux", reason="bitsandbytes has no wheel"),
]
torchao = pytest.importorskip("torchao.quantization", reason="make test-quantized installs it")
METHODS = {
    "nf4": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "nested": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True),
    "int8": BitsAndBytesConfig(load_in_8bit=True),
    "torchao": TorchAoConfig(torchao.Int8WeightOnlyConfig(version=2)),
}
FOUR_BITS = ("nf4", "nested")
ADAPTED = ["q_proj", "up_proj"]
PEFT_WARNINGS = pytest.mark.filterwarnings(  # its own call, and that merging rounds
    "ignore:.is_gradient_checkpointing:FutureWarning", "ignore:Merge lora:UserWarning"
)
ROWS = torch.tensor([[3 + start + step for step in range(10)] for start in range(8)])


@pytest.fixture(scope="module", params=list(METHODS))
def base(request, tmp_path_factory):
    """Save a quantized Llama, of a width that blocks of 64 weights divide."""
    root = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        sizes = {"hidden_size": 128, "intermediate_size": 128, "num_key_value_heads": 4}
        for name, value in sizes.items():
            patch.setitem(decoders.SIZES, name, value)
        plain = decoders.save_decoder("llama", root / "plain")
    config = METHODS[request.param]
    model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=config)
    model.save_pretrained(root / "base")
    decoders.save_tokenizer(root / "base")
    return root / "base"


@pytest.fixture
def four_bits(base):
    """Such a base if LoRA can be trained on it."""
    if not base.parent.name.startswith(FOUR_BITS):
        pytest.skip("refused")
    return base


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def frozen(base, **fields):
    return {"base": str(base), "unfreeze": {"last_blocks": 0}, **fields}


def test_a_head_is_trained_on_a_quantized_body(base, make_causal_yaml, tmp_path):
    constant = {"start": -8.0, "end": -8.0}
    results = train(load_run_config(make_causal_yaml(model=frozen(base), h_exp=constant)))
    assert results["final"]["loss"] < results["before"]["loss"]
    folder = tmp_path / "run"
    # The body is in the checkpoint as it was in the base, bit for bit.
    before, after = tensors(base), tensors(folder)
    body = {name.replace("model.", "model.backbone.", 1): t for name, t in before.items()}
    del body["lm_head.weight"]
    assert body.keys() == after.keys() - {"dist_head.weight"}
    for name, tensor in body.items():
        assert torch.equal(after[name], tensor), name
    evaluated = evaluate_folder(folder)
    assert evaluated["final"]["loss"] == pytest.approx(results["final"]["loss"], rel=1e-5)


def test_a_published_folder_generates_without_this_package(base, make_causal_yaml, tmp_path):
    train(load_run_config(make_causal_yaml(model=frozen(base))))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run", trust_remote_code=True)
    native = AutoModelForCausalLM.from_pretrained(base)
    settle_quantized_(native)
    input_ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        hidden_states = model.model(input_ids=input_ids).last_hidden_state
        expected = native.base_model(input_ids).last_hidden_state
    torch.testing.assert_close(hidden_states, expected)
    tokens = model.generate(input_ids, max_new_tokens=3, min_new_tokens=3)
    assert tokens.shape == (1, 6)
    # Saved again, after it has run, it is the same.
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    with torch.no_grad():
        assert torch.equal(again(input_ids).logits, model(input_ids).logits)
    other = HarmonicForCausalLM.from_base(str(tmp_path / "again"), init="output_embeddings")
    torch.testing.assert_close(other.dist_head.weight, model.dist_head.weight)


def test_distillation_from_the_quantized_model(base, make_causal_yaml):
    run = load_run_config(make_causal_yaml(model=frozen(base), loss={"name": "distill"}))
    results = train(run)
    assert results["final"]["loss"] < results["before"]["loss"]


def test_what_would_train_or_change_packed_weights_is_refused(base, make_causal_yaml, tmp_path):
    one = load_run_config(make_causal_yaml("one", model={"base": str(base)}))
    for start in (train, dry_run):
        with pytest.raises(ValueError, match=r"model.unfreeze: expected {last_blocks: 0} on"):
            start(one)
    assert not (tmp_path / "one").exists()
    dry_run(load_run_config(make_causal_yaml("run", model=frozen(base))))
    train(load_run_config(make_causal_yaml("run", model=frozen(base))))
    with pytest.raises(ValueError, match="export: expected a base in a floating dtype"):
        export_linear(tmp_path / "run", tmp_path / "exported")
    model = HarmonicForCausalLM.from_pretrained(tmp_path / "run")
    with pytest.raises(ValueError, match="--form head: expected a base in a floating dtype"):
        check_form(model.config, "head", False)
    with pytest.raises(ValueError, match="--form peft: expected a run with LoRA"):
        check_form(model.config, "peft", False)


def test_layers_that_are_not_packed_stay_so(base, make_causal_yaml, tmp_path):
    """As in published models that leave sensitive layers out."""
    config = AutoConfig.from_pretrained(base).quantization_config
    field = "modules_to_not_convert" if "quant_type" in config else "llm_int8_skip_modules"
    quantization = AutoQuantizationConfig.from_dict(
        {**config, field: ["lm_head", "model.layers.1.mlp"]}
    )
    plain = base.parent / "plain"
    model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=quantization)
    folder = tmp_path / "partly"
    model.save_pretrained(folder)
    decoders.save_tokenizer(folder)
    results = train(load_run_config(make_causal_yaml(model=frozen(folder))))
    loaded = HarmonicForCausalLM.from_pretrained(tmp_path / "run")
    assert type(loaded.model.backbone.layers[1].mlp.up_proj.weight) is torch.nn.Parameter
    assert is_quantized(loaded.model.backbone.layers[0].mlp.up_proj.weight)
    evaluated = evaluate_folder(tmp_path / "run")
    assert evaluated["final"]["loss"] == pytest.approx(results["final"]["loss"], rel=1e-5)
    if field == "llm_int8_skip_modules":  # transformers finds torchao's only below a head
        body = AutoModel.from_pretrained(tmp_path / "run")
        assert type(body.backbone.layers[1].mlp.up_proj.weight) is torch.nn.Parameter


def test_packed_embeddings_and_output_layers_are_refused(base, tmp_path):
    if "torchao" not in base.parent.name:
        pytest.skip("bitsandbytes packs neither")
    quantization = TorchAoConfig(
        torchao.Int8WeightOnlyConfig(version=2), include_input_output_embeddings=True
    )
    plain = base.parent / "plain"
    model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=quantization)
    model.save_pretrained(tmp_path / "packed")
    with pytest.raises(ValueError, match="base: expected an output layer that is not quantized"):
        HarmonicForCausalLM.from_base(str(tmp_path / "packed"))
    model.model.embed_tokens.weight = model.model.layers[0].mlp.up_proj.weight
    with pytest.raises(ValueError, match="base x: expected token embeddings that are not quant"):
        check_embeddings("x", model.base_model)


def lora(base, **fields):
    """The sections of a run with LoRA on two layers of every block."""
    return {"model": frozen(base, **fields), "peft": {"r": 2, "target_modules": ADAPTED}}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lora_is_trained_on_a_quantized_body(base, make_causal_yaml, tmp_path, dtype):
    constant, folder = {"start": -8.0, "end": -8.0}, tmp_path / "run"
    path = make_causal_yaml(**lora(base, dtype=dtype), h_exp=constant)
    if not base.parent.name.startswith(FOUR_BITS):
        with pytest.raises(ValueError, match="peft: expected a base in a floating dtype or in 4 b"):
            train(load_run_config(path))
        return
    dry_run(load_run_config(path))
    results = train(load_run_config(path))
    assert results["final"]["loss"] < results["before"]["loss"]
    saved = tensors(folder)
    merged = {name for name in saved if name.split(".")[-2] in ADAPTED}
    assert len(merged) == 4
    body = {name.replace("model.", "model.backbone.", 1): t for name, t in tensors(base).items()}
    for name, tensor in saved.items():
        if name in merged:
            assert tensor.dtype == torch.float32
        elif "norm" not in name and "embed" not in name and name != "dist_head.weight":
            assert torch.equal(body[name], tensor), name  # as packed as before
    # Without this package.
    loaded = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    layer = loaded.model.backbone.layers[0]
    assert type(layer.mlp.up_proj.weight) is torch.nn.Parameter
    assert is_quantized(layer.mlp.down_proj.weight)
    # What was trained is what is loaded: the packed weights, unpacked, and the update.
    plain = HarmonicForCausalLM.from_base(str(base)).dequantize(torch.float32)
    adapter = load_file(folder / "adapter" / "adapter_model.safetensors")
    for name in merged:
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        down, up = (adapter[f"{stem}.lora_{part}.weight"] for part in "AB")
        expected = plain.get_parameter(name) + 8 * up @ down  # lora_alpha / r
        torch.testing.assert_close(saved[name], expected, msg=name)
    evaluated = evaluate_folder(folder)
    # Merged weights are rounded to 16 bits where the body computes in them.
    tolerance = 1e-3 if dtype == "bfloat16" else 1e-5
    assert evaluated["final"]["loss"] == pytest.approx(results["final"]["loss"], rel=tolerance)


BEST = [
    "training.load_best_model_at_end=true",
    "training.metric_for_best_model=post_hoc_loss",
    "training.eval_strategy=steps",
    "training.eval_steps=3",
]


@pytest.mark.parametrize(
    ("has_lora", "save", "words"),
    [(False, "full", BEST), (True, "full", []), (True, "trainable", [])],
)
def test_a_stopped_run_goes_on(base, make_causal_yaml, tmp_path, has_lora, save, words):
    if has_lora and not base.parent.name.startswith(FOUR_BITS):
        pytest.skip("refused")
    sections = lora(base) if has_lora else {"model": frozen(base)}
    train(load_run_config(make_causal_yaml("whole", **sections), words))
    path = make_causal_yaml("parts", **sections, save=save)
    train(load_run_config(path, words))
    folder = tmp_path / "parts"
    assert (folder / "checkpoint-3" / "model.safetensors").is_file() == (save == "full")
    shutil.rmtree(folder / "checkpoint-6")  # as if it had been killed after step 3
    for name in ("model.safetensors", "results/train.json"):
        (folder / name).unlink()
    train(load_run_config(path, ["resume=true", *words]))
    whole, parts = tensors(tmp_path / "whole"), tensors(folder)
    assert whole.keys() == parts.keys()
    for name, tensor in whole.items():
        assert torch.equal(parts[name], tensor), name


@pytest.mark.parametrize("has_lora", [False, True])
def test_the_estimate_counts_weights_as_they_are_packed(base, make_causal_yaml, has_lora):
    if "torchao" in base.parent.name or (has_lora and not base.parent.name.startswith(FOUR_BITS)):
        pytest.skip("counted unpacked, or refused")
    run = load_run_config(make_causal_yaml(**(lora(base) if has_lora else {"model": frozen(base)})))
    rows, _ = estimate_step(run, load_base_config(run.model), batch_size=2)
    assert rows == parts(prepare(run)[0].model)


def test_a_given_quantized_model_is_merged_too(four_bits, tmp_path):
    trainer = HarmonicTrainer(
        AutoModelForCausalLM.from_pretrained(four_bits),
        HarmonicTrainingArguments(
            str(tmp_path / "run"),
            h_exp=-8.0,
            unfreeze={"last_blocks": 0},
            max_steps=2,
            report_to=[],
        ),
        train_dataset=Dataset.from_dict({"text": ["w1 w2 w3 w4 w5 w6"] * 20}),
        processing_class=AutoTokenizer.from_pretrained(four_bits),
        peft_config=LoraConfig(r=2, target_modules=["q_proj"]),
    )
    trainer.train()
    trainer.save_model()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "run", trust_remote_code=True)
    attention = loaded.model.backbone.layers[0].self_attn
    assert type(attention.q_proj.weight) is torch.nn.Parameter
    assert is_quantized(attention.v_proj.weight)


def test_what_a_weight_was_packed_with_is_told_apart(four_bits, tmp_path):
    model = HarmonicForCausalLM.from_base(str(four_bits))
    model.model.requires_grad_(False)
    write_manifest(tmp_path, rows_per_step=8, frozen_sha256=frozen_sha256(model))
    check_frozen(model, tmp_path)
    model.model.backbone.layers[1].mlp.up_proj.weight.quant_state.absmax[0] += 1
    with pytest.raises(ValueError, match="resume: expected the frozen weights that"):
        check_frozen(model, tmp_path)


@PEFT_WARNINGS
def test_an_adapter_of_a_quantized_body_is_published_alone(four_bits, make_causal_yaml, tmp_path):
    train(load_run_config(make_causal_yaml(**lora(four_bits))))
    repo = tmp_path / "repo"
    repo.mkdir()
    stage(
        read_trained(tmp_path / "run"),
        repo,
        Destination(repo_id="me/mine", form="peft", license="mit"),
    )
    card = (repo / "README.md").read_text()
    assert "bitsandbytes" in card
    call = re.search(r"```python\n(.*?)tokenizer = ", card, re.S)[1]
    call = call.replace("path/to/base", str(four_bits)).replace("me/mine", str(repo))
    found: dict = {}
    exec(call, found)  # what the card says
    assert is_quantized(found["model"].model.model.backbone.layers[0].mlp.down_proj.weight)
    whole = HarmonicForCausalLM.from_pretrained(tmp_path / "run")
    with torch.no_grad():
        logits = [model.eval()(ROWS).logits for model in (found["model"], whole)]
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_packed_weights_are_not_cast(base, dtype):
    packed = tensors(base)
    model = HarmonicForCausalLM.from_base(str(base), dtype=dtype)
    assert model.get_input_embeddings().weight.dtype == dtype
    state = model.hf_quantizer.get_state_dict_and_metadata(model.model.backbone)[0]
    state = model.model.backbone.state_dict() if state is None else state
    for name, tensor in state.items():
        kept = packed[f"model.{name}"]
        plain = "norm" in name or "embed" in name
        assert torch.equal(tensor, kept.to(dtype) if plain else kept), name


def test_bitsandbytes_still_saves_other_statistics_after_a_pass_on_some_cpus(four_bits):
    """When this fails, `settle_quantized_` need not turn the packing off any more."""
    model = AutoModelForCausalLM.from_pretrained(four_bits).eval()
    layer = model.model.layers[0].mlp.up_proj
    if not layer.support_avx512bf16_for_cpu:
        pytest.skip("needs a CPU with AVX512-BF16")
    before = layer.state_dict()["weight.absmax"].clone()
    with torch.no_grad():
        model(ROWS)
    assert not torch.equal(layer.state_dict()["weight.absmax"], before)


def test_transformers_still_cannot_save_what_it_has_unpacked(four_bits, tmp_path):
    """When this fails, our `dequantize` need not remove `_weight_conversions` any more."""
    model = AutoModelForCausalLM.from_pretrained(four_bits).dequantize()
    with pytest.raises(NotImplementedError):
        model.save_pretrained(tmp_path)


@pytest.fixture
def qlora(four_bits, tmp_path):
    """A 4-bit body with LoRA and a head that trained for 8 steps; the model and its folder."""
    torch.manual_seed(0)
    start = HarmonicForCausalLM.from_base(str(four_bits), head={"name": "dist", "h_exp": -6.0})
    start.save_pretrained(tmp_path / "start")
    model = HarmonicForCausalLM.from_pretrained(tmp_path / "start")
    settings = LoraConfig(
        r=4,
        target_modules=["q_proj", "v_proj"],
        modules_to_save=["dist_head"],
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(model, settings).train()
    packed = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(8):
        loss = model(input_ids=ROWS, labels=ROWS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad or torch.equal(parameter, packed[name]), name
    model.save_pretrained(tmp_path / "adapter")
    return model.eval(), tmp_path


@PEFT_WARNINGS
@torch.no_grad()
def test_qlora_trains_and_loads_again(qlora):
    model, folder = qlora
    head = model.get_base_model().dist_head.modules_to_save.default
    assert head.weight.dtype == torch.float32
    loaded = PeftModel.from_pretrained(
        HarmonicForCausalLM.from_pretrained(folder / "start"), folder / "adapter"
    ).eval()
    assert torch.equal(loaded(ROWS).logits, model(ROWS).logits)


@PEFT_WARNINGS
@torch.no_grad()
def test_qlora_is_merged_without_loss_into_a_body_that_is_unpacked(qlora):
    model, folder = qlora
    body = HarmonicForCausalLM.from_pretrained(folder / "start").dequantize()
    merged = PeftModel.from_pretrained(body, folder / "adapter").merge_and_unload().eval()
    expected = model(ROWS).logits
    torch.testing.assert_close(merged(ROWS).logits, expected, atol=1e-4, rtol=1e-4)
    merged.save_pretrained(folder / "merged")
    loaded = HarmonicForCausalLM.from_pretrained(folder / "merged")
    assert torch.equal(loaded(ROWS).logits, merged(ROWS).logits)
    assert not any(is_quantized(parameter) for parameter in loaded.parameters())


@PEFT_WARNINGS
@torch.no_grad()
def test_qlora_merged_into_packed_weights_is_rounded(qlora):
    model, _ = qlora
    expected = model(ROWS).logits
    merged = model.merge_and_unload()
    difference = (merged(ROWS).logits - expected).abs().max()
    assert difference > 1e-2
