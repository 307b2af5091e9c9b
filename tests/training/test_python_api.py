"""HarmonicTrainer from Python: a user's models, data sets and callables, without a YAML file."""

import shutil
from pathlib import Path

import numpy as np
import optuna
import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDataset, interleave_datasets
from datasets.distributed import split_dataset_by_node
from peft import AdaLoraConfig, IA3Config, LoraConfig, get_peft_model
from torch.utils.data import Subset
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    CLIPVisionConfig,
    DataCollatorForLanguageModeling,
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    SplinterConfig,
    T5Config,
    TrainerCallback,
    TrainingArguments,
    XLMConfig,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from harmonic_sft import (
    DistLayer,
    HarmonicForMaskedLM,
    HarmonicForSequenceClassification,
    HarmonicLoss,
    HarmonicTrainer,
    HarmonicTrainingArguments,
    train,
)
from harmonic_sft.config import read_yaml
from harmonic_sft.models import HEADS
from harmonic_sft.models.heads import heads_in
from harmonic_sft.training import load_run_config
from harmonic_sft.training.master_weights import MasterWeightsAdamW
from harmonic_sft.training.run import check_run
from harmonic_sft.training.tasks import task_of
from tests.training.conftest import logged, losses, trained

AS_IN_YAML = {
    "per_device_train_batch_size": 8,
    "schedule": {"warmup_ratio": 0.2, "decay_ratio": 0.4},
}
# Where no head is named it goes behind the layers of a BERT's own.
BEHIND_TRANSFORM = {"name": "transform", "inner": {"name": "dist"}}
SAVING = {"save_strategy": "steps", "save_steps": 2}


def rates(trainer):
    return logged(trainer.state.log_history, "learning_rate")


def assert_same_weights(*trainers):
    weights = (dict(trainer.model.named_parameters()) for trainer in trainers)
    torch.testing.assert_close(*weights, rtol=0, atol=0)


@pytest.mark.parametrize("is_stream", [False, True], ids=["a table", "a packed stream"])
def test_a_name_and_a_data_set_train_the_weights_of_the_yaml_file(
    make_yaml, texts, text_file, arguments, make, is_stream
):
    source = {"path": str(text_file), "streaming": is_stream}
    data = {"sources": [source], "packing": is_stream, "eval": {"documents": 0}}
    from_yaml = trained(make_yaml(data=data, head=BEHIND_TRANSFORM), "training.max_steps=4")
    given = texts, texts.select(range(10))
    train, held_out = [rows.to_iterable_dataset() for rows in given] if is_stream else given
    args = arguments("python", packing=is_stream, **AS_IN_YAML)
    trainer = make(args, train_dataset=train, eval_dataset=held_out)
    trainer.train()
    assert losses(trainer) == losses(from_yaml)
    assert_same_weights(trainer, from_yaml)
    assert trainer.evaluate()["eval_tokens"] > 0


@pytest.mark.parametrize(
    ("head", "names"),
    [
        (None, ["transform", "dist"]),
        ("cosine", ["transform", "cosine"]),
        ("transform", ["transform", "linear"]),
        ({"name": "cosine"}, ["cosine"]),
    ],
)
def test_a_head_that_is_only_named_goes_behind_the_bases_layers(
    tiny_base, arguments, make, head, names, caplog
):
    """A dictionary is taken as it stands; a loaded model is as its checkpoint."""
    for model in (tiny_base, BertForMaskedLM.from_pretrained(tiny_base)):
        settings = make(arguments(head=head, h_exp=None), model=model).model.dist_head.settings()
        assert [found["name"] for found in heads_in(settings)] == names
    assert ("left out" in caplog.text) == ("transform" not in names)


def test_a_model_from_scratch_has_no_layers_to_keep(arguments, make):
    model = make(arguments(from_scratch=True, unfreeze=["*"])).model
    assert model.dist_head.settings()["name"] == "dist"


def test_nothing_is_held_out_and_evaluation_is_asked_for(texts, make):
    trainer = make()
    documents = {int(row["document"]) for row in trainer.train_dataset.rows}
    assert len(documents) == len(texts)
    assert trainer.eval_dataset is None
    found = trainer.evaluate(texts.select(range(10)))
    assert found["eval_tokens"] > 10
    times = {key: found[key] for key in found if "runtime" in key or "per_second" in key}
    assert found == {**trainer.evaluate(texts.select(range(10))), **times}


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_data_set_that_is_assigned_later_is_refused_to_train_on(texts, make, is_stream):
    trainer = make(train_dataset=texts.to_iterable_dataset()) if is_stream else make()
    trainer.train_dataset = texts.select(range(5))
    with pytest.raises(ValueError, match="train_dataset: expected the one that the trainer was"):
        trainer.train()


def test_data_sets_that_are_assigned_later_are_evaluated_on(texts, make):
    trainer, some = make(), texts.select(range(10))
    trainer.eval_dataset = {"some": some}
    assert trainer.evaluate()["eval_some_loss"] == trainer.evaluate(some)["eval_loss"]


def test_what_is_not_trained_on_is_read_to_its_last_row(texts, arguments, make):
    trainer = make(arguments(dataloader_drop_last=True, per_device_eval_batch_size=4))
    assert len(trainer.get_train_dataloader()) == len(trainer.train_dataset) // 8
    held_out = texts.select(range(6))
    num_rows = len(trainer.get_eval_dataloader(held_out).dataset)
    assert num_rows % 4
    assert trainer.evaluate(held_out)["eval_documents"] == 6
    assert len(trainer.predict(held_out).label_ids) == num_rows
    assert trainer.args.dataloader_drop_last


def test_one_process_saves(make, tmp_path, monkeypatch):
    trainer = make()
    monkeypatch.setattr(HarmonicTrainingArguments, "should_save", False)
    trainer.save_model(str(tmp_path / "saved"))
    assert not (tmp_path / "saved").exists()


