"""Checkpoints of trained parts alone, completed from a base in the Hub's cache."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM

from harmonic_sft.models import (
    BLOCKS_FILE,
    HEAD_FILE,
    HarmonicConfig,
    HarmonicForCausalLM,
    HarmonicForMaskedLM,
    HarmonicModel,
)
from tests.decoders import save_decoder
from tests.encoders import save_encoder
from tests.head_variants import VARIANTS
from tests.saved_models import change_json, change_weights, spoil_embeddings, write_partial

INPUTS = torch.arange(5, 17).view(2, 6)


def train_last_block(model):
    """Stand in for training: move the last block and the head, in the block's own precision."""
    torch.manual_seed(1)
    last = f".{model.config.text_config.num_hidden_layers - 1}."
    names = [n for n, _ in model.named_parameters() if last in n or n.startswith("dist_head")]
    with torch.no_grad():
        for name in names:
            parameter = model.get_parameter(name)
            parameter.data = (parameter + 0.1 * torch.randn(parameter.shape)).float()
    if model.config.dtype == torch.bfloat16:
        prefix = "model.backbone."
        blocks = [n.removeprefix(prefix) for n in names if n.startswith(prefix)]
        model.config.float32_modules = blocks
    model.config.trained_parameters = names
    return model


@torch.no_grad()
def assert_same(found, expected):
    """The same weights, in the same precision, with the same logits."""
    weights = found.state_dict()
    for name, tensor in expected.state_dict().items():
        assert weights[name].dtype == tensor.dtype, name
        assert torch.equal(weights[name], tensor), name
    assert torch.equal(found(INPUTS).logits, expected(INPUTS).logits)


@pytest.fixture
def make_pair(tmp_path, bases, cache_repo):
    """A trained model saved in full and in part, over a base in the cache."""

    def make(family="bert", dtype=torch.float32, head=None):
        base = tmp_path / "base"
        if family == "ours":  # with a bfloat16 body
            ours = HarmonicForMaskedLM.from_base(str(bases / "bert"), dtype=torch.bfloat16)
            ours.save_pretrained(base)
        else:
            shutil.copytree(bases / family, base)
        commit = cache_repo("me/base", base)
        model = HarmonicForMaskedLM.from_base("me/base", dtype=dtype, head=head)
        assert model.config.base_revision == commit
        train_last_block(model).save_pretrained(tmp_path / "full")
        write_partial(tmp_path / "full", tmp_path / "part")
        return tmp_path / "full", tmp_path / "part"

    return make


@pytest.mark.parametrize(
    ("family", "dtype", "head"),
    [
        ("bert", torch.bfloat16, "rotation of multi_head"),
        ("neobert", torch.float32, "dist"),
        ("ours", torch.bfloat16, "dist"),
    ],
)
def test_a_completed_model_equals_the_full_one(make_pair, family, dtype, head):
    full, part = make_pair(family, dtype, VARIANTS[head])
    expected = HarmonicForMaskedLM.from_pretrained(full)
    found = HarmonicForMaskedLM.from_pretrained(part)
    assert_same(found, expected)
    assert found.name_or_path == str(part)
    assert not found.training
    body = HarmonicModel.from_pretrained(part)
    with torch.no_grad():
        states = [model(INPUTS).last_hidden_state for model in (body, expected.model)]
    assert torch.equal(*states)


def test_a_decoder_generates_as_the_full_one_does(tmp_path, cache_repo):
    cache_repo("me/base", save_decoder("llama", tmp_path / "base"))
    model = train_last_block(HarmonicForCausalLM.from_base("me/base"))
    model.generation_config.repetition_penalty = 1.7
    model.save_pretrained(tmp_path / "full")
    write_partial(tmp_path / "full", tmp_path / "part")
    full, part = (HarmonicForCausalLM.from_pretrained(tmp_path / f) for f in ("full", "part"))
    assert part.generation_config.to_dict() == full.generation_config.to_dict()
    assert part.generation_config.repetition_penalty == 1.7
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    assert torch.equal(full.generate(INPUTS, **options), part.generate(INPUTS, **options))
    (tmp_path / "part" / "generation_config.json").unlink()
    part = HarmonicForCausalLM.from_pretrained(tmp_path / "part")
    assert part.generation_config.repetition_penalty != 1.7


