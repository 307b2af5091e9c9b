"""Fine-tune Hugging Face models with a geometry-aware output head.

Importing this package registers its models with transformers' Auto classes. Its other public
names are imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import harmonic_sft._minimum  # noqa: F401  (before imports that an older transformers lacks)

# isort: split
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from harmonic_sft.models import (
    HEADS,
    CosineHead,
    DistLayer,
    HarmonicConfig,
    HarmonicForCausalLM,
    HarmonicForMaskedLM,
    HarmonicForQuestionAnswering,
    HarmonicForSequenceClassification,
    HarmonicForTokenClassification,
    HarmonicModel,
    Head,
    L2Head,
    LinearHead,
    MultiHead,
    NeoBERTConfig,
    NeoBERTForMaskedLM,
    NeoBERTModel,
    PowerHead,
    RotationHead,
    TransformHead,
    VonMisesFisherHead,
    build_head,
)

if TYPE_CHECKING:
    from harmonic_sft.losses import (
        LOSSES,
        ArcFaceLoss,
        CosFaceLoss,
        CrossEntropyLoss,
        DistillLoss,
        HarmonicLoss,
        InfoNCELoss,
        KNNLabelSmoothingLoss,
        SumLoss,
        WassersteinLoss,
    )
    from harmonic_sft.ops import LossOptions, distance_cross_entropy, linear_cross_entropy
    from harmonic_sft.training.arguments import HarmonicTrainingArguments
    from harmonic_sft.training.run import train
    from harmonic_sft.training.run_config import RunConfig, load_run_config
    from harmonic_sft.training.trainer import HarmonicTrainer

__version__ = "0.1.0"
__all__ = [
    "HEADS",
    "LOSSES",
    "ArcFaceLoss",
    "CosFaceLoss",
    "CosineHead",
    "CrossEntropyLoss",
    "DistLayer",
    "DistillLoss",
    "HarmonicConfig",
    "HarmonicForCausalLM",
    "HarmonicForMaskedLM",
    "HarmonicForQuestionAnswering",
    "HarmonicForSequenceClassification",
    "HarmonicForTokenClassification",
    "HarmonicLoss",
    "HarmonicModel",
    "HarmonicTrainer",
    "HarmonicTrainingArguments",
    "Head",
    "InfoNCELoss",
    "KNNLabelSmoothingLoss",
    "L2Head",
    "LinearHead",
    "LossOptions",
    "MultiHead",
    "NeoBERTConfig",
    "NeoBERTForMaskedLM",
    "NeoBERTModel",
    "PowerHead",
    "RotationHead",
    "RunConfig",
    "SumLoss",
    "TransformHead",
    "VonMisesFisherHead",
    "WassersteinLoss",
    "build_head",
    "distance_cross_entropy",
    "linear_cross_entropy",
    "load_run_config",
    "train",
]
LAZY = {
    "LOSSES": "harmonic_sft.losses",
    "ArcFaceLoss": "harmonic_sft.losses",
    "CosFaceLoss": "harmonic_sft.losses",
    "CrossEntropyLoss": "harmonic_sft.losses",
    "DistillLoss": "harmonic_sft.losses",
    "HarmonicLoss": "harmonic_sft.losses",
    "HarmonicTrainer": "harmonic_sft.training.trainer",
    "HarmonicTrainingArguments": "harmonic_sft.training.arguments",
    "InfoNCELoss": "harmonic_sft.losses",
    "KNNLabelSmoothingLoss": "harmonic_sft.losses",
    "LossOptions": "harmonic_sft.ops",
    "RunConfig": "harmonic_sft.training.run_config",
    "SumLoss": "harmonic_sft.losses",
    "WassersteinLoss": "harmonic_sft.losses",
    "distance_cross_entropy": "harmonic_sft.ops",
    "linear_cross_entropy": "harmonic_sft.ops",
    "load_run_config": "harmonic_sft.training.run_config",
    "train": "harmonic_sft.training.run",
}

if not TYPE_CHECKING:  # or type checkers would accept every mistyped name

    def __getattr__(name: str) -> Any:
        if name not in LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


AutoConfig.register("neobert", NeoBERTConfig, exist_ok=True)  # transformers may get its own
AutoModel.register(NeoBERTConfig, NeoBERTModel)
AutoModelForMaskedLM.register(NeoBERTConfig, NeoBERTForMaskedLM)
AutoConfig.register("harmonic", HarmonicConfig)
HarmonicConfig.register_for_auto_class()
for _auto, _model in {
    AutoModel: HarmonicModel,
    AutoModelForCausalLM: HarmonicForCausalLM,
    AutoModelForMaskedLM: HarmonicForMaskedLM,
    AutoModelForQuestionAnswering: HarmonicForQuestionAnswering,
    AutoModelForSequenceClassification: HarmonicForSequenceClassification,
    AutoModelForTokenClassification: HarmonicForTokenClassification,
}.items():
    _auto.register(HarmonicConfig, _model)
    # Without this, save_pretrained would not copy the code that loads the weights.
    _model.register_for_auto_class(_auto.__name__)
