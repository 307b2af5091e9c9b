"""Every loss that stands on its own, by name."""

from harmonic_sft.losses.arcface import ArcFaceLoss
from harmonic_sft.losses.cosface import CosFaceLoss
from harmonic_sft.losses.cross_entropy import CrossEntropyLoss
from harmonic_sft.losses.harmonic import HarmonicLoss
from harmonic_sft.losses.info_nce import InfoNCELoss
from harmonic_sft.losses.knn_label_smoothing import KNNLabelSmoothingLoss
from harmonic_sft.losses.wasserstein import WassersteinLoss

TERMS = {
    "cross_entropy": CrossEntropyLoss,
    "harmonic": HarmonicLoss,
    "knn_label_smoothing": KNNLabelSmoothingLoss,
    "wasserstein": WassersteinLoss,
    "arcface": ArcFaceLoss,
    "cosface": CosFaceLoss,
    "info_nce": InfoNCELoss,
}
