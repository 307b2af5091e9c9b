"""HarmonicTrainer from Python on labelled rows: classes, their order, and labels that are none."""

import copy
import random
import sys
import types
from types import SimpleNamespace

import datasets
import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard
from datasets import Dataset
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from transformers import default_data_collator

from harmonic_sft import (
    HarmonicForMaskedLM,
    HarmonicForQuestionAnswering,
    HarmonicForSequenceClassification,
    HarmonicForTokenClassification,
)
from tests.conftest import WORDS
from tests.training.conftest import losses


def test_labelled_rows_make_a_classifier(arguments, make):
    generator = random.Random(0)
    groups = {"early": WORDS[:30], "late": WORDS[30:60]}
    rows = [
        {"sentence": " ".join(generator.choices(words, k=6)), "kind": label}
        for _ in range(40)
        for label, words in groups.items()
    ]
    trainer = make(
        arguments(label_column="kind", text_column="sentence", h_exp=-12.0),
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows[:20]),
        compute_metrics=lambda found: {"right": (found[0].argmax(-1) == found[1]).mean()},
    )
    assert isinstance(trainer.model, HarmonicForSequenceClassification)
    assert trainer.model.config.id2label == {0: "early", 1: "late"}
    trainer.train()
    metrics = trainer.evaluate()
    assert metrics["eval_right"] == pytest.approx(metrics["eval_accuracy"])
    assert trainer.predict(Dataset.from_list(rows[:6])).predictions.shape == (6, 2)


CLASSES = ["low", "high", "none"]


@pytest.mark.parametrize(
    "model_class", [HarmonicForSequenceClassification, HarmonicForTokenClassification]
)
def test_a_classifier_keeps_its_classes_and_their_order(tiny_base, arguments, make, model_class):
    model = model_class.from_base(str(tiny_base), labels=CLASSES)
    is_whole = model_class is HarmonicForSequenceClassification

    def rows(*labels):
        text = ["aa ab"] * 4 if is_whole else [["aa", "ab"]] * 4
        label = [*labels, *labels] if is_whole else [labels] * 4
        return Dataset.from_dict({"text": text, "label": label})

    def numbers(trainer, data):
        found = trainer.predict(data).label_ids
        return found[found != -100].tolist()

    args = arguments(label_column="label", max_steps=1)
    trainer = make(args, model=model, train_dataset=rows("high", "low"))
    only_evaluates = make(args, model=model, train_dataset=None)
    expected = [1, 0] * (2 if is_whole else 4)
    for found in (trainer, only_evaluates):
        assert numbers(found, rows("high", "low")) == numbers(found, rows(1, 0)) == expected
    trainer.train()
    assert model.config.id2label == dict(enumerate(CLASSES))
    with pytest.raises(ValueError, match=r"expected the model's classes, 'low'.* got 'odd'"):
        trainer.evaluate(rows("odd", "low"))
    with pytest.raises(ValueError, match=r"expected the model's classes, 'low'.* got '3'"):
        trainer.evaluate(rows(0, 3))


def test_a_folder_of_ours_is_a_base_and_a_classifier_keeps_its_classes(
    tiny_base, arguments, make, tokenizer, tmp_path
):
    masked, folder = tmp_path / "masked", tmp_path / "classifier"
    HarmonicForMaskedLM.from_base(str(tiny_base)).save_pretrained(masked)
    model = HarmonicForSequenceClassification.from_base(str(masked), labels=CLASSES)
    model.save_pretrained(folder)
    rows = Dataset.from_dict({"text": ["aa ab"] * 4, "label": ["high", "low"] * 2})
    options = {"train_dataset": rows, "processing_class": tokenizer}
    new = make(arguments(label_column="label"), model=str(masked), **options).model
    assert new.config.id2label == {0: "high", 1: "low"}
    for data in (rows, None):
        options["train_dataset"] = data
        kept = make(arguments(label_column="label"), model=str(folder), **options)
        assert kept.model.config.id2label == dict(enumerate(CLASSES))
        assert torch.equal(kept.model.dist_head.weight, model.dist_head.weight)
        assert kept.predict(rows).label_ids.tolist() == [1, 0, 1, 0]
    again = make(arguments(task="masked_lm"), model=str(folder), processing_class=tokenizer)
    assert isinstance(again.model, HarmonicForMaskedLM)


