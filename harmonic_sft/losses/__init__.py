"""Training losses: frozen values, called with a head, hidden states and labels."""

from harmonic_sft.losses.cosines import ArcFaceLoss, CosFaceLoss, InfoNCELoss
from harmonic_sft.losses.distill import Distillation, DistillLoss
from harmonic_sft.losses.knn_label_smoothing import KNNLabelSmoothingLoss
from harmonic_sft.losses.loss import CrossEntropyLoss, HarmonicLoss
from harmonic_sft.losses.sum import TERMS, SumLoss, neighbor_tables
from harmonic_sft.losses.wasserstein import WassersteinLoss

LOSSES = {**TERMS, "distill": DistillLoss, "sum": SumLoss}

__all__ = [
    "LOSSES",
    "ArcFaceLoss",
    "CosFaceLoss",
    "CrossEntropyLoss",
    "DistillLoss",
    "Distillation",
    "HarmonicLoss",
    "InfoNCELoss",
    "KNNLabelSmoothingLoss",
    "SumLoss",
    "WassersteinLoss",
    "neighbor_tables",
]
