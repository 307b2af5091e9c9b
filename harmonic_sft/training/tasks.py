"""Tasks: the class of model for each, and which one a model of transformers has."""

from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING, PreTrainedConfig

from harmonic_sft.models import (
    HarmonicClassifier,
    HarmonicForCausalLM,
    HarmonicForMaskedLM,
    HarmonicForSequenceClassification,
    HarmonicForTokenClassification,
    HarmonicHeadModel,
    HarmonicLanguageModel,
)
from harmonic_sft.models.bases import check_supported

CLASSIFIERS: dict[str, type[HarmonicClassifier]] = {
    "sequence_classification": HarmonicForSequenceClassification,
    "token_classification": HarmonicForTokenClassification,
}
LANGUAGE_MODELS: dict[str, type[HarmonicLanguageModel]] = {
    "masked_lm": HarmonicForMaskedLM,
    "causal_lm": HarmonicForCausalLM,
}
MODELS: dict[str, type[HarmonicHeadModel]] = {**LANGUAGE_MODELS, **CLASSIFIERS}
TASKS = {model_class.__name__: task for task, model_class in MODELS.items()}
CLASSIFIER_NAMES = {  # suffixes of transformers' classes, and the class of ours
    "ForSequenceClassification": "HarmonicForSequenceClassification",
    "ForTokenClassification": "HarmonicForTokenClassification",
    "ForQuestionAnswering": "HarmonicForQuestionAnswering",
    "ForMultipleChoice": "HarmonicForSequenceClassification",
}


def task_of(model: Any, config: PreTrainedConfig, label_column: str | None) -> str:
    """Tell from a model, or from its configuration, what it predicts."""
    names = [] if isinstance(model, str) else [cls.__name__ for cls in type(model).__mro__]
    names += config.architectures or []
    # An answer has two labelled tokens, its start and its end.
    ours = {**TASKS, "HarmonicForQuestionAnswering": "token_classification"}
    for name in names:
        if name in ours and (label_column is None or ours[name] in CLASSIFIERS):
            return ours[name]
    if label_column is not None:
        is_tagger = any(name.endswith("ForTokenClassification") for name in names)
        return "token_classification" if is_tagger else "sequence_classification"
    for name in names:
        if name.endswith(("ForMaskedLM", "WithLMHeadModel")):  # XLM's and FlauBERT's
            return "masked_lm"
        if name.endswith(("ForCausalLM", "LMHeadModel")):
            return "causal_lm"
        own = next((o for suffix, o in CLASSIFIER_NAMES.items() if name.endswith(suffix)), None)
        if own is not None:
            raise ValueError(
                f"label_column: expected the column of the labels of a {name}, got nothing. To "
                "bring rows and a collator of your own, make the model first: "
                f"{own}.from_base(...). To train its body on text without labels, set "
                f"task={token_task(config) or 'masked_lm'!r}"
            )
    if (task := token_task(config)) is not None:
        return task
    check_supported(model if isinstance(model, str) else names[0], config, is_causal=True)
    raise ValueError(
        f"task: expected one of {list(MODELS)}, got nothing, and a {config.model_type} does not "
        "say which. Name it"
    )


def token_task(config: PreTrainedConfig) -> str | None:
    """Tell from the configuration of a body which tokens it predicts, None if it does not say."""
    if config.model_type == "harmonic":
        return "causal_lm" if config.is_causal else "masked_lm"
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING or config.model_type == "neobert":
        return "masked_lm"
    return "causal_lm" if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else None
