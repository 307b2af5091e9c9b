"""Bases: load one, or take a loaded one apart: its backbone and the head it was published with."""

import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights
from transformers.utils import logging

from .backbones import (
    CACHE,
    build_backbone,
    cast_parameters_,
    commit_of,
    is_quantized,
    load_backbone,
    load_checked,
    set_dropout_,
    settle_quantized_,
)
from .configuration_harmonic import quantization_method
from .head import Head
from .heads import TransformHead, heads_in
from .linear_heads import LinearHead
from .modeling_neobert import NeoBERTForMaskedLM

logger = logging.get_logger(__name__)
MASKED = ("ForMaskedLM", "WithLMHeadModel")  # endings of transformers' class names
QUANTIZED = ("bitsandbytes", "torchao")  # packages whose weights may stay frozen under a new head
# Fields of a decoder's configuration that change its dot products before they are logits: factors,
# each being the field's value to this power, and a soft cap. `_check_decoder` runs the model to
# make sure that it does nothing else.
FACTORS = {"logit_scale": 1, "lm_head_multiplier": 1, "logits_scaling": -1}
SOFTCAP = "final_logit_softcapping"
# Masked models with a dense layer, an activation and a norm before their output layer, and the
# field that names the activation: None where their code has gelu.
TRANSFORMS = {
    "bert": "hidden_act",
    "camembert": None,
    "convbert": None,
    "data2vec-text": None,
    "deberta": "hidden_act",
    "deberta-v2": "hidden_act",
    "distilbert": "activation",
    "electra": None,
    "ernie": "hidden_act",
    "esmc": None,
    "gte": None,
    "ibert": None,
    "jina_embeddings_v3": None,
    "layoutlm": "hidden_act",
    "longformer": None,
    "megatron-bert": "hidden_act",
    "modernbert": "classifier_activation",
    "mpnet": None,
    "mra": "hidden_act",
    "nomic_bert": "hidden_act",
    "nystromformer": "hidden_act",
    "roberta": None,
    "roberta-prelayernorm": None,
    "roc_bert": "hidden_act",
    "roformer": "hidden_act",
    "squeezebert": "hidden_act",
    "tapas": "hidden_act",
    "xlm-roberta": None,
    "xlm-roberta-xl": None,
    "xmod": None,
    "yoso": "hidden_act",
}
PLAIN = ("eurobert", "flaubert", "xlm")  # masked models with an output layer alone


class Base(NamedTuple):
    """A loaded base: its backbone, its head if one of ours was asked for, and where it is from."""

    name: str
    backbone: PreTrainedModel
    head: Head | None
    labels: list[str]  # of the head's rows, if it is a classifier's
    origin: dict[str, Any]  # fields of the configuration
    generation_config: GenerationConfig | None = None  # of a decoder
    pooling: str | None = None  # that the head was trained with, if it is a classifier's


