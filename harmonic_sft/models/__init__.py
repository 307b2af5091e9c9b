"""Models and heads; these files are copied to the Hub as they stand."""

from .backbones import build_backbone, find_blocks, load_backbone, load_checked, max_positions
from .configuration_harmonic import HarmonicConfig
from .configuration_neobert import NeoBERTConfig
from .dist_layer import DistLayer
from .head import AffineForm, DistanceForm, Form, Head, MixtureForm
from .heads import HEADS, build_head
from .linear_heads import LinearHead
from .modeling_harmonic import HarmonicForMaskedLM, HarmonicModel, HarmonicPreTrainedModel
from .modeling_neobert import NeoBERTForMaskedLM, NeoBERTModel
from .objective import LossFunction, mean_token_loss, negative_log_likelihood
from .partial import BLOCKS_FILE, HEAD_FILE

__all__ = [
    "BLOCKS_FILE",
    "HEADS",
    "HEAD_FILE",
    "AffineForm",
    "DistLayer",
    "DistanceForm",
    "Form",
    "HarmonicConfig",
    "HarmonicForMaskedLM",
    "HarmonicModel",
    "HarmonicPreTrainedModel",
    "Head",
    "LinearHead",
    "LossFunction",
    "MixtureForm",
    "NeoBERTConfig",
    "NeoBERTForMaskedLM",
    "NeoBERTModel",
    "build_backbone",
    "build_head",
    "find_blocks",
    "load_backbone",
    "load_checked",
    "max_positions",
    "mean_token_loss",
    "negative_log_likelihood",
]
