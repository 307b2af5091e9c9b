"""Trainings of `HarmonicTrainer` without a YAML file, in each of several processes."""

import json
import os
from pathlib import Path

import optuna
import torch
from datasets import load_dataset
from torch.utils.data import IterableDataset
from transformers import (
    AutoTokenizer,
    DataCollatorForTokenClassification,
    default_data_collator,
)

from harmonic_sft import (
    HarmonicForMaskedLM,
    HarmonicForSequenceClassification,
    HarmonicTrainer,
    HarmonicTrainingArguments,
)

ROWS = 12  # of a step; an epoch has 17


def own_rows(tokenizer, texts) -> list[dict[str, list[int]]]:
    """Every second token is masked."""
    rows = []
    for text in texts["text"]:
        ids = tokenizer(text)["input_ids"][:24]
        labels = [token if place % 2 else -100 for place, token in enumerate(ids)]
        ids[1::2] = [tokenizer.mask_token_id] * len(ids[1::2])
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def with_numbers(base: Path, folder: Path) -> HarmonicForSequenceClassification:
    """Three logits, each a number or the odds of a class of its own."""
    HarmonicForMaskedLM.from_base(str(base)).save_pretrained(folder)
    torch.manual_seed(0)
    return HarmonicForSequenceClassification.from_pretrained(folder, num_labels=3)


class Stream(IterableDataset):
    """Rows one after the other, whose number nobody knows."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def squared_nll(outputs, labels, num_items_in_batch=None):
    scored = labels != -100
    nll = torch.nn.functional.cross_entropy(
        outputs.logits[scored], labels[scored], reduction="none"
    )
    return nll.square().sum() / num_items_in_batch


def train(base: Path, text_file: Path, folder: Path, processes: int = 1) -> dict:
    """Train after an evaluation, then on rows of the user, which others follow in an epoch.

    Returns:
        Of each training its losses, those of its evaluations, how many labels these saw, and the
        sums of weights.
    """
    texts = load_dataset("text", data_files=str(text_file), split="train").select(range(17))
    tokenizer = AutoTokenizer.from_pretrained(base)
    rows, rank = own_rows(tokenizer, texts), os.environ.get("RANK", "0")
    numbers = [
        {"input_ids": [2, 5 + place, 6, 3], "labels": [float(place % 2), 1.0, place / 17]}
        for place in range(17)
    ]
    ways = {
        "evaluated": {"train_dataset": texts, "eval_dataset": texts},
        "rows": {
            "train_dataset": rows,
            "eval_dataset": Stream(rows),
            "data_collator": DataCollatorForTokenClassification(tokenizer),
        },
        "numbers": {
            "train_dataset": numbers,
            "eval_dataset": numbers,
            "data_collator": default_data_collator,
            "model": with_numbers(base, folder / f"body{rank}"),
        },
        "own_loss": {
            "train_dataset": texts,
            "eval_dataset": texts,
            "compute_loss_func": squared_nll,
            "logging_steps": 3,  # the last step is not logged
        },
    }
    found = {}
    for name, data in ways.items():
        args = HarmonicTrainingArguments(
            str(folder / name),
            max_steps=4,
            learning_rate=1e-3,
            logging_steps=data.pop("logging_steps", 1),
            eval_strategy="steps",
            eval_steps=1,
            save_strategy="no",
            context_length=24,
            per_device_train_batch_size=ROWS // processes,
            per_device_eval_batch_size=ROWS // processes,
            disable_tqdm=True,
            use_cpu=True,
            report_to="none",
        )
        trainer = HarmonicTrainer(
            data.pop("model", str(base)),
            args,
            processing_class=tokenizer,
            compute_metrics=lambda p: {"labels": float((p.label_ids != -100).sum())},
            preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
            **data,
        )
        if name == "evaluated":
            trainer.evaluate()
        output = trainer.train()
        log = trainer.state.log_history
        found[name] = {
            "losses": [entry["loss"] for entry in log if "loss" in entry],
            "evaluated": [entry["eval_loss"] for entry in log if "eval_loss" in entry],
            "training_loss": output.training_loss,
            "labels": [entry["eval_labels"] for entry in log if "eval_labels" in entry],
            "weights": [p.double().sum().item() for p in trainer.model.parameters()],
        }
    return found


def search(base: Path, text_file: Path, folder: Path) -> dict | None:
    """Search among two learning rates, with one of which training diverges."""
    texts = load_dataset("text", data_files=str(text_file), split="train").select(range(17))
    rates = {"learning_rate": [1e30, 1e-3]}
    settings = {"context_length": 24, "disable_tqdm": True, "use_cpu": True, "report_to": "none"}
    args = HarmonicTrainingArguments(
        str(folder / "search"), max_steps=4, save_strategy="no", **settings
    )
    trainer = HarmonicTrainer(str(base), args, train_dataset=texts, eval_dataset=texts)
    best = trainer.hyperparameter_search(
        lambda trial: {name: trial.suggest_categorical(name, rates[name]) for name in rates},
        n_trials=2,
        backend="optuna",
        sampler=optuna.samplers.GridSampler(rates, seed=0),
    )
    return best and best.hyperparameters  # the first process alone knows it


def write(words: list[str], rank: int) -> None:
    """Train in one of two processes, on a base and a text, and leave in a folder what is found."""
    base, text_file, folder = map(Path, words)
    found = {**train(base, text_file, folder, 2), "best": search(base, text_file, folder)}
    (folder / f"{rank}.json").write_text(json.dumps(found))
