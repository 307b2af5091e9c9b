"""Evaluate a folder that holds a trained model."""

import json
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from glob import glob
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset
from tqdm import tqdm
from transformers import AutoConfig, PreTrainedConfig, TrainingArguments

from harmonic_sft.config import apply_overrides, check_fields, parse, to_plain
from harmonic_sft.data import DataConfig, Source
from harmonic_sft.data.batches import MaskedRows, collate_padding_free
from harmonic_sft.data.files import file_kind
from harmonic_sft.data.heldout import Ancestor, lineage, run_home, seen_by
from harmonic_sft.data.loading import LoadedData, load_data
from harmonic_sft.data.row_maker import document_names
from harmonic_sft.data.sections import check_label_settings
from harmonic_sft.eval import TokenScores, documents_of, explain, score, summarize
from harmonic_sft.eval.calibration import calibration_report
from harmonic_sft.eval.html import report_page
from harmonic_sft.eval.ruler import Ruler, judge, read_ruler
from harmonic_sft.eval.scoring import cross_fitted
from harmonic_sft.eval.statistics import document_interval
from harmonic_sft.eval.suite import (
    NO_RULER,
    Scored,
    Subject,
    figures_of,
    join_rows,
    loss_differences,
    measure,
    semantic_rows,
)
from harmonic_sft.hub.run_folder import RUN_FILE, saved_tokenizer
from harmonic_sft.models import (
    HarmonicHeadModel,
    check_prototypes,
    load_checked,
    max_positions,
)
from harmonic_sft.models.backbones import load_backbone
from harmonic_sft.models.configuration_harmonic import quantization_method
from harmonic_sft.models.partial_checkpoint import check_not_partial
from harmonic_sft.results import (
    environment,
    make_folder,
    reading,
    show_table,
    without_secrets,
    write_results,
    write_whole,
)
from harmonic_sft.training.arguments import TRAIN_NAME
from harmonic_sft.training.batches import batches_on, head_inputs, labelled_states
from harmonic_sft.training.checkpoints import last_checkpoint
from harmonic_sft.training.loading import locate_base
from harmonic_sft.training.output_folder import read_run
from harmonic_sft.training.report import BEST, log_left_out, names_of, show_metrics, show_suite
from harmonic_sft.training.tasks import CLASSIFIERS, LANGUAGE_MODELS, MODELS, TASKS

logger = logging.getLogger(__name__)
TRAINING_KEYS = {f"training.{key}" for key in ("per_device_eval_batch_size", "seed", "use_cpu")}
TEXT_BYTES = {"quick": 60_000, "full": 1_000_000}  # scored of each text; at most half a text
NUM_ROWS = 400  # rows whose hidden states are compared with their labels' prototypes
CONTEXT_LENGTH = 512  # at most, for a folder without a run.yaml


def evaluate_folder(
    folder: Path, overrides: Sequence[str] = (), per_document: Path | None = None
) -> dict[str, Any]:
    """Evaluate a trained model on its run's evaluation split, or on all rows of other data.

    Args:
        folder: Made by a run, or downloaded; without a `run.yaml` the overrides must give `data`.
        overrides: Of that file. `data=other.txt` is short for a `data.sources` of this one path,
            with the column and format that the run's sources share unless it is plain text. Sources
            given here are evaluated in full, unless `data.eval` is given too.
        per_document: Also write the loss of every document into this file, one JSON object a line.

    Returns:
        The content of `results/eval.json`.
    """
    opened = _open(folder, overrides)
    _check_output("--per-document", per_document, ".jsonl", folder, opened.data_config)
    scores, documents = opened.score(opened.data)
    final = summarize(scores, opened.model.dist_head, documents)
    losses, confidences = scores.at(1.0)
    results = {
        "folder": str(folder),
        "head": opened.model.config.head,
        "final": {
            **final,
            **calibration_report(confidences, scores.ranks == 0),
            "loss_interval": document_interval(losses, documents[scores.rows]),
        },
        "documents": len(np.unique(documents)),
        "data": opened.data_results(),
        "environment": environment(),
    }
    show_metrics(str(folder), results, task=opened.task)
    log_left_out(opened.data)
    _keep(folder, "eval", results)
    if per_document is not None:
        _write_documents(per_document, opened, scores, documents)
    return results


