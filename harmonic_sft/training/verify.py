"""`harmonic-sft verify`: ways to train that have to agree, compared on your machine and data."""

import copy
import gc
import json
import logging
import os
import socket
import tempfile
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset
from torch.multiprocessing.spawn import spawn
from transformers import PrinterCallback, TrainerCallback, TrainerState

from harmonic_sft.config import to_plain
from harmonic_sft.data.batches import MaskedRows, pack
from harmonic_sft.data.encoding import SpecialTokens
from harmonic_sft.data.files import BAD, NUMBER, PLACE, Row
from harmonic_sft.data.loading import LoadedData
from harmonic_sft.data.masking import EVAL_EPOCH, IGNORE_INDEX
from harmonic_sft.data.sources import GivenSource, load_documents, numbered_rows
from harmonic_sft.models.backbones import set_dropout_
from harmonic_sft.results import environment, read_whole, show_table, write_results
from harmonic_sft.training.arguments import check_launch
from harmonic_sft.training.head_swap import check_base, measure_swap
from harmonic_sft.training.loading import load_base_config, load_run_data, packable
from harmonic_sft.training.output_folder import changed_keys, has_batch_negatives, results_path
from harmonic_sft.training.run_config import HubConfig, RunConfig
from harmonic_sft.training.trainer import HarmonicTrainer

logger = logging.getLogger(__name__)
STEPS, ROWS, LENGTH = 12, 4, 128  # optimizer steps, rows of a step, most tokens of a row
STOPPED_AFTER = 5  # steps: an epoch has three, so in the middle of one
DOCUMENTS, PER_CLASS = 128, 8  # documents read; for a classifier, rows of each class
CHECKED_ROWS = 64  # rows whose loss the check of the base takes
# Largest relative difference of losses whose sums are taken in another order. Gradient norms may
# differ ten times as much, since they are differences of large sums.
TOLERANCES = {"float32": 1e-4, "bfloat16": 5e-3}
QUANTITIES = {"loss": 1, "grad_norm": 10}  # keys of a log entry; factors on the tolerance
SHORT: dict[str, Any] = {  # arguments of every training here
    "max_steps": STEPS,
    "warmup_steps": 0,  # a long warmup would hide what a step does
    "logging_strategy": "steps",
    "logging_steps": 1,
    "save_strategy": "no",
    "eval_strategy": "no",
    "load_best_model_at_end": False,
    "report_to": "none",
    "disable_tqdm": True,
}


class Way(NamedTuple):
    """How to take the same short training."""

    micro_batches: int = 1  # per optimizer step
    num_processes: int = 1  # that share a step
    is_whole: bool = False  # every step reads all rows, so that their order does not matter
    packing: bool = False
    streaming: bool = False  # the rows are read while training
    has_dropout: bool = False  # as in the file; other micro-batches would draw other masks
    is_stopped: bool = False  # another trainer continues from a checkpoint, to the same bits


PAIRS = {  # of ways that have to agree
    "uninterrupted = resumed": (Way(has_dropout=True), Way(has_dropout=True, is_stopped=True)),
    "big batch = accumulation": (Way(), Way(micro_batches=2)),
    "one process = two": (Way(), Way(num_processes=2)),
    "padded = packed": (Way(is_whole=True), Way(is_whole=True, packing=True)),
    "table = stream": (Way(is_whole=True), Way(is_whole=True, streaming=True)),
}


class FirstRows(list[Row]):
    """Rows of a source as a list, since columns that are not read may hold what no table takes."""

    def __init__(self, rows: list[Row], features: Any):
        super().__init__(rows)
        self.features = features


class Material(NamedTuple):
    """What is trained on: rows of many lengths, and their collator if they have one."""

    rows: Any
    collator: Any = None


class StopAfter(TrainerCallback):
    """Ends training after a step, with a checkpoint."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Save and stop after that step."""
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True


