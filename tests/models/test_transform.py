"""A head behind the dense layer and the norm that a masked model has before its output layer."""

import shutil
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertForSequenceClassification,
)

from harmonic_sft.models import HarmonicConfig, HarmonicForMaskedLM, TransformHead, base_of
from harmonic_sft.models.backbones import build_backbone
from harmonic_sft.models.bases import PLAIN, TRANSFORMS, has_transform
from tests.encoders import SIZES, SPECIAL, save_encoder

# transformers 5.17 compiles parts of DeBERTa so.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is depre:DeprecationWarning")
BEHIND = {"name": "transform", "inner": {"name": "dist"}}
IDS = torch.arange(12).view(2, 6) + 5
ACTIVATIONS = {"hidden_act": "relu", "activation": "relu", "classifier_activation": "relu"}
OWN = {  # where the sizes of the others, or relu, do not fit
    "convbert": {"embedding_size": 32},
    "electra": {"embedding_size": 32},
    "ibert": {"hidden_act": "gelu"},
    "longformer": {"attention_window": 4},
    "modernbert": SPECIAL,
    "roformer": {"embedding_size": 32},
    "squeezebert": {"embedding_size": 32},
    "xmod": {"default_language": "en_XX"},
}


def move_(model):
    """Bring biases and norms away from where they start."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Make a base of a family."""

    def make(family, **fields):
        folder = tmp_path_factory.mktemp(family) / "base"
        save_encoder(family, folder, **fields)
        model = AutoModelForMaskedLM.from_pretrained(folder)
        move_(model)
        model.save_pretrained(folder)
        return folder

    made = {
        "bert": make("bert", hidden_act="gelu_new"),
        "modernbert": make("modernbert", classifier_activation="silu"),
    }
    return made.__getitem__


@pytest.mark.parametrize("family", [*TRANSFORMS, *PLAIN])
def test_the_own_head_of_every_family_is_one_of_ours(family):
    if family not in CONFIG_MAPPING:
        pytest.skip("newer than this transformers")
    torch.manual_seed(0)
    fields = {**SIZES, "pad_token_id": 0, **ACTIVATIONS, **OWN.get(family, {})}
    model: Any = AutoModelForMaskedLM.from_config(CONFIG_MAPPING[family](**fields)).eval()
    move_(model)
    states = []
    model.base_model.register_forward_hook(lambda module, inputs, output: states.append(output[0]))
    with torch.no_grad():
        expected = model(input_ids=IDS).logits
        base = base_of(model, dtype=torch.float32, is_causal=False)
        found = base.head(states[0].flatten(0, 1)).view_as(expected)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert isinstance(base.head, TransformHead) == (family in TRANSFORMS)
    built = build_backbone(model.config).state_dict()
    assert base.backbone.state_dict().keys() == built.keys()  # no pooler


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("esm", {"pad_token_id": 0, "mask_token_id": 4, "token_dropout": False}),
        ("deberta-v2", {"legacy": False}),  # another output layer
    ],
)
def test_a_head_that_is_not_known_is_left_out_with_a_word(family, fields, tmp_path, caplog):
    save_encoder(family, tmp_path, **fields)
    model = HarmonicForMaskedLM.from_base(tmp_path)
    assert model.config.head["name"] == "dist"
    assert caplog.text.count("ts own head is") == 1
    if family == "esm":  # transformers 5.17 cannot load the other, and the log says that
        assert "its own head is of no kind that is known here, and is left out" in caplog.text
    config = AutoConfig.from_pretrained(tmp_path)
    assert not has_transform(config, config.architectures)
    HarmonicForMaskedLM.from_base(tmp_path, head=BEHIND)
    assert "Those of the head transform are drawn at random" in caplog.text


def test_the_head_of_a_subclass_is_left_out(caplog):
    class SteeperForMaskedLM(BertForMaskedLM):
        def forward(self, *args, **kwargs):
            outputs = super().forward(*args, **kwargs)
            outputs.logits = 3 * outputs.logits
            return outputs

    model = SteeperForMaskedLM(BertConfig(**SIZES))
    assert base_of(model, dtype=torch.float32, is_causal=False).head is None
    assert "its own head is of no kind that is known here" in caplog.text


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_another_head_is_put_behind_the_bases_layers(base, family, tmp_path, caplog):
    model = HarmonicForMaskedLM.from_base(base(family))  # the default
    assert model.config.head["name"] == "transform"
    assert "left out" not in caplog.text
    own = AutoModelForMaskedLM.from_pretrained(base(family))
    output = own.get_output_embeddings()
    seen = []
    output.register_forward_hook(lambda module, inputs, _: seen.append(inputs[0]))
    with torch.no_grad():
        own(input_ids=IDS)
        states = model.model(input_ids=IDS).last_hidden_state
        mapped = model.dist_head.mapped(states.flatten(0, 1))
    torch.testing.assert_close(mapped.view_as(seen[0]), seen[0], rtol=1e-4, atol=1e-5)
    table = own.get_input_embeddings().weight
    torch.testing.assert_close(model.dist_head.prototypes, F.normalize(table, dim=-1))
    assert model.config.head["inner"]["name"] == "dist"
    model.save_pretrained(tmp_path)
    again = HarmonicForMaskedLM.from_pretrained(tmp_path)
    for loaded in (again, HarmonicForMaskedLM.from_base(tmp_path, head=BEHIND)):
        torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_a_base_of_two_tasks_gives_the_one_of_tokens(tmp_path):
    torch.manual_seed(0)
    both = BertForPreTraining(BertConfig(**SIZES)).eval()
    both.save_pretrained(tmp_path)
    model = HarmonicForMaskedLM.from_base(tmp_path, head={"name": "transform"}, init="base_head")
    with torch.no_grad():
        expected = both(input_ids=IDS).prediction_logits
    torch.testing.assert_close(model(input_ids=IDS).logits, expected, rtol=1e-4, atol=1e-5)