def evaluate_suite(
    folders: Sequence[Path],
    overrides: Sequence[str] = (),
    *,
    size: str = "quick",
    sets: Path | None = None,
    ruler: str | None = None,
    html: Path | None = None,
) -> dict[str, Any]:
    """Measure a trained model, and others against it, on the sets of the suite.

    Args:
        folders: The model, then those it is compared with, all on the held-out data of the first.
        overrides: As in `evaluate_folder`, for the first.
        size: "quick" or "full".
        sets: The folder with the sets; None measures on the held-out data alone.
        ruler: A sentence encoder, a name or a folder, that judges how near in meaning the wrong
            predictions of language models are.
        html: Also write a report into this file.

    Returns:
        The content of `results/suite.json` of the first folder.
    """
    if find_spec("sklearn") is None:
        raise ValueError(
            "--suite: expected scikit-learn, got none. Install it with: pip install scikit-learn"
        )
    if sets is not None and not sets.is_dir():
        raise ValueError(f"--data: expected a folder with evaluation sets, got {str(sets)!r}")
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ValueError(f"--against: expected every folder once, got {[*map(str, folders)]}")
    # Read before the first model is measured, which takes minutes.
    others = [_harmonic_config(folder, "--against")[0] for folder in folders[1:]]
    first = _open(folders[0], overrides)
    _check_output("--html", html, ".html", folders[0], first.data_config)
    names = names_of(folders)
    table, judged = None if ruler is None else _read_ruler(ruler, first, others), []
    problems, measured, losses, figures = {}, [], {"loss": [], "post_hoc_loss": []}, {}
    exponents = set()
    for name, folder in zip(names, folders, strict=True):
        opened = first if folder == folders[0] else _open_other(first, folder)
        head, is_tied = opened.model.dist_head, opened.model.config.tie_word_embeddings
        problems[name] = check_prototypes(head, is_tied=is_tied)
        for problem in problems[name]:
            logger.warning("%s: %s.", name, problem)
        subject = opened.subject(size)
        measured.append(measure(subject, sets, size=size))
        scores, rows = subject.held_out
        documents = rows[scores.rows]
        losses["loss"].append(scores.at(1.0)[0])
        losses["post_hoc_loss"].append(cross_fitted(scores, rows)[0])
        exponents.add(head.h_exp)
        if table is not None:
            judged.append(judge(table, head, subject.states, scores))
        figures[name] = figures_of(scores)
    extra = [[NO_RULER]] * len(names) if table is None else semantic_rows(table, judged, documents)
    measured = [[*rows, *more] for rows, more in zip(measured, extra, strict=True)]
    payload = {
        "suite": size,
        "models": names,
        "rows": join_rows(measured),
        "differences": [
            difference
            for metric, values in losses.items()
            for difference in loss_differences(names, values, documents, metric=metric)
        ],
        "problems": problems,
        "figures": figures,
        "data": first.data_results(),
        "environment": environment(),
    }
    show_suite(payload)
    if len(exponents) > 1:
        logger.info("%s", BEST)
    _keep(folders[0], "suite", payload)
    if html is not None:
        write_whole(html, report_page(payload))
        logger.info("Report: %s", html)
    return payload


