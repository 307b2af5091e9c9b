"""Classifiers of texts and words: what the head sees, losses, saving, loading elsewhere."""

import copy
import inspect
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from harmonic_sft.models import (
    HarmonicConfig,
    HarmonicForCausalLM,
    HarmonicForMaskedLM,
    HarmonicForQuestionAnswering,
    HarmonicForSequenceClassification,
    HarmonicForTokenClassification,
    HarmonicModel,
)
from tests.encoders import SIZES, V, save_bert_tokenizer
from tests.saved_models import write_partial

LABELS = ["cat", "dog", "eel"]
TASKS = {
    "sequence": HarmonicForSequenceClassification,
    "token": HarmonicForTokenClassification,
}
AUTOS = {"sequence": AutoModelForSequenceClassification, "token": AutoModelForTokenClassification}
CLASS_TASKS = ("QuestionAnswering", "SequenceClassification", "TokenClassification")
PEFT_TASKS = {  # in PEFT and in transformers
    "QUESTION_ANS": AutoModelForQuestionAnswering,
    "SEQ_CLS": AutoModelForSequenceClassification,
    "TOKEN_CLS": AutoModelForTokenClassification,
}
HEADS = {"dist": {"name": "dist", "h_exp": -3.0}, "linear": {"name": "linear"}}


@pytest.fixture(scope="session")
def base(bases):
    return str(bases / "bert")


@pytest.fixture(scope="module")
def causal(tmp_path_factory):
    """A saved decoder, which is a base for other tasks."""
    folder = tmp_path_factory.mktemp("causal")
    torch.manual_seed(0)
    llama = LlamaConfig(**SIZES, num_key_value_heads=2, pad_token_id=0)
    LlamaForCausalLM(llama).save_pretrained(folder / "base")
    HarmonicForCausalLM.from_base(str(folder / "base")).save_pretrained(folder / "causal")
    return folder / "causal"


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
    assert model(**inputs, labels=labels, output_logits=False).logits is None
    assert model.train()(**inputs, labels=labels).logits is not None


def test_the_trainer_of_transformers_keeps_token_types(base, tmp_path):
    """It drops every column that is no named parameter of `forward`."""
    model = HarmonicForSequenceClassification.from_base(base, labels=LABELS)
    columns = {"input_ids": [[2, 5, 6]], "token_type_ids": [[0, 0, 1]], "labels": [1]}
    arguments = TrainingArguments(tmp_path, use_cpu=True, report_to=[])
    trainer = Trainer(model, arguments, train_dataset=Dataset.from_dict(columns))
    [batch] = trainer.get_train_dataloader()
    assert batch["token_type_ids"].tolist() == columns["token_type_ids"]
    for class_ in (HarmonicForMaskedLM, *TASKS.values(), HarmonicForQuestionAnswering):
        names = inspect.signature(class_.forward).parameters
        assert {"token_type_ids", "inputs_embeds"} <= set(names)
    del batch["labels"]
    with torch.no_grad():
        embeddings = model.get_input_embeddings()(batch.pop("input_ids"))
        by_embeddings = model(inputs_embeds=embeddings, **batch).logits
        ids = torch.tensor(columns["input_ids"])
        assert torch.equal(by_embeddings, model(ids, **batch).logits)
        assert not torch.equal(by_embeddings, model(ids).logits)


def test_a_mixture_finds_no_answers(base):
    mixture = {"name": "rotation", "inner": {"name": "multi_head", "num_heads": 2}}
    with pytest.raises(ValueError, match=r"^head: expected one whose logits can be .* multi_head"):
        HarmonicForQuestionAnswering.from_base(base, labels=["start", "end"], head=mixture)


