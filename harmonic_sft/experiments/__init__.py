"""Experiments of papers, run again: what each is, and the one way to run them."""

from harmonic_sft.experiments.reproduction import EXPERIMENTS, reproduce

__all__ = ["EXPERIMENTS", "reproduce"]