def explain_folder(folder: Path, text: str, *, top: int = 5) -> None:
    """Print what a language model predicts at the masks of a text, or after its end."""
    config, task = _harmonic_config(folder, "explain")
    if task not in LANGUAGE_MODELS:
        raise ValueError(f"explain: expected a language model, got {task} in {str(folder)!r}")
    tokenizer = saved_tokenizer(folder)
    model = load_checked(LANGUAGE_MODELS[task], str(folder), config)
    columns = ["token", "probability, %", "distance", "nearest prototypes"]
    for number, tokens in enumerate(explain(model, tokenizer, text, top=top), start=1):
        rows = [
            (
                token["token"],
                100 * token["probability"],
                None if token["distance"] is None else f"{token['distance']:.3f}",
                " ".join(token["neighbors"]),
            )
            for token in tokens
        ]
        place = "After" if task == "causal_lm" else f"Mask {number} of"
        show_table(f"{place} {text!r}", columns, rows)


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A model with the data that it is evaluated on."""

    folder: Path
    task: str
    model: HarmonicHeadModel
    tokenizer: Any
    data: LoadedData
    data_config: DataConfig
    batch_size: int
    ancestors: list[Ancestor]  # whether model and bases were trained on the data

    def data_results(self) -> dict[str, Any]:
        """Return the section data of the results."""
        lineage = [ancestor._asdict() for ancestor in self.ancestors]
        rows, reasons, _ = self.data.left_out({})
        return {
            **to_plain(self.data_config),
            "rows_left_out": rows,
            "reasons": reasons,
            "eval_sha256": scored_sha256(self.data.eval),
            "held_out": {"sha256": self.data.held_out.digest, "lineage": lineage},
        }

    def score(self, rows: LoadedData) -> Scored:
        """Score evaluation rows; return the scores and the document of every row."""
        # Collating without padding would make one row of a whole batch.
        size = 1 if rows.collator is collate_padding_free else self.batch_size
        device = self.model.device
        batches = batches_on(device, rows.eval, rows.collator, size)
        total = -(-len(rows.eval) // size)
        batches = tqdm(batches, desc="Evaluating", total=total, dynamic_ncols=True)
        with torch.no_grad():
            scores = score(self.model, (head_inputs(self.model, batch) for batch in batches))
        if scores is None:
            raise ValueError(
                "eval: expected rows to evaluate on, got an empty split. Give more data"
            )
        return scores, documents_of(rows.eval, scores.num_rows)

    @torch.no_grad()
    def states(self) -> tuple[Tensor, Tensor]:
        """Return hidden states `[N, D]` and labels `[N]` of the first rows."""
        model, data = self.model, self.data
        first = Subset(data.eval, range(min(NUM_ROWS, len(data.eval))))
        batches = batches_on(model.device, first, data.collator, self.batch_size)
        states, labels = zip(*(labelled_states(model, batch) for batch in batches), strict=True)
        return torch.cat(states), torch.cat(labels)

    def subject(self, size: str) -> Subject:
        """Return the model in the form that the suite of this size, "quick" or "full", measures."""
        return Subject(
            model=self.model,
            tokenizer=self.tokenizer,
            held_out=self.score(self.data),
            states=self.states(),
            base=self.base(),
            init=(_run_settings(self.folder).get("head") or {}).get("init"),
            score_text=partial(self._score_text, size),
        )

    def _score_text(self, size: str, path: Path) -> Scored:
        """Score some documents of a text, none of which the model was trained on."""
        with path.open(encoding="utf-8", newline="\n") as file:  # as documents are read
            count = sum(1 for line in file if line.strip())
        if count < 2:
            raise ValueError(f"{path.name}: expected at least 2 lines, got {count}")
        share = min(0.5, TEXT_BYTES[size] / path.stat().st_size)
        wanted = min(count - 1, max(2, round(count * share)))
        source = {"path": str(path), "streaming": True}  # reads no further than it must
        plain = {"sources": [source], "context_length": self.data_config.context_length}
        config = parse(DataConfig, {**plain, "eval": {"documents": wanted}})
        rows = _load(self.task, self.model.config, self.tokenizer, config)
        check_unseen(self.folder, rows, config)
        return self.score(rows)

    def base(self) -> Any:
        """Return the body of the base if it is on this machine, else None."""
        saved = _run_settings(self.folder)  # config.base_model has only the last part of a path
        name = saved["model"]["base"] if saved else self.model.config.base_model
        if name is None:
            return None
        local = {"local_files_only": True, "revision": self.model.config.base_revision}
        try:
            path = locate_base(name)
            config = AutoConfig.from_pretrained(path, trust_remote_code=False, **local)
            base = load_backbone(path, config, **local)
        except (OSError, ValueError):
            return None
        return base.to(self.model.device).eval()


def _open(folder: Path, overrides: Sequence[str]) -> Opened:
    """Load the model of a folder and its data."""
    config, task = _harmonic_config(folder, "eval")
    data_config, training = _settings(folder, overrides, config)
    if data_config.sources[0].path == TRAIN_NAME and not Path(TRAIN_NAME).exists():
        raise ValueError(
            f"eval: expected data, got none, since the run in {str(folder)!r} was given its rows "
            "in Python. Add data=file.txt"
        )
    if task in CLASSIFIERS:
        check_label_settings(data_config)
    tokenizer = saved_tokenizer(folder)
    keys = {override.split("=")[0] for override in overrides}
    eval_only = _gives_sources(keys) and not any(key.startswith("data.eval") for key in keys)
    seed = training.get("seed", 42)
    data = _load(task, config, tokenizer, data_config, seed=seed, eval_only=eval_only)
    ancestors = check_unseen(folder, data, data_config)
    model = load_checked(MODELS[task], str(folder), config)
    if quantization_method(config) != "bitsandbytes":  # which loads onto the GPU itself
        model.to(TrainingArguments(str(folder), use_cpu=training.get("use_cpu", False)).device)
    return Opened(
        folder=folder,
        task=task,
        model=model,
        tokenizer=tokenizer,
        data=data,
        data_config=data_config,
        batch_size=training["per_device_eval_batch_size"],
        ancestors=ancestors,
    )


def _keep(folder: Path, name: str, results: dict[str, Any]) -> None:
    """Write results into the folder of a model; warn if it is not writable."""
    if os.access(folder, os.W_OK):
        write_results(folder / "results", name, results)
    else:
        logger.warning("%s may not be written: its %s.json is left out.", folder, name)


def _gives_sources(keys: Collection[str]) -> bool:
    return any(key == "data" or key.startswith("data.sources") for key in keys)


def _sources_of(config: DataConfig) -> list[Source]:
    """Return the sources, in the order in which rows number them."""
    return [*config.sources, *([] if config.eval.source is None else [config.eval.source])]


def _check_output(
    option: str, path: Path | None, suffix: str, folder: Path, config: DataConfig
) -> None:
    """Refuse an output path that is data or of another kind, or that cannot be written.

    This is checked before minutes of evaluation. The data of the run in `folder` count too.
    """
    if path is None:
        return
    if path.exists() and not path.is_file():  # such as /dev/null, which would be replaced
        raise ValueError(f"{option}: expected a file, got {str(path)!r}, which is none")
    paths = [source.path for source in _sources_of(config)]
    if run := _run_settings(folder):
        sources = [*run["data"]["sources"], run["data"]["eval"].get("source")]
        paths += [source["path"] for source in sources if source]
    for source in paths:
        for name in glob(os.path.expanduser(source), recursive=True):
            if path.resolve().is_relative_to(Path(name).resolve()):
                raise ValueError(
                    f"{option}: expected a file of its own, got {str(path)!r}, which is data"
                )
    if path.suffix != suffix:
        raise ValueError(f"{option}: expected a name that ends in {suffix}, got {str(path)!r}")
    make_folder(path.parent, f"{option}: expected a place for a file, got {str(path)!r}")


def _read_ruler(name: str, opened: Opened, others: Sequence[PreTrainedConfig]) -> Ruler:
    """Encode the largest vocabulary of the compared language models with a sentence encoder."""
    if opened.task not in LANGUAGE_MODELS:
        raise ValueError(f"--ruler: expected language models to judge, got {opened.task}")
    configs = [opened.model.config, *others]
    count = max(config.get_text_config().vocab_size for config in configs)
    logger.info("Reading %s tokens with %s.", f"{count:,}", name)
    try:
        return read_ruler(locate_base(name), opened.tokenizer, count)
    except OSError as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"--ruler: expected an encoder that can be loaded, got {name!r}. {reason}"
        ) from error


def check_unseen(folder: Path, data: LoadedData, config: DataConfig) -> list[Ancestor]:
    """Refuse to evaluate a model on documents that it, or a base of it, did not hold out.

    Return what is known of the model and its bases.
    """
    names = data.held_out.fingerprints
    ancestors = lineage(str(folder), names, [to_plain(s) for s in config.eval_sources])
    if sentence := seen_by(ancestors, len(names)):
        raise ValueError(
            f"eval: expected documents that no model was trained on, got others: {sentence}. "
            "Evaluate on other ones, data=other.txt, or hold the same ones out of every run"
        )
    return ancestors


def _load(
    task: str,
    config: Any,
    tokenizer: Any,
    data: DataConfig,
    *,
    seed: int = 42,
    eval_only: bool = False,
) -> LoadedData:
    return load_data(
        data,
        base=config,
        tokenizer=tokenizer,
        seed=seed,
        task=task,
        labels=[config.id2label[index] for index in range(config.num_labels)],
        eval_only=eval_only,
        is_trained=True,
    )


def _open_other(first: Opened, folder: Path) -> Opened:
    """Load another model, to be measured on the data of the first."""
    config, task = _harmonic_config(folder, "--against")
    tokenizer = saved_tokenizer(folder)
    same = tokenizer.get_vocab() == first.tokenizer.get_vocab()
    if task != first.task or not same or config.id2label != first.model.config.id2label:
        differs = "task" if task != first.task else "classes" if same else "tokenizer"
        raise ValueError(
            f"--against: expected a model with the {differs} of {str(first.folder)!r}, got another "
            f"in {str(folder)!r}. Their losses cannot be compared"
        )
    length, longest = first.data_config.context_length, max_positions(config.get_text_config())
    if longest < length:
        raise ValueError(
            f"--against: expected a model of at least {length:,} positions, got {longest:,} in "
            f"{str(folder)!r}. Add data.context_length={longest}, for all models"
        )
    ancestors = check_unseen(folder, first.data, first.data_config)
    model = load_checked(MODELS[task], str(folder), config).to(first.model.device)
    return replace(first, folder=folder, model=model, tokenizer=tokenizer, ancestors=ancestors)


def scored_sha256(rows: MaskedRows) -> str:
    """Return the checksum of the tokens and labels of evaluation rows, masked as for scoring."""
    digest = sha256()
    for index in range(len(rows)):
        row = rows[index]
        for values in (row["input_ids"], row["labels"]):
            digest.update(f"{values.shape}".encode())
            digest.update(np.ascontiguousarray(values, dtype="<i8").tobytes())
    return digest.hexdigest()


def _harmonic_config(folder: Path, argument: str) -> tuple[Any, str]:
    """Return the configuration of a trained model and its task."""
    if not (folder / "config.json").is_file():
        latest = last_checkpoint(folder)
        advice = (
            "" if latest is None else f". Name its checkpoint {str(latest)!r}, or save the model"
        )
        raise ValueError(
            f"{argument}: expected a folder with a trained model, got {str(folder)!r}{advice}"
        )
    check_not_partial(folder)
    with reading(folder):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if config.model_type != "harmonic":
        raise ValueError(
            f"{argument}: expected a harmonic model, got a {config.model_type} in {str(folder)!r}. "
            "Train one on it first"
        )
    architecture = (config.architectures or ["HarmonicForMaskedLM"])[0]
    if architecture not in TASKS:
        is_body = architecture == "HarmonicModel"
        how = ", which has no head. Give the folder of the whole model" if is_body else ""
        raise ValueError(
            f"{argument}: expected one of {sorted(TASKS)}, got a {architecture} in "
            f"{str(folder)!r}{how}"
        )
    if config.problem_type not in (None, "single_label_classification"):
        raise ValueError(
            f"{argument}: expected a model that predicts one class of a text or token, got "
            f"{config.problem_type} in {str(folder)!r}. Use HarmonicTrainer.evaluate in Python"
        )
    return config, TASKS[architecture]


def _run_settings(folder: Path) -> dict[str, Any]:
    """Return the settings of the run that a folder belongs to, empty if there is none."""
    home = run_home(folder)
    return read_run(home) if (home / RUN_FILE).is_file() else {}


def _settings(
    folder: Path, overrides: Sequence[str], config: PreTrainedConfig
) -> tuple[DataConfig, dict[str, Any]]:
    """Return the sections data and training of the folder's run with these overrides."""
    keys = {override.split("=")[0] for override in overrides}
    unused = {key for key in keys if key.split(".")[0] != "data"} - TRAINING_KEYS
    if unused:
        raise ValueError(
            f"eval: expected overrides of data or {sorted(TRAINING_KEYS)}, got {sorted(unused)}"
        )
    saved = _run_settings(folder)
    sources = saved["data"]["sources"] if saved else []
    if saved and _gives_sources(keys) and not any(k.startswith("data.eval.source") for k in keys):
        saved["data"]["eval"]["source"] = None  # sources are given in place of the run's
    settings = apply_overrides(saved, [_written_out(override, sources) for override in overrides])
    if "data" not in settings:
        raise ValueError(
            f"eval: expected data, got none, since {str(folder)!r} has no {RUN_FILE}. "
            "Add data=file.txt"
        )
    if not saved and isinstance(settings["data"], dict):
        longest = min(CONTEXT_LENGTH, max_positions(config.get_text_config()))
        settings["data"].setdefault("context_length", longest)
    data = parse(DataConfig, settings["data"], "data")
    training = check_fields(TrainingArguments, settings.get("training") or {}, "training")
    size = training.setdefault("per_device_eval_batch_size", 8)
    if size < 1:
        raise ValueError(
            f"training.per_device_eval_batch_size: expected a number above 0, got {size}"
        )
    return data, training


