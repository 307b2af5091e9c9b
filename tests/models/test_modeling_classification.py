"""Classifiers of texts and words: what the head sees, losses, saving, loading elsewhere."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    BertForMaskedLM,
    BertTokenizer,
)

from harmonic_sft.models import (
    HarmonicConfig,
    HarmonicForMaskedLM,
    HarmonicForSequenceClassification,
    HarmonicForTokenClassification,
    HarmonicModel,
    NeoBERTConfig,
    NeoBERTForMaskedLM,
)

V = 40
LABELS = ["cat", "dog", "eel"]
SIZES = {
    "vocab_size": V,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
}
TASKS = {
    "sequence": HarmonicForSequenceClassification,
    "token": HarmonicForTokenClassification,
}
HEADS = {"dist": {"name": "dist", "h_exp": -3.0}, "linear": {"name": "linear"}}


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("classifier_base")
    torch.manual_seed(0)
    BertForMaskedLM(BertConfig(**SIZES)).save_pretrained(folder)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocab = folder / "vocab.txt"
    vocab.write_text("\n".join(words + [f"w{i}" for i in range(V - len(words))]))
    BertTokenizer(vocab=str(vocab)).save_pretrained(folder)
    return str(folder)


def make(base, task="sequence", head="dist", **options):
    torch.manual_seed(1)
    return TASKS[task].from_base(base, labels=LABELS, head=HEADS[head], **options)


def batch(*, left=False):
    input_ids = torch.randint(5, V, (3, 8), generator=torch.Generator().manual_seed(0))
    attention_mask = torch.ones_like(input_ids)
    attention_mask[1, : 3 if left else None] = 0 if left else 1
    if not left:
        attention_mask[1, 5:] = 0
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def test_the_head_sees_the_mean_over_attended_tokens(base):
    model, inputs = make(base), batch()
    states = model.model(**inputs).last_hidden_state.double()
    expected = torch.stack(
        [
            sum(states[row, place] for place in range(length)) / length
            for row, length in enumerate((8, 5, 8))
        ]
    )
    seen = model.select(states.float(), inputs["attention_mask"])
    torch.testing.assert_close(seen.double(), expected.unsqueeze(1), atol=1e-6, rtol=1e-5)
    expected_logits = model.dist_head(seen.squeeze(1))
    assert torch.equal(model(**inputs).logits, expected_logits)
    everything = model.select(states, None)
    torch.testing.assert_close(everything.squeeze(1), states.mean(1))


def test_the_first_token_is_the_first_attended_one(base):
    model, inputs = make(base, pooling="cls"), batch(left=True)
    states = model.model(**inputs).last_hidden_state
    seen = model.select(states, inputs["attention_mask"]).squeeze(1)
    assert torch.equal(seen, torch.stack([states[0, 0], states[1, 3], states[2, 0]]))
    assert model.config.pooling == "cls"


def test_padding_changes_nothing(base):
    model, inputs = make(base).eval(), batch()
    alone = {key: value[1:2, :5] for key, value in inputs.items()}
    torch.testing.assert_close(model(**inputs).logits[1:2], model(**alone).logits)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("task", TASKS)
def test_the_loss_is_the_cross_entropy_of_the_logits(base, task, head):
    model, inputs = make(base, task, head), batch()
    shape = (3,) if task == "sequence" else (3, 8)
    labels = torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(2))
    labels[0] = -100
    output = model(**inputs, labels=labels)
    assert output.logits.shape == (*shape, 3)
    scored = labels != -100
    expected = torch.nn.functional.cross_entropy(output.logits[scored], labels[scored])
    torch.testing.assert_close(output.loss, expected, rtol=1e-5, atol=1e-6)
    halved = model(**inputs, labels=labels, num_items_in_batch=2 * scored.sum())
    torch.testing.assert_close(halved.loss, output.loss / 2)
    output.loss.backward()
    assert model.dist_head.weight.grad.abs().sum() > 0
    assert isinstance(model(**inputs, return_dict=False), tuple)


def test_the_loss_function_is_the_one_that_was_set(base):
    model, seen = make(base), []

    def loss_fn(head, hidden_states, labels):
        seen.append((tuple(hidden_states.shape), labels.tolist()))
        return head.nll(hidden_states, labels)

    model.loss_fn = loss_fn
    model(**batch(), labels=torch.tensor([2, -100, 0]))
    assert seen == [((2, 32), [2, 0])]


def test_labels_are_in_the_configuration(base):
    model = make(base)
    assert model.config.id2label == dict(enumerate(LABELS))
    assert model.config.label2id == {"cat": 0, "dog": 1, "eel": 2}
    assert model.dist_head.weight.shape == (3, 32)
    torch.testing.assert_close(model.dist_head.weight.norm(dim=-1), torch.ones(3))
    assert torch.equal(model.class_embeddings(), model.dist_head.prototypes)
    assert model.to(torch.bfloat16).dist_head.weight.dtype == torch.float32


def test_bad_arguments_are_refused(base):
    for labels in (["one"], ["one", "one"]):
        with pytest.raises(ValueError, match="labels: expected two or more different ones"):
            HarmonicForSequenceClassification.from_base(base, labels=labels)
    with pytest.raises(ValueError, match="init: expected 'random' or 'base_head', got 'zeros'"):
        make(base, init="zeros")
    with pytest.raises(ValueError, match="pooling: expected 'mean' or 'cls', got 'max'"):
        make(base, pooling="max")
    with pytest.raises(ValueError, match="labels: expected values from 0 to 2 or -100"):
        make(base)(**batch(), labels=torch.tensor([0, 1, 3]))
    for labels in (torch.eye(3), torch.tensor([0.0, 1.0, 2.0]), torch.tensor([0, 1])):
        with pytest.raises(
            ValueError, match=r"labels: expected one class number for each of \[3, "
        ):
            make(base)(**batch(), labels=labels)


@pytest.mark.parametrize("task", TASKS)
def test_other_problems_than_one_class_of_several_are_refused(base, tmp_path, task):
    make(base, task).save_pretrained(tmp_path)
    for fields in ({"problem_type": "multi_label_classification"}, {"problem_type": "regression"}):
        with pytest.raises(ValueError, match="problem_type: expected single_label_classification"):
            TASKS[task].from_pretrained(tmp_path, **fields)
    with pytest.raises(ValueError, match=r"got single_label_classification of 1\."):
        TASKS[task](HarmonicConfig(num_labels=1))
    fields = {"problem_type": "single_label_classification"}
    assert TASKS[task].from_pretrained(tmp_path, **fields)(**batch()).logits.shape[-1] == 3


def test_a_masked_model_of_ours_is_a_base_and_a_classifier_keeps_its_head(base, tmp_path):
    masked = HarmonicForMaskedLM.from_base(base)
    masked.save_pretrained(tmp_path / "masked")
    first = make(str(tmp_path / "masked"))
    expected = masked.model(**batch()).last_hidden_state
    assert torch.equal(first.model(**batch()).last_hidden_state, expected)
    first.save_pretrained(tmp_path / "classifier")
    kept = make(str(tmp_path / "classifier"), init="base_head")
    assert torch.equal(kept.dist_head.weight, first.dist_head.weight)
    for labels in (["dog", "cat", "eel"], ["cat", "dog"]):
        with pytest.raises(
            ValueError, match=r"init base_head: expected the labels of base .* 'eel'"
        ):
            HarmonicForSequenceClassification.from_base(
                str(tmp_path / "classifier"), labels=labels, head=HEADS["dist"], init="base_head"
            )
    with pytest.raises(ValueError, match=r"init base_head: expected base .* to have a linear head"):
        make(str(tmp_path / "classifier"), head="linear", init="base_head")
    with pytest.raises(ValueError, match=r"init base_head: expected base .* to have a dist head"):
        make(base, init="base_head")


READER = """
import json, sys, torch
from transformers import (
    AutoModel, AutoModelForSequenceClassification, AutoModelForTokenClassification, pipeline
)
root = sys.argv[1]
inputs = torch.load(f"{root}/inputs.pt", weights_only=True)
autos = {
    "sequence": AutoModelForSequenceClassification, "token": AutoModelForTokenClassification
}
for folder in sys.argv[2:]:
    auto = autos[folder.split("-")[0]]
    model = auto.from_pretrained(f"{root}/{folder}", trust_remote_code=True)
    expected = torch.load(f"{root}/{folder}.pt", weights_only=True)
    assert torch.equal(model(**inputs).logits, expected["logits"]), folder
    assert model.dist_head.weight.dtype == torch.float32
    backbone = AutoModel.from_pretrained(f"{root}/{folder}", trust_remote_code=True)
    assert torch.equal(backbone(**inputs).last_hidden_state, expected["states"]), folder
    model.save_pretrained(f"{root}/{folder}-again")
    again = auto.from_pretrained(f"{root}/{folder}-again", trust_remote_code=True)
    assert torch.equal(again(**inputs).logits, expected["logits"]), folder
