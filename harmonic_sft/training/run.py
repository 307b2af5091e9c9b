"""One run from its configuration to its results."""

import logging
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from accelerate import PartialState
from accelerate.utils import gather_object
from transformers import TrainerState, TrainingArguments, set_seed

from harmonic_sft.config import to_plain
from harmonic_sft.data.classification import LabeledData
from harmonic_sft.data.files import SHOWN_REASONS
from harmonic_sft.data.loading import LoadedData
from harmonic_sft.data.masking import IGNORE_INDEX
from harmonic_sft.data.streams import StreamedRows
from harmonic_sft.eval import nearest_prototypes, unigram_loss
from harmonic_sft.hub import check_destination, check_model
from harmonic_sft.models import HarmonicConfig, Head
from harmonic_sft.results import environment, peak_memory_bytes, read_results, write_results
from harmonic_sft.training.calibration import Calibration
from harmonic_sft.training.data_view import load_run_data
from harmonic_sft.training.freezing import parts
from harmonic_sft.training.head_swap import measure_swap, recalibrate_
from harmonic_sft.training.model_loading import load_model
from harmonic_sft.training.output_folder import (
    RESULTS_NAME,
    check_output_folder,
    claim_output_folder,
    is_finished,
    last_checkpoint,
    results_path,
)
from harmonic_sft.training.publishing import (
    PushCallback,
    destination_of,
    finish_pushes,
    push_run,
)
from harmonic_sft.training.report import draw, show_closing_table, show_parts
from harmonic_sft.training.run_config import Recipe, RunConfig
from harmonic_sft.training.schedules import phase_steps
from harmonic_sft.training.trainer import HarmonicTrainer, evaluate

logger = logging.getLogger(__name__)
DISTRIBUTED_PLUGINS = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")


class Ready(NamedTuple):
    """A run with everything loaded, before its first step."""

    trainer: HarmonicTrainer
    data: LoadedData | LabeledData
    tokenizer: Any
    left_out: int  # rows of data, so far
    old_head: Head | None  # what the base predicted with, if that is known


def train(run: RunConfig) -> dict[str, Any]:
    """Train a model and write everything into the run's output folder.

    Args:
        run: The checked configuration.

    Returns:
        The content of `results/train.json`.

    Raises:
        ValueError: Bad input; nothing was trained or overwritten.
        StoppedError: Training was stopped; saved checkpoints are whole.
        PushError: The Hub did not take the result; the run itself is complete.
    """
    check_plan(run)
    check_output_folder(run)
    if run.hub.push and PartialState().is_main_process:
        check_destination(destination_of(run.hub))
    if is_finished(run):
        return _show_finished(run)
    ready = prepare(run)
    trainer, state = ready.trainer, PartialState()
    if run.hub.push and state.is_main_process:
        check_model(trainer.model.config, destination_of(run.hub))
    if state.is_main_process:
        claim_output_folder(run)
        show_parts(parts(trainer.model), title=f"{run.model.base} + {run.head.name} head")
    state.wait_for_everyone()
    before = _measure_before(run, ready)
    ready = ready._replace(old_head=None)  # as large as the new one
    checkpoint = last_checkpoint(run.output_dir)
    set_seed(run.seed)  # dropout starts alike, whether the evaluation above was made or remembered
    try:
        session = _train(trainer, checkpoint)
        final = evaluate(trainer, "final")
        trainer.save_model()
    except BaseException:
        finish_pushes(trainer.callback_handler.callbacks)
        raise
    results = {
        "run": run.output_dir.name,
        "base": run.model.base,
        "head": trainer.model.config.head,
        **before,
        "final": final,
        "neighbors_after": _neighbors(run, ready),
        "steps": trainer.state.global_step,
        "history": _history(before["before"], trainer.state.log_history),
        **session,
        "data": _data_results(ready),
        "peak_memory_bytes": peak_memory_bytes(),
        "config": to_plain(run),
        "environment": environment(),
    }
    if state.is_main_process:
        trainer.state.save_to_json(str(run.output_dir / "trainer_state.json"))
        write_results(run.output_dir / "results", RESULTS_NAME, results)
        show_closing_table(results)
        draw(results, run.output_dir / "results" / "train.png")
    state.wait_for_everyone()  # a push may take longer than the others would wait
    if state.is_main_process and run.hub.push:
        push_run(run, trainer.callback_handler.callbacks)
    return results


