"""Evaluate a folder that holds a trained model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, TrainingArguments

from harmonic_sft.config import apply_overrides, check_fields, parse, read_yaml, to_plain
from harmonic_sft.data import DataConfig
from harmonic_sft.models import load_checked, max_positions
from harmonic_sft.results import environment, write_results
from harmonic_sft.training.arguments import HarmonicTrainingArguments
from harmonic_sft.training.loading import CLASSIFIERS, MODELS, load_task_data
from harmonic_sft.training.output_folder import CONFIG_NAME
from harmonic_sft.training.report import show_metrics
from harmonic_sft.training.trainer import HarmonicTrainer, evaluate

USED = {"data", "training"}


def evaluate_folder(folder: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Evaluate a trained model on its run's evaluation split, or on other data.

    Args:
        folder: Made by a run, or downloaded; without a `run.yaml` the overrides must give `data`.
        overrides: Of that file, such as `data.sources.0.path=other.txt`.

    Returns:
        The content of `results/eval.json`.

    Raises:
        ValueError: No model in the folder, or bad data.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"eval: expected a folder with a trained model, got {str(folder)!r}")
    saved = read_yaml(folder / CONFIG_NAME) if (folder / CONFIG_NAME).is_file() else {}
    settings = apply_overrides(saved, overrides)
    if "data" not in settings:
        raise ValueError(
            f"eval: expected data, got none, since {str(folder)!r} has no {CONFIG_NAME}. "
            "Add data.sources='[{path: file.txt}]' data.context_length=512"
        )
    unused = {override.split("=")[0].split(".")[0] for override in overrides} - USED
    if unused:
        raise ValueError(f"eval: expected overrides of {sorted(USED)}, got {sorted(unused)}")
    config = parse(DataConfig, settings["data"])
    training = check_fields(TrainingArguments, settings.get("training") or {}, "training")
    base = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if base.model_type != "harmonic":
        raise ValueError(
            f"eval: expected a harmonic model, got a {base.model_type} in {str(folder)!r}. "
            "Train one on it first"
        )
    tasks = {model_class.__name__: task for task, model_class in MODELS.items()}
    architecture = (base.architectures or ["HarmonicForMaskedLM"])[0]
    if architecture not in tasks:
        raise ValueError(
            f"eval: expected one of {sorted(tasks)}, got a {architecture} in {str(folder)!r}, "
            "which has no head. Give the folder of the whole model"
        )
    task = tasks[architecture]
    model = load_checked(MODELS[task], str(folder), base)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    text_config = model.config.text_config
    labels = [base.id2label[index] for index in range(base.num_labels)]
    data = load_task_data(
        config,
        task,
        tokenizer=tokenizer,
        vocab_size=text_config.vocab_size,
        max_positions=max_positions(text_config),
        seed=training.get("seed", 42),
        labels=labels if task in CLASSIFIERS else None,
    )
    trainer = HarmonicTrainer(
        model,
        HarmonicTrainingArguments(
            output_dir=str(folder),
            per_device_eval_batch_size=training.get("per_device_eval_batch_size", 8),
            report_to="none",
            use_cpu=training.get("use_cpu", False),
        ),
        data_collator=data.collator,
        eval_dataset=data.eval,
    )
    results = {
        "folder": str(folder),
        "head": model.config.head,
        "final": evaluate(trainer, "eval"),
        "data": to_plain(config),
        "environment": environment(),
    }
    write_results(folder / "results", "eval", results)
    show_metrics(str(folder), results, task=task)
    return results