def test_a_loaded_model_is_not_trained_for_another_task(tiny_base, arguments, make):
    masked = HarmonicForMaskedLM.from_base(str(tiny_base))
    classes = HarmonicForSequenceClassification.from_base(str(tiny_base), labels=CLASSES)
    for model, name, fields in (
        (masked, "task", {"task": "token_classification", "label_column": "label"}),
        (masked, "label_column", {"label_column": "label"}),
        (classes, "task", {"task": "masked_lm"}),
        (classes, "task", {"task": "token_classification"}),
    ):
        with pytest.raises(ValueError, match=rf"^{name}: expected nothing with a Harmonic"):
            make(arguments(**fields), model=model)


def test_predictions_match_the_numbers_of_the_data_set(texts, arguments, make):
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["low", "high"])}
    )
    rows = {"text": texts["text"][:8], "label": [0, 1, 1, 0] * 2}
    data = Dataset.from_dict(rows, features=features)
    trainer = make(arguments(label_column="label"), train_dataset=data)
    assert trainer.predict(data).label_ids.tolist() == data["label"][:]
    spelled = Dataset.from_dict({**rows, "label": data.features["label"].int2str(rows["label"])})
    trainer = make(arguments("spelled", label_column="label"), train_dataset=spelled)
    assert trainer.model.config.id2label == {0: "high", 1: "low"}
    stream = data.to_iterable_dataset()
    for known in (data, stream):
        assert trainer.predict(known).label_ids.tolist() == [1, 0, 0, 1] * 2
    with pytest.raises(ValueError, match=r"expected the model's classes, 'high', 'low', got '0', "):
        trainer.predict(stream.map(dict))  # after which the names are not known


@pytest.mark.parametrize(
    "model_class", [HarmonicForSequenceClassification, HarmonicForTokenClassification]
)
def test_rows_without_labels_are_predicted(tiny_base, arguments, make, model_class):
    model = model_class.from_base(str(tiny_base), labels=CLASSES)
    args = arguments(label_column="label", weight_column="weight")
    texts, labels = ["aa ab", "ba"], ["low", "high"]
    if model_class is HarmonicForTokenClassification:
        texts, labels = [["aa", "ab"], ["ba"]], [["low", "low"], ["high"]]
    plain = Dataset.from_dict({"text": texts})
    labelled = plain.add_column("label", labels).add_column("weight", [1.0, 1.0])
    trainer = make(args, model=model, train_dataset=labelled)
    expected = trainer.predict(labelled)
    for data in (plain, plain.to_iterable_dataset().with_format("torch")):
        found = trainer.predict(data)
        assert found.label_ids is None
        assert "test_loss" not in found.metrics
        assert (found.predictions == expected.predictions).all()
    of_texts = isinstance(texts[0], str)
    for nothing in (-1, -100, None):  # as test splits without labels have it
        unknown = [nothing] * 2 if of_texts else [[nothing] * 2, [nothing]]
        assert trainer.predict(plain.add_column("label", unknown)).label_ids is None
    blank = Dataset.from_dict({"text": [*texts, " " if of_texts else []]})
    known = blank.add_column("label", [*labels, "low" if of_texts else []])
    for rows in (blank, known.add_column("weight", [1.0] * 3)):
        with pytest.raises(ValueError, match=r"test_dataset: expected all of 3 rows .* only 2"):
            trainer.predict(rows)
    with pytest.raises(ValueError, match=r"data.label_column: expected one of"):
        trainer.evaluate(plain)
    tokenized = Dataset.from_dict({"input_ids": [[2, 5, 3]], "label": labels[:1]})
    with pytest.raises(ValueError, match=r"eval_dataset: expected rows of text .* Pass data_coll"):
        trainer.evaluate(tokenized)


