"""What a run would train, on what and in how much memory, without training it."""

import logging

from transformers import PreTrainedConfig

from harmonic_sft.config import to_yaml
from harmonic_sft.data.inspection import inspect_data
from harmonic_sft.data.row_maker import check_length
from harmonic_sft.losses import CrossEntropyLoss, DistillLoss, HarmonicLoss
from harmonic_sft.models import NeoBERTConfig, max_positions
from harmonic_sft.results import without_secrets
from harmonic_sft.training.checkpoints import rows_per_step
from harmonic_sft.training.loading import check_base_config, load_base_config, load_run_data
from harmonic_sft.training.memory import estimate_step
from harmonic_sft.training.report import log_data, show_classes, show_estimate, show_parts
from harmonic_sft.training.run import check_run
from harmonic_sft.training.run_config import RunConfig

logger = logging.getLogger(__name__)
NEOBERT = "chandar-lab/NeoBERT"


def dry_run(run: RunConfig) -> None:
    """Print the resolved plan, the parameter table and a memory estimate; load no weights."""
    check_run(run)
    config = _base_config(run)
    check_base_config(run, config)
    check_length(
        run.data.context_length,
        max_positions=max_positions(config.get_text_config()),
        pad_to_multiple_of=run.data.pad_to_multiple_of or 1,
    )
    batch_size = run.training_arguments().per_device_train_batch_size
    rows, estimate = estimate_step(run, config, batch_size=batch_size)
    logger.info("%s", without_secrets(to_yaml(run)))
    show_parts(run, rows)
    show_estimate(estimate, batch=f"{batch_size} x {run.data.context_length} tokens")
    is_known = isinstance(run.loss, CrossEntropyLoss | HarmonicLoss | DistillLoss)
    if not is_known or getattr(run.loss, "impl", "") == "reference":
        logger.info("In this estimate the loss counts as that of cross-entropy without logits.")


def _base_config(run: RunConfig) -> PreTrainedConfig:
    """Without a network NeoBERT's published configuration is known: ours has its values."""
    try:
        return load_base_config(run.model)
    except ValueError:
        if run.model.base != NEOBERT:
            raise
        logger.info("%s cannot be reached; its published configuration is used.", NEOBERT)
        return NeoBERTConfig()


def show_data(run: RunConfig) -> None:
    """Load the data of a run and print counts, lengths, fill rate, one row, and steps."""
    tokenizer, data = load_run_data(run)
    if data.labels is not None:
        show_classes(data)
        log_data(data)
        return
    args = run.training_arguments()
    inspect_data(
        data,
        tokenizer=tokenizer,
        rows_per_step=rows_per_step(args),
        batch_size=args.per_device_train_batch_size,
        seed=run.seed,
    )