def test_a_weight_that_blocks_share_is_completed_under_each_of_its_names(tmp_path, cache_repo):
    options = {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2}
    options["use_mamba_kernels"] = False  # transformers 5.10 would refuse a CPU
    cache_repo("me/base", save_decoder("zamba", tmp_path / "base", **options))
    model = HarmonicForCausalLM.from_base("me/base")
    shared = "layers.1.shared_transf.feed_forward.up_proj.weight"
    model.config.trained_parameters = ["dist_head.weight", f"model.backbone.{shared}"]
    with torch.no_grad():
        model.model.backbone.get_parameter(shared).add_(1)
    model.save_pretrained(tmp_path / "full")
    write_partial(tmp_path / "full", tmp_path / "part")
    assert_same(HarmonicForCausalLM.from_pretrained(tmp_path / "part"), model.eval())


def test_options_of_from_pretrained_are_honored(make_pair):
    full, part = make_pair()
    options = {"dtype": torch.bfloat16, "device_map": "cpu", "attn_implementation": "eager"}
    expected, found = (HarmonicForMaskedLM.from_pretrained(f, **options) for f in (full, part))
    assert {p.dtype for p in found.model.parameters()} == {torch.bfloat16}
    assert found.dist_head.weight.dtype == torch.float32
    assert found.model.backbone.config._attn_implementation == "eager"
    assert_same(found, expected)
    model, report = HarmonicForMaskedLM.from_pretrained(part, output_loading_info=True)
    assert isinstance(model, HarmonicForMaskedLM)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("bert", torch.float32), ("bert", torch.float16), ("neobert", torch.bfloat16)],
)
def test_another_dtype_gives_what_the_full_one_gives(make_pair, family, dtype):
    full, part = make_pair(family, torch.bfloat16)
    expected, found = (
        AutoModelForMaskedLM.from_pretrained(folder, dtype=dtype) for folder in (full, part)
    )
    assert_same(found, expected)


@pytest.mark.parametrize("form", ["full", "part"])
def test_fields_of_the_configuration_can_be_changed(make_pair, form):
    folder = dict(zip(("full", "part"), make_pair(), strict=True))[form]
    head = {"name": "dist", "h_exp": -3.0}
    model = HarmonicForMaskedLM.from_pretrained(folder, head=head, output_hidden_states=True)
    assert model.h_exp == -3.0
    assert model.config.output_hidden_states
    assert HarmonicForMaskedLM.from_pretrained(folder, state_dict=None).h_exp == -12.0


def test_saved_again_it_is_a_whole_checkpoint(make_pair, tmp_path):
    _, part = make_pair()
    model = HarmonicForMaskedLM.from_pretrained(part)
    model.save_pretrained(tmp_path / "again")
    assert not HarmonicConfig.from_pretrained(tmp_path / "again").partial
    saved = load_file(tmp_path / "again" / "model.safetensors")
    assert saved.keys() == model.state_dict().keys()
    shutil.rmtree(Path(os.environ["HF_HUB_CACHE"]) / "models--me--base")  # no longer needed
    assert_same(HarmonicForMaskedLM.from_pretrained(tmp_path / "again"), model)


def test_only_the_head_may_have_been_trained(make_pair, tmp_path):
    full, _ = make_pair(head={"name": "dist"})
    change_json(full / "config.json", trained_parameters=["dist_head.weight"])
    write_partial(full, tmp_path / "head_only")
    assert not (tmp_path / "head_only" / "trained_blocks.safetensors").exists()
    model = HarmonicForMaskedLM.from_pretrained(tmp_path / "head_only")
    head = load_file(full / "model.safetensors")["dist_head.weight"]
    assert torch.equal(model.dist_head.weight, head)
    base = HarmonicForMaskedLM.from_base("me/base")
    for name, tensor in base.model.state_dict().items():
        assert torch.equal(model.model.state_dict()[name], tensor), name