@pytest.mark.parametrize("outside", [-100, -1, 6, 99])
def test_answers_outside_of_a_row_are_not_scored(base, outside):
    model = HarmonicForQuestionAnswering.from_base(base, labels=["start", "end"])
    ids = torch.arange(10, 22).view(2, 6)
    starts, ends = torch.tensor([1, outside]), torch.tensor([[2], [outside]])
    outputs = model(ids, start_positions=starts, end_positions=ends)
    logits = [outputs.start_logits, outputs.end_logits]
    losses = [-one[0].double().log_softmax(-1)[n] for one, n in zip(logits, (1, 2), strict=True)]
    assert outputs.loss.item() == pytest.approx(sum(losses).item() / 2, rel=1e-5)
    nowhere = torch.full((2,), outside)
    nothing = model(ids, start_positions=nowhere, end_positions=nowhere).loss
    assert nothing == 0
    nothing.backward()  # a batch of a training


def test_labels_are_in_the_configuration(base):
    model = make(base)
    assert model.config.id2label == dict(enumerate(LABELS))
    assert model.config.label2id == {"cat": 0, "dog": 1, "eel": 2}
    assert model.dist_head.weight.shape == (3, 32)
    torch.testing.assert_close(model.dist_head.weight.norm(dim=-1), torch.ones(3))
    assert torch.equal(model.class_embeddings(), model.dist_head.prototypes)
    assert model.to(torch.bfloat16).dist_head.weight.dtype == torch.float32


def test_bad_arguments_are_refused(base, tmp_path):
    for labels in (["one"], ["one", "one"]):
        with pytest.raises(ValueError, match="labels: expected two or more different ones"):
            HarmonicForSequenceClassification.from_base(base, labels=labels)
    with pytest.raises(ValueError, match="init: expected 'random' or 'base_head', got 'zeros'"):
        make(base, init="zeros")
    with pytest.raises(ValueError, match="pooling: expected 'mean' or 'cls', got 'max'"):
        make(base, pooling="max")
    make(base).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="pooling: expected 'mean' or 'cls', got 'max'"):
        HarmonicForSequenceClassification.from_pretrained(tmp_path, pooling="max")
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
    first = make(str(tmp_path / "masked"), pooling="cls")
    expected = masked.model(**batch()).last_hidden_state
    assert torch.equal(first.model(**batch()).last_hidden_state, expected)
    first.save_pretrained(tmp_path / "classifier")
    kept = make(str(tmp_path / "classifier"), init="base_head").train()
    assert torch.equal(kept.dist_head.weight, first.dist_head.weight)
    assert kept.config.pooling == "cls"
    assert make(str(tmp_path / "classifier")).config.pooling == "mean"
    kept.dist_head.requires_grad_(False)
    kept(**batch())  # a new head would have to be trained
    for labels in (["dog", "cat", "eel"], ["cat", "dog"]):
        with pytest.raises(
            ValueError, match=r"init base_head: expected the labels of base .* 'eel'"
        ):
            HarmonicForSequenceClassification.from_base(
                str(tmp_path / "classifier"), labels=labels, head=HEADS["dist"], init="base_head"
            )
    with pytest.raises(
        ValueError, match=r"init base_head: expected base .* to have a head like .*'linear'"
    ):
        make(str(tmp_path / "classifier"), head="linear", init="base_head")
    with pytest.raises(
        ValueError, match=r"init base_head: expected base .* to have a head like .*'dist'"
    ):
        make(base, init="base_head")


LABELER = """
import json, sys
from transformers import pipeline
options = {"tokenizer": "tokenizer", "trust_remote_code": True}
texts = pipeline("text-classification", model="sequence-dist", top_k=None, **options)
words = pipeline("token-classification", model="token-dist", **options)
found = [[w["word"], w["entity"], float(w["score"])] for w in words("w1 w2")]
print(json.dumps([texts("w1 w2"), found]))
"""


def test_published_classifiers_need_no_package(base, tmp_path, check_elsewhere, elsewhere):
    """Bit-equal logits and pipelines in a process that cannot import harmonic_sft."""
    for task, head in (("sequence", "dist"), ("sequence", "linear"), ("token", "dist")):
        model = make(base, task, head, pooling="cls" if head == "linear" else "mean")
        auto = f"AutoModelFor{task.title()}Classification"
        check_elsewhere.add(f"{task}-{head}", model, auto, **batch())
    check_elsewhere.run()
    saved = json.loads((tmp_path / "token-dist" / "config.json").read_text())
    autos = map("AutoModelFor{}".format, CLASS_TASKS)
    assert set(saved["auto_map"]) == {"AutoConfig", "AutoModel", *autos}
    (tmp_path / "tokenizer").mkdir()
    save_bert_tokenizer(tmp_path / "tokenizer")
    written = elsewhere(LABELER, cwd=tmp_path)
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