def load_base(
    name: str | os.PathLike[str],
    revision: str | None,
    *,
    head_class: type[PreTrainedModel] | None,
    dtype: torch.dtype | str,
    dropout: float | None,
    is_causal: bool = False,
) -> Base:
    """Load what a new head is put on: a base, or one of our own checkpoints.

    Checkpoints of `head_class` are loaded with their head, as are published masked models if it is
    `HarmonicForMaskedLM`; with None heads are left out. A published decoder always comes with its
    head. `dropout` is the probability of every dropout of the backbone, None the base's own.

    Raises:
        ValueError: The checkpoint does not fill the backbone, is not of the kind that `is_causal`
            says, is quantized otherwise than by bitsandbytes or torchao, or has no token
            embeddings; or `dtype` is not a dtype.
    """
    name = os.fspath(name)
    dtype = getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype: expected a dtype such as torch.bfloat16, got {dtype!r}")
    config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
    is_ours = config.model_type == "harmonic"
    check_supported(name, config, is_causal=is_causal)
    _check_kind(name, config, is_causal=is_causal)
    if dropout is not None:
        set_dropout_(config.get_text_config(), dropout)
    # transformers would cast only some weights of a quantized model: `_as_base` casts them.
    loaded_dtype = dtype if quantization_method(config) is None else "auto"
    options: dict[str, Any] = {"config": config, "revision": revision, "dtype": loaded_dtype}
    architecture = None if head_class is None else head_class.__name__
    if is_ours and architecture in (config.architectures or []):
        model = load_checked(head_class, name, **options)
        generation_config = model.generation_config if is_causal else None
        kept = config.float32_modules
        base = _as_base(name, model.model.backbone, dtype, model.dist_head, generation_config, kept)
    elif config.model_type == "neobert" and architecture == "HarmonicForMaskedLM":
        model = load_checked(NeoBERTForMaskedLM, name, **options)
        base = base_of(model, dtype=dtype, is_causal=False, name=name)
    elif is_causal and not is_ours:
        model = load_checked(AutoModelForCausalLM, name, **options)
        base = base_of(model, dtype=dtype, is_causal=True, name=name)
    elif architecture == "HarmonicForMaskedLM" and (model := _load_masked(name, options)):
        base = base_of(model, dtype=dtype, is_causal=False, name=name)
    else:
        kept = config.float32_modules if is_ours else None
        base = _as_base(name, load_backbone(name, **options), dtype, kept=kept)
    origin = {
        **base.origin,
        "base_model": Path(name).name if os.path.isabs(name) else name,
        "base_revision": commit_of(name, revision),  # a branch may move on; a folder has none
    }
    labels = list((config.id2label or {}).values())
    pooling = config.pooling if is_ours and base.head is not None else None
    return base._replace(labels=labels, origin=origin, pooling=pooling)


def _is_masked(config: PreTrainedConfig, architectures: Iterable[str] | None) -> bool:
    """Whether a checkpoint claims to be a masked model of transformers, with its head."""
    if type(config) not in MODEL_FOR_MASKED_LM_MAPPING:
        return False
    if "BertForPreTraining" in (architectures or []):  # ElectraForPreTraining has another head
        return True
    return any(kind.endswith(MASKED) for kind in architectures or [])


def has_transform(config: PreTrainedConfig, architectures: Iterable[str] | None) -> bool:
    """Whether a base has a head with a dense layer and a norm before its output layer."""
    if config.model_type == "harmonic":
        is_masked = "HarmonicForMaskedLM" in (architectures or [])
        return is_masked and config.head.get("name") == "transform"
    if config.model_type not in TRANSFORMS or not _is_masked(config, architectures):
        return False
    with torch.device("meta"), no_init_weights():
        model_class: Any = MODEL_FOR_MASKED_LM_MAPPING[type(config)]
        return isinstance(_masked_head(model_class(config)), TransformHead)


def _load_masked(name: str, options: dict[str, Any]) -> PreTrainedModel | None:
    """Load a masked model of transformers, None if the checkpoint is not a whole one."""
    config = options["config"]
    if not _is_masked(config, config.architectures):
        return None
    if config.model_type not in (*TRANSFORMS, *PLAIN):
        _leave_out(name)
        return None
    try:
        return load_checked(AutoModelForMaskedLM, name, **options)
    except Exception as error:  # of any class; loading the body alone reports what is wrong there
        logger.warning("%s. Its own head is left out.", error)
        return None


def _leave_out(name: str) -> None:
    logger.warning(
        "base %s: its own head is of no kind that is known here, and is left out with any layers "
        "before its output layer. What the new head sees has not passed through them: expect a "
        "high loss before training. Whether the base was loaded well is not checked by it.",
        name,
    )