def test_a_stream_with_a_shuffle_buffer_is_not_trained_on(texts, make):
    stream = texts.to_iterable_dataset()
    make(train_dataset=stream.map(dict).filter(bool).take(20), eval_dataset=stream.shuffle())
    shuffled = stream.shuffle(buffer_size=10)
    for data in (shuffled, shuffled.map(dict).take(20), interleave_datasets([stream, shuffled])):
        with pytest.raises(ValueError, match=r"^train_dataset: expected a stream without a shuff"):
            make(train_dataset=data)


def test_a_stream_that_is_split_by_node_is_not_trained_on(texts, make):
    part = split_dataset_by_node(texts.to_iterable_dataset(num_shards=2), rank=0, world_size=2)
    with pytest.raises(ValueError, match=r"^train_dataset: expected the stream of all processes"):
        make(train_dataset=part.map(dict))


def test_values_of_a_stream_to_evaluate_on_may_differ_in_type(make):
    question, answer = ([{"role": role, "content": "aa"}] for role in ("user", "assistant"))
    trainer = make()
    for rows in (
        [{"text": "aa ab", "from": 1}, {"text": "ba", "from": "x"}, {"text": "aa", "to": []}],
        [{"prompt": "aa", "completion": "ab"}, {"prompt": question, "completion": answer}],
    ):
        data = IterableDataset.from_generator(lambda rows=rows: iter(rows))
        documents = trainer._preparation.eval_rows(data).rows["document"]
        assert list(documents) == [*range(len(rows))]


def test_arguments_of_a_stream_serve_a_table(texts, arguments, make):
    args = arguments(max_steps=1)
    trainer = make(args, train_dataset=texts.to_iterable_dataset())
    assert not args.ignore_data_skip
    trainer.train()
    assert not args.ignore_data_skip


CONVERSATIONS = {
    "messages": {
        "messages": [
            {"role": "user", "content": "w5 w6 w7"},
            {"role": "assistant", "content": "w8 w9"},
        ]
    },
    "prompt_completion": {"prompt": "w5 w6 w7", "completion": "w8 w9"},
    "tokens": {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]},
}
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }} w2"
    "{% endgeneration %}{% else %}{{ m.content }} {% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("form", "loss_on"),
    [("messages", "assistant"), ("prompt_completion", "completion"), ("tokens", "all")],
)
def test_a_decoder_learns_from_every_form_of_rows(causal_base, arguments, form, loss_on, make):
    tokenizer = AutoTokenizer.from_pretrained(causal_base)
    tokenizer.chat_template = TEMPLATE
    trainer = make(
        arguments(loss_on=loss_on, packing=True),
        model=str(causal_base),
        train_dataset=Dataset.from_list([CONVERSATIONS[form]] * 40),
        processing_class=tokenizer,
    )
    assert trainer.model.is_causal
    row = trainer.train_dataset[0]
    scored = row["labels"][row["labels"] != -100]
    assert set(scored.tolist()) <= ({7, 8} if form == "tokens" else {2, 8, 9})
    trainer.train()
    assert losses(trainer)[-1] < losses(trainer)[0]


def test_predictions_of_texts_without_a_masked_token_are_kept(arguments, make):
    trainer = make(arguments(mask=0.001))
    found = trainer.predict(Dataset.from_dict({"text": ["aa"]}))
    assert found.predictions.shape[:2] == (1, 3)
    assert "test_loss" not in found.metrics
    with pytest.raises(ValueError, match="evaluation: expected labelled tokens, got none"):
        trainer.evaluate(Dataset.from_dict({"text": ["aa"]}))


@pytest.mark.parametrize("kind", ["packed", "stream", "decoder", "classes"])
def test_rows_weigh_in_the_loss_what_their_column_says(
    tiny_base, causal_base, texts, arguments, kind, make
):
    """The first losses of two halves that weigh 3 are together 3 times that of the whole."""
    rows = Dataset.from_dict({"text": texts["text"][:8], "kind": ["x", "y"] * 4})
    if kind == "decoder":
        rows = Dataset.from_dict({"text": ["w5 w6 w7 w8", "w9 w5 w4 w3"] * 4})
    base = str(causal_base if kind == "decoder" else tiny_base)
    fields = {
        "max_steps": 1,
        "per_device_train_batch_size": 8,
        "packing": kind == "packed",
        "label_column": "kind" if kind == "classes" else None,
    }

    def first_loss(name, weights):
        weighted = rows.add_column("importance", weights)
        data = weighted.to_iterable_dataset() if kind == "stream" else weighted
        args = arguments(name, weight_column="importance", **fields)
        trainer = make(args, model=base, train_dataset=data)
        trainer.train()
        return losses(trainer)[0]

    total, half = first_loss("ones", [1.0] * 8), first_loss("half", [3.0, 0.0] * 4)
    other = first_loss("other", [0.0, 3.0] * 4)
    assert half + other == pytest.approx(3 * total, rel=1e-4)
    assert half != pytest.approx(other, rel=1e-4)


def test_a_weight_is_a_number_of_0_or_more(texts, arguments, make):
    for column in (["much"] * 2, [-1.0, 1.0], [float("nan"), 1.0], [1.0, 1e39]):
        rows = Dataset.from_dict({"text": texts["text"][:2], "importance": column})
        with pytest.raises(ValueError, match="importance: expected a weight from 0 to the"):
            make(arguments(weight_column="importance"), train_dataset=rows)


@pytest.mark.parametrize(
    ("fields", "last"),
    [({"lr_scheduler_type": "linear"}, 5e-3), ({"schedule": {"decay_ratio": 0.25}}, 1e-2)],
    ids=["a schedule of transformers", "ours, with other phases"],
)
def test_a_schedule_is_honoured_and_warmup_steps_win_over_the_ratio(arguments, make, fields, last):
    trainer = make(arguments(warmup_steps=2, **fields))
    trainer.train()
    assert rates(trainer) == pytest.approx([0.0, 5e-3, 1e-2, last])