@pytest.mark.parametrize(("task", "family"), [("sequence", "bert"), ("token", "neobert")])
def test_a_partial_classifier_is_completed_from_its_base(bases, tmp_path, cache_repo, task, family):
    commit = cache_repo("me/base", bases / family)
    model = make("me/base", task, dtype=torch.bfloat16)
    model.h_exp = -5.0
    assert model.config.base_revision == commit
    model.config.trained_parameters = ["dist_head.weight"]
    model.save_pretrained(tmp_path / "full")
    write_partial(tmp_path / "full", tmp_path / "part")
    found, expected = (AUTOS[task].from_pretrained(tmp_path / form) for form in ("part", "full"))
    for one in (found, expected):
        assert type(one) is TASKS[task]
        assert one.config.id2label == dict(enumerate(LABELS))
        assert one.h_exp == -5.0
    with torch.no_grad():
        assert torch.equal(found(**batch()).logits, expected(**batch()).logits)
    assert type(HarmonicModel.from_pretrained(tmp_path / "full")) is HarmonicModel
    assert not HarmonicConfig.from_pretrained(tmp_path / "full").partial


TASKS_READER = """
import os, sys, torch
from transformers import (
    AutoModelForQuestionAnswering, AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
torch.manual_seed(0)
inputs = torch.load("inputs.pt", weights_only=True)
options = {"trust_remote_code": True, "cache_dir": sys.argv[1]}
dist = {"name": "dist", "h_exp": -3.0}
sequence, token = AutoModelForSequenceClassification, AutoModelForTokenClassification
TASKS = {
    "three": (sequence, {"num_labels": 3}, [(3, 3)]),
    "one": (sequence, {"num_labels": 1}, [(3, 1)]),
    "dist": (sequence, {"num_labels": 4, "classifier_head": dist}, [(3, 4)]),
    "token": (token, {"num_labels": 5}, [(3, 8, 5)]),
    "answers": (AutoModelForQuestionAnswering, {}, [(3, 8), (3, 8)]),
}
for job in sys.argv[2:]:
    repo, *tasks = job.split()
    states = torch.load(f"{repo}.pt", weights_only=True)
    for auto, fields, shapes in map(TASKS.get, tasks):
        model = auto.from_pretrained(repo, **fields, **options).eval()
        outputs = model(**inputs, output_hidden_states=True)
        logits = [outputs[key] for key in outputs if key.endswith("logits")]
        assert [tuple(x.shape) for x in logits] == shapes, (repo, auto, shapes)
        assert torch.equal(model.model(**inputs).last_hidden_state, states), (repo, auto)
        head = model.dist_head.settings()
        assert head["name"] == ("dist" if "classifier_head" in fields else "linear")
        assert 0.01 < model.dist_head.weight.std() < 1, "drawn, not left empty"
        model.save_pretrained("again")
        again = auto.from_pretrained("again", trust_remote_code=True)
        for one, other in zip(model(**inputs).values(), again(**inputs).values()):
            # Not to the bit: a product with one column depends on where its weight lies.
            torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
        assert again.config.architectures == [type(model).__name__]
    # What was fine-tuned for one task is a base for another, in a folder that this process saved.
    model = AutoModelForTokenClassification.from_pretrained("again", trust_remote_code=True)
    assert torch.equal(model.model(**inputs).last_hidden_state, states)
"""


def test_a_classifier_keeps_its_own_head_and_says_so(base, tmp_path, caplog):
    HarmonicForSequenceClassification.from_base(base, labels=["a", "b"]).save_pretrained(tmp_path)
    load = AutoModelForSequenceClassification.from_pretrained
    with caplog.at_level("WARNING"):
        assert load(tmp_path, classifier_head={"name": "dist"}).dist_head.h_exp is not None
        assert "classifier_head" not in caplog.text
        load(tmp_path, classifier_head={"name": "linear"})
    assert "classifier_head: linear is not used: the checkpoint has a trained dist" in caplog.text


