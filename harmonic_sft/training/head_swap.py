"""What the change of heads costs before any training, and how calibration lowers it."""

import logging
from dataclasses import replace

from harmonic_sft.data.classification import LabeledData
from harmonic_sft.data.loading import LoadedData
from harmonic_sft.models import Head
from harmonic_sft.training.calibration import (
    Calibration,
    agreed,
    apply_calibration_,
    calibrate_,
    first_batches,
)
from harmonic_sft.training.run_config import RunConfig
from harmonic_sft.training.trainer import HarmonicTrainer, evaluate

logger = logging.getLogger(__name__)
Metrics = dict[str, float]


def measure_swap(
    run: RunConfig, trainer: HarmonicTrainer, data: LoadedData | LabeledData, old_head: Head | None
) -> tuple[dict[str, Metrics], Calibration | None]:
    """Evaluate the base with its own head and with the new one; then calibrate that, if asked to.

    Args:
        run: Says whether to calibrate.
        trainer: Has the model, whose head and exponents are changed in place.
        data: Of the run.
        old_head: What the base predicted with, if that is known.

    Returns:
        Metrics of the evaluation split: `old_head`, where there is one, and `swapped`, the new head
        as it was put there, where it is then calibrated; and what calibration found.
    """
    model, swap = trainer.model, {}
    if old_head is not None:
        new_head, device = model.dist_head, old_head.weight.device
        model.dist_head = old_head.to(model.device)
        try:
            swap["old_head"] = evaluate(trainer, "old_head")
        finally:
            model.dist_head = new_head
            old_head.to(device)
    if run.h_exp is None or not run.h_exp.calibrate:
        return swap, None
    swap["swapped"] = evaluate(trainer, "swapped")
    batch_size = trainer.args.per_device_eval_batch_size
    batches = first_batches(data.train, data.collator, batch_size, model.device)
    calibration = agreed(calibrate_(model, batches))
    _anneal_from(run, trainer, calibration)
    logger.info(
        "Calibrated on %d tokens: h_exp %.3g, prototypes times %.3g.",
        calibration.tokens,
        calibration.h_exp,
        calibration.scale,
    )
    return swap, calibration


def recalibrate_(run: RunConfig, trainer: HarmonicTrainer, calibration: Calibration) -> None:
    """Do again what `measure_swap` found in an earlier session of the run, to a head as loaded.

    Args:
        run: The checked configuration.
        trainer: Its model and its recipe are changed in place.
        calibration: Of the earlier session.
    """
    apply_calibration_(trainer.model, calibration)
    _anneal_from(run, trainer, calibration)


def _anneal_from(run: RunConfig, trainer: HarmonicTrainer, calibration: Calibration) -> None:
    """Anneal from the calibrated exponent, and to as many times as much as the run says."""
    assert run.h_exp is not None, "only a distance head is calibrated"
    if not run.learns_h_exp:
        end = calibration.h_exp * run.h_exp.end / run.h_exp.start
        trainer.anneal(replace(run.h_exp, start=calibration.h_exp, end=end))
