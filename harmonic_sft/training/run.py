"""One run from its configuration to its results."""

import logging
import os
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import gather_object
from transformers import set_seed

from harmonic_sft.config import to_plain
from harmonic_sft.data.heldout import LIST, Duplicates, lineage, record, seen_by
from harmonic_sft.data.loading import LoadedData
from harmonic_sft.data.sources import check_path
from harmonic_sft.data.streams import merge
from harmonic_sft.eval import nearest_prototypes, unigram_loss
from harmonic_sft.hub import check_destination, check_model
from harmonic_sft.hub.run_folder import RUN_FILE
from harmonic_sft.plots import plot_run
from harmonic_sft.results import (
    environment,
    leaves,
    peak_memory_bytes,
    read_results,
    read_whole,
    write_results,
)
from harmonic_sft.training.arguments import check_launch
from harmonic_sft.training.callbacks import StoppedError, check_reporters, lasting_reports
from harmonic_sft.training.checkpoints import all_checkpoints, last_checkpoint
from harmonic_sft.training.evaluation import scored_sha256
from harmonic_sft.training.freezing import parts
from harmonic_sft.training.head_swap import (
    apply_fit_,
    check_base,
    eval_labels,
    evaluate,
    measure_swap,
    plain_metrics,
)
from harmonic_sft.training.loading import load_run_data
from harmonic_sft.training.output_folder import (
    RESULTS_NAME,
    check_output_folder,
    is_finished,
    results_path,
)
from harmonic_sft.training.publishing import (
    PushCallback,
    destination_of,
    push_run,
)
from harmonic_sft.training.report import (
    draw,
    log_data,
    show_closing_table,
    show_next_steps,
    show_parts,
)
from harmonic_sft.training.run_config import RunConfig
from harmonic_sft.training.trainer import HarmonicTrainer
from harmonic_sft.training.verify import read_verdicts

logger = logging.getLogger(__name__)


def train(run: RunConfig) -> dict[str, Any]:
    """Train a model and write everything into the run's output folder.

    Args:
        run: The checked configuration.

    Returns:
        The content of `results/train.json`.

    Raises:
        ValueError: Bad input; nothing was trained or overwritten.
        StoppedError: Training was stopped; saved checkpoints are whole.
        PushError: The Hub cannot be reached, before anything is trained; or it did not take the
            result, and the run itself is complete.
    """
    if not isinstance(run, RunConfig):
        raise ValueError(
            f"run: expected a RunConfig, got a {type(run).__name__}. Read a file: "
            'train(load_run_config("run.yaml"))'
        )
    check_run(run)
    if run.hub.push and PartialState().is_main_process:
        check_destination(destination_of(run.hub))
    if is_finished(run):
        return _show_finished(run)
    trainer, data = prepare(run)
    checkpoint = last_checkpoint(run.output_dir) if run.resume else None
    if checkpoint is not None:
        trainer.check_continues(checkpoint)  # now: nothing has been written yet
    if PartialState().is_main_process:
        if run.hub.push:
            check_model(trainer.model.config, destination_of(run.hub), run.peft is not None)
        show_parts(run, parts(trainer.model))
    callbacks = trainer.callback_handler.callbacks
    with trainer.at_work(resume=run.resume):
        before = _measure_before(trainer, data, checkpoint)
        with lasting_reports(callbacks):
            trained = _train(trainer, checkpoint)
        results = _results(trainer, data, before, trained)
        _publish(trainer, results)
    return results


def check_run(run: RunConfig) -> None:
    """Refuse what can be refused before anything is loaded, without a network."""
    if run.loss is None:
        raise ValueError(
            "loss: expected the name of a loss, got null. A run with a loss function of your own "
            "continues from Python"
        )
    if run.data.eval.documents < 1 and run.data.eval.source is None:
        raise ValueError("data.eval.documents: expected at least 1, got 0. A run is evaluated")
    for number, source in enumerate(run.data.sources):
        check_path(source, f"data.sources.{number}")
    if run.data.eval.source is not None:
        check_path(run.data.eval.source, "data.eval.source")
    args = run.training_arguments()
    check_launch(args)
    loss = to_plain(run.loss)
    parts = [loss, *(term["loss"] for term in loss.get("terms", ()))]
    has_kernels = any("triton" in leaves(part).values() for part in parts)
    if has_kernels and args.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError("loss.impl: expected auto, chunked or reference without a GPU, got triton")
    check_reporters(args.report_to or [])
    check_output_folder(run)
    is_new = not (run.output_dir / RUN_FILE).is_file()
    if run.resume and is_new and PartialState().is_main_process:
        logger.info("No run in %s yet: a new one starts.", run.output_dir)