@pytest.fixture
def free_trainer(make, arguments, tokenizer):
    """Make a trainer that has taken a step on rows that torch makes batches of."""

    def collate(rows):
        return {key: torch.tensor([row[key] for row in rows]) for key in rows[0]}

    def trained(model, rows):
        data = {"train_dataset": rows, "eval_dataset": rows, "data_collator": collate}
        args = arguments(max_steps=1, per_device_train_batch_size=4, gradient_accumulation_steps=2)
        trainer = make(args, model=model, processing_class=tokenizer, **data)
        trainer.train()
        return trainer

    return trained


@pytest.fixture
def body(tiny_base, tmp_path):
    HarmonicForMaskedLM.from_base(str(tiny_base)).save_pretrained(tmp_path / "body")
    return tmp_path / "body"


FREE = {
    "several labels": (3, [[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]] * 4),
    "numbers": (1, [0.5, 2.0] * 4),
    "whole numbers": (1, [5, 7] * 4),
}


@pytest.mark.parametrize("labels", FREE.values(), ids=FREE)
def test_labels_that_are_no_classes_are_trained_and_evaluated(body, free_trainer, labels):
    num_labels, values = labels
    model = HarmonicForSequenceClassification.from_pretrained(body, num_labels=num_labels)
    rows = Dataset.from_dict({"input_ids": [[2, 5, 6, 3]] * 8, "labels": values})
    trainer = free_trainer(model, rows)
    batch = trainer.data_collator(rows.to_list())
    batch.pop("num_tokens")
    with torch.no_grad():
        expected = trainer.model(**batch).loss.item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-4)
    assert trainer.predict(rows).predictions.shape == (8, num_labels)


def test_answers_are_trained_and_evaluated(body, free_trainer):
    model = HarmonicForQuestionAnswering.from_pretrained(body)
    spans = {"start_positions": [1] * 8, "end_positions": [2] * 8}
    rows = Dataset.from_dict({"input_ids": [[2, 5, 6, 3]] * 8, **spans})
    trainer = free_trainer(model, rows)
    assert 0 < losses(trainer)[0] < 2  # the mean of two micro-batches, not their sum
    assert trainer.evaluate()["eval_loss"] > 0
    assert trainer.predict(rows).predictions[0].shape == (8, 4)


def test_a_loss_or_metric_that_answers_and_numbers_do_not_have_is_refused(body, arguments, make):
    answers = HarmonicForQuestionAnswering.from_pretrained(body)
    number = HarmonicForSequenceClassification.from_pretrained(body, num_labels=1)
    data = {"train_dataset": [{"input_ids": [2, 5, 3]}], "data_collator": default_data_collator}
    for model in (answers, number):
        with pytest.raises(ValueError, match=r"^loss: expected nothing with a Harmonic.* loaded"):
            make(arguments(loss={"name": "cross_entropy", "label_smoothing": 0.3}), model=model)
        with pytest.raises(ValueError, match=r"^metric_for_best_model: expected 'loss' .*accuracy"):
            make(arguments(metric_for_best_model="accuracy"), model=model, **data)
        with pytest.raises(ValueError, match="without compute_metrics, got 'f1'"):
            make(arguments(metric_for_best_model="f1"), model=model, **data)


def test_a_tokenizers_sides_are_set_for_our_rows_and_kept_for_those_of_the_user(
    body, arguments, make, tokenizer
):
    model = HarmonicForSequenceClassification.from_pretrained(body, num_labels=1)
    tokenized = [{"input_ids": [2, 5, 3], "labels": 0.5}]
    own = {"model": model, "train_dataset": tokenized, "data_collator": default_data_collator}
    texts = Dataset.from_dict({"text": ["aa ab"] * 4, "kind": ["x", "y"] * 2})
    ours = {"train_dataset": texts}
    for data, column, side in ((own, None, "left"), (ours, "kind", "right")):
        given = copy.deepcopy(tokenizer)
        given.padding_side = "left"
        make(arguments(label_column=column), processing_class=given, **data)
        assert given.padding_side == side