def test_another_optimizer_is_honoured(arguments, make):
    trainer = make(arguments(optim="adafactor"))
    trainer.train()
    assert type(trainer.optimizer.optimizer).__name__ == "Adafactor"
    given = make(arguments("other"), optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.5}))
    given.train()
    assert isinstance(given.optimizer.optimizer, torch.optim.SGD)


def test_master_weights_are_stepped_as_the_arguments_say_when_training_begins(arguments, make):
    args = arguments(dtype="bfloat16", unfreeze={"last_blocks": 1, "dtype": "bfloat16"})
    trainer = make(args)
    args.learning_rate, args.adam_beta1, args.lr_scheduler_type = 0.5, 0.8, "constant"
    trainer.create_optimizer()
    assert isinstance(trainer.optimizer, MasterWeightsAdamW)
    assert trainer.optimizer.defaults["lr"] == 0.5
    assert trainer.optimizer.defaults["betas"] == (0.8, 0.95)


def test_an_optimizer_has_to_hold_what_trains(tiny_base, arguments, make):
    args = arguments(dtype="bfloat16", unfreeze={"last_blocks": 1, "dtype": "bfloat16"})
    with pytest.raises(ValueError, match=r"optimizers: expected none with torch\.bfloat16"):
        make(args, optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.5}))
    model = BertForMaskedLM.from_pretrained(tiny_base)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="optimizers: expected one that holds all that trains"):
        make(model=model, optimizers=(optimizer, None))
    ours = HarmonicForMaskedLM.from_base(str(tiny_base))
    parts = (ours.dist_head, ours.model.backbone.encoder.layer[-1])  # and nothing that is frozen
    optimizer = torch.optim.SGD([p for part in parts for p in part.parameters()], lr=0.1)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    for other in (None, torch.optim.SGD(ours.parameters(), lr=7.0)):
        with pytest.raises(ValueError, match="expected a schedule of the optimizer beside it"):
            make(model=ours, optimizers=(other, schedule))
    trainer = make(model=ours, optimizers=(optimizer, schedule))
    trainer.train()
    assert trainer.optimizer.optimizer is optimizer
    assert rates(trainer) == [0.1] * 4


def test_metrics_and_predictions_are_those_of_transformers(texts, make):
    def metrics(found):
        labels = found.label_ids
        scored = labels != -100
        return {"right": (found.predictions[scored] == labels[scored]).mean()}

    trainer = make(
        eval_dataset={"first": texts.select(range(20)), "last": texts.select(range(100, 120))},
        compute_metrics=metrics,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    )
    found = trainer.evaluate()
    for name in ("first", "last"):
        assert found[f"eval_{name}_right"] == pytest.approx(found[f"eval_{name}_accuracy"])
    test = texts.select(range(3))
    predicted = trainer.predict(test)
    assert predicted.predictions.shape == predicted.label_ids.shape
    assert predicted.predictions.dtype == np.int64
    assert predicted.metrics["test_loss"] == pytest.approx(trainer.evaluate(test)["eval_loss"])


def test_a_loss_function_of_the_user_sees_logits_and_labels(arguments, make):
    seen = []

    def cross_entropy(outputs, labels, num_items_in_batch=None):
        seen.append((outputs.logits.shape[:2], labels.shape))
        total = torch.nn.functional.cross_entropy(
            outputs.logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
        )
        return total / num_items_in_batch

    trainer, expected = make(compute_loss_func=cross_entropy), make(arguments("other"))
    trainer.train()
    expected.train()
    assert seen[0][0] == seen[0][1]
    assert losses(trainer) == pytest.approx(losses(expected), rel=1e-5)
    file = trainer.run_config.output_dir / "run.yaml"
    assert read_yaml(file)["loss"] is None
    with pytest.raises(ValueError, match=r"^loss: expected the name of a loss, got null"):
        check_run(load_run_config(file, ["resume=true"]))


@pytest.mark.parametrize("kind", ["encoder", "decoder", "decoder without a head"])
def test_a_model_of_transformers_gets_a_new_head_and_lends_its_body(
    tiny_base, causal_base, texts, arguments, make, kind
):
    base, model_class = tiny_base, BertForMaskedLM
    if kind != "encoder":
        base = causal_base
        model_class = LlamaForCausalLM if kind == "decoder" else LlamaModel
        texts = Dataset.from_dict({"text": ["w5 w6 w7 w8"] * 8})
    options = {"train_dataset": texts, "processing_class": AutoTokenizer.from_pretrained(base)}
    model = model_class.from_pretrained(base)
    trainer = make(model=model, **options)
    assert trainer.model.model.backbone is model.base_model
    by_name = make(arguments("other"), model=str(base), **options)
    trainer.train()
    by_name.train()
    assert losses(trainer) == losses(by_name)
    with pytest.raises(ValueError, match="model: expected a name with from_scratch or dropout"):
        make(arguments("third", dropout=0.1), model=model, **options)
    if kind == "decoder without a head":
        with pytest.raises(ValueError, match="loss distill: expected a base with a head of its"):
            make(arguments("fourth", loss="distill"), model=model, **options)


@pytest.mark.parametrize(
    ("given", "dtype", "warning"),
    [
        ("bfloat16", "float32", "in bfloat16 and becomes float32; dtype='bfloat16' keeps it in"),
        ("float64", "float32", "in float64 and becomes float32."),
        ("bfloat16", "bfloat16", ""),
    ],
)
def test_a_model_that_becomes_float32_is_warned_of(
    tiny_base, arguments, make, caplog, given, dtype, warning
):
    model = BertForMaskedLM.from_pretrained(tiny_base, dtype=given)
    make(arguments(dtype=dtype), model=model)
    assert str(model.dtype) == f"torch.{dtype}"
    if warning:
        assert f"The loaded model is {warning}" in caplog.text
    else:
        assert "The loaded model is" not in caplog.text


