"""What users of transformers' Trainer count on, where ours does something of its own."""

import json
import logging
import signal
from unittest.mock import Mock

import numpy as np
import optuna
import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import (
    DataCollatorForLanguageModeling,
    ProgressCallback,
    TrainerCallback,
    default_data_collator,
)

from harmonic_sft import (
    HarmonicForCausalLM,
    HarmonicForSequenceClassification,
    HarmonicForTokenClassification,
    HarmonicTrainer,
    HarmonicTrainingArguments,
)
from harmonic_sft.data import chat
from harmonic_sft.training import trainer as trainer_module
from harmonic_sft.training.batches import split_batch
from harmonic_sft.training.callbacks import LabeledProgress, StoppedError


def mean_loss(outputs, labels, num_items_in_batch=None):
    return torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())


def test_a_metric_of_the_user_keeps_its_name_and_the_loss_weighs_tokens(texts, make):
    held_out = texts.select(range(20))
    trainer = make(eval_dataset=held_out, compute_metrics=lambda found: {"accuracy": 0.123})
    found, expected = trainer.evaluate(), make().evaluate(held_out)
    assert found["eval_accuracy"] == 0.123
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-6)


def test_loss_and_metrics_of_the_user_are_of_the_same_random_masks(texts, make, tokenizer):
    """The data are read twice, and again by the next evaluation."""

    def mean_nll(found):
        is_scored = found.label_ids != -100
        log_p = torch.tensor(found.predictions[is_scored]).double().log_softmax(-1)
        labels = torch.tensor(found.label_ids[is_scored])
        return {"tokens": len(labels), "nll": -log_p[range(len(labels)), labels].mean().item()}

    rows = texts.select(range(20)).map(
        lambda row: tokenizer(row["text"], truncation=True, max_length=32),
        remove_columns=["text"],
    )
    trainer = make(
        train_dataset=None,
        eval_dataset=rows,
        data_collator=DataCollatorForLanguageModeling(tokenizer),
        compute_metrics=mean_nll,
    )
    state, found = torch.get_rng_state(), trainer.evaluate()
    assert found["eval_nll"] == pytest.approx(found["eval_loss"], rel=1e-6)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(1)
    again = trainer.evaluate()
    assert [again[f"eval_{key}"] for key in ("tokens", "loss")] == [
        found[f"eval_{key}"] for key in ("tokens", "loss")
    ]


def test_an_evaluation_has_no_dropout(make, arguments, texts):
    trainer = make(arguments(), eval_dataset=texts.select(range(20)))
    for module in trainer.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5  # the bases of the tests have none
    found = [trainer.model.train() and trainer.evaluate()["eval_loss"] for _ in range(2)]
    assert found[0] == found[1]


def test_the_loss_of_an_evaluation_is_that_of_the_user(texts, make):
    def constant(outputs, labels, num_items_in_batch=None):
        return outputs.logits.sum() * 0 + 42

    found = make(compute_loss_func=constant).evaluate(texts.select(range(20)))
    assert found["eval_loss"] == 42
    assert found["eval_post_hoc_loss"] < 42


def test_shifted_labels_alone_are_accumulated_as_a_mean(causal_base, arguments, make):
    def shifted(rows):
        ids = torch.tensor([[5, 6, 7, 8]] * len(rows))
        return {"input_ids": ids, "shift_labels": ids.roll(-1, 1)}

    found = []
    for size, steps in ((4, 1), (2, 2)):
        sizes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps}
        trainer = make(
            arguments(str(size), max_steps=1, **sizes),
            model=HarmonicForCausalLM.from_base(str(causal_base)),
            data_collator=shifted,
        )
        trainer.train()
        (entry,) = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
        found.append((entry["loss"], entry["grad_norm"]))
    assert found[1] == pytest.approx(found[0], rel=1e-5)