def _show_finished(run: RunConfig) -> dict[str, Any]:
    logger.info("This run is finished: %s", run.output_dir)
    results = read_results(results_path(run))
    if PartialState().is_main_process:
        show_closing_table(results)
        if run.hub.push:  # the last try may have failed
            push_run(run)
    return results


def prepare(run: RunConfig) -> Ready:
    """Load tokenizer, data and model, and build the trainer.

    Raises:
        ValueError: Something is missing or does not fit together.
    """
    set_seed(run.seed)
    with PartialState().main_process_first():  # one process fills the cache, the others read it
        tokenizer, data = load_run_data(run)
    _log_data(data)
    model, old_head = load_model(run, data)
    args = run.training_arguments()
    recipe = Recipe(
        schedule=run.schedule,
        h_exp=None if run.learns_h_exp else run.h_exp,
        oom_fallback=run.oom_fallback,
        gradient_checkpointing=run.gradient_checkpointing,
    )
    try:
        trainer = HarmonicTrainer(
            model,
            args,
            recipe,
            train_dataset=data.train,
            eval_dataset=data.eval,
            data_collator=data.collator,
            processing_class=tokenizer,
            callbacks=[PushCallback(destination_of(run.hub))] if run.hub.every_save else [],
        )
        trainer.create_optimizer()
    except (ImportError, RuntimeError) as error:
        if "install" not in str(error):
            raise
        raise ValueError(f"training: expected what it asks for to be installed. {error}") from error
    return Ready(trainer, data, tokenizer, data.bad_rows.total, old_head)


def check_plan(run: RunConfig) -> None:
    """Refuse what can be known to fail before anything is loaded.

    Raises:
        ValueError: transformers' arguments, the way of starting, or phases that do not fit into
            the run.
    """
    args = run.training_arguments()
    check_launch(args)
    if args.max_steps > 0:
        phase_steps(
            args.max_steps,
            warmup_ratio=run.schedule.warmup_ratio,
            decay_ratio=run.schedule.decay_ratio,
        )


def check_launch(args: TrainingArguments) -> None:
    """Refuse ways of starting that would train something else than the file says.

    Raises:
        ValueError: FSDP, DeepSpeed, several GPUs in one process, or processes that do not know
            of each other.
    """
    for variable in DISTRIBUTED_PLUGINS:
        if os.environ.get(variable, "false").lower() in ("true", "1"):
            plugin = variable.removeprefix("ACCELERATE_USE_")
            raise ValueError(
                f"accelerate launch: expected no {plugin}, got {variable}. "
                "Use plain data parallelism (--multi_gpu)"
            )
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision != "no":
        raise ValueError(
            f"accelerate launch: expected --mixed_precision no, got {precision}. "
            "model.dtype and model.unfreeze.dtype decide"
        )
    if args.n_gpu > 1:
        raise ValueError(
            f"launch: expected one GPU per process, got {args.n_gpu}. "
            "Use accelerate launch --multi_gpu, or set CUDA_VISIBLE_DEVICES=0"
        )
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes > 1 and args.world_size == 1:
        raise ValueError(
            f"launch: expected {processes} processes that work together, got single ones. "
            "Without GPUs set training.use_cpu=true and start with torchrun"
        )


def _measure_before(run: RunConfig, ready: Ready) -> dict[str, Any]:
    """Evaluate the model as loaded; a resumed run remembers what that was."""
    path = run.output_dir / "results" / "before.json"
    if path.is_file():
        before = read_results(path)
        if before.get("calibration") is not None:
            recalibrate_(run, ready.trainer, Calibration(**before["calibration"]))
        return before
    swap, calibration = measure_swap(run, ready.trainer, ready.data, ready.old_head)
    metrics = evaluate(ready.trainer, "before")
    if not math.isfinite(metrics["loss"]):
        raise ValueError(
            f"model.base: expected weights with a finite loss, got {metrics['loss']}. "
            "The checkpoint is damaged, or its precision too low"
        )
    before = {
        "before": metrics,
        "swap": swap,
        "calibration": None if calibration is None else calibration._asdict(),
        "unigram_loss": _unigram_loss(ready.data),
        "neighbors_before": _neighbors(run, ready),
    }
    state = PartialState()
    state.wait_for_everyone()
    if state.is_main_process:
        write_results(path.parent, path.stem, before)
    return before


