"""Training: from a RunConfig to a fine-tuned model and its numbers."""

from harmonic_sft.training.run_config import Recipe, RunConfig, load_run_config

__all__ = ["Recipe", "RunConfig", "load_run_config"]