def prepare(run: RunConfig) -> tuple[HarmonicTrainer, LoadedData]:
    """Load tokenizer, data and model, and build the trainer."""
    set_seed(run.seed)
    with PartialState().main_process_first():  # one process fills the cache, the others read it
        tokenizer, data = load_run_data(run)
    log_data(data)
    args = run.training_arguments()
    try:
        trainer = HarmonicTrainer(
            run.model.base,
            args,
            data_collator=data.collator,
            train_dataset=data.train,
            eval_dataset=data.eval,
            processing_class=tokenizer,
            callbacks=[PushCallback(destination_of(run.hub))] if run.hub.every_save else [],
            peft_config=run.peft,
        )
        trainer.create_optimizer()
    except (ImportError, RuntimeError) as error:
        if "install" not in str(error):
            raise
        raise ValueError(f"training: expected what it asks for to be installed. {error}") from error
    trainer.run_config = run  # its own has other data sources and hub settings
    return trainer, data


def _show_finished(run: RunConfig) -> dict[str, Any]:
    logger.info("This run is finished: %s", run.output_dir)
    results = read_results(results_path(run.output_dir))
    if PartialState().is_main_process:
        show_closing_table(results)
        if run.hub.push:  # the last try may have failed
            push_run(run)
    return results


def _measure_before(
    trainer: HarmonicTrainer, data: LoadedData, checkpoint: Path | None
) -> dict[str, Any]:
    """Evaluate the model as loaded; a run that continues from a checkpoint reads the old values."""
    run = trainer.run_config
    path = run.output_dir / "results" / "before.json"
    before = read_whole(path, "before", "unigram_loss", "neighbors_before")
    is_recorded = read_whole(path.with_name(f"{LIST}.json"), "digest") is not None
    if before is not None and is_recorded and checkpoint is not None:
        if before.get("calibration") is not None:
            apply_fit_(trainer, before["calibration"])
        return before
    swap, fit = measure_swap(trainer, data)
    counts = data.unigram_counts
    unigrams = None if counts is None else unigram_loss(eval_labels(data), counts)
    if checkpoint is None:
        check_base(run, data, swap, unigrams)
    before = {
        "before": evaluate(trainer, "before"),
        "swap": swap,
        "calibration": fit,
        "unigram_loss": unigrams,
        "neighbors_before": _neighbors(trainer, data),
    }
    state = PartialState()
    state.wait_for_everyone()
    if state.is_main_process:
        data_section = to_plain(run.data)
        record(
            run.output_dir,
            data.held_out,
            sources=data_section["sources"],
            eval_source=data_section["eval"]["source"],
            base=_base(run),
            trained=data.trained,
        )
        write_results(path.parent, path.stem, before)
    return before


def _neighbors(trainer: HarmonicTrainer, data: LoadedData) -> dict[str, list[str]]:
    if data.labels is not None:
        return {}  # a classifier's prototypes are not words
    head, words = trainer.model.dist_head, trainer.run_config.neighbors
    return nearest_prototypes(head, trainer.processing_class, words)


def _train(trainer: HarmonicTrainer, checkpoint: Path | None) -> dict[str, Any]:
    """Train, or continue, to the last step; evaluate and save the model.

    Returns:
        `final`, the metrics, with the seconds, the speed and the share of time spent waiting for
        data in this session. Speed counts tokens without padding; its time includes evaluations.
    """
    # So that dropout is the same whether the first evaluation was made now or read.
    set_seed(trainer.args.seed)
    if checkpoint is not None:
        logger.info("Continuing from %s", checkpoint)
    elif all_checkpoints(trainer.run_config.output_dir):
        logger.warning("No checkpoint is whole: the run starts again from its first step.")
    output = trainer.train(None if checkpoint is None else str(checkpoint))
    seconds = output.metrics["train_runtime"]
    is_short = trainer.state.global_step < trainer.state.max_steps
    if is_short and trainer.is_stopped_early:
        logger.info("Early stopping ended the run after step %d.", trainer.state.global_step)
    elif is_short:
        raise StoppedError(
            f"training: expected {trainer.state.max_steps} steps, got "
            f"{trainer.state.global_step}: a signal or a callback ended it. The same command "
            "with resume=true continues from the last checkpoint"
        )
    trainer.save_model()  # before the evaluation, which may be interrupted
    final = _evaluation_of_last_step(trainer) or evaluate(trainer, "final")
    speed = None
    if seconds:
        resumed_at = trainer._initial_num_input_tokens_seen
        speed = (trainer.state.num_input_tokens_seen - resumed_at) / seconds
    return {
        "final": final,
        "train_seconds": seconds,
        "tokens_per_second": speed,
        "data_wait_share": trainer.data_seconds / seconds if seconds else None,
    }


