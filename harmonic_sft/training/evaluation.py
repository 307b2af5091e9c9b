"""Evaluate a folder that holds a trained model."""

import json
import logging
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, TrainingArguments

from harmonic_sft.config import apply_overrides, check_fields, parse, to_plain
from harmonic_sft.data import DataConfig
from harmonic_sft.data.batches import LabeledRows, MaskedRows, PaddingFreeCollator
from harmonic_sft.data.classification import LabeledData
from harmonic_sft.data.loading import LoadedData
from harmonic_sft.data.row_maker import document_names
from harmonic_sft.eval import TokenScores, documents_of, score, summarize
from harmonic_sft.eval.calibration import calibration_report
from harmonic_sft.eval.statistics import document_interval
from harmonic_sft.models import HarmonicHeadModel, load_checked, max_positions
from harmonic_sft.models.configuration_harmonic import quantization_method
from harmonic_sft.results import environment, write_results
from harmonic_sft.training.batches import head_inputs
from harmonic_sft.training.loading import CLASSIFIERS, MODELS, load_task_data
from harmonic_sft.training.output_folder import CONFIG_NAME, read_run
from harmonic_sft.training.report import show_metrics

logger = logging.getLogger(__name__)
USED = {"data", "training"}
CONTEXT_LENGTH = 512  # of data for a folder without a run.yaml, at most


def evaluate_folder(
    folder: Path, overrides: Sequence[str] = (), per_document: Path | None = None
) -> dict[str, Any]:
    """Evaluate a trained model on its run's evaluation split, or on all of other data.

    Args:
        folder: Made by a run, or downloaded; without a `run.yaml` the overrides must give `data`.
        overrides: Of that file. `data=other.txt` is short for a `data.sources` of this one path;
            of sources that are given here nothing is held back, unless `data.eval` is given too.
        per_document: Also write the loss of every document into this file, one JSON object a line.

    Returns:
        The content of `results/eval.json`.

    Raises:
        ValueError: No model in the folder, or bad data.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"eval: expected a folder with a trained model, got {str(folder)!r}")
    config, task = _harmonic_config(folder)
    settings = _settings(folder, overrides, config)
    data_config = parse(DataConfig, settings["data"])
    training = check_fields(TrainingArguments, settings.get("training") or {}, "training")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    labels = [config.id2label[index] for index in range(config.num_labels)]
    keys = [override.split("=")[0] for override in overrides]
    data = load_task_data(
        data_config,
        task,
        tokenizer=tokenizer,
        vocab_size=config.get_text_config().vocab_size,
        max_positions=max_positions(config.get_text_config()),
        seed=training.get("seed", 42),
        labels=labels if task in CLASSIFIERS else None,
        eval_only=any(key == "data" or key.startswith("data.sources") for key in keys)
        and not any(key.startswith("data.eval") for key in keys),
    )
    model = load_checked(MODELS[task], str(folder), config)
    if quantization_method(config) != "bitsandbytes":  # which loads to the GPU
        model.to(TrainingArguments(str(folder), use_cpu=training.get("use_cpu", False)).device)
    batch_size = training.get("per_device_eval_batch_size", 8)
    if per_document is not None and isinstance(data.collator, PaddingFreeCollator):
        batch_size = 1  # it makes one row of a batch
    scores = score_data(model, data, batch_size=batch_size)
    documents = documents_of(data.eval, scores.num_rows)
    final, losses = summarize(scores, model.dist_head, documents), scores.at(1.0)[0]
    results = {
        "folder": str(folder),
        "head": model.config.head,
        "final": {
            **final,
            **calibration_report(scores.at(1.0)[1], scores.ranks == 0),
            "loss_interval": document_interval(losses, documents[scores.rows]),
        },
        "documents": len(np.unique(documents)),
        "data": {**to_plain(data_config), "eval_sha256": fingerprint(data.eval)},
        "environment": environment(),
    }
    write_results(folder / "results", "eval", results)
    if per_document is not None:
        _write_documents(per_document, data.eval, scores, data_config)
    show_metrics(str(folder), results, task=task)
    return results


def score_data(
    model: HarmonicHeadModel, data: LoadedData | LabeledData, *, batch_size: int
) -> TokenScores:
    """Score the evaluation rows of a run's data, in their order.

    Raises:
        ValueError: There is none.
    """
    model.eval()
    loader: Any = DataLoader(data.eval, batch_size=batch_size, collate_fn=data.collator)

    @torch.no_grad()
    def inputs() -> Iterator[tuple[Tensor, Tensor]]:
        for batch in tqdm(loader, desc="Evaluating", dynamic_ncols=True):
            yield head_inputs(model, {key: value.to(model.device) for key, value in batch.items()})

    scores = score(model, inputs())
    if scores is None:
        raise ValueError("eval: expected rows to evaluate on, got an empty split. Give more data")
    return scores


def fingerprint(rows: MaskedRows | LabeledRows) -> str:
    """Return the sha256 of evaluation rows, tokens and labels, as they are scored."""
    digest = sha256()
    for index in range(len(rows)):
        row = rows[index]
        for values in (row["input_ids"], row["labels"]):
            digest.update(f"{values.shape}".encode())
            digest.update(np.ascontiguousarray(values, dtype="<i8").tobytes())
    return digest.hexdigest()


def _harmonic_config(folder: Path) -> tuple[Any, str]:
    """Return the configuration of a trained model and its task.

    Raises:
        ValueError: It is another model, or has no head.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if config.model_type != "harmonic":
        raise ValueError(
            f"eval: expected a harmonic model, got a {config.model_type} in {str(folder)!r}. "
            "Train one on it first"
        )
    tasks = {model_class.__name__: task for task, model_class in MODELS.items()}
    architecture = (config.architectures or ["HarmonicForMaskedLM"])[0]
    if architecture not in tasks:
        raise ValueError(
            f"eval: expected one of {sorted(tasks)}, got a {architecture} in {str(folder)!r}, "
            "which has no head. Give the folder of the whole model"
        )
    return config, tasks[architecture]