def verify(run: RunConfig) -> dict[str, Any]:
    """Compare ways of training that have to agree, with the model and the data of a run.

    Every way is the same short training with one thing changed, in a temporary folder beside the
    run's. If the run is finished, its results, and so its card, get the verdicts.

    Args:
        run: The checked configuration.

    Returns:
        The content of the file at `verify_path`: `pairs`, each with the largest and the mean signed
        relative difference of its losses and gradient norms, and a verdict.
    """
    check_launch(run.training_arguments())
    path = verify_path(run.output_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{run.output_dir.name}-")
    with beside as scratch:
        with _without(logging.INFO):
            tokenizer, data = load_run_data(_short_data(run))
            material = _material(data, tokenizer, min(LENGTH, run.data.context_length))
            base = _check_base(run, data, Path(scratch, "base"))
        with _without(logging.WARNING):  # the check of the base has shown them
            pairs = _compared(run, material, Path(scratch))
    results = {
        "run": run.output_dir.name,
        "base": base,
        "pairs": pairs,
        "config": to_plain(run),
        "environment": environment(),
    }
    write_results(path.parent, path.stem, results)
    note_verdicts(run)
    _show(run, pairs)
    logger.info("Written: %s", path)
    different = [pair["name"] for pair in pairs if pair["verdict"] == "differs"]
    if different:
        on_cpu = run.training_arguments().device.type == "cpu"
        advice = "Report" if on_cpu else "Try training.use_cpu=true; if they stay, report"
        raise ValueError(
            f"verify: expected ways of training that agree, got {different}, which differ. "
            f"{advice} {path.name}"
        )
    return results


@contextmanager
def _without(level: int) -> Generator[None]:
    """Silence logging up to a level, since every short training would repeat its messages."""
    before = logging.root.manager.disable
    logging.disable(level)
    try:
        yield
    finally:
        logging.disable(before)


def _short_data(run: RunConfig) -> RunConfig:
    """Return the run on its first documents, cut to `LENGTH`."""
    data = replace(
        run.data,
        sources=[_first_documents(run, index) for index in range(len(run.data.sources))],
        context_length=min(LENGTH, run.data.context_length),
        packing=False,
        mask=replace(run.data.mask, whole_word=False),  # rows of tokens do not know their words
        eval=replace(run.data.eval, documents=0, source=None),
    )
    return replace(run, data=data)


def _first_documents(run: RunConfig, index: int) -> GivenSource:
    source, label_column = run.data.sources[index], run.data.label_column
    name = f"data.sources.{index}"
    documents, _ = load_documents(source, name=name, skip=run.data.on_bad_row == "skip")
    rows: list[Row] = []
    counts: Counter[str] = Counter()
    for row in numbered_rows(documents, name):
        if label_column is None and len(rows) == DOCUMENTS:
            break
        label = str(row.get(label_column))
        # Rows may be sorted by class, so some of every class are taken.
        if BAD not in row and (label_column is None or counts[label] < PER_CLASS):
            counts[label] += 1
            rows.append({key: row[key] for key in row if key not in (NUMBER, PLACE)})
    return GivenSource(
        path=source.path,
        format=source.format,
        column=source.column,
        documents=FirstRows(rows, documents.features),
    )


def _check_base(run: RunConfig, data: LoadedData, folder: Path) -> dict[str, float] | None:
    """Return how well the base's own head predicts the text, None if it has none."""
    if data.labels is not None:
        return None
    assert isinstance(data.train, MaskedRows), "nothing is streamed"
    rows = data.train.rows.select(range(min(CHECKED_ROWS, len(data.train.rows))))
    data = replace(data, eval=MaskedRows(rows, data.train.masker, fixed_epoch=EVAL_EPOCH))
    run = _settings(run, Way(), Material(()), folder)
    trainer = _trainer(run, Material(data.train, data.collator), data.eval)
    swap, _ = measure_swap(trainer, data)
    check_base(run, data, swap, None)
    return swap.get("old_head")


def _material(data: LoadedData, tokenizer: Any, length: int) -> Material:
    """Return rows of many lengths; text becomes tokens, which can be packed and streamed."""
    if data.labels is not None:
        material = Material(data.train, data.collator)
    else:
        assert isinstance(data.train, MaskedRows), "nothing is streamed"
        special, found = SpecialTokens.of(tokenizer), []
        around = len(special.prefix), len(special.suffix)  # of every row
        for row in data.train.rows:
            # Every fourth row keeps its length; others keep their end, where completions are.
            kept = max(1, length * (1 + len(found) % 4) // 4 - sum(around))
            inner = slice(around[0], len(row["input_ids"]) - around[1])
            body = row["input_ids"][inner][-kept:]
            scored = row["scored"][inner][-kept:] if "scored" in row else np.ones(len(body), bool)
            labels = np.pad(
                np.where(scored, body, IGNORE_INDEX), around, constant_values=IGNORE_INDEX
            )
            weight = {"weight": float(row["weight"])} if "weight" in row else {}
            input_ids = [*special.prefix, *body.tolist(), *special.suffix]
            if scored.any():
                found.append({"input_ids": input_ids, "labels": labels, **weight})
            if len(found) == ROWS * STEPS // 4:
                break
        material = Material(Dataset.from_list(found))
    if len(material.rows) < ROWS:
        raise ValueError(
            f"data.sources: expected {ROWS} rows or more to verify, got {len(material.rows)}"
        )
    return material


def _compared(run: RunConfig, material: Material, folder: Path) -> list[dict[str, Any]]:
    """Train in every way once and return how far the two ways of each pair differ."""
    is_16_bit = "bfloat16" in (run.model.dtype, run.model.unfreeze.dtype)
    on_cpu = run.training_arguments().device.type == "cpu"
    taken: dict[Way, list[dict[str, float]]] = {}
    results: list[dict[str, Any]] = []
    is_stream = any(source.streaming for source in run.data.sources)
    for name, pair in PAIRS.items():
        # The resume reads its rows as the run does, from a table or a stream.
        first, second = (
            way._replace(streaming=way.streaming or (is_stream and way.has_dropout)) for way in pair
        )
        if reason := _why_not(run, second, material, on_cpu=on_cpu):
            results.append({"name": name, "verdict": "skipped", "reason": reason})
            continue
        for way in {first, second} - taken.keys():
            train = _take if way.num_processes == 1 else _take_in_processes
            taken[way] = train(run, way, material, folder / str(len(taken)))
        tolerance = TOLERANCES["bfloat16" if is_16_bit else "float32"]
        tolerance = 0.0 if second.is_stopped and on_cpu else tolerance  # a GPU adds in any order
        found = {key: residuals(taken[first], taken[second], key) for key in QUANTITIES}
        agrees = all(
            (one := found[key]) is not None and one["largest"] <= factor * tolerance
            for key, factor in QUANTITIES.items()
        )
        verdict = "agrees" if agrees else "differs"
        results.append({"name": name, **found, "tolerance": tolerance, "verdict": verdict})
    return results


def residuals(
    first: Sequence[Mapping[str, float]], second: Sequence[Mapping[str, float]], quantity: str
) -> dict[str, float] | None:
    """Return the largest and the mean signed relative difference of a quantity over the steps.

    None where the two trainings have logged different numbers of steps.
    """
    pairs = [(a[quantity], b[quantity]) for a, b in zip(first, second, strict=False)]
    if not pairs or len(first) != len(second):
        return None
    found = [(b - a) / max(abs(a), 1e-12) for a, b in pairs]
    return {"largest": max(map(abs, found)), "mean_signed": fmean(found)}


def _why_not(run: RunConfig, way: Way, material: Material, *, on_cpu: bool) -> str | None:
    """Say why a way cannot be taken here."""
    if (way.packing or way.streaming) and isinstance(material.rows, MaskedRows):
        return "a classifier's rows are neither packed nor streamed"
    model_type = load_base_config(run.model).get_text_config().model_type
    if way.packing and model_type not in packable(run):
        return "the base cannot keep the documents of a row apart"
    if way.micro_batches * way.num_processes > 1 and has_batch_negatives(run):
        return "the negatives of info_nce are the other labels of one micro-batch"
    if way.num_processes > 1 and not on_cpu:
        return "two processes need two GPUs; training.use_cpu=true compares them"
    return None


def _settings(run: RunConfig, way: Way, material: Material, folder: Path) -> RunConfig:
    """Return the settings of a run that trains in one way, in a folder."""
    length = min(LENGTH, run.data.context_length)
    size = ROWS // way.micro_batches // way.num_processes
    if way.packing:
        size = len(pack(np.array([len(row["input_ids"]) for row in material.rows]), length))
    training = {
        **run.training,
        **SHORT,
        "output_dir": str(folder),
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": way.micro_batches,
    }
    if way.num_processes > 1:  # `_why_not` skips GPUs; without them check_launch needs this
        training["use_cpu"] = True
    data = replace(
        run.data,
        context_length=length,
        mask=replace(run.data.mask, whole_word=False),
        loss_on="all",  # the labels say what is scored
        weight_column=None if run.data.weight_column is None else "weight",
        packing=way.packing,
        padding_free=run.data.padding_free and way.packing,
    )
    h_exp = None if run.h_exp is None else replace(run.h_exp, calibrate=False)
    run = replace(run, training=training, data=data, h_exp=h_exp, hub=HubConfig(), resume=False)
    run = replace(run, early_stopping_patience=None)
    return run if way.has_dropout else _without_dropout(run)


def _without_dropout(run: RunConfig) -> RunConfig:
    peft = None if run.peft is None else replace(run.peft, lora_dropout=0.0)
    try:
        set_dropout_(copy.deepcopy(load_base_config(run.model).get_text_config()), 0.0)
    except ValueError:  # the model has none
        return replace(run, peft=peft)
    return replace(run, peft=peft, model=replace(run.model, dropout=0.0))


def _take(run: RunConfig, way: Way, material: Material, folder: Path) -> list[dict[str, float]]:
    """Train and return the log entries of the steps."""
    if way.is_whole:
        material = Material(material.rows.select(range(ROWS)))
    settings = _settings(run, way, material, folder)
    if way.streaming:
        material = Material(material.rows.to_iterable_dataset())
    if way.is_stopped:
        trainer = _trainer(settings, material)
        trainer.add_callback(StopAfter(STOPPED_AFTER))
        trainer.train()
    trainer = _trainer(settings, material)
    trainer.train(resume_from_checkpoint=way.is_stopped or None)
    log = [{key: entry[key] for key in QUANTITIES} for entry in trainer.state.log_history[:-1]]
    del trainer
    gc.collect()
    torch.cuda.empty_cache()
    return log


def _trainer(run: RunConfig, material: Material, eval_rows: Any = None) -> HarmonicTrainer:
    trainer = HarmonicTrainer(
        run.model.base,
        run.training_arguments(),
        data_collator=material.collator,
        train_dataset=material.rows,
        eval_dataset=eval_rows,
        peft_config=run.peft,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _take_in_processes(
    run: RunConfig, way: Way, material: Material, folder: Path
) -> list[dict[str, float]]:
    """Train in processes that work together, as torchrun starts them."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    world = {"WORLD_SIZE": str(way.num_processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    log = folder.with_suffix(".json")
    spawn(_one_process, (world, run, way, material, folder, log), way.num_processes)
    return json.loads(log.read_text())


def _one_process(
    rank: int,
    world: dict[str, str],
    run: RunConfig,
    way: Way,
    material: Material,
    folder: Path,
    log: Path,
) -> None:
    os.environ |= {**world, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(max(1, torch.get_num_threads() // way.num_processes))
    with _without(logging.WARNING):
        found = _take(run, way, material, folder)
    if rank == 0:
        log.write_text(json.dumps(found))


def _show(run: RunConfig, pairs: Sequence[Mapping[str, Any]]) -> None:
    """Print the pairs, and why some were left out."""
    rows = []
    for pair in pairs:
        found = [pair.get(key) or {} for key in QUANTITIES]
        numbers = [f.get(key) for f in found for key in ("largest", "mean_signed")]
        shown = [None if x is None else f"{x:.1e}" if x else "0" for x in numbers]
        rows.append((pair["name"], *shown, pair["verdict"]))
        if "reason" in pair:
            logger.info("%s: skipped, %s.", pair["name"], pair["reason"])
    columns = ["pair", "loss: largest", "mean", "norm: largest", "mean", "verdict"]
    show_table(f"{run.output_dir.name}: relative differences over {STEPS} steps", columns, rows)


def verify_path(output_dir: Path) -> Path:
    """Where the results of `verify` are: beside a run's folder, which may not exist yet."""
    return output_dir.with_name(f"{output_dir.name}.verify.json")


def read_verdicts(run: RunConfig) -> dict[str, str] | None:
    """Return what `verify` said of every pair of ways to train a run with these settings.

    Each verdict has the largest relative difference of the losses. None if `verify` was not run,
    or was run with other settings.
    """
    results = read_whole(verify_path(run.output_dir), "pairs", "config")
    if results is None or changed_keys(results["config"], run):
        return None
    return {pair["name"]: _verdict(pair) for pair in results["pairs"]}


def note_verdicts(run: RunConfig) -> None:
    """Write what `verify` said into the results of this run, if it is finished."""
    path = results_path(run.output_dir)
    results = read_whole(path, "config")
    if results is not None and not changed_keys(results["config"], run):
        write_results(path.parent, path.stem, {**results, "verified": read_verdicts(run)})


def _verdict(pair: dict[str, Any]) -> str:
    loss = pair.get("loss")
    return (
        pair["verdict"] if loss is None else f"{pair['verdict']} (losses to {loss['largest']:.0e})"
    )