@pytest.mark.parametrize("num_rows", [8, 7])
@pytest.mark.parametrize("own_loss", [None, lambda *_, **__: 0])
def test_rows_that_are_scored_again_by_several_processes_are_said(
    make, monkeypatch, caplog, num_rows, own_loss
):
    rows = [{"input_ids": [2, 5, 6, 3], "labels": [-100, 5, 6, -100]}] * 8
    options = {"compute_loss_func": own_loss, "data_collator": default_data_collator}
    trainer = make(train_dataset=rows, **options)
    trainer.args.per_device_train_batch_size = 2
    sampler = BatchSampler(SequentialSampler(range(num_rows)), 2, drop_last=False)
    loader = SimpleNamespace(batch_sampler=BatchSamplerShard(sampler, 2, 0), dataset=rows)
    with monkeypatch.context() as patch:
        patch.setattr(type(trainer.args), "world_size", 2)
        trainer._warn_of_repeated(loader)
    is_said = "The last batches of an epoch score 1 rows again, so that all 2 pro" in caplog.text
    assert is_said == (num_rows == 7 and own_loss is not None)


@pytest.mark.parametrize("drop_last", [False, True])
def test_rows_of_an_iterable_that_are_scored_again_are_said(make, monkeypatch, caplog, drop_last):
    shard = IterableDatasetShard(range(3), 2, drop_last=drop_last, num_processes=2)
    trainer = make()
    monkeypatch.setattr(type(trainer.args), "world_size", 2)
    trainer._warn_of_repeated(DataLoader(shard, batch_size=2))
    assert ("batch of all 2 processes, its first rows are scored again" in caplog.text) != drop_last


def test_a_loss_of_the_user_sees_no_row_without_its_class(arguments, make):
    """It may take no label of -100: several processes score some rows again, and say so."""
    rows = Dataset.from_dict({"text": ["aa ab"] * 4, "kind": ["x", "y"] * 2})
    for own_loss in (None, lambda *_, **__: 0):
        args = arguments(label_column="kind")
        trainer = make(args, train_dataset=rows, compute_loss_func=own_loss)
        assert trainer._leaves_out_repeated == (own_loss is None)


def test_a_formatting_function_that_was_edited_makes_other_rows(make, monkeypatch):
    # As in a later process: the library knows a function of a module by its name.
    ending = types.ModuleType("ending")
    monkeypatch.setitem(sys.modules, "ending", ending)
    rows = Dataset.from_dict({"raw": ["aa ab"] * 4})
    lengths = []
    for end in ("", " ac ad", ""):
        exec(f"def text(row):\n    return row['raw'] + {end!r}", vars(ending))
        trainer = make(train_dataset=rows, formatting_func=ending.text)
        lengths.append(len(trainer.train_dataset[0]["input_ids"]))
    assert lengths == [4, 6, 4]


def test_a_formatting_function_makes_the_text_and_leaves_labels_and_weights(arguments, make):
    columns = {"first": ["aa ab", "ab aa"] * 4, "second": ["ac"] * 8}
    columns |= {"kind": ["x", "y"] * 4, "importance": [2.0] * 8}
    trainer = make(
        arguments(label_column="kind", weight_column="importance"),
        train_dataset=Dataset.from_dict(columns).with_format("pandas"),
        formatting_func=lambda row: f"{row['first']} [SEP] {row['second']}",
    )
    assert len(trainer.train_dataset[0]["input_ids"]) == 6
    assert trainer.model.config.id2label == {0: "x", 1: "y"}
    assert trainer.train_dataset[0]["label_weights"] == 2
