"""Training: from a RunConfig to a fine-tuned model and its numbers."""

from harmonic_sft.training.callbacks import StoppedError
from harmonic_sft.training.evaluation import evaluate_folder
from harmonic_sft.training.preview import dry_run, show_data
from harmonic_sft.training.report import compare_runs
from harmonic_sft.training.run import train
from harmonic_sft.training.run_config import Recipe, RunConfig, load_run_config
from harmonic_sft.training.trainer import HarmonicTrainer

__all__ = [
    "HarmonicTrainer",
    "Recipe",
    "RunConfig",
    "StoppedError",
    "compare_runs",
    "dry_run",
    "evaluate_folder",
    "load_run_config",
    "show_data",
    "train",
]