def _evaluation_of_last_step(trainer: HarmonicTrainer) -> dict[str, float]:
    """Return the metrics of the final weights if training has evaluated them, else nothing."""
    if trainer.args.load_best_model_at_end:
        return {}
    state = trainer.state
    measured = {row["step"]: row for row in state.log_history if "eval_loss" in row}
    return plain_metrics(measured.get(state.global_step, {}), "eval")


def _results(
    trainer: HarmonicTrainer, data: LoadedData, before: dict[str, Any], trained: dict[str, Any]
) -> dict[str, Any]:
    """Return the results of a run, counted over all processes."""
    run = trainer.run_config
    left_out, duplicates = _left_out(trainer, data)
    held_out = _held_out(run, data, duplicates)
    return {
        "run": run.output_dir.name,
        "base": run.model.base,
        "head": trainer.model.config.head,
        **before,
        **trained,
        "neighbors_after": _neighbors(trainer, data),
        "steps": trainer.state.global_step,
        "history": _history(before["before"], trainer.state.log_history),
        "data": {**left_out, "held_out": held_out, "eval_sha256": scored_sha256(data.eval)},
        "peak_memory_bytes": peak_memory_bytes(),
        "verified": read_verdicts(run),
        "config": to_plain(run),
        "environment": environment(),
    }


def _history(before: dict[str, float], log: list[dict[str, float]]) -> list[dict[str, float]]:
    """Return the log, with the evaluations before and after training named like those within."""
    start = {"step": 0, **{f"eval_{key}": value for key, value in before.items()}}
    return [start, *({k.replace("final_", "eval_"): v for k, v in row.items()} for row in log)]


def _left_out(trainer: HarmonicTrainer, data: LoadedData) -> tuple[dict[str, Any], Duplicates]:
    """Return what all processes left out, and how many copies of held-out documents they read."""
    place = trainer.stream_place
    states = gather_object([] if place is None else [place.state])
    rows, reasons, duplicates = data.left_out(merge(states)["streams"])
    results = {
        "rows_left_out": rows,
        "reasons": reasons,
        "fill_rate": data.fill_rate,
        "unscored_tokens_left_out": None if states else data.bad_rows.unscored_tokens,
    }
    return results, duplicates


def _held_out(run: RunConfig, data: LoadedData, duplicates: Duplicates) -> dict[str, Any]:
    """Return what the results say of the held-out documents; warn if a base was trained on them."""
    held_out = data.held_out
    sources = [to_plain(source) for source in run.data.eval_sources]
    ancestors = lineage(_base(run), held_out.fingerprints, sources)
    if sentence := seen_by(ancestors, len(held_out.fingerprints)):
        logger.warning("The evaluation does not count: %s that it is made on.", sentence)
    return {
        "documents": len(held_out.fingerprints),
        "sha256": held_out.digest,
        "exact_duplicates": duplicates.exact,
        "near_duplicates": duplicates.near,
        "near_duplicates_left_out": run.data.eval.drop_near_duplicates,
        "lineage": [ancestor._asdict() for ancestor in ancestors],
    }


def _base(run: RunConfig) -> str | None:
    return None if run.model.from_scratch else run.model.base


def _publish(trainer: HarmonicTrainer, results: dict[str, Any]) -> None:
    """Write the results, which marks the run as finished, show them and push the model."""
    run, state = trainer.run_config, PartialState()
    if state.is_main_process:
        trainer.state.save_to_json(str(run.output_dir / "trainer_state.json"))
        write_results(run.output_dir / "results", RESULTS_NAME, results)
        show_closing_table(results)
        draw(plot_run, results, run.output_dir / "results" / "train.png")
        show_next_steps(run.output_dir, run.model.task)
    state.wait_for_everyone()  # here: a push may take longer than processes wait for one another
    if state.is_main_process and run.hub.push:
        push_run(run, trainer.callback_handler.callbacks)
