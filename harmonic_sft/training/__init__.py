"""Training: from a RunConfig to a fine-tuned model and its numbers."""

from harmonic_sft.training.run_config import RunConfig, load_run_config

__all__ = ["RunConfig", "load_run_config"]
