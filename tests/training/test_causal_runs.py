"""Runs of decoders: by plan, with LoRA, in full and from scratch; calibrated and distilled."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from harmonic_sft.hub import Destination, read_trained, stage
from harmonic_sft.hub.linear_export import export_linear
from harmonic_sft.hub.staging import check_completed, check_form
from harmonic_sft.models import BLOCKS_FILE, HarmonicForCausalLM
from harmonic_sft.training.evaluation import evaluate_folder
from harmonic_sft.training.head_swap import measure_swap
from harmonic_sft.training.loading import load_run_data, on_the_right, with_padding
from harmonic_sft.training.run import prepare, train
from harmonic_sft.training.run_config import load_run_config
from tests.decoders import SIZES, V, save_decoder, save_tokenizer
from tests.training.conftest import prepared, start

RECIPES = {
    "plan": {},
    "lora": {"peft": {"r": 2}, "model": {"unfreeze": {"last_blocks": 0}}},
    "scratch": {"model": {"unfreeze": {"patterns": ["*"]}, "from_scratch": True}},
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_learns_and_can_be_loaded(make_causal_yaml, tmp_path, recipe):
    results = start(make_causal_yaml(**RECIPES[recipe], h_exp=-8.0))
    assert results["final"]["loss"] < results["before"]["loss"]
    assert ("old_head" in results["swap"]) == (recipe != "scratch")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    assert type(model) is HarmonicForCausalLM
    stops = model.generation_config.eos_token_id
    assert stops in (2, [2], [2, 2])  # transformers before 5.18 writes a list
    assert "use_cache" not in json.loads((tmp_path / "run" / "config.json").read_text())
    evaluated = evaluate_folder(tmp_path / "run")
    assert evaluated["final"]["loss"] == pytest.approx(results["final"]["loss"], rel=1e-5)
    tokens = model.generate(torch.tensor([[5, 6]]), max_new_tokens=3, min_new_tokens=3)
    assert tokens.shape == (1, 5)


def test_a_decoder_that_is_made_again_has_the_same_special_tokens(make_causal_yaml, tmp_path):
    path, run = make_causal_yaml(), tmp_path / "run"
    start(path)
    configs = ("config.json", "generation_config.json")
    whole = [(run / name).read_bytes() for name in configs]
    (run / "model.safetensors").unlink()
    start(path, "resume=true")
    assert [(run / name).read_bytes() for name in configs] == whole


def test_lora_of_gpt2_has_transposed_layers(tmp_path, make_causal_yaml):
    folder = save_decoder("gpt2", tmp_path / "gpt2")
    save_tokenizer(folder)
    section = {"base": str(folder), "unfreeze": {"last_blocks": 0}}
    results = start(make_causal_yaml(model=section, peft={"r": 2}, h_exp=-8.0))
    assert results["final"]["loss"] < results["before"]["loss"]
    evaluated = evaluate_folder(tmp_path / "run")  # of the merged weights
    assert evaluated["final"]["loss"] == pytest.approx(results["final"]["loss"], rel=1e-5)
    adapter = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert adapter["fan_in_fan_out"] is True
    assert any(name.endswith("attn.c_attn") for name in adapter["target_modules"])


def test_the_old_head_is_measured_as_transformers_measures_it(causal_base, make_causal_yaml):
    run = load_run_config(make_causal_yaml())
    results = train(run)
    native = AutoModelForCausalLM.from_pretrained(causal_base).eval()
    _, data = load_run_data(run)
    batch = data.collator([data.eval[index] for index in range(len(data.eval))])
    with torch.no_grad():
        expected = native(**batch).loss.item()
    assert results["swap"]["old_head"]["loss"] == pytest.approx(expected, rel=1e-5)


def test_calibration_lowers_the_start_moves_both_ends_and_is_remembered(make_causal_yaml, tmp_path):
    head = {"name": "dist", "unit_sphere": False}
    path = make_causal_yaml(h_exp={"start": -12.0, "end": -4.0, "calibrate": True}, head=head)
    results = start(path)
    swap, before = results["swap"], results["before"]
    assert set(swap) == {"old_head", "swapped"}
    assert swap["swapped"]["post_hoc_loss"] == pytest.approx(before["post_hoc_loss"], rel=0.05)
    assert before["loss"] < swap["swapped"]["loss"]
    assert swap["swapped"]["h_exp"] == -12
    assert before["h_exp"] == pytest.approx(results["calibration"]["h_exp"])
    assert results["final"]["h_exp"] == pytest.approx(before["h_exp"] / 3)
    logged = [row["h_exp"] for row in results["history"] if "h_exp" in row]
    assert logged[0] == pytest.approx(before["h_exp"])
    # As if it had been killed after step 3: what came later is gone.
    folder = tmp_path / "run"
    shutil.rmtree(folder / "checkpoint-6")
    for name in ("model.safetensors", "results/train.json"):
        (folder / name).unlink()
    again = start(path, "resume=true")
    assert again["final"] == results["final"]
    assert again["calibration"] == results["calibration"]


@pytest.mark.parametrize("name", ["wasserstein", "distill"])
def test_a_calibrated_length_reaches_fixed_ground_and_no_teacher(make_causal_yaml, name):
    path = make_causal_yaml(
        h_exp={"start": -12.0, "end": -12.0, "calibrate": True},
        head={"name": "dist", "unit_sphere": False},
        loss={"name": name} | ({"ground": "fixed"} if name == "wasserstein" else {}),
    )
    trainer, data = prepare(load_run_config(path))
    model = trainer.model
    before = model.loss_fn
    _, fit = measure_swap(trainer, data)
    assert fit["scale"] != 1
    if name == "wasserstein":
        assert torch.equal(model.loss_fn.fixed, model.dist_head.weight)
    else:
        assert model.loss_fn is before


def test_distillation_is_annealed_over_its_share(make_causal_yaml, monkeypatch):
    trainer = prepared(make_causal_yaml(loss={"name": "distill", "until": 0.5}))
    seen, kind = [], type(trainer.model.loss_fn)
    call = kind.__call__
    monkeypatch.setattr(kind, "__call__", lambda s, *args: seen.append(s.weight) or call(s, *args))
    trainer.train()
    assert seen == pytest.approx([1, 2 / 3, 1 / 3, 0, 0, 0])


@pytest.mark.parametrize("recipe", ["plan", "lora"])
def test_the_teacher_stays_the_base(causal_base, make_causal_yaml, recipe):
    loss = {"name": "distill", "until": 1.0}
    trainer = prepared(make_causal_yaml(**RECIPES[recipe], loss=loss))
    model = trainer.model
    trainer.train()
    input_ids = torch.tensor([[5, 6, 7, 8]])
    model.loss_fn.anneal(0.0)
    model.loss_fn.read({"input_ids": input_ids, "labels": input_ids})
    native = AutoModelForCausalLM.from_pretrained(causal_base).eval().model
    with torch.no_grad():
        expected = native(input_ids).last_hidden_state[0, :-1]
        moved = model.model(input_ids=input_ids).last_hidden_state[0, :-1]
    torch.testing.assert_close(model.loss_fn._states, expected)
    assert (moved - expected).abs().max() > 1e-4
    # What is frozen exists once.
    own = {id(p) for p in model.model.parameters() if not p.requires_grad}
    assert own <= {id(p) for p in model.loss_fn.body.parameters()}
    assert not any(name.startswith("loss_fn") for name in model.state_dict())


def test_a_frozen_body_is_not_read_twice(make_causal_yaml):
    section = {"unfreeze": {"last_blocks": 0}}
    trainer = prepared(make_causal_yaml(model=section, loss={"name": "distill"}))
    assert trainer.model.loss_fn.body is None
    assert trainer.train().global_step == 6


def test_tokens_that_only_the_tokenizer_has(make_causal_yaml, tmp_path):
    folder = save_decoder("llama", tmp_path / "base")
    save_tokenizer(folder, extra=4)
    run = load_run_config(make_causal_yaml(model={"base": str(folder)}))
    results = train(run)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    assert model.dist_head.weight.shape[0] == V + 4
    assert results["swap"] == {}  # another vocabulary
    distill = make_causal_yaml("distill", model={"base": str(folder)}, loss={"name": "distill"})
    with pytest.raises(ValueError, match=f"tokenizer with the base's own {V} tokens, got one"):
        start(distill)
    with pytest.raises(ValueError, match=r"--form head: expected the base's vocabulary"):
        check_form(model.config, "head", False)


def test_a_tokenizer_without_pad_and_eos_is_refused(tmp_path):
    save_tokenizer(tmp_path, eos=None)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="expected a pad token or an eos token, got neither"):
        with_padding(tokenizer, "causal_lm")


@pytest.mark.parametrize(
    ("task", "side"), [("sequence_classification", "right"), ("causal_lm", "left")]
)
def test_a_tokenizer_pads_and_cuts_as_training_does(tmp_path, task, side):
    save_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, padding_side="left", truncation_side="left")
    settled = on_the_right(tokenizer, task)
    assert settled.padding_side == settled.truncation_side == side


@pytest.fixture
def exported(tmp_path):
    """Export a model, and load it with the classes of transformers."""

    def load(model, **options):
        model.save_pretrained(tmp_path / "model")
        export_linear(tmp_path / "model", tmp_path / "plain")
        return AutoModelForCausalLM.from_pretrained(tmp_path / "plain", **options).eval()

    return load


@pytest.mark.parametrize("head", [{"name": "dist"}, {"name": "linear", "bias": False}])
def test_the_export_is_an_ordinary_checkpoint_that_decodes_alike(
    causal_base, tmp_path, exported, head
):
    model = HarmonicForCausalLM.from_base(str(causal_base), head=head)
    native = exported(model)
    assert type(native).__name__ == "LlamaForCausalLM"
    assert not list((tmp_path / "plain").glob("*.py"))
    rows = torch.randint(3, V, (4, 9), generator=torch.Generator().manual_seed(0))
    options = {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(native.generate(rows, **options), model.generate(rows, **options))
    with torch.no_grad():
        order = model(input_ids=rows).logits.argsort(-1)
        assert (order == native(rows).logits.argsort(-1)).float().mean() > 0.99


def test_the_export_of_a_decoder_that_derives_its_factor_has_none(tmp_path, exported):
    pytest.importorskip("transformers.models.minicpm3")  # of later versions
    ranks = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
    own = {**SIZES, **ranks, "num_key_value_heads": 4, "v_head_dim": 8, "dim_model_base": 16}
    config = CONFIG_MAPPING["minicpm3"](**own)
    assert config.logits_scaling == 2
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    head = {"name": "linear", "bias": False}
    model = HarmonicForCausalLM.from_base(str(tmp_path / "base"), head=head)
    native = exported(model)
    assert native.config.logits_scaling == 1
    rows = torch.randint(3, V, (2, 9), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(native(rows).logits, model(input_ids=rows).logits)


def test_a_16_bit_export_says_that_it_is_rounded(causal_base, tmp_path, exported):
    model = HarmonicForCausalLM.from_base(str(causal_base), dtype=torch.bfloat16)
    assert exported(model, dtype="auto").dtype == torch.bfloat16
    assert "rounded to bfloat16" in (tmp_path / "plain" / "README.md").read_text()


def test_a_head_with_a_bias_has_no_ordinary_place(causal_base, tmp_path, exported):
    head = {"name": "dist", "unit_sphere": False}
    model = HarmonicForCausalLM.from_base(str(causal_base), head=head)
    with pytest.raises(ValueError, match="LlamaForCausalLM has no place for it"):
        exported(model)
    assert not (tmp_path / "plain").exists()


def test_experts_are_resumed_and_published_to_the_bit(
    tmp_path, arguments, make, texts, monkeypatch
):
    """transformers saves them under names that its trainer does not know."""
    experts = {"moe_intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 2}
    config = Qwen3MoeConfig(**{**SIZES, "vocab_size": 600}, **experts)

    def trainer():
        torch.manual_seed(0)
        args = arguments("moe", max_steps=4, save_strategy="steps", save_steps=2, h_exp=-6.0)
        return make(args, model=Qwen3MoeForCausalLM(config), eval_dataset=texts.select(range(9)))

    whole = trainer()
    whole.train()
    shutil.rmtree(tmp_path / "moe" / "checkpoint-4")
    again = trainer()
    again.train(resume_from_checkpoint=True)
    weights = (dict(one.model.named_parameters()) for one in (whole, again))
    torch.testing.assert_close(*weights, rtol=0, atol=0)
    finished = trainer()
    finished.train(resume_from_checkpoint=True)
    assert finished.evaluate()["eval_loss"] == whole.evaluate()["eval_loss"]
    finished.save_model()
    published = read_trained(tmp_path / "moe")
    published.config.base_model, published.config.base_revision = "me/base", "a" * 40
    (tmp_path / "head").mkdir()
    stage(
        published, tmp_path / "head", Destination(repo_id="me/experts", form="head", license="mit")
    )
    blocks, state = load_file(tmp_path / "head" / BLOCKS_FILE), finished.model.state_dict()
    assert blocks.keys() == {n for n in published.config.trained_parameters if "dist_head" not in n}
    assert any("experts" in name for name in blocks)
    assert all(torch.equal(value, state[name]) for name, value in blocks.items())
    frozen = next(name for name in state if "experts" in name and name not in blocks)
    completed = {name: value for name, value in state.items() if name.startswith("model.")}
    monkeypatch.setattr("harmonic_sft.hub.staging.base_state_dict", lambda *_: completed)
    monkeypatch.setattr("harmonic_sft.hub.staging.save_file", None)  # a body may have gigabytes
    check_completed(published, "head")
    completed[frozen] = completed[frozen] + 1
    with pytest.raises(ValueError, match=f"got another {frozen}, which was changed before"):
        check_completed(published, "head")