def test_language_models_are_bases_for_every_task_where_this_package_is_not(
    base, causal, tmp_path, elsewhere, cache_repo
):
    """Masked, tied, partial and causal repos, by transformers alone."""
    torch.save(batch(), tmp_path / "inputs.pt")
    cached = cache_repo("me/base", Path(base))
    masked = HarmonicForMaskedLM.from_base("me/base", revision=cached, head={"name": "dist"})
    masked.config.trained_parameters = ["dist_head.weight"]
    masked.save_pretrained(tmp_path / "masked")
    write_partial(tmp_path / "masked", tmp_path / "part")
    HarmonicForMaskedLM.from_base(base, tie=True).save_pretrained(tmp_path / "tied")
    shutil.copytree(causal, tmp_path / "causal")
    states = masked.model(**batch()).last_hidden_state
    for name in ("masked", "part", "tied"):
        torch.save(states, tmp_path / f"{name}.pt")
    decoder = HarmonicModel.from_pretrained(causal)
    torch.save(decoder(**batch()).last_hidden_state, tmp_path / "causal.pt")
    elsewhere(
        TASKS_READER,
        os.environ["HF_HUB_CACHE"],
        "masked three dist answers token",
        "part one token",
        "tied answers token",
        "causal dist token",
        cwd=tmp_path,
    )
    found = HarmonicForSequenceClassification.from_pretrained(tmp_path / "part", num_labels=3)
    assert found.dist_head.weight.shape == (3, 32)
    assert torch.equal(found.model(**batch()).last_hidden_state, states)


@pytest.fixture(scope="module")
def published(base, tmp_path_factory):
    """A saved masked model, which is a base for other tasks."""
    folder = tmp_path_factory.mktemp("published")
    HarmonicForMaskedLM.from_base(base).save_pretrained(folder)
    return folder


def test_a_single_output_learns_numbers_and_floating_labels_several_classes(published):
    inputs, sequence = batch(), HarmonicForSequenceClassification
    score = sequence.from_pretrained(published, num_labels=1)
    built = sequence.from_base(published, labels=["LABEL_0"], head=score.config.head)  # as on cards
    assert built.config.num_labels == 1
    numbers = torch.tensor([0.5, -2.0, 3.0])
    found = score(**inputs, labels=numbers)
    expected = sum(
        (x - y) ** 2 for (x,), y in zip(found.logits.tolist(), numbers.tolist(), strict=True)
    )
    assert found.loss.item() == pytest.approx(expected / 3, rel=1e-5)
    halved = score(**inputs, labels=numbers, num_items_in_batch=torch.tensor(6))
    torch.testing.assert_close(halved.loss, found.loss / 2)
    doubled = score(**inputs, labels=numbers, label_weights=torch.full((3,), 2.0))
    torch.testing.assert_close(doubled.loss, found.loss * 2)
    assert score.config.problem_type == "regression"
    several = sequence.from_pretrained(published, num_labels=2)
    hot = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    found = several(**inputs, labels=hot)
    odds = found.logits.double().sigmoid()
    expected = -(hot * odds.log() + (1 - hot) * (1 - odds).log()).mean()
    assert found.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert several.config.problem_type == "multi_label_classification"
    assert several(**inputs, labels=hot.long()).loss == found.loss
    for count in (None, 0, torch.tensor(0)):  # a batch in which nothing is scored
        loss = several(**inputs, labels=torch.full_like(hot, -100), num_items_in_batch=count).loss
        assert loss == 0
    with pytest.raises(ValueError, match=r"labels: expected one number for each of \[3, 2\], got"):
        several(**inputs, labels=torch.zeros(3))
    one_of_two = sequence.from_pretrained(published, num_labels=2)
    found = one_of_two(**inputs, labels=torch.tensor([0, 1, 1]))
    expected = torch.nn.functional.cross_entropy(found.logits, torch.tensor([0, 1, 1]))
    torch.testing.assert_close(found.loss, expected)
    assert one_of_two.config.problem_type is None