@pytest.mark.parametrize("of_words", [False, True])
def test_a_classifier_on_a_decoder_scores_every_label(
    causal_base, arguments, make, tmp_path, of_words
):
    HarmonicForCausalLM.from_base(str(causal_base)).save_pretrained(tmp_path / "decoder")
    kind = HarmonicForTokenClassification if of_words else HarmonicForSequenceClassification
    model = kind.from_pretrained(tmp_path / "decoder", num_labels=2)
    model.config.pad_token_id = 0
    ids = torch.tensor([[5, 9, 0, 0], [6, 9, 4, 7]])
    labels = torch.tensor([[0, 1, -100, -100], [1, 0, 0, 1]] if of_words else [0, 1])
    with torch.no_grad():
        model.dist_head.weight.mul_(50)
        expected = model.eval()(ids, labels=labels).loss.item()
    rows = [{"input_ids": x, "labels": y} for x, y in zip(ids, labels, strict=True)]
    trainer = make(
        arguments(max_steps=1, unfreeze=0),
        model=model,
        train_dataset=rows,
        eval_dataset=rows,
        data_collator=default_data_collator,
    )
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)
    trainer.train()
    (entry,) = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    assert entry["loss"] == pytest.approx(expected, rel=1e-5)


def test_a_mean_is_not_made_of_parts_where_memory_runs_out(make, monkeypatch):
    trainer = make(compute_loss_func=mean_loss)
    original, sizes = trainer.compute_loss, []

    def compute_loss(model, inputs, **kwargs):
        sizes.append(len(inputs["input_ids"]))
        if sizes[-1] > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return original(model, inputs, **kwargs)

    monkeypatch.setattr(trainer, "compute_loss", compute_loss)
    with pytest.raises(StoppedError, match="a mean over its rows is no sum of parts"):
        trainer.train()
    assert set(sizes) == {8}


@pytest.mark.parametrize("has_own_loss", [False, True])
def test_a_search_minimizes_the_users_loss_or_that_at_the_best_exponent(
    texts, arguments, make, has_own_loss
):
    seen = []

    class Seen(TrainerCallback):
        def on_evaluate(self, args, state, control, metrics, **kwargs):
            seen.append(metrics["eval_loss" if has_own_loss else "eval_post_hoc_loss"])

    options = {"compute_loss_func": mean_loss} if has_own_loss else {}
    held_out = texts.select(range(20))
    trainer = make(arguments(max_steps=1), eval_dataset=held_out, callbacks=[Seen()], **options)
    best = trainer.hyperparameter_search(
        lambda trial: {"learning_rate": trial.suggest_categorical("learning_rate", [1e-3])},
        n_trials=1,
        backend="optuna",
        sampler=optuna.samplers.RandomSampler(seed=0),
    )
    assert best.objective == seen[-1]
    sets = make(arguments("sets"), eval_dataset={"a": held_out})
    with pytest.raises(ValueError, match="compute_objective: expected one for several data sets"):
        sets.hyperparameter_search(lambda trial: {}, n_trials=1)


def test_a_stream_is_read_from_its_start_by_every_training(texts, arguments, make):
    trainer = make(arguments(max_steps=2), train_dataset=texts.to_iterable_dataset())
    read = []
    for _ in range(2):
        trainer.train()
        read.append((trainer.stream_place.state, trainer.stream_place.examples))
    assert read[0] == read[1]


def test_a_second_training_does_not_write_over_the_first(arguments, make):
    trainer = make(arguments(save_strategy="steps", save_steps=2, max_steps=2))
    trainer.train()
    with pytest.raises(ValueError, match=r"expected an empty folder, got .*, which holds a run"):
        trainer.train()
    assert trainer.train(resume_from_checkpoint=True).global_step == 2


def test_arguments_that_were_changed_later_are_refused(arguments, make, tmp_path):
    trainer = make(arguments(max_steps=1))
    trainer.args.logging_steps, trainer.args.oom_fallback = 5, False
    trainer.args.save_steps, trainer.args.eval_steps, trainer.args.run_name = 5, 5, "other"
    trainer.train()
    for name, value in {"h_exp": -5.0, "max_steps": 2, "hub_form": "head"}.items():
        before = getattr(trainer.args, name)
        setattr(trainer.args, name, value)
        with pytest.raises(ValueError, match=rf"args.{name}: expected .*, got .*. Make another"):
            trainer.train()
        setattr(trainer.args, name, before)


def test_rows_without_padding_are_evaluated_and_predicted_one_by_one(texts, arguments, make):
    held_out = texts.select(range(20))
    expected = make(arguments("padded"))
    padded = expected.evaluate(held_out)
    trainer = make(arguments(padding_free=True))
    found = trainer.evaluate(held_out)
    for key in ("eval_documents", "eval_tokens", "eval_loss", "eval_post_hoc_loss"):
        assert found[key] == pytest.approx(padded[key], rel=1e-4)
    assert len(trainer.predict(held_out).label_ids) == len(expected.predict(held_out).label_ids)


