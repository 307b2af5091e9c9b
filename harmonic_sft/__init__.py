"""Fine-tune Hugging Face models with a geometry-aware output head.

Importing this package registers its models with transformers' Auto classes.
"""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from harmonic_sft.models import (
    HarmonicConfig,
    HarmonicForCausalLM,
    HarmonicForMaskedLM,
    HarmonicForSequenceClassification,
    HarmonicForTokenClassification,
    HarmonicModel,
    NeoBERTConfig,
    NeoBERTForMaskedLM,
    NeoBERTModel,
)

__version__ = "0.1.0"

AutoConfig.register("neobert", NeoBERTConfig)
AutoModel.register(NeoBERTConfig, NeoBERTModel)
AutoModelForMaskedLM.register(NeoBERTConfig, NeoBERTForMaskedLM)
AutoConfig.register("harmonic", HarmonicConfig)
AutoModel.register(HarmonicConfig, HarmonicModel)
AutoModelForCausalLM.register(HarmonicConfig, HarmonicForCausalLM)
AutoModelForMaskedLM.register(HarmonicConfig, HarmonicForMaskedLM)
AutoModelForSequenceClassification.register(HarmonicConfig, HarmonicForSequenceClassification)
AutoModelForTokenClassification.register(HarmonicConfig, HarmonicForTokenClassification)
# Without this, save_pretrained would not copy the code that loads the weights.
HarmonicConfig.register_for_auto_class()
HarmonicModel.register_for_auto_class("AutoModel")
HarmonicForCausalLM.register_for_auto_class("AutoModelForCausalLM")
HarmonicForMaskedLM.register_for_auto_class("AutoModelForMaskedLM")
HarmonicForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
HarmonicForTokenClassification.register_for_auto_class("AutoModelForTokenClassification")

__all__ = [
    "HarmonicConfig",
    "HarmonicForCausalLM",
    "HarmonicForMaskedLM",
    "HarmonicForSequenceClassification",
    "HarmonicForTokenClassification",
    "HarmonicModel",
    "NeoBERTConfig",
    "NeoBERTForMaskedLM",
    "NeoBERTModel",
]