def _settings(folder: Path, overrides: Sequence[str], config: PreTrainedConfig) -> dict[str, Any]:
    """Return the settings of the folder's run with these overrides."""
    unused = {override.split("=")[0].split(".")[0] for override in overrides} - USED
    if unused:
        raise ValueError(f"eval: expected overrides of {sorted(USED)}, got {sorted(unused)}")
    saved = read_run(folder) if (folder / CONFIG_NAME).is_file() else {}
    settings = apply_overrides(saved, [_sources(override) for override in overrides])
    if "data" not in settings:
        raise ValueError(
            f"eval: expected data, got none, since {str(folder)!r} has no {CONFIG_NAME}. "
            "Add data=file.txt"
        )
    if not saved and isinstance(settings["data"], dict):
        longest = min(CONTEXT_LENGTH, max_positions(config.get_text_config()))
        settings["data"].setdefault("context_length", longest)
    return settings


def _sources(override: str) -> str:
    """Write `data=PATH` out."""
    key, _, value = override.partition("=")
    if key != "data" or value.lstrip().startswith("{"):
        return override
    return f"data.sources={json.dumps([{'path': value}])}"


def _write_documents(
    path: Path, rows: MaskedRows | LabeledRows, scores: TokenScores, config: DataConfig
) -> None:
    """Write source, number, scored tokens and mean loss in nats of every document."""
    documents = documents_of(rows, len(rows))  # [rows]
    first = np.unique(documents, return_index=True)[1]
    names = np.stack([np.zeros(len(rows), dtype=np.int64), np.arange(len(rows))])
    if isinstance(rows, MaskedRows):
        names = document_names(rows.rows)  # [2, rows]
    tokens = np.bincount(documents[scores.rows], minlength=len(first))
    losses = np.bincount(documents[scores.rows], scores.at(1.0)[0], minlength=len(first))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for index, (source, number) in enumerate(names[:, first].T.tolist()):
            line = {
                "source": config.sources[source].path,
                "document": number,
                "tokens": int(tokens[index]),
                "loss": losses[index] / tokens[index] if tokens[index] else None,
            }
            file.write(f"{json.dumps(line, ensure_ascii=False)}\n")
    logger.info("Losses of the documents: %s", path)