@pytest.mark.parametrize("given", ["float16", "float64"])
def test_one_of_our_models_in_another_precision_is_refused(tiny_base, make, given):
    model = HarmonicForMaskedLM.from_base(tiny_base, dtype=given)
    message = rf"model: expected weights in float32 or bfloat16, got torch\.{given}\. Call"
    with pytest.raises(ValueError, match=message):
        make(model=model)
    make(model=model.float()).train()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inside of torch
def test_a_compiled_model_is_refused_with_the_argument_that_compiles(tiny_base, make):
    model = torch.compile(HarmonicForMaskedLM.from_base(tiny_base))
    with pytest.raises(ValueError, match="Give the model itself, and torch_compile=True among"):
        make(model=model)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_a_model_with_an_adapter_of_peft_is_refused(tiny_base, make, monkeypatch):
    # transformers 5.24 asks for PEFT 0.22, which is not out yet.
    monkeypatch.setattr("transformers.integrations.peft.check_peft_version", lambda **_: None)
    for put in (lambda model, lora: model.add_adapter(lora), get_peft_model):  # in place
        ours = HarmonicForMaskedLM.from_base(str(tiny_base))
        for model in (BertForMaskedLM.from_pretrained(tiny_base), ours):
            wrapped = put(model, LoraConfig(r=2, target_modules=["query"])) or model
            for one in (model, wrapped):
                with pytest.raises(ValueError, match="expected one without a PEFT adapter, got"):
                    make(model=one)


def test_one_of_our_models_keeps_its_head_and_exponent(tiny_base, arguments, tmp_path, make):
    head = {"name": "dist", "h_exp": -7.0, "unit_sphere": False}
    model = HarmonicForMaskedLM.from_base(str(tiny_base), head=head)
    trainer = make(model=model)
    assert trainer.model is model
    trainer.train()
    assert model.h_exp == -7.0
    assert not [n for n, p in model.named_parameters() if p.requires_grad and ".layer.1." in n]
    with pytest.raises(ValueError, match="head: expected nothing with a HarmonicForMaskedLM"):
        make(arguments("other", head="linear"), model=model)
    trainer.save_model(str(tmp_path / "saved"))
    again = make(arguments("again"), model=str(tmp_path / "saved"))
    assert again.model.h_exp == -7.0
    assert torch.equal(again.model.dist_head.weight, model.dist_head.weight)
    swapped = make(arguments("swapped", head="cosine"), model=str(tmp_path / "saved"))
    assert swapped.model.dist_head.settings()["name"] == "cosine"


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("dtype", {"dtype": "bfloat16"}),
        ("dropout", {"dropout": 0.1}),
        ("from_scratch", {"from_scratch": True, "unfreeze": ["*"]}),
        ("pooling", {"pooling": "cls", "label_column": "label"}),
        ("h_exp.schedule", {"h_exp": {"start": -5.0, "schedule": "learned"}}),
    ],
)
def test_one_of_our_models_is_not_loaded_again(tiny_base, arguments, make, name, fields):
    model = HarmonicForMaskedLM.from_base(str(tiny_base))
    if name == "pooling":
        model = HarmonicForSequenceClassification.from_base(str(tiny_base), labels=["a", "b"])
    with pytest.raises(ValueError, match=f"{name}: expected nothing with a Harmonic.* is loaded"):
        make(arguments(**fields), model=model)


def test_a_head_that_could_not_be_saved_is_not_trained(tiny_base, make):
    class Own(DistLayer):
        pass

    model = HarmonicForMaskedLM.from_base(str(tiny_base), head={"name": "dist"})
    model.dist_head.__class__ = Own
    with pytest.raises(ValueError, match="dist_head: expected a class of HEADS, got Own"):
        make(model=model)


def test_a_given_exponent_is_evaluated_before_training_too(tiny_base, texts, arguments, make):
    model = HarmonicForMaskedLM.from_base(str(tiny_base))
    trainer = make(arguments(h_exp=-5.0), model=model)
    assert trainer.evaluate(texts.select(range(10)))["eval_h_exp"] == -5.0


def test_a_learned_exponent_is_logged(arguments, make):
    trainer = make(arguments(h_exp={"start": -5.0, "schedule": "learned"}))
    trainer.train()
    found = logged(trainer.state.log_history, "h_exp")
    assert len(set(found)) > 1
    assert found[-1] == trainer.model.h_exp


class OwnSchedule(TrainerCallback):
    """Another exponent for each step, as the guide says."""

    def on_train_begin(self, args, state, control, **kwargs):
        kwargs["model"].h_exp = -12.0 + state.global_step

    on_step_end = on_train_begin


def test_the_exponents_of_a_schedule_of_the_users_own_are_logged(arguments, make, tmp_path):
    first, resumed = (
        make(arguments(h_exp=-12.0, save_strategy="steps", save_steps=2), callbacks=[OwnSchedule()])
        for _ in range(2)
    )
    first.train()
    assert logged(first.state.log_history, "h_exp") == [-12.0, -11.0, -10.0, -9.0]
    assert first.model.h_exp == -8.0
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert losses(resumed) == losses(first)
    assert logged(resumed.state.log_history, "h_exp") == [-12.0, -11.0, -10.0, -9.0]


def test_rows_go_to_a_collator_of_the_user_as_they_are(texts, make, tokenizer):
    rows = texts.map(lambda row: tokenizer(row["text"]), remove_columns=["text"])
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.5)
    trainer = make(data_collator=collator, train_dataset=rows)
    assert trainer.train_dataset is rows
    trainer.train()
    assert len(losses(trainer)) == 4


