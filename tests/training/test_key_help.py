"""Every key of the file has an explanation that can be asked for."""

import dataclasses

import pytest
from transformers import TrainingArguments

from harmonic_sft.losses import LOSSES
from harmonic_sft.models import HEADS
from harmonic_sft.training.key_help import _root, explain
from harmonic_sft.training.training_section import REFUSED
from tests.test_docs import FENCE, ROOT


def all_keys(key, name=""):
    yield name, key
    for step, inner in key.below.items():
        yield from all_keys(inner, f"{name}.{step}".lstrip("."))


def test_every_key_has_an_explanation_of_lines_that_fit():
    for name, key in all_keys(_root()):
        assert key.text, name
        assert all(len(line) <= 80 for line in explain(name).splitlines()), name
        assert key.kind != "null", name


def test_the_head_of_the_guide_is_explained_as_the_others_are(monkeypatch):
    blocks = FENCE.findall((ROOT / "docs" / "heads_and_losses.md").read_text())
    (code,) = (code for language, code in blocks if "class ScaledLinearHead" in code)
    exec(code, found := {})
    monkeypatch.setitem(HEADS, "scaled_linear", found["ScaledLinearHead"])
    test_every_key_has_an_explanation_of_lines_that_fit()
    assert "Multiplies" in explain("head.scaled_linear.scale")


def test_sections_heads_and_losses_are_there():
    keys = dict(all_keys(_root()))
    assert {f"head.{name}" for name in HEADS} | {f"loss.{name}" for name in LOSSES} <= set(keys)
    assert {"data.sources.path", "model.unfreeze.last_blocks", "hub.push", "resume"} <= set(keys)
    assert "head.dist.h_exp" not in keys  # the section h_exp decides
    refused = {key for names in REFUSED.values() for key in names}
    known = {field.name for field in dataclasses.fields(TrainingArguments)} - refused
    assert {name for name in known if f"training.{name}" not in keys} <= {"deprecated"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("head.dist.eps", "squared units of the hidden states. (number; default 1e-06)"),
        ("training.learning_rate", "(number; default 0.0002)"),
        ("training.lr_scheduler_type", "(text; default warmup_stable_decay)"),
        ("data.mask.policy", "(one of mask_only, 80_10_10; default mask_only)"),
        ("data.sources.0.path", "owner/name on the Hub"),
        ("loss.wasserstein.top_k", "(whole number or null; default null)"),
        ("h_exp", "dist heads: a number holds it, {start, end} moves it"),
        ("data", "The documents, how rows are made of them"),
        ("head", "{name: dist, ...}; `harmonic-sft config head.dist` explains its keys."),
        ("h_exp.end", "h_exp after the last step (number)"),  # has to be given
    ],
)
def test_a_key_is_explained_with_its_type_and_default(name, text):
    assert text in " ".join(explain(name).split())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("modle", "config: expected one of the known keys, got 'modle'. Did you mean 'model'"),
        ("max_steps", "config: expected .* got 'max_steps'. Did you mean 'training.max_steps'"),
        ("resume.xyz", "resume: expected one of the known keys, got 'xyz'$"),
    ],
)
def test_an_unknown_key_names_the_nearest(name, message):
    with pytest.raises(ValueError, match=message):
        explain(name)


def test_a_key_that_no_run_can_have_says_why():
    for reason, keys in REFUSED.items():
        for key in keys:
            with pytest.raises(ValueError, match=f"^training.{key}: expected nothing") as error:
                explain(f"training.{key}")
            assert str(error.value).endswith(reason)