def test_a_base_at_another_revision_is_refused(make_pair):
    _, part = make_pair()
    change_json(part / "config.json", base_revision="f" * 40)
    with pytest.raises(ValueError, match=f"expected me/base at revision {'f' * 40}.*got an error"):
        HarmonicForMaskedLM.from_pretrained(part)


def test_a_base_of_another_shape_is_refused(make_pair, tmp_path, cache_repo):
    _, part = make_pair()
    shutil.rmtree(Path(os.environ["HF_HUB_CACHE"]) / "models--me--base")
    other = save_encoder("bert", tmp_path / "other", intermediate_size=64)
    commit = cache_repo("me/base", other)
    change_json(part / "config.json", base_revision=commit)
    with pytest.raises(ValueError, match="of another shape"):
        HarmonicForMaskedLM.from_pretrained(part)


def test_a_checkpoint_without_all_trained_weights_is_refused(make_pair):
    _, part = make_pair()
    (part / "trained_blocks.safetensors").unlink()
    with pytest.raises(ValueError, match="expected weights of all trained parameters, got no"):
        HarmonicForMaskedLM.from_pretrained(part)


def test_a_base_is_a_name_on_the_hub_at_a_commit(make_pair, tmp_path, monkeypatch):
    """Else a repo on the Hub could have a folder of this machine loaded."""
    _, part = make_pair()
    commit = json.loads((part / "config.json").read_text())["base_revision"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "me").mkdir()
    shutil.copytree(tmp_path / "base", tmp_path / "me" / "local")
    named = [(str(tmp_path / "base"), commit), ("./base", commit), ("me/local", commit)]
    named += [("base", commit), ("me/base", None), ("me/base", "main"), (None, commit)]
    for base, revision in named:
        change_json(part / "config.json", base_model=base, base_revision=revision)
        message = "base_model: expected a name on the Hub at a commit"
        if base in ("me/local", "base") and revision == commit:  # names, which folders here hide
            message = f"base: expected {base} on the Hub, got '{tmp_path / base}' of this machine"
        with pytest.raises(ValueError, match=message):
            HarmonicForMaskedLM.from_pretrained(part)


def test_a_repo_that_names_itself_as_base_is_one_error(make_pair, cache_repo):
    _, part = make_pair()
    commit = f"{len(os.listdir(os.environ['HF_HUB_CACHE'])) + 1:040x}"
    change_json(part / "config.json", base_model="me/part", base_revision=commit)
    assert cache_repo("me/part", part) == commit
    with pytest.raises(ValueError, match="me/part: expected another repo as base, got itself"):
        HarmonicForMaskedLM.from_pretrained("me/part")


@pytest.mark.parametrize("is_partial", [False, True])
def test_prototypes_that_predict_nothing_are_reported(make_pair, caplog, is_partial):
    folder = make_pair()[is_partial]
    path = folder / ("dist_head.safetensors" if is_partial else "model.safetensors")
    change_weights(path, lambda weights: weights["dist_head.inner.weight"].fill_(0.1))
    HarmonicForMaskedLM.from_pretrained(folder)
    (message,) = [text for text in caplog.messages if "prototypes" in text]
    assert message.startswith(f"{folder}: all prototypes are equal")


def test_weights_that_are_not_finite_are_reported(make_pair, caplog):
    folder, _ = make_pair()
    name = spoil_embeddings(folder / "model.safetensors")
    HarmonicForMaskedLM.from_pretrained(folder)
    HarmonicModel.from_pretrained(folder)
    message = "{}: {} is not finite. Its predictions mean nothing."
    names = (name, name.removeprefix("model."))
    assert [text for text in caplog.messages if "finite" in text] == [
        message.format(folder, own) for own in names
    ]


def test_a_whole_model_leaves_no_file_of_a_partial_one(tiny_base, tmp_path):
    for name in (HEAD_FILE, BLOCKS_FILE):
        (tmp_path / name).write_bytes(b"of another training")
    HarmonicForMaskedLM.from_base(str(tiny_base)).save_pretrained(tmp_path)
    assert not [*tmp_path.glob("dist_head*"), *tmp_path.glob("trained_blocks*")]