def test_lora_of_peft_trains_and_what_cannot_be_merged_is_refused(arguments, make):
    lora = LoraConfig(r=2, target_modules=["query"], modules_to_save=["dist_head"])
    trainer = make(arguments(), peft_config=lora)
    trained = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
    assert len([name for name in trained if "lora_A" in name]) == 3
    assert all("lora_" in name or name.startswith("dist_head.") for name in trained)
    trainer.train()
    names = dict(make(arguments("both", unfreeze=1), peft_config=lora).model.named_parameters())
    assert any(p.requires_grad and "layer.2.output" in name for name, p in names.items())
    with pytest.raises(
        ValueError, match=r"peft_config: expected no more than .* got \['use_dora'\]"
    ):
        make(arguments("other"), peft_config=LoraConfig(r=2, use_dora=True))
    for other in (AdaLoraConfig(total_step=400), IA3Config()):
        with pytest.raises(ValueError, match="peft_config: expected a LoraConfig, got a"):
            make(arguments("type"), peft_config=other)
    with pytest.raises(ValueError, match=r"^target_modules: expected .*, got '\.\*query'$"):
        make(arguments("third"), peft_config=LoraConfig(r=2, target_modules=".*query"))


def test_a_model_with_lora_of_a_training_is_merged_before_another_one(arguments, make, tmp_path):
    """A second training of its blocks would train what stands under the LoRA and is in no form."""
    first = make(arguments(unfreeze=0), peft_config=LoraConfig(r=2, target_modules=["query"]))
    first.train()
    for options in ({}, {"peft_config": LoraConfig(r=2)}):
        with pytest.raises(ValueError, match=r"expected one without .* save it and load it again"):
            make(arguments("second"), model=first.model, **options)
    first.save_model(str(tmp_path / "merged"))
    second = make(
        arguments("second"), model=HarmonicForMaskedLM.from_pretrained(tmp_path / "merged")
    )
    second.train()
    earlier = set(first.model.config.trained_parameters)
    assert earlier < set(second.model.config.trained_parameters)


def test_a_run_continues_from_its_last_checkpoint(arguments, make, texts):
    whole = make(arguments("run", **SAVING))
    whole.train()
    held_out = texts.select(range(5))  # there was none before
    resumed = make(arguments("run", **SAVING), eval_dataset=held_out)
    with pytest.raises(ValueError, match=r"in Python train\(resume_from_checkpoint=True\)"):
        resumed.train()
    resumed.train(resume_from_checkpoint=f"{resumed.args.output_dir}/checkpoint-2")
    assert losses(resumed) == losses(whole)
    assert_same_weights(resumed, whole)
    fresh = make(arguments("fresh"))
    with pytest.raises(ValueError, match="resume_from_checkpoint: expected a whole checkpoint"):
        fresh.train(resume_from_checkpoint=True)
    message = r"expected the settings of the run .* training.learning_rate \(then 0.01\). Use"
    other = make(arguments("other", **SAVING, learning_rate=1e-5))
    with pytest.raises(ValueError, match=message):  # the optimizer would keep the old rate
        other.train(resume_from_checkpoint=f"{resumed.args.output_dir}/checkpoint-2")
    assert not Path(other.args.output_dir, "run.yaml").exists()


def test_a_run_does_not_continue_on_other_rows(arguments, make, texts):
    """On two evaluation sets the best checkpoint, and when to stop, would be chosen."""

    def start(count, train=texts, **options):
        args = {**SAVING, "eval_strategy": "steps", "eval_steps": 2, **options}
        held_out = texts.select(range(count))
        return make(arguments("run", **args), train_dataset=train, eval_dataset=held_out)

    start(10).train()
    shutil.rmtree(f"{arguments('run').output_dir}/checkpoint-4")
    with pytest.raises(ValueError, match=r"resume: expected the training rows of .*checkpoint-2"):
        start(10, texts.select(range(len(texts) - 1))).train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match=r"resume: expected the evaluation rows of .*checkpoint-2"):
        start(11).train(resume_from_checkpoint=True)
    again = start(10, logging_steps=4)  # which may change
    again.train(resume_from_checkpoint=True)
    assert [e["step"] for e in again.state.log_history if "loss" in e][-2:] == [2, 4]