def test_without_such_layers_in_the_base_they_are_drawn(bases):
    head = HarmonicForMaskedLM.from_base(bases / "neobert", head=BEHIND).dist_head
    assert head.dense_weight.std().item() == pytest.approx(32**-0.5, rel=0.1)
    assert torch.equal(head.norm_weight, torch.ones(32))


def test_a_loaded_model_is_taken_apart_as_its_checkpoint_is(base):
    given = AutoModelForMaskedLM.from_pretrained(base("bert"), dtype=torch.bfloat16).train()
    found = base_of(given, dtype=torch.bfloat16, is_causal=False).head
    assert found.dense_weight.dtype == torch.float32
    expected = given.cls.predictions.transform.dense.weight.float()
    assert torch.equal(found.dense_weight, expected)


def test_layers_are_looked_for_where_a_checkpoint_has_its_head(base, bases):
    config = AutoConfig.from_pretrained(base("bert"))
    assert has_transform(config, config.architectures)
    assert not has_transform(config, ["BertModel"])
    assert not has_transform(AutoConfig.from_pretrained(bases / "neobert"), ["NeoBERTForMaskedLM"])
    albert = AutoConfig.for_model("albert", embedding_size=16, **SIZES)
    assert not has_transform(albert, ["AlbertForMaskedLM"])  # another width


def test_a_name_that_promises_such_a_head_is_not_enough(tmp_path):
    """ELECTRA's discriminator predicts no tokens; a classifier of ours has another head."""
    config = AutoConfig.for_model("electra", embedding_size=32, **SIZES)
    assert not has_transform(config, ["ElectraForPreTraining"])
    assert has_transform(config, ["ElectraForMaskedLM"])
    ours = HarmonicConfig(text_config=config, head={"name": "transform"})
    assert has_transform(ours, ["HarmonicForMaskedLM"])
    assert not has_transform(ours, ["HarmonicForSequenceClassification"])


def test_a_damaged_head_is_left_out_with_a_word(base, tmp_path, caplog):
    folder = shutil.copytree(base("bert"), tmp_path / "base")
    weights = load_file(folder / "model.safetensors")
    del weights["cls.predictions.transform.LayerNorm.bias"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    HarmonicForMaskedLM.from_base(folder, head={"name": "transform"})
    assert "1 weights missing: cls.predictions.transform.LayerNorm.bias" in caplog.text
    assert "Its own head is left out" in caplog.text
    assert "Those of the head transform are drawn at random" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation": "relu"}, "head activation: expected 'gelu_new', as the base was trained"),
        ({"norm_bias": False}, "head norm_bias: expected True, as the base was trained"),
        ({"iner": {"name": "dist"}}, "head transform: expected its own fields"),
    ],
)
def test_fields_that_the_base_decides_are_not_dropped_in_silence(base, changes, message):
    head = {"name": "transform", **changes}
    with pytest.raises(ValueError, match=message):
        HarmonicForMaskedLM.from_base(base("bert"), head=head)


def test_the_bases_own_head_is_of_the_same_kind_within(base):
    with pytest.raises(ValueError, match=r"init base_head: expected base .* to have a head like"):
        HarmonicForMaskedLM.from_base(base("bert"), head=BEHIND, init="base_head")


def test_a_given_model_keeps_its_parts_and_the_generator_its_state():
    classifier = BertForSequenceClassification(BertConfig(**SIZES))
    base_of(classifier, dtype=torch.float32, is_causal=False)
    assert classifier(input_ids=IDS).logits.shape == (2, 2)
    masked = BertForMaskedLM(BertConfig(**SIZES))
    state = torch.get_rng_state()
    assert base_of(masked, dtype=torch.float32, is_causal=False).head is not None
    assert torch.equal(torch.get_rng_state(), state)


def test_an_unknown_activation_or_an_eps_below_0_is_refused():
    with pytest.raises(ValueError, match=r"^transform norm_eps: expected 0 or more, got -1\.0$"):
        TransformHead(4, 9, norm_eps=-1.0)
    with pytest.raises(ValueError, match=r"^transform activation: expected one of .*, got 'glu'$"):
        TransformHead(4, 9, activation="glu")