def test_answers_are_scored_as_transformers_does(published):
    model, inputs = HarmonicForQuestionAnswering.from_pretrained(published), batch()
    positions = {
        "start_positions": torch.tensor([1, 0, 99]),
        "end_positions": torch.tensor([4, 2, 3]),
    }
    found = model(**inputs, **positions)
    assert found.start_logits.shape == found.end_logits.shape == (3, 8)
    starts, ends = found.start_logits.log_softmax(-1), found.end_logits.log_softmax(-1)
    expected = -(starts[0, 1] + starts[1, 0]) / 2 - (ends[0, 4] + ends[1, 2] + ends[2, 3]) / 3
    torch.testing.assert_close(found.loss, expected / 2)
    assert model(**inputs).loss is None


def test_a_decoder_reads_a_text_at_its_last_token(causal):
    model = HarmonicForSequenceClassification.from_pretrained(causal, num_labels=1)
    for left in (False, True):
        inputs = batch(left=left)
        length = int(inputs["attention_mask"][1].sum())
        kept = slice(8 - length, None) if left else slice(length)
        positions = {"position_ids": (inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0)}
        alone = model(input_ids=inputs["input_ids"][1:2, kept]).logits
        torch.testing.assert_close(model(**inputs, **positions).logits[1:2], alone)
    text = torch.randint(5, V, (1, 6))
    assert torch.equal(
        model(text).logits, model.dist_head(model.model(text).last_hidden_state[:, -1])
    )


def test_a_decoder_without_a_mask_reads_the_last_token_that_is_no_padding(causal):
    model = HarmonicForSequenceClassification.from_pretrained(causal, num_labels=1)
    inputs = batch()
    input_ids = inputs["input_ids"] * inputs["attention_mask"]
    assert torch.equal(model(input_ids).logits, model(**inputs).logits)
    shorter = model(input_ids[1:2, :5]).logits  # by products of other shapes
    torch.testing.assert_close(model(input_ids[1:2]).logits, shorter)
    model.config.text_config.pad_token_id = None
    with pytest.raises(ValueError, match=r"attention_mask: expected one .* no pad_token_id"):
        model(input_ids)
    model.config.pad_token_id = 0
    assert torch.equal(model(input_ids).logits, model(**inputs).logits)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is:FutureWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("pooling", ["cls", "last"])
def test_a_classifier_traced_with_one_text_reads_each_of_three(base, causal, pooling):
    if pooling == "cls":
        model = make(base, pooling="cls")
    else:
        model = HarmonicForSequenceClassification.from_pretrained(causal, num_labels=3)
    model.requires_grad_(False)
    texts = tuple(batch().values())
    one = tuple(text[:1] for text in texts)
    traced = torch.jit.trace(lambda *texts: model(*texts).logits, one, check_trace=False)
    torch.testing.assert_close(traced(*texts), model(*texts).logits)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("task", PEFT_TASKS)
def test_a_random_head_that_peft_leaves_out_is_refused_in_training(published, task):
    inputs = batch()

    def wrapped(**options):
        return get_peft_model(
            PEFT_TASKS[task].from_pretrained(published),
            LoraConfig(task_type=task, target_modules=["query"], **options),
        )

    frozen = wrapped()
    frozen.eval()(**inputs)
    frozen.train()
    of_texts = {"labels": torch.zeros(3).long(), "output_logits": False}
    without_logits = {
        "QUESTION_ANS": {},  # it always returns them
        "SEQ_CLS": of_texts,
        "TOKEN_CLS": of_texts | {"labels": torch.zeros(3, 8).long()},
    }
    for options in ({}, without_logits[task]):
        with pytest.raises(ValueError, match=r'a frozen one .* modules_to_save=\["dist_head"\]'):
            frozen(**inputs, **options)
    with torch.no_grad():
        frozen(**inputs)
        frozen.base_model.model.dist_head.weight.zero_()  # no longer random
    frozen(**inputs)
    trained = wrapped(modules_to_save=["dist_head"]).train()
    next(iter(trained(**inputs).values())).sum().backward()
    assert trained.base_model.model.active_head.weight.grad.abs().sum() > 0