def _history(before: dict[str, float], log: list[dict[str, float]]) -> list[dict[str, float]]:
    """Return what was logged, the evaluations before and after training being ordinary ones."""
    start = {"step": 0, **{f"eval_{key}": value for key, value in before.items()}}
    return [start, *({k.replace("final_", "eval_"): v for k, v in row.items()} for row in log)]


def _neighbors(run: RunConfig, ready: Ready) -> dict[str, list[str]]:
    if isinstance(ready.data, LabeledData):
        return {}  # its prototypes are not words
    model = ready.trainer.model
    return nearest_prototypes(model.dist_head, ready.tokenizer, run.neighbors)


def _train(trainer: HarmonicTrainer, checkpoint: Path | None) -> dict[str, float | None]:
    """Train, or go on; return the seconds and the speed of this session.

    Speed counts tokens without padding, and the time of evaluations too.
    """
    if checkpoint is None:
        seconds = trainer.train().metrics["train_runtime"]
        tokens = trainer.state.num_input_tokens_seen
        return _session(trainer, seconds, tokens)
    logger.info("Going on from %s", checkpoint)
    saved, now = HarmonicConfig.from_pretrained(checkpoint), trainer.model.config
    if saved.id2label != now.id2label:
        raise ValueError(
            f"resume: expected the classes of {str(checkpoint)!r}, {saved.id2label}, "
            f"got {now.id2label}. The data have changed; start a new run"
        )
    # Read before training, which may delete the checkpoint when newer ones come.
    state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
    if state.global_step >= state.max_steps:
        trainer.load_finished(checkpoint, state)
        return {"train_seconds": 0.0, "tokens_per_second": None, "data_wait_share": None}
    trainer.load_stream_state(checkpoint)
    seconds = trainer.train(resume_from_checkpoint=str(checkpoint)).metrics["train_runtime"]
    tokens = trainer.state.num_input_tokens_seen - state.num_input_tokens_seen
    return _session(trainer, seconds, tokens)


def _session(trainer: HarmonicTrainer, seconds: float, tokens: int) -> dict[str, float | None]:
    return {
        "train_seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "data_wait_share": trainer.data_seconds / seconds,
    }


def _unigram_loss(data: LoadedData | LabeledData) -> float | None:
    if data.unigram_counts is None:
        return None
    rows = (data.eval[index]["labels"] for index in range(len(data.eval)))
    labels = np.concatenate([np.atleast_1d(row) for row in rows])
    return unigram_loss(labels[labels != IGNORE_INDEX], data.unigram_counts)


def _log_data(data: LoadedData | LabeledData) -> None:
    if isinstance(data, LabeledData):
        logger.info("Data: %d classes.", len(data.labels))
    if isinstance(data.train, StreamedRows):
        logger.info(
            "Data: %d logical streams; %d rows kept for evaluation.",
            len(data.train.streams),
            len(data.eval),
        )
        return
    logger.info(
        "Data: %d documents, %d tokens in %d rows; %d rows of other documents for evaluation.",
        data.num_documents,
        data.num_tokens,
        len(data.train),
        len(data.eval),
    )
    if data.fill_rate is not None:
        logger.info("Packed: %.1f %% of every row are tokens, none is cut.", 100 * data.fill_rate)
    if tokens := data.bad_rows.unscored_tokens:
        logger.info("Left out: %d tokens of chunks in which nothing may be predicted.", tokens)
    if first := data.bad_rows.first:
        count = data.bad_rows.total - data.bad_rows.blank
        logger.warning("Left out: %d bad rows, such as %s", count, "; ".join(first))


def _data_results(ready: Ready) -> dict[str, Any]:
    """Return what was left out, by all processes, and how full packed rows are."""
    trainer = ready.trainer
    found = [
        (stream, max(snapshot["skipped"], trainer.skipped.get(int(stream), 0)), snapshot["reasons"])
        for stream, snapshot in trainer.stream_state["streams"].items()
    ]
    skipped: dict[str, int] = {}
    reasons = list(ready.data.bad_rows.first)
    for stream, count, first in sorted(gather_object(found)):
        # A process knows what a stream had left out by its own last row.
        skipped[stream] = max(skipped.get(stream, 0), count)
        reasons += first
    return {
        "rows_left_out": ready.left_out + sum(skipped.values()),
        "reasons": list(dict.fromkeys(reasons))[:SHOWN_REASONS],
        "fill_rate": ready.data.fill_rate,
        "unscored_tokens_left_out": None if found else ready.data.bad_rows.unscored_tokens,
    }
