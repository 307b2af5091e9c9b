"""Models and heads; these files are copied to the Hub as they stand."""

from .backbones import find_blocks, known_blocks, load_checked, max_positions
from .bases import Base, base_of, load_base, random_base
from .configuration_harmonic import HarmonicConfig
from .configuration_neobert import NeoBERTConfig
from .dist_layer import DistLayer
from .head import (
    AffineLogits,
    DistanceLogits,
    Head,
    LazyLogits,
    MixtureLogits,
    check_prototypes,
)
from .heads import HEADS, MappedHead, MultiHead, RotationHead, TransformHead, build_head
from .linear_heads import CosineHead, L2Head, LinearHead, PowerHead, VonMisesFisherHead
from .modeling_backbone import HarmonicHeadModel, HarmonicModel
from .modeling_harmonic import (
    HarmonicClassifier,
    HarmonicForCausalLM,
    HarmonicForMaskedLM,
    HarmonicForQuestionAnswering,
    HarmonicForSequenceClassification,
    HarmonicForTokenClassification,
    HarmonicLanguageModel,
)
from .modeling_neobert import NeoBERTForMaskedLM, NeoBERTModel
from .objective import (
    LossFunction,
    mean_token_loss,
    negative_log_likelihood,
    scored_positions,
)
from .partial_checkpoint import BLOCKS_FILE, HEAD_FILE

__all__ = [
    "BLOCKS_FILE",
    "HEADS",
    "HEAD_FILE",
    "AffineLogits",
    "Base",
    "CosineHead",
    "DistLayer",
    "DistanceLogits",
    "HarmonicClassifier",
    "HarmonicConfig",
    "HarmonicForCausalLM",
    "HarmonicForMaskedLM",
    "HarmonicForQuestionAnswering",
    "HarmonicForSequenceClassification",
    "HarmonicForTokenClassification",
    "HarmonicHeadModel",
    "HarmonicLanguageModel",
    "HarmonicModel",
    "Head",
    "L2Head",
    "LazyLogits",
    "LinearHead",
    "LossFunction",
    "MappedHead",
    "MixtureLogits",
    "MultiHead",
    "NeoBERTConfig",
    "NeoBERTForMaskedLM",
    "NeoBERTModel",
    "PowerHead",
    "RotationHead",
    "TransformHead",
    "VonMisesFisherHead",
    "base_of",
    "build_head",
    "check_prototypes",
    "find_blocks",
    "known_blocks",
    "load_base",
    "load_checked",
    "max_positions",
    "mean_token_loss",
    "negative_log_likelihood",
    "random_base",
    "scored_positions",
]