def test_predictions_that_stand_beside_other_rows_are_warned_of(texts, make, caplog):
    long = " ".join(texts[:20]["text"])
    rows = texts.from_dict({"text": [texts[0]["text"], "", long]})
    with caplog.at_level(logging.WARNING):
        predicted = make().predict(rows)
    assert f"{len(predicted.label_ids)} rows are predicted for 3 texts" in caplog.text


def test_a_trainer_without_data_sets_evaluates_texts(texts, make):
    held_out = texts.select(range(20))
    expected = make().evaluate(held_out)["eval_loss"]
    trainer = make(train_dataset=None)
    assert trainer.evaluate(held_out)["eval_loss"] == expected
    assert make(train_dataset=None).predict(held_out).metrics["test_loss"] == expected


def test_a_progress_bar_of_the_user_stays(arguments, make):
    class Mine(ProgressCallback):
        pass

    trainer = make(arguments(disable_tqdm=False), callbacks=[Mine()])
    kinds = [type(callback) for callback in trainer.callback_handler.callbacks]
    assert Mine in kinds
    assert LabeledProgress in kinds
    assert ProgressCallback not in kinds


def test_the_line_of_a_log_begins_with_its_step(arguments, make, capsys):
    make(arguments(disable_tqdm=False, logging_steps=1)).train()
    line = next(line for line in capsys.readouterr().out.splitlines() if "'loss'" in line)
    assert line.startswith("{'step': 1, 'loss': ")
    assert "num_input_tokens_seen" not in line


class Rows(IterableDataset):
    def __iter__(self):
        for k in range(6):
            yield {"input_ids": [5, 6, 7 + k], "labels": [-100, 6, -100]}


def test_a_stream_of_the_user_is_read_from_its_start_by_a_resumed_run(arguments, make, caplog):
    def start(max_steps, **options):
        args = arguments(
            max_steps=max_steps,
            h_exp=-12.0,
            schedule={"decay_ratio": 0.0},
            save_steps=1,
            save_strategy="steps",
        )
        make(args, train_dataset=Rows(), data_collator=default_data_collator).train(**options)
        return "is read from its start" in caplog.text

    assert not start(1)
    assert start(2, resume_from_checkpoint=True)


def test_bars_count_every_batch_once_and_streams_without_a_length(arguments, make, monkeypatch):
    bar = Mock()
    monkeypatch.setattr("transformers.trainer_callback.tqdm", bar)
    trainer = make(
        arguments(disable_tqdm=False, per_device_eval_batch_size=2),
        train_dataset=None,
        data_collator=default_data_collator,
        compute_metrics=lambda found: {},
    )
    trainer.evaluate(Rows())
    bar.assert_not_called()
    trainer.evaluate([*Rows()])
    bar.assert_called_once()
    assert bar.call_args.kwargs["total"] == 3
    assert sum(call.args[0] for call in bar.return_value.update.call_args_list) == 3


def test_the_folder_of_an_evaluation_is_free_for_its_trainer(texts, arguments, make):
    trainer = make(arguments(max_steps=1))
    trainer.save_metrics("eval", trainer.evaluate(texts.select(range(10))))
    trainer.train()
    with pytest.raises(ValueError, match="expected an empty folder"):
        make(arguments(max_steps=1)).train()


def test_what_scripts_say_for_a_card_is_named_and_a_token_refused(
    arguments, make, monkeypatch, caplog
):
    pushed = []
    monkeypatch.setattr(trainer_module, "push", lambda folder, to: pushed.append(to) or "address")
    trainer = make(arguments(max_steps=1, hub_model_id="me/mine"))
    with caplog.at_level(logging.WARNING):
        assert trainer.push_to_hub("First", dataset_name="mine", finetuned_from="x") == "address"
    assert "without ['dataset_name', 'finetuned_from']" in caplog.text
    trainer.push_to_hub(private=True)
    trainer.args.hub_model_id, trainer.args.hub_private_repo = "me/second", True
    trainer.args.hub_form = "head"
    trainer.push_to_hub()
    assert (pushed[0].message, pushed[0].private) == ("First", False)
    assert pushed[1].private
    third = pushed[2]
    assert (third.repo_id, third.private, third.form) == ("me/second", True, "head")
    with pytest.raises(ValueError, match="expected neither blocking=False nor a token") as error:
        trainer.push_to_hub(token="hf_secret")
    assert "hf_secret" not in str(error.value)