def base_of(
    model: PreTrainedModel, *, dtype: torch.dtype, is_causal: bool, name: str | None = None
) -> Base:
    """Take a model of transformers apart: its backbone, and a language model's head.

    The model is not copied: its backbone is cast to `dtype`, and a decoder is in evaluation mode
    afterwards. Where its weights came from is left out: they may have been changed since.

    Raises:
        ValueError: The model is not of the kind that `is_causal` says, has no token embeddings, or
            its logits are more than a linear layer, factors and soft caps.
    """
    name = name or type(model).__name__
    check_supported(name, model.config, is_causal=is_causal)
    settle_quantized_(model)
    head: Head | None = None
    generation_config = None
    if is_causal:
        if model.base_model is not model:
            head = old_head(model)
            generation_config = getattr(model, "generation_config", None)
        elif model.get_output_embeddings() is not None:
            raise ValueError(
                f"base {name}: expected a decoder whose body stands apart from its head, got a "
                f"{type(model).__name__}"
            )
        if _has_values(model):
            _check_decoder(model, head, name)
    elif isinstance(model, NeoBERTForMaskedLM):
        head = LinearHead(model.config.hidden_size, model.config.vocab_size)
        head.load_state_dict(model.get_submodule("decoder").state_dict())
    elif type(model).__name__.endswith(MASKED):
        with torch.random.fork_rng(devices=[]):  # later random draws are as without this head
            head = _masked_head(model)
        if head is None:
            _leave_out(name)
    body = cast("PreTrainedModel", model.base_model)
    return _as_base(name, body, dtype, head, generation_config)


def random_base(
    name: str, revision: str | None, *, dtype: torch.dtype, dropout: float | None
) -> Base:
    """Build a backbone of random weights in the shape of a published one, by its configuration."""
    config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
    config = config.get_text_config()
    vars(config).pop("quantization_config", None)
    if dropout is not None:
        set_dropout_(config, dropout)
    return _as_base(name, build_backbone(config), dtype)


def _as_base(
    name: str,
    backbone: PreTrainedModel,
    dtype: torch.dtype,
    head: Head | None = None,
    generation_config: GenerationConfig | None = None,
    kept: list[str] | None = None,
) -> Base:
    """Check and cast a backbone, and drop its local path, which must not be published."""
    check_embeddings(name, backbone)
    cast_parameters_(backbone, dtype, kept)
    backbone.config.name_or_path = ""
    origin = {"base_dtype": str(dtype).removeprefix("torch."), "dtype": dtype}
    if dtype != torch.float32:
        origin["float32_modules"] = kept
    return Base(name, backbone, head, [], origin, generation_config)


def copy_head_(head: Head, base: Base) -> None:
    """Copy the weights of the base's own head, which must be of the same kind."""
    own, weights = ({}, {}) if base.head is None else (base.head.settings(), base.head.state_dict())
    expected = head.settings()
    kinds = [
        [(part.get("name"), part.get("softcap")) for part in heads_in(settings)]
        for settings in (own, expected)
    ]
    if kinds[0] != kinds[1] or weights.keys() != head.state_dict().keys():
        raise ValueError(
            f"init base_head: expected base {base.name} to have a head like {expected}, "
            f"got {own or 'none'}" + (f". Write head: {own}" if own else "")
        )
    head.load_state_dict(weights)


def check_embeddings(name: str, backbone: PreTrainedModel) -> None:
    """Refuse a backbone without one plain table of token embeddings to take prototypes from."""
    try:
        weight = getattr(backbone.get_input_embeddings(), "weight", None)
    except NotImplementedError:  # what transformers raises where it finds none
        weight = None
    if weight is None or weight.dim() != 2:
        raise ValueError(
            f"base {name}: expected token embeddings, got none in a {type(backbone).__name__}"
        )
    if is_quantized(weight):
        raise ValueError(f"base {name}: expected token embeddings that are not quantized")


