"""The data of a run, and how it is shown without its model."""

import os
from typing import Any

from harmonic_sft.data.classification import LabeledData, load_labeled_data
from harmonic_sft.data.inspection import inspect_data
from harmonic_sft.data.loading import LoadedData, load_data
from harmonic_sft.models import max_positions
from harmonic_sft.training.model_loading import (
    check_frozen,
    load_base_config,
    load_tokenizer,
    vocabulary_size,
)
from harmonic_sft.training.report import show_classes
from harmonic_sft.training.run_config import RunConfig


def load_run_data(run: RunConfig) -> tuple[Any, LoadedData | LabeledData]:
    """Load the tokenizer and the data of a run.

    Raises:
        ValueError: Something is missing or does not fit together.
    """
    config = load_base_config(run.model)
    check_frozen(run, config)  # before anything is fetched
    config = config.get_text_config()
    tokenizer = load_tokenizer(run.model)
    options: dict[str, Any] = {
        "tokenizer": tokenizer,
        "vocab_size": vocabulary_size(run, config.vocab_size, tokenizer),
        "max_positions": max_positions(config),
        "seed": run.seed,
    }
    if run.model.task in ("masked_lm", "causal_lm"):
        is_causal = run.model.task == "causal_lm"
        return tokenizer, load_data(run.data, is_causal=is_causal, **options)
    return tokenizer, load_labeled_data(run.data, task=run.model.task, **options)


def show_data(run: RunConfig, *, row: int = 0) -> None:
    """Load the data of a run and print counts, lengths, fill rate, one row, and steps.

    Args:
        run: Its configuration.
        row: Number of the row, or pack, that is shown.

    Raises:
        ValueError: Bad data, or no row of this number.
    """
    tokenizer, data = load_run_data(run)
    if isinstance(data, LabeledData):
        show_classes(data)
        return
    args = run.training_arguments()
    batch_size = args.per_device_train_batch_size
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    inspect_data(
        data,
        tokenizer=tokenizer,
        rows_per_step=batch_size * args.gradient_accumulation_steps * processes,
        batch_size=batch_size,
        seed_row=row,
    )
