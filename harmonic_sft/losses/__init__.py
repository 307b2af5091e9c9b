"""Training losses: frozen values, called with a head, hidden states and labels."""

from harmonic_sft.losses.cross_entropy import CrossEntropyLoss
from harmonic_sft.losses.harmonic import HarmonicLoss

LOSSES = {"cross_entropy": CrossEntropyLoss, "harmonic": HarmonicLoss}

__all__ = ["LOSSES", "CrossEntropyLoss", "HarmonicLoss"]