def check_supported(name: str, config: PreTrainedConfig, *, is_causal: bool) -> None:
    """Refuse a base that is no text model of transformers, or is quantized in a way we cannot save.

    Raises:
        ValueError: It has code of its own, takes images or sound, or has both an encoder and a
            decoder; or it is quantized and an encoder, or by something else than bitsandbytes and
            torchao, or by one of them that is not installed.
    """
    is_ours = config.model_type in ("harmonic", "neobert")
    is_not_one_body = config.is_encoder_decoder or config.get_text_config() is not config
    # Reformer has two streams of hidden states; Whisper's decoder would lose its encoder.
    is_not_one_body |= config.model_type in ("reformer", "whisper")
    is_not_one_body |= not hasattr(config, "vocab_size")
    if not is_ours and (is_not_one_body or type(config) not in MODEL_MAPPING):
        raise ValueError(
            f"base {name}: expected an encoder or a decoder of text alone that transformers knows, "
            f"got a model of type {config.model_type!r}"
        )
    method = quantization_method(config)
    if method is None:
        return
    if not is_causal or method not in QUANTIZED:
        known = f" or quantized by one of {list(QUANTIZED)}" if is_causal else ""
        raise ValueError(
            f"base {name}: expected weights in a floating dtype{known}, got {method!r}. Take the "
            "model that they were made of; dtype: bfloat16 halves what a frozen body takes"
        )
    if importlib.util.find_spec(method) is None:
        raise ValueError(
            f"base {name}: expected package {method}, which its weights are quantized with, got "
            f"none. Install it: pip install {method}"
        )


def _check_kind(name: str, config: PreTrainedConfig, *, is_causal: bool) -> None:
    """Refuse an encoder in the place of a decoder, and the other way round."""
    if config.model_type == "harmonic":
        if config.is_causal != is_causal:
            kind = "a decoder" if is_causal else "an encoder"
            raise ValueError(f"base {name}: expected {kind}, got {config.architectures}")
        return
    is_decoder = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    if is_causal and not is_decoder:
        raise ValueError(
            f"base {name}: expected a causal language model that transformers knows, got one of "
            f"type {config.model_type!r}"
        )
    if is_decoder and not is_causal and type(config) not in MODEL_FOR_MASKED_LM_MAPPING:
        raise ValueError(
            f"base {name}: expected an encoder, got a decoder ({config.model_type}). Decoders are "
            "bases of HarmonicForCausalLM, model.task: causal_lm"
        )


@torch.no_grad()
def old_head(model: PreTrainedModel) -> LinearHead:
    """Return the head of a causal language model, in float32, as one of ours with the same logits.

    A factor on the logits goes into the weight.

    Raises:
        ValueError: The model has no linear output layer.
    """
    output, config = model.get_output_embeddings(), model.config
    if not isinstance(output, nn.Linear):
        kind = "none" if output is None else f"a {type(output).__name__}"
        raise ValueError(f"base: expected a linear output layer, got {kind}")
    if is_quantized(output.weight):
        raise ValueError("base: expected an output layer that is not quantized")
    vocab_size, hidden_size = output.weight.shape
    softcap, factor = getattr(config, SOFTCAP, None), 1.0
    for field, power in FACTORS.items():
        if (value := getattr(config, field, None)) is not None:
            # HyperCLOVA X multiplies by what others divide by.
            factor *= value if config.model_type == "hyperclovax" else value**power
    head = LinearHead(hidden_size, vocab_size, bias=output.bias is not None, softcap=softcap)
    head.to(output.weight.device)
    head.weight.copy_(output.weight).mul_(factor)  # in float32
    if head.bias is not None:
        head.bias.copy_(output.bias).mul_(factor)
    return head


