"""Configuration of a harmonic model: a backbone, a head, and where the backbone came from."""

import copy
import sys
from dataclasses import field
from typing import Any, ClassVar

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig
from transformers import __version__ as transformers_version

from .configuration_neobert import NeoBERTConfig


def _of_body(name: str) -> property:
    """Return a property that reads and writes a field of the backbone's configuration."""

    def write(config: Any, value: Any) -> None:
        setattr(config.text_config, name, value)

    return property(lambda config: getattr(config.text_config, name), write)


class HarmonicConfig(PreTrainedConfig):
    """Configuration of `HarmonicModel` and the models with a head around it.

    Args:
        text_config: The backbone's own configuration; a dictionary needs its `model_type`.
            Default: NeoBERT's.
        head: `{"name": ..., fields...}` of the output head, with the `h_exp` reached.
        base_model: Name or folder of the model the backbone was loaded from.
        base_revision: The base's commit on the Hub, None for a local one.
        base_dtype: Precision that the base's weights were rounded to when training began.
        tie_word_embeddings: Whether the head shares its weight with the input embeddings.
        float32_modules: Names of modules kept in float32 when the rest is loaded in 16 bits.
        trained_parameters: Names of the parameters that differ from the base's, the head's too.
        partial: The checkpoint holds these parameters alone; the others are fetched from the base.
        pooling: What stands for a whole text in a sequence classifier. `mean`, over the attended
            tokens, suits every encoder: sentence encoders are trained with it, and a masked model
            has trained every position. `cls`, the first token, is trained in bases with a
            sentence-level objective only, such as BERT's next-sentence prediction.
        is_causal: Whether the backbone is a decoder, which reads from left to right.
        classifier_head: `{"name": ..., fields...}` of the new head where a task over classes is
            loaded from another class's checkpoint; default: linear.
        logit_shift: Added to all logits over tokens, which changes no probability. Logits of a
            distance head are above 0 only within distance 1 (on the sphere: cosines above 0.5).
            Methods that cut logits off at 0, such as SPLADE, see tokens up to squared distance s
            if this is -h_exp * log(s); s = 2 is a right angle.
        base_vocab_size: Rows of the base's token embeddings, if they have been resized since.

    Raises:
        ValueError: This version of transformers does not have the backbone.
    """

    model_type = "harmonic"
    use_cache = True  # not a field: loading may turn it off, and that must not be saved
    sub_configs: ClassVar[dict[str, Any]] = {"text_config": AutoConfig}

    text_config: Any = None
    head: dict[str, Any] = field(default_factory=lambda: {"name": "dist"})
    base_model: str | None = None
    base_revision: str | None = None
    base_dtype: str | None = None
    tie_word_embeddings: bool = False
    float32_modules: list[str] | None = None
    trained_parameters: list[str] | None = None
    partial: bool = False
    pooling: str = "mean"
    is_causal: bool = False
    classifier_head: dict[str, Any] | None = None
    logit_shift: float = 0.0
    base_vocab_size: int | None = None

    # The body's fields, where others look for them: transformers sets num_hidden_layers if a
    # decoder drafts with its first layers, PEFT saves embeddings with an adapter if vocab_size is
    # not the base's, sentence-transformers reads max_position_embeddings, scripts use the others.
    num_hidden_layers = _of_body("num_hidden_layers")
    vocab_size = _of_body("vocab_size")
    max_position_embeddings = _of_body("max_position_embeddings")
    hidden_size = _of_body("hidden_size")
    pad_token_id = _of_body("pad_token_id")
    eos_token_id = _of_body("eos_token_id")
    bos_token_id = _of_body("bos_token_id")

    def __post_init__(self, **kwargs: Any):
        if not isinstance(self.text_config, PreTrainedConfig):
            fields = dict(self.text_config or {"model_type": "neobert"})
            name = fields.pop("model_type")
            if name != "neobert" and name not in CONFIG_MAPPING:
                raise ValueError(
                    f"text_config: expected a backbone that transformers {transformers_version} "
                    f"has, got {name!r}. Update transformers"
                )
            # NeoBERT is ours: transformers knows it only where this package is installed.
            config_class = NeoBERTConfig if name == "neobert" else CONFIG_MAPPING[name]
            self.text_config = config_class.from_dict(fields)
        super().__post_init__(**kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as a dictionary.

        Also enters our models in PEFT's table of the layers that LoRA adapts by default: all linear
        ones. The table has no hook, and PEFT calls this right before it reads the table (PEFT
        0.21.2, `tuners/tuners_utils.py:867`). This can go when a model can name these layers.
        """
        if (peft := sys.modules.get("peft.utils.constants")) is not None:
            table = peft.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
            table.setdefault(self.model_type, "all-linear")
        return super().to_dict()

    @property
    def h_exp(self) -> float | None:
        """The exponent that `head` names, or the head inside it; None if they name none.

        `from_pretrained(..., h_exp=-24.0)` sets another one before the model is built.
        """
        return _innermost(self.head).get("h_exp")

    @h_exp.setter
    def h_exp(self, value: float) -> None:
        self.head = copy.deepcopy(self.head)
        _innermost(self.head)["h_exp"] = value


def _innermost(head: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the head that is inside all others."""
    while inner := head.get("inner"):
        head = inner
    return head


def quantization_method(config: PreTrainedConfig) -> str | None:
    """Return the method that a model's frozen weights are quantized by, None if they are not."""
    fields = quantization_fields(config)
    if not fields:
        return None
    method = fields.get("quant_method", "an unknown method")
    return str(getattr(method, "value", method))


def quantization_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """Return how a model's frozen weights are quantized; nothing if they are not."""
    own = getattr(config, "quantization_config", None)
    found = own or getattr(config.get_text_config(), "quantization_config", None) or {}
    return found if isinstance(found, dict) else found.to_dict()