options = {"tokenizer": sys.argv[1] + "/tokenizer", "trust_remote_code": True}
texts = pipeline("text-classification", model=f"{root}/sequence-dist", top_k=None, **options)
words = pipeline("token-classification", model=f"{root}/token-dist", **options)
found = [[w["word"], w["entity"], float(w["score"])] for w in words("w1 w2")]
print(json.dumps([texts("w1 w2"), found]))
"""


def test_published_classifiers_need_no_package(base, tmp_path, elsewhere):
    """Bit-equal logits, backbone and pipelines in a process that cannot import harmonic_sft."""
    torch.save(batch(), tmp_path / "inputs.pt")
    folders = []
    for task in TASKS:
        for head in HEADS:
            model = make(base, task, head, pooling="cls" if head == "linear" else "mean")
            name = f"{task}-{head}"
            model.save_pretrained(tmp_path / name)
            with torch.no_grad():
                states = model.model(**batch()).last_hidden_state
                expected = {"logits": model(**batch()).logits, "states": states}
            torch.save(expected, tmp_path / f"{name}.pt")
            folders.append(name)
    saved = json.loads((tmp_path / "token-dist" / "config.json").read_text())
    assert set(saved["auto_map"]) == {
        "AutoConfig",
        "AutoModel",
        "AutoModelForTokenClassification",
    }
    BertTokenizer.from_pretrained(base).save_pretrained(tmp_path / "tokenizer")
    written = elsewhere(READER, tmp_path, *folders)
    assert "not supported" not in written
    texts, words = json.loads(written.splitlines()[-1])
    inputs = {"input_ids": torch.tensor([[2, 6, 7, 3]])}
    whole = make(base, "sequence")(**inputs).logits[0].softmax(-1)
    assert {guess["label"]: guess["score"] for guess in texts[0]} == pytest.approx(
        dict(zip(LABELS, whole.tolist(), strict=True)), rel=1e-4
    )
    each = make(base, "token")(**inputs).logits[0, 1:3].softmax(-1)
    assert [word for word, _, _ in words] == ["w1", "w2"]
    assert [label for _, label, _ in words] == [LABELS[i] for i in each.argmax(-1)]
    assert [score for _, _, score in words] == pytest.approx(each.max(-1).values.tolist(), rel=1e-4)


def test_our_classes_load_a_saved_folder(base, tmp_path):
    autos = (AutoModelForSequenceClassification, AutoModelForTokenClassification)
    for task, auto in zip(TASKS, autos, strict=True):
        model = make(base, task)
        model.h_exp = -5.0
        model.save_pretrained(tmp_path / task)
        again = auto.from_pretrained(tmp_path / task)
        assert type(again) is TASKS[task]
        assert again.h_exp == -5.0
        assert again.config.id2label == dict(enumerate(LABELS))
    assert type(HarmonicModel.from_pretrained(tmp_path / "token")) is HarmonicModel


@pytest.mark.parametrize(("task", "family"), [("sequence", "bert"), ("token", "neobert")])
def test_a_partial_classifier_is_completed_from_its_base(tmp_path, task, family):
    torch.manual_seed(0)
    if family == "bert":
        BertForMaskedLM(BertConfig(**SIZES)).save_pretrained(tmp_path / "base")
    else:
        NeoBERTForMaskedLM(NeoBERTConfig(**SIZES)).save_pretrained(tmp_path / "base")
    commit = "e" * 40
    repo = Path(os.environ["HF_HUB_CACHE"]) / "models--classifier--base"
    shutil.copytree(tmp_path / "base", repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    try:
        model = make("classifier/base", task, dtype=torch.bfloat16)
        assert model.config.base_revision == commit
        model.config.trained_parameters = ["dist_head.weight"]
        model.save_pretrained(tmp_path / "full")
        part = tmp_path / "part"
        part.mkdir()
        fields = json.loads((tmp_path / "full" / "config.json").read_text())
        (part / "config.json").write_text(json.dumps({**fields, "partial": True}))
        weights = load_file(tmp_path / "full" / "model.safetensors")
        head = {"dist_head.weight": weights["dist_head.weight"]}
        save_file(head, part / "dist_head.safetensors", {"format": "pt"})
        found = TASKS[task].from_pretrained(part)
        expected = TASKS[task].from_pretrained(tmp_path / "full")
        with torch.no_grad():
            assert torch.equal(found(**batch()).logits, expected(**batch()).logits)
        assert not HarmonicConfig.from_pretrained(tmp_path / "full").partial
    finally:
        shutil.rmtree(repo)