@torch.no_grad()
def _check_decoder(model: PreTrainedModel, head: LinearHead | None, name: str) -> None:
    """Refuse a decoder that sees later tokens, or whose logits are not those of body and `head`."""
    model.eval()
    num_tokens, vocab_size = 8, model.config.vocab_size
    rows = torch.arange(2 * num_tokens, device=model.device).view(2, num_tokens) * 7 % vocab_size
    rows[1, :-1] = rows[0, :-1]  # they differ in the last token only
    kind = type(model).__name__
    try:  # with a cache, whatever its configuration says
        outputs = model.base_model(input_ids=rows, use_cache=True)
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"base {name}: expected a decoder that transformers runs in this precision, got an "
            f"error of its {kind}: {error}"
        ) from error
    hidden_states = outputs.last_hidden_state
    if _differ(*hidden_states[:, :-1].unbind(), 0.01):
        raise ValueError(
            f"base {name}: expected a decoder, got a {kind} whose tokens see those behind them. "
            "For an encoder set model.task: masked_lm"
        )
    cache = outputs.get(CACHE)
    is_ordinary = getattr(model, "_supports_default_dynamic_cache", lambda: True)()  # not MiniMax's
    if cache is None or not is_ordinary or all(getattr(cache, "is_linear", [False])):  # Mamba's
        raise ValueError(
            f"base {name}: expected a decoder with a cache of keys and values, got a {kind}, which "
            "keeps another state"
        )
    if head is None:
        return
    native = model(input_ids=rows).logits
    tolerance = 0.01 if native.dtype == torch.float32 else 0.05
    is_as_wide = head.weight.shape[1] == hidden_states.shape[-1]
    if not is_as_wide or _differ(
        head(hidden_states.flatten(0, 1)).view_as(native), native, tolerance
    ):
        raise ValueError(
            f"base {name}: expected logits of one linear layer, a factor and a soft cap at most, "
            f"got a {kind}, which does more between its hidden states and its logits"
        )


@torch.no_grad()
def _masked_head(model: PreTrainedModel) -> Head | None:
    """Return the head of a masked model, in float32, as one of ours with the same logits.

    None if it is of no kind that is known here, or has an output layer of another width (ELECTRA's
    generators, ALBERT).
    """
    config, output = model.config, model.get_output_embeddings()
    if type(model) is not MODEL_FOR_MASKED_LM_MAPPING.get(type(config), None):
        return None  # a subclass may compute something else
    shape = (config.vocab_size, config.hidden_size)
    if not isinstance(output, nn.Linear) or output.weight.shape != shape:
        return None
    if config.model_type in PLAIN:
        return old_head(model)
    if config.model_type not in TRANSFORMS:
        return None
    body, field = set(model.base_model.modules()), TRANSFORMS[config.model_type]
    layers = [module for module in model.modules() if module not in body and module is not output]
    dense = next(layer for layer in layers if isinstance(layer, nn.Linear))
    norm = next(layer for layer in layers if isinstance(layer, nn.LayerNorm))
    return _behind(dense, norm, old_head(model), getattr(config, field) if field else "gelu")


def _behind(
    dense: nn.Linear, norm: nn.LayerNorm, linear: LinearHead, activation: str
) -> TransformHead:
    """Return the linear head behind a dense layer, an activation and a norm, all copied."""
    vocab_size, hidden_size = linear.weight.shape
    head = TransformHead(
        hidden_size,
        vocab_size,
        inner=linear.settings(),
        activation=activation,
        bias=dense.bias is not None,
        norm_bias=norm.bias is not None,
        norm_eps=norm.eps,
    ).to(linear.weight.device)
    parts = {"inner.": linear, "dense_": dense, "norm_": norm}
    state = {f"{key}{n}": w for key, part in parts.items() for n, w in part.state_dict().items()}
    head.load_state_dict(state)
    return head


def _has_values(model: PreTrainedModel) -> bool:
    """Whether a model is neither on the meta device nor made of fake tensors."""
    weight = next(model.parameters())
    return weight.device.type != "meta" and not isinstance(weight, FakeTensor)


def _differ(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Whether two tensors differ by more than this share of the expected one's norm."""
    return bool(torch.dist(found.float(), expected.float()) > tolerance * expected.float().norm())