def _written_out(override: str, sources: Sequence[Mapping[str, Any]]) -> str:
    """Return an override; `data=PATH` becomes a source with the column and format of `sources`."""
    key, _, value = override.partition("=")
    if key != "data" or value.lstrip().startswith("{"):
        return override
    source = {"path": value}
    for name in ("column", "format"):
        values = {source[name] for source in sources if name in source}
        if len(values) == 1 and file_kind(value) != "text":  # text needs neither
            source[name] = values.pop()
    return f"data.sources={json.dumps([source])}"


def _write_documents(path: Path, model: Opened, scores: TokenScores, documents: np.ndarray) -> None:
    """Write source, number, scored tokens and mean loss in nats of every document."""
    first = np.unique(documents, return_index=True)[1]
    names = document_names(model.data.eval.rows)  # [2, rows]
    tokens = np.bincount(documents[scores.rows], minlength=len(first))
    losses = np.bincount(documents[scores.rows], scores.at(1.0)[0], minlength=len(first))
    sources = _sources_of(model.data_config)
    lines = []
    for index, (source, number) in enumerate(names[:, first].T.tolist()):
        line = {
            "source": without_secrets(sources[source].path),
            "document": number,
            "tokens": int(tokens[index]),
            "loss": losses[index] / tokens[index] if tokens[index] else None,
        }
        lines.append(f"{json.dumps(line, ensure_ascii=False)}\n")
    write_whole(path, "".join(lines))
    logger.info("Losses of the documents: %s", path)
