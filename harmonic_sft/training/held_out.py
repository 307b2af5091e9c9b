"""What a run writes of its held-out documents, and whether models were trained on them."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harmonic_sft.config import to_plain
from harmonic_sft.data import DataConfig
from harmonic_sft.data.heldout import Ancestor, Duplicates, lineage, record, seen_by
from harmonic_sft.data.loading import LoadedData
from harmonic_sft.training.run_config import RunConfig

logger = logging.getLogger(__name__)


def record_held_out(run: RunConfig, data: LoadedData) -> None:
    """Write the list of a run's held-out documents, and what else tells what it trains on."""
    record(
        run.output_dir,
        data.held_out,
        sources=_sources(run.data),
        base=_base(run),
        trained=data.trained,
    )


def held_out_results(run: RunConfig, data: LoadedData, duplicates: Duplicates) -> dict[str, Any]:
    """Return what the results of a run say of its held-out documents.

    Args:
        run: The checked configuration.
        data: Of the run.
        duplicates: Training documents that are copies of them, as far as they were read.

    Returns:
        `documents`, how many there are; `sha256`, the digest of their list; `exact_duplicates`,
        which left the training data; `near_duplicates`, and whether these left; and `lineage`, for
        the base, its base and so on whether they were trained on them. A warning says who was.
    """
    names = data.held_out.fingerprints
    ancestors = lineage(_base(run), names, _sources(run.data))
    if sentence := seen_by(ancestors, len(names)):
        logger.warning("The evaluation does not count: %s that it is made on.", sentence)
    return {
        "documents": len(names),
        "sha256": data.held_out.digest,
        "exact_duplicates": duplicates.exact,
        "near_duplicates": duplicates.near,
        "near_duplicates_left_out": run.data.eval.drop_near_duplicates,
        "lineage": [ancestor._asdict() for ancestor in ancestors],
    }


def check_unseen(model: Path, data: LoadedData, config: DataConfig) -> list[Ancestor]:
    """Refuse to evaluate a model on documents that it, or a base of it, did not hold out.

    Args:
        model: Its folder.
        data: To evaluate on.
        config: The `data` section that they come from.

    Returns:
        What is known of the model and its bases.

    Raises:
        ValueError: One of them is known not to have held out some of the documents.
    """
    names = data.held_out.fingerprints
    ancestors = lineage(str(model), names, _sources(config))
    if sentence := seen_by(ancestors, len(names)):
        raise ValueError(
            f"eval: expected documents that no model was trained on, got others: {sentence}. "
            "Evaluate on other ones, data=other.txt, or hold the same ones out of every run"
        )
    return ancestors


def _base(run: RunConfig) -> str | None:
    return None if run.model.from_scratch else run.model.base


def _sources(config: DataConfig) -> list[Mapping[str, Any]]:
    return to_plain(config)["sources"]
