"""Loading: prototypes from class means, and nothing is read or hashed twice."""

import hashlib
import shutil
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from harmonic_sft.models import HarmonicForSequenceClassification, HarmonicForTokenClassification
from harmonic_sft.training import loading
from harmonic_sft.training.preparation import class_means
from harmonic_sft.training.preview import dry_run
from harmonic_sft.training.run import prepare
from harmonic_sft.training.run_config import ModelConfig, load_run_config
from tests.decoders import save_decoder
from tests.no_float64 import without_float64

LABELS = ["a", "b", "c"]


def make_batches(shape):
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(3):
        input_ids = torch.randint(5, 100, (6, 7), generator=generator)
        labels = torch.randint(0, 3, (6, 7)[: len(shape)], generator=generator)
        labels.view(-1)[0] = -100
        attention_mask = torch.ones_like(input_ids)
        attention_mask[2, 4:] = 0
        batches.append({"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels})
    return batches


@pytest.mark.parametrize("head", ["dist", "linear"])
@pytest.mark.parametrize(
    ("model_class", "axes"),
    [(HarmonicForSequenceClassification, "B"), (HarmonicForTokenClassification, "BT")],
)
def test_means_are_those_of_a_loop(tiny_base, model_class, axes, head):
    model = model_class.from_base(str(tiny_base), labels=LABELS, head={"name": head})
    batches = make_batches(axes)
    sums, counts = torch.zeros(3, 32, dtype=torch.float64), [0, 0, 0]
    for batch in batches:
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        with torch.no_grad():
            states = model.select(
                model.model(**inputs).last_hidden_state, batch["attention_mask"]
            ).double()
        labels = batch["labels"].reshape(states.shape[:2])
        for row in range(states.shape[0]):
            for place in range(states.shape[1]):
                label, vector = int(labels[row, place]), states[row, place]
                if label != -100:
                    sums[label] += vector / vector.norm() if head == "dist" else vector
                    counts[label] += 1
    expected = sums / torch.tensor(counts).unsqueeze(-1)
    found = class_means(model, batches)
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-5)
    model.dist_head.initialize_(found)
    if head == "dist":
        torch.testing.assert_close(
            model.dist_head.weight.double(), expected / expected.norm(dim=-1, keepdim=True)
        )


def test_class_means_of_a_rotated_sphere_are_those_of_the_sphere(tiny_base):
    heads = ({"name": "dist"}, {"name": "rotation", "inner": {"name": "dist"}})
    load = HarmonicForSequenceClassification.from_base
    models = [load(str(tiny_base), labels=LABELS, head=head) for head in heads]
    torch.testing.assert_close(*(class_means(model, make_batches("B")) for model in models))


@pytest.mark.parametrize("rotated", [False, True])
def test_class_means_are_of_what_the_prototypes_are_compared_with(tiny_base, rotated):
    head = {"name": "transform", "inner": {"name": "linear"}}
    head = {"name": "rotation", "inner": head} if rotated else head
    model = HarmonicForSequenceClassification.from_base(str(tiny_base), labels=LABELS, head=head)
    [batch, *_] = make_batches("B")
    batch["labels"] = torch.arange(len(batch["labels"])) % len(LABELS)
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    with torch.no_grad():
        states = model.select(model.model(**inputs).last_hidden_state, batch["attention_mask"])
        transform = model.dist_head.inner if rotated else model.dist_head  # R is I at the start
        seen = transform.mapped(states.flatten(0, 1))
    labels = batch["labels"]
    expected = torch.stack([seen[labels == label].mean(0) for label in range(len(LABELS))])
    torch.testing.assert_close(class_means(model, [batch]), expected)


def test_class_means_need_no_float64_on_the_device(tiny_base):
    model = HarmonicForSequenceClassification.from_base(str(tiny_base), labels=LABELS)
    there = [
        {key: without_float64(value) for key, value in batch.items()} for batch in make_batches("B")
    ]
    assert torch.equal(class_means(model, there), class_means(model, make_batches("B")))


def test_a_class_without_rows_is_an_error(tiny_base):
    model = HarmonicForSequenceClassification.from_base(str(tiny_base), labels=LABELS)
    batch = {"input_ids": torch.tensor([[5, 6], [7, 8]]), "labels": torch.tensor([0, 2])}
    with pytest.raises(ValueError, match=r"head.init: expected training rows .* none of \['b'\]"):
        class_means(model, [batch])


@pytest.fixture
def package(monkeypatch, tiny_base, tmp_path):
    """A base that comes as a Python package."""
    folder = shutil.copytree(tiny_base, tmp_path / "tiny_package" / "model")
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    monkeypatch.setitem(loading.PACKAGES, "tiny_package", digest)
    (folder.parent / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    return folder


@pytest.mark.usefixtures("package")
def test_a_run_reads_its_tokenizer_once_and_hashes_its_base_once(make_yaml, monkeypatch):
    tokenizers = Mock(wraps=AutoTokenizer.from_pretrained)
    hashes = Mock(wraps=hashlib.file_digest)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", tokenizers)
    monkeypatch.setattr(hashlib, "file_digest", hashes)
    run = load_run_config(make_yaml(), ["model.base=package:tiny_package"])
    dry_run(run)
    assert (tokenizers.call_count, hashes.call_count) == (0, 0)
    prepare(run)  # hashes the base, and the cached table
    assert (tokenizers.call_count, hashes.call_count) == (1, 2)


@pytest.mark.parametrize("start", [prepare, dry_run])
@pytest.mark.parametrize("option", ["packing", "padding_free"])
def test_a_base_that_cannot_pack_is_refused_at_once(make_causal_yaml, tmp_path, start, option):
    folder = save_decoder("granite", tmp_path / "base")
    run = load_run_config(make_causal_yaml(model={"base": str(folder)}, data={option: True}))
    with pytest.raises(ValueError, match=f"data.{option}: expected false .* 'granite', got true"):
        start(run)


def test_other_weights_in_a_package_are_refused(make_yaml, package):
    with (package / "model.safetensors").open("ab") as file:
        file.write(b"more")
    run = load_run_config(make_yaml(), ["model.base=package:tiny_package"])
    with pytest.raises(ValueError, match=r"expected the published weights in package tiny_package"):
        prepare(run)


def test_an_evaluation_without_a_masked_token_is_refused_before_training(make_yaml):
    run = load_run_config(make_yaml(), ["data.mask.probability=1e-6"])
    with pytest.raises(ValueError, match=r"data\.eval: expected something to predict in the eval"):
        loading.load_run_data(run)


def test_of_a_folder_that_is_no_model_its_files_are_named(tmp_path, tiny_base):
    folder = shutil.copytree(tiny_base, tmp_path / "base")
    (folder / "model.safetensors").unlink()
    message = r"no file named model\.safetensors.* The folder holds config\.json, "
    with pytest.raises(ValueError, match=message) as error:
        loading.from_base(AutoModel.from_pretrained, ModelConfig(base=str(folder)))
    assert "hf download" not in str(error.value)