class TensorRows(torch.utils.data.Dataset):
    """Rows of a user: tensors, and padding that they mask themselves."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        row = torch.tensor([2, 5 + index, 6, 3, 0])
        return {
            "input_ids": row,
            "attention_mask": row.ne(0).long(),
            "labels": row.where(row > 4, -100),
        }


def test_rows_of_tensors_need_no_collator(arguments, make):
    some = torch.utils.data.Subset(TensorRows(13), range(12))
    whole = make(arguments("run", **SAVING), train_dataset=some)
    batch = next(iter(whole.get_train_dataloader()))
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 0]] * len(batch["input_ids"])
    whole.train()
    shutil.rmtree(f"{whole.args.output_dir}/checkpoint-4")
    with pytest.raises(ValueError, match=r"resume: expected the training rows of .*checkpoint-2"):
        make(arguments("run", **SAVING), train_dataset=TensorRows(13)).train(
            resume_from_checkpoint=True
        )


def test_the_patience_of_early_stopping_outlives_a_resume(arguments, make, texts):
    steps: dict = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps"}
    steps |= {"save_steps": 1, "metric_for_best_model": "loss", "load_best_model_at_end": True}
    fixed = {"h_exp": -8.0, "learning_rate": 1e-30, "max_steps": 9}  # nothing gets much better
    fixed["eval_on_start"] = True  # of the run: a session that continues would count it again

    def start(patience=3, **options):
        # Prototypes that are scaled to norm 1 again may move by their last bit.
        callbacks = [EarlyStoppingCallback(patience, early_stopping_threshold=1e-3)]
        trainer = make(
            arguments("run", **steps, **fixed),
            eval_dataset=texts.select(range(10)),
            callbacks=callbacks,
        )
        trainer.train(**options)
        return trainer.state.global_step

    whole = start()
    folder = Path(arguments("run").output_dir)
    shutil.rmtree(folder / f"checkpoint-{whole}")
    assert start(resume_from_checkpoint=True) == whole < 9
    assert start(resume_from_checkpoint=True) == whole  # it had stopped
    assert start(patience=4, resume_from_checkpoint=True) == whole + 1


def test_a_finished_run_is_not_trained_further(arguments, make, caplog):
    part = {"max_steps": -1, "num_train_epochs": 0.2}
    for name, length in (("steps", {"max_steps": 4}), ("epochs", part)):
        whole = make(arguments(name, **SAVING, **length))
        steps = whole.train().global_step
        again = make(arguments(name, **SAVING, **length))
        output = again.train(resume_from_checkpoint=True)
        assert output.global_step == again.state.global_step == steps
        assert_same_weights(again, whole)
        last = sorted(Path(again.args.output_dir).glob("checkpoint-*"))[-1]
        assert last.name == f"checkpoint-{steps}"
        assert f"Finished: nothing is left to train after {last}." in caplog.messages


def test_a_checkpoint_after_which_nothing_is_left_keeps_its_exponent(arguments, make):
    """Of a longer run, whose exponent had not come to its end."""
    whole = make(arguments("long", **SAVING, max_steps=4))
    whole.train()
    short = make(arguments("short", **SAVING, max_steps=2))
    short.train(resume_from_checkpoint=f"{whole.args.output_dir}/checkpoint-2")
    assert (whole.model.h_exp, short.model.h_exp) == (-4.0, -8.0)


def test_a_search_loads_the_model_again_for_every_trial(tiny_base, texts, arguments, make):
    trainer = make(arguments(gradient_checkpointing=True), eval_dataset=texts.select(range(20)))
    found = []

    def objective(metrics):
        blocks = trainer.model.model.backbone.encoder.layer
        assert [block.gradient_checkpointing for block in blocks] == [False, False, True]
        found.append((trainer.model.h_exp, metrics["eval_loss"]))
        return metrics["eval_loss"]

    best = trainer.hyperparameter_search(
        hp_space=lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 2e-2, 2e-2)},
        compute_objective=objective,
        n_trials=2,
        backend="optuna",
        sampler=optuna.samplers.RandomSampler(seed=0),
    )
    assert found[0] == found[1]
    assert best.objective == found[0][1]
    for name, value in best.hyperparameters.items():
        setattr(trainer.args, name, value)
    trainer.args.output_dir += "/best"
    trainer.train()
    assert trainer.evaluate()["eval_loss"] == best.objective
    assert "learning_rate: 0.02" in Path(trainer.args.output_dir, "run.yaml").read_text()
    ours = HarmonicForMaskedLM.from_base(str(tiny_base))
    fixed = make(model=ours)
    with pytest.raises(ValueError, match="model: expected a name for a hyper-parameter search"):
        fixed.hyperparameter_search(lambda trial: {}, n_trials=1)
    with pytest.raises(ValueError, match="hp_space: expected a function that makes"):
        trainer.hyperparameter_search(n_trials=1)


def test_a_loaded_model_trains_on_the_loss_of_the_arguments_or_on_its_users_own(
    tiny_base, arguments, make, caplog
):
    model = HarmonicForMaskedLM.from_base(str(tiny_base))
    for loss in (None, "wasserstein", None):  # the last run names none, and the one before is over
        trainer = make(arguments(str(loss), loss=loss), model=model)
    assert trainer.run_config.loss == HarmonicLoss()
    assert model.loss_fn == HarmonicLoss().prepare(model.dist_head)
    model.loss_fn = own = lambda head, hidden_states, labels: head.nll(hidden_states, labels)
    make(arguments("own"), model=model)
    assert model.loss_fn is own
    named = make(arguments("named", loss="wasserstein"), model=model)
    assert named.run_config.loss.name == "wasserstein"
    assert model.loss_fn is not own
    assert caplog.text.count("the default, in place of the model's") == 1
    assert "router" not in caplog.text
    model.config.text_config.output_router_logits = True  # of a mixture of experts
    make(arguments("experts", loss="harmonic"), model=model)
    assert caplog.messages[-1].startswith("The router's own loss, which output_router_logits asks")


@pytest.mark.parametrize(
    "fields",
    [{"max_steps": 4}, {"max_steps": 1}, {"max_steps": 1, "eval_strategy": "steps"}],
    ids=["in a step", "in the last step", "in an evaluation"],
)
def test_a_search_goes_on_after_a_trial_that_diverges(texts, arguments, make, fields):
    def space(trial):
        return {"learning_rate": trial.suggest_categorical("learning_rate", [1e30, 1e-3])}

    trainer = make(arguments(**fields), eval_dataset=texts.select(range(10)))
    best = trainer.hyperparameter_search(
        hp_space=space,
        n_trials=2,
        backend="optuna",
        sampler=optuna.samplers.GridSampler({"learning_rate": [1e30, 1e-3]}, seed=0),
    )
    assert best.hyperparameters["learning_rate"] == 1e-3


def test_every_trial_of_a_search_has_its_own_settings(texts, arguments, make):
    seen = {}

    class Seen(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen[args.h_exp] = kwargs["model"].h_exp

    def search(**space):
        options = {"eval_dataset": texts.select(range(10)), "callbacks": [Seen()]}
        args = arguments("-".join(space), h_exp=-12, mask=0.2, max_steps=1)
        make(args, **options).hyperparameter_search(
            hp_space=lambda trial: {k: trial.suggest_categorical(k, v) for k, v in space.items()},
            n_trials=2,
            backend="optuna",
            sampler=optuna.samplers.GridSampler(space, seed=0),
        )

    search(h_exp=[-4.0, -8.5])
    assert seen == {value: value for value in (-4.0, -8.5)}
    # A whole number, a text that is a number, and a field whose old value has no type.
    search(max_steps=[1.0], learning_rate=["1e-3"], dropout=[0.0])
    for name, value in (("mask", 0.5), ("seed", 1)):
        with pytest.raises(
            ValueError, match=rf"hp_space: expected the rows .* got other \['{name}"
        ):
            search(**{name: [value]})
    with pytest.raises(ValueError, match=r"hp_space.lr: expected .* Did you mean 'learning_rate'"):
        search(lr=[1e-3])


def test_the_batch_size_after_a_search_is_that_of_the_arguments(texts, arguments, make):
    trainer = make(arguments("a", max_steps=2), eval_dataset=texts.select(range(10)))
    name, values = "per_device_train_batch_size", [8, 2]
    trainer.hyperparameter_search(
        hp_space=lambda trial: {name: trial.suggest_categorical(name, values)},
        n_trials=2,
        backend="optuna",
        sampler=optuna.samplers.GridSampler({name: values}, seed=0),
    )
    for size in values:
        trainer.args.per_device_train_batch_size = size
        trainer.args.output_dir = f"{trainer.args.output_dir}/{size}"
        trainer.train()
        fresh = make(arguments(f"fresh{size}", max_steps=2, **{name: size}))
        fresh.train()
        tokens = [one.state.num_input_tokens_seen for one in (trainer, fresh)]
        assert tokens[0] == tokens[1] > 0


def test_a_search_may_set_the_noise_of_embeddings(texts, arguments, make):
    def objective(alpha):
        options = {"max_steps": 3, "unfreeze": ["*"], "learning_rate": 1e-2}
        trainer = make(arguments(str(alpha), **options), eval_dataset=texts.select(range(10)))
        space = {"neftune_noise_alpha": alpha}
        return trainer.hyperparameter_search(lambda trial: space, n_trials=1).objective

    assert objective(50.0) != objective(None)


def test_a_trial_may_set_the_patience(texts, arguments, make):
    steps = []

    class Counted(TrainerCallback):
        def on_train_end(self, args, state, control, **kwargs):
            steps.append(state.global_step)

    options = arguments(
        "patience",
        head="linear",
        learning_rate=1e-30,  # nothing gets better
        max_steps=9,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
    )
    trainer = make(options, eval_dataset=texts.select(range(10)), callbacks=[Counted()])
    space = {"early_stopping_patience": [1, 3]}
    trainer.hyperparameter_search(
        hp_space=lambda trial: {
            name: trial.suggest_categorical(name, space[name]) for name in space
        },
        n_trials=2,
        backend="optuna",
        sampler=optuna.samplers.GridSampler(space, seed=0),
    )
    assert sorted(steps) == [1 + 1, 1 + 3]


@pytest.mark.parametrize(("h_exp", "is_said"), [(None, True), (-12.0, False)])
def test_the_annealing_of_the_recipe_is_said(arguments, make, caplog, h_exp, is_said):
    make(arguments(h_exp=h_exp))
    assert (
        "h_exp goes from -12 to -4, as in the recipe. Held, h_exp=-12.0," in caplog.text
    ) == is_said


def test_the_exponent_of_a_classifier_is_held_by_default(texts, arguments, make):
    labelled = texts.add_column("label", ["a", "b"] * (len(texts) // 2))
    config = make(arguments(label_column="label"), train_dataset=labelled).run_config
    assert (config.h_exp.start, config.h_exp.end) == (-12.0, -12.0)


def test_a_head_of_a_script_is_trained(arguments, make, tiny_base, tmp_path, monkeypatch):
    class OwnHead(DistLayer):
        def settings(self):
            return {**super().settings(), "name": "own"}

    monkeypatch.setitem(HEADS, "own", OwnHead)
    model = HarmonicForMaskedLM.from_base(str(tiny_base), head={"name": "own", "h_exp": -10.0})
    trainer = make(arguments(h_exp=-10.0), model=model)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    assert isinstance(HarmonicForMaskedLM.from_pretrained(tmp_path / "saved").dist_head, OwnHead)


def test_a_classifier_needs_labels_and_an_encoder(tiny_base, causal_base, texts, arguments, make):
    model = BertForSequenceClassification(BertForMaskedLM.from_pretrained(tiny_base).config)
    with pytest.raises(ValueError, match="label_column: expected the column of the labels of a Be"):
        make(model=model)
    assert make(arguments(task="masked_lm"), model=model).model.model.backbone is model.bert
    tagger = BertForTokenClassification(model.config)
    with pytest.raises(ValueError, match=r"first: HarmonicForTokenClassification\.from_base"):
        make(model=tagger)
    own = {"data_collator": list, "train_dataset": [{"input_ids": [5, 6]}]}
    with pytest.raises(ValueError, match=r"first: HarmonicForTokenClassification\.from_base"):
        make(arguments(label_column="labels"), model=tagger, **own)
    labelled = texts.add_column("label", ["a", "b"] * (len(texts) // 2))
    with pytest.raises(ValueError, match=r"label_column: expected an encoder .* decoder \(llama\)"):
        make(arguments(label_column="label"), model=str(causal_base), train_dataset=labelled)


TEXT = Dataset.from_dict({"text": ["aa"]})
REFUSED = {  # arguments, and what else the trainer is given
    "weight_column: expected nothing with compute_loss_func, which does not see it, got 'w'": {
        "weight_column": "w",
        "compute_loss_func": max,
    },
    "loss: expected nothing with compute_loss_func, which does not see it, got 'harmonic'": {
        "loss": "harmonic",
        "compute_loss_func": max,
    },
    "data_collator: expected nothing with formatting_func or weight_column": {
        "data_collator": list,
        "formatting_func": str,
    },
    r"dataloader_drop_last: expected false, got true with \d+ rows and 5000 in a batch": {
        "dataloader_drop_last": True,
        "per_device_train_batch_size": 5000,
    },
    "hub_always_push: expected nothing, got True; a push that is at work is waited for": {
        "hub_always_push": True
    },
    "train_dataset: expected a data set of the datasets library, got a Column. Make one": {
        "train_dataset": TEXT["text"]
    },
    "of the datasets library, got a Subset": {"train_dataset": Subset(TEXT, [0])},
    "of the datasets library, got a DataFrame": {"train_dataset": TEXT.to_pandas()},
    r"processing_class: expected a tokenizer, got 'x'. Load it: AutoTokenizer.from_pr": {
        "processing_class": "x"
    },
    "h_exp.calibrate: expected false from Python, got true": {
        "h_exp": {"start": -12.0, "end": -12.0, "calibrate": True}
    },
    "neftune_noise_alpha: expected nothing with frozen input embeddings, .* got 5.0": {
        "neftune_noise_alpha": 5.0
    },
    "train_dataset: expected a Dataset for a classifier, got a stream": {
        "label_column": "label",
        "train_dataset": TEXT.to_iterable_dataset(),
    },
    "text_column of train_dataset: expected one of": {"text_column": "txt"},
    "train_dataset: expected a data set with a column of la": {
        "task": "sequence_classification",
        "data_collator": list,
    },
    r"formatting_func: expected text without special tokens, got '\[SEP\]', which": {
        "formatting_func": lambda row: f"[MASK] {row['text']} [SEP] aa"
    },
    "expected a column of text": {"formatting_func": lambda row: [1]},
    "model: expected a name, a folder or a model of transformers, got BertForMaskedLM": {
        "model": BertForMaskedLM
    },
    "of the datasets library, got a str. Make one with": {"train_dataset": "my.txt"},
    "of the datasets library, got a list": {"train_dataset": ["aa ab"]},
    "eval_dataset: expected a data set of the datasets library, got a dict": {"eval_dataset": {}},
    "train_dataset: expected one data set, got the splits": {
        "train_dataset": DatasetDict({"train": TEXT})
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_a_trainer_cannot_use_is_refused_by_name(message, arguments, make):
    given = dict(REFUSED[message])
    names = HarmonicTrainingArguments.__dataclass_fields__.keys() & given
    fields = {name: given.pop(name) for name in names}
    with pytest.raises(ValueError, match=message):
        make(arguments(**fields), **given)


def test_other_arguments_a_model_without_a_tokenizer_and_no_evaluation_are_refused(tiny_base, make):
    with pytest.raises(ValueError, match="args: expected HarmonicTrainingArguments, got Training"):
        HarmonicTrainer(str(tiny_base), TrainingArguments("out", use_cpu=True, report_to="none"))
    model = BertForMaskedLM(BertForMaskedLM.config_class(num_hidden_layers=1))
    with pytest.raises(ValueError, match="processing_class: expected the model's tokenizer"):
        make(model=model, processing_class=None)
    with pytest.raises(
        ValueError, match=r"run: expected a RunConfig, got a str.*load_run_config\("
    ):
        train("configs/demo.yaml")
    config = load_run_config("configs/demo.yaml", ["data.eval.documents=0"])
    with pytest.raises(ValueError, match=r"data\.eval\.documents: expected at least 1"):
        train(config)


def test_a_loaded_decoder_is_no_masked_model(causal_base, arguments, make):
    model = LlamaForSequenceClassification.from_pretrained(causal_base)
    with pytest.raises(ValueError, match="task: expected causal_lm for a decoder"):
        make(arguments(task="masked_lm"), model=model)
    with pytest.raises(ValueError, match="set task='causal_lm'"):
        make(model=model)


def test_text_that_the_tokenizer_does_not_know_is_refused(make):
    unknown = Dataset.from_dict({"text": ["Привет мир"] * 20})
    with pytest.raises(ValueError, match="expected training rows with a token that may be predic"):
        make(train_dataset=unknown)


def test_evaluations_of_other_rows_leave_no_file_open(texts, make):
    trainer = make()
    open_files = Path("/proc/self/fd")
    trainer.evaluate(texts.select(range(5)))
    before = len(list(open_files.iterdir()))
    for _ in range(4):
        trainer.evaluate(texts.select(range(5)))
    assert len(list(open_files.iterdir())) <= before


def test_a_body_without_architectures_has_the_task_of_its_type():
    assert task_of("body", BertConfig(), None) == "masked_lm"
    assert task_of("body", LlamaConfig(), None) == "causal_lm"
    xlm = XLMConfig(architectures=["XLMWithLMHeadModel"])  # what its masked model is called
    assert task_of("body", xlm, None) == "masked_lm"
    with pytest.raises(ValueError, match="task: expected one of"):
        task_of("body", SplinterConfig(), None)
    for config in (CLIPVisionConfig(), T5Config()):
        with pytest.raises(ValueError, match="base body: expected an encoder or a decoder of text"):
            task_of("body", config, None)


def test_a_model_of_the_code_that_came_with_it_is_refused(tiny_base, make, tmp_path):
    """A notebook that imports this package after AutoModel... has such a one."""
    HarmonicForMaskedLM.from_base(str(tiny_base)).save_pretrained(tmp_path / "own")
    own = get_class_from_dynamic_module("modeling_harmonic.HarmonicForMaskedLM", tmp_path / "own")
    with pytest.raises(ValueError, match="Import harmonic_sft before you load the model"):
        make(model=own.from_pretrained(tmp_path / "own"))