def test_batches_of_every_form_are_counted_and_split(make):
    count = make().data_collator.count
    ids, labels = torch.ones(2, 3, dtype=torch.int64), torch.full((2, 3), -100)
    pairs = torch.zeros(2, 1, 3, 3)
    pairs[..., 2] = -torch.inf
    assert count({"input_ids": ids, "attention_mask": pairs, "labels": labels})["num_tokens"] == 6
    embedded = count({"inputs_embeds": torch.ones(2, 3, 4), "labels": labels})
    assert embedded["num_tokens"] == 6
    parts = split_batch({"inputs_embeds": torch.ones(3, 3, 4), "output_attentions": False}, 2)
    assert [len(part["inputs_embeds"]) for part in parts] == [2, 1]
    assert [part["output_attentions"] for part in parts] == [False, False]


def test_a_timer_of_the_caller_runs_on():
    signal.setitimer(signal.ITIMER_REAL, 300)
    try:
        with chat._time_limit():
            pass
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 300
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


class WithPenalty(HarmonicTrainer):
    """Adds to the model's loss."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        return (loss + 40, outputs) if return_outputs else loss + 40


class FromOutputs(HarmonicTrainer):
    """Calls the model itself, as scripts do."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = outputs.loss + 40
        return (loss, outputs) if return_outputs else loss


class FromLogits(HarmonicTrainer):
    """Scores logits itself, as scripts do."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = mean_loss(outputs, labels) + 40
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("trainer_class", [WithPenalty, FromOutputs, FromLogits])
def test_a_subclass_trains_on_a_loss_of_its_own_and_evaluates_it(
    texts, arguments, make, trainer_class
):
    held_out = texts.select(range(20))
    trainer = make(arguments(max_steps=1), eval_dataset=held_out, trainer_class=trainer_class)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] > 40
    found = trainer.evaluate()
    assert found["eval_loss"] > 40 > found["eval_post_hoc_loss"]


def test_another_folder_is_looked_at_when_the_arguments_name_it(arguments, make, tmp_path):
    trainer = make(arguments("first", max_steps=1))
    trainer.train()
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "model.safetensors").write_bytes(b"mine")
    trainer.args.output_dir = str(foreign)
    with pytest.raises(ValueError, match="output_dir: expected an empty folder"):
        trainer.train()
    assert (foreign / "model.safetensors").read_bytes() == b"mine"
    trainer.args.output_dir = str(tmp_path / "second")
    trainer.train()
    assert (tmp_path / "second" / "run.yaml").is_file()


def test_arguments_survive_their_own_json_and_take_numpy_numbers(arguments):
    args = arguments(h_exp=np.float32(-5), unfreeze=np.int64(1))
    assert (args.h_exp, args.unfreeze) == (-5.0, 1)
    again = HarmonicTrainingArguments(**json.loads(args.to_json_string()))
    assert again.hub_token is None
    assert (again.h_exp, again.output_dir) == (-5.0, args.output_dir)
    with pytest.raises(
        ValueError, match=r"loss: expected one of harmonic_sft\.losses, got CrossEnt"
    ):
        arguments(loss=torch.nn.CrossEntropyLoss())


def test_an_evaluation_of_the_training_rows_changes_no_mask_of_the_training(arguments, make):
    class Evaluating(TrainerCallback):
        trainer = None

        def on_step_begin(self, args, state, control, **kwargs):
            if self.trainer is not None and state.global_step == 5:
                self.trainer.evaluate(self.trainer.train_dataset)

    found = []
    for name in ("plain", "evaluated"):
        callback = Evaluating()
        fields = {"max_steps": 8, "per_device_train_batch_size": 32}  # two epochs
        trainer = make(arguments(name, **fields), callbacks=[callback])
        callback.trainer = trainer if name == "evaluated" else None
        trainer.train()
        found.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
    assert len(found[0]) == 8
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("dtype", "capability", "warns"),
    [
        (torch.bfloat16, (7, 5), True),
        (torch.bfloat16, (8, 0), False),
        (torch.float32, (7, 5), False),
    ],
)
def test_a_gpu_too_old_for_bfloat16_is_said(dtype, capability, warns, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    body = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, dtype=dtype)])
    trainer_module._warn_of_bfloat16(body, torch.device("cuda"))
    assert ("Try float32 in dtype and unfreeze" in caplog.text) is warns