def test_what_was_trained_in_the_backbone_of_a_language_model_is_still_named(base, tmp_path):
    model = HarmonicForMaskedLM.from_base(base)
    trained = "model.backbone.encoder.layer.1.output.dense.bias"
    model.config.trained_parameters = [trained, "dist_head.weight"]
    model.save_pretrained(tmp_path)
    classifier = HarmonicForSequenceClassification.from_pretrained(tmp_path, num_labels=2)
    assert classifier.config.trained_parameters == [trained]


def test_a_classifier_of_another_vocabulary_says_so(base):
    model = HarmonicForSequenceClassification.from_base(base, labels=LABELS)
    for size, known in ((V, None), (V + 3, V), (V + 5, V)):
        model.resize_token_embeddings(size)
        assert model.config.base_vocab_size == known
    assert len(model.dist_head.weight) == len(LABELS)


def test_a_random_head_of_a_base_is_refused_where_it_is_frozen(base):
    model = make(base).train()
    model.dist_head.requires_grad_(False)
    for one in (model, copy.deepcopy(model)):
        with pytest.raises(ValueError, match="dist_head: expected a new head to be trained"):
            one(**batch())
    model.dist_head.initialize_(torch.randn(3, 32))
    model(**batch())


def test_a_trained_head_may_be_frozen(base):
    model = make(base).train()
    optimizer = torch.optim.AdamW(model.dist_head.parameters(), fused=True)
    model(**batch()).logits.sum().backward()
    optimizer.step()  # which leaves no trace in the weight's version
    model.dist_head.requires_grad_(False)
    model(**batch())


def test_a_new_head_leaves_the_configuration_of_the_caller_alone(published):
    config = HarmonicConfig.from_pretrained(published, num_labels=3)
    model = HarmonicForSequenceClassification.from_pretrained(published, config=config)
    assert config.head["name"] == "transform"
    assert config.architectures == ["HarmonicForMaskedLM"]
    assert model.config.head == {"name": "linear", "bias": True}
    assert model.config.num_labels == 3


class Finer(HarmonicForSequenceClassification):
    """A user's own."""


def test_a_subclass_keeps_the_head_it_was_trained_with(base, tmp_path):
    model = make(base)
    model.save_pretrained(tmp_path)
    assert torch.equal(Finer.from_pretrained(tmp_path).dist_head.weight, model.dist_head.weight)


@pytest.mark.parametrize("num_labels", [1, 3])
def test_numbers_of_tokens_that_are_not_scored_count_nothing(base, tmp_path, num_labels):
    make(base).save_pretrained(tmp_path)
    model = AutoModelForTokenClassification.from_pretrained(
        tmp_path, num_labels=num_labels, ignore_mismatched_sizes=True
    )
    inputs = batch()
    labels = torch.rand(3, 8, num_labels).round(decimals=1)
    labels[:, [0, 7]] = -100
    found = model(**inputs, labels=labels)
    logits, expected = found.logits[:, 1:7], labels[:, 1:7]
    loss_fn = torch.nn.MSELoss() if num_labels == 1 else torch.nn.BCEWithLogitsLoss()
    torch.testing.assert_close(found.loss, loss_fn(logits, expected))


def test_a_trained_head_of_an_adapter_is_loaded_again(published, tmp_path, monkeypatch):
    """The repository below is a language model's: its classifier's head is in the adapter alone."""
    monkeypatch.setattr("transformers.integrations.peft.check_peft_version", lambda **_: None)
    sequence = HarmonicForSequenceClassification
    model = sequence.from_pretrained(published, num_labels=3)
    options = {"target_modules": ["query"], "modules_to_save": ["dist_head"]}
    model.add_adapter(LoraConfig(r=2, init_lora_weights=False, **options))
    torch.nn.init.normal_(model.active_head.weight)
    model.save_pretrained(tmp_path)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    torch.testing.assert_close(again(**batch()).logits, model.eval()(**batch()).logits)
    with pytest.raises(ValueError, match=r"got one of type None.* an adapter .* AutoModelFor"):
        sequence.from_pretrained(tmp_path)
