"""A linear head that ranks tokens as another head does, for engines that know no other."""

import copy
import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from harmonic_sft.hub.run_folder import public_base
from harmonic_sft.hub.staging import CODE_FIELDS, copy_tokenizer
from harmonic_sft.models import (
    AffineLogits,
    DistanceLogits,
    HarmonicConfig,
    HarmonicForCausalLM,
    HarmonicForMaskedLM,
    HarmonicHeadModel,
    Head,
    LinearHead,
    check_prototypes,
    load_checked,
)
from harmonic_sft.models.bases import FACTORS, SOFTCAP
from harmonic_sft.models.configuration_harmonic import quantization_method
from harmonic_sft.models.head import find_not_finite, unit_rows
from harmonic_sft.results import make_folder, read_results, reading

LINEAR_HEAD_FILE = "linear_head.safetensors"
ROWS = 4096  # of the head that are computed at a time, in float64
LANGUAGE_MODELS = {one.__name__: one for one in (HarmonicForMaskedLM, HarmonicForCausalLM)}
REPLACED = """The model was trained with another head: `{}`.
In its place stands a linear head, for software that knows no other. **Only the order of the tokens
is kept**: greedy decoding gives what the trained model gives, and so does any search that looks at
the order alone. A softmax over these logits does not give the probabilities of the trained model,
so sampling, beam search and perplexity differ."""
KEPT = "The head of the trained model was linear already, and is the same."
ROUNDED = "The head is rounded to {}: tokens with almost the same logit may change places."
ALONE = f"""`{LINEAR_HEAD_FILE}` holds the head alone, for the hidden states of the trained
encoder: the logits are `hidden_states @ weight.T`, plus `bias` if there is one."""


def export_linear(folder: Path, target: Path) -> Path:
    """Write a model with a linear head that ranks all tokens as the model in `folder` does.

    A decoder becomes an ordinary checkpoint of transformers' own class, which engines that know
    that class load. For an encoder only the head is written.

    Off the unit sphere -|x - w|^2 / 2 is x w - |w|^2 / 2 up to a constant per row; on it the order
    is that of the cosine. A linear map that the head applies to hidden states first goes into the
    rows. Rounding may swap tokens at almost the same distance.

    Args:
        folder: A saved harmonic model with a head that `linear_head` takes.
        target: The new folder, which is returned; must not exist, or be empty. It then holds a
            tokenizer, a README.md and a whole decoder, or `linear_head.safetensors` (`weight`
            `[V, D]`, `bias` `[V]` if there is one).

    Raises:
        ValueError: `folder` holds no harmonic language model, its head has no linear equivalent, or
            one with a bias for which the decoder has no place, or `target` is not empty or cannot
            be made.
    """
    place = target.resolve()
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise ValueError(f"--output: expected an empty folder or none, got {str(target)!r}")
    make_folder(place.parent, f"--output: expected a folder that can be made, got {str(target)!r}")
    model_class = LANGUAGE_MODELS[_architecture(folder)]
    with reading(folder):
        config = HarmonicConfig.from_pretrained(folder)
    model = load_checked(model_class, str(folder), config)
    method = quantization_method(model.config)
    if method is not None:
        raise ValueError(
            f"export: expected a base in a floating dtype, got one quantized by {method}"
        )
    if name := find_not_finite(model.named_parameters()):
        raise ValueError(f"export: expected finite numbers, got others in {name}")
    for problem in check_prototypes(model.dist_head, is_tied=model.config.tie_word_embeddings):
        raise ValueError(f"export: expected a head that predicts, got one of which {problem}")
    head = linear_head(model.dist_head)
    native = _native(model, head) if isinstance(model, HarmonicForCausalLM) else None
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=f".{place.name}-") as temporary:
        draft = Path(temporary) / "draft"
        draft.mkdir()
        if native is None:
            save_file(head.state_dict(), draft / LINEAR_HEAD_FILE, metadata={"format": "pt"})
        else:
            native.save_pretrained(draft)
        (draft / "README.md").write_text(_readme(model, head, native), encoding="utf-8")
        copy_tokenizer(folder, draft)
        draft.replace(place)  # whole or not at all
    return target


@torch.no_grad()
def linear_head(head: Head) -> LinearHead:
    """Return the linear head that ranks classes as `head` does, computed in float64.

    Args:
        head: One whose logits are dot products or Euclidean distances of a linear map of the
            hidden states (linear, cosine, vmf, l2, dist, rotation). A `LinearHead` is copied, its
            soft cap too.

    Raises:
        ValueError: The head is of another kind.
    """
    if type(head) is LinearHead:
        return copy.deepcopy(head)
    lazy, linear_map, is_scaled = _lazy_linear(head)
    normalizes = isinstance(lazy, DistanceLogits) and lazy.unit_sphere
    bias = None
    if isinstance(lazy, AffineLogits):
        bias = lazy.bias
    elif not normalizes:
        bias = -lazy.weight.norm(dim=-1).square() / 2
    if bias is not None and is_scaled:
        raise _no_linear_equal(head)
    num_classes, hidden_size = head.weight.shape
    linear = LinearHead(hidden_size, num_classes, bias=bias is not None)
    for part, rows in zip(linear.weight.split(ROWS), lazy.weight.split(ROWS), strict=True):
        part.copy_((unit_rows(rows) if normalizes else rows) @ linear_map.T)
    if linear.bias is not None and bias is not None:
        linear.bias.copy_(bias)
    return linear


def _lazy_linear(head: Head) -> tuple[AffineLogits | DistanceLogits, Tensor, bool]:
    """Return a head's lazy logits in float64, and the map that it applies to hidden states first.

    The map is a matrix `[D, E]`, the images of the unit vectors, and whether each state is also
    scaled by a factor of its own, as by a normalization. Random states test that this is all.
    """
    exact = copy.deepcopy(head).double()
    size = head.weight.shape[1]
    states = torch.randn(8, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    lazy = exact.lazy_logits(torch.cat([torch.eye(size, dtype=torch.float64), states]))
    if not isinstance(lazy, AffineLogits | DistanceLogits):
        raise _no_linear_equal(head)
    linear_map, images = lazy.hidden_states[:size], lazy.hidden_states[size:]  # [D, E], [8, E]
    expected = states @ linear_map
    scales = images.norm(dim=-1, keepdim=True) / expected.norm(dim=-1, keepdim=True)
    if not torch.allclose(images, scales * expected):
        raise _no_linear_equal(head)
    return lazy, linear_map, not torch.allclose(scales, torch.ones_like(scales))


def _no_linear_equal(head: Head) -> ValueError:
    return ValueError(
        "head: expected one that ranks by dot products or Euclidean distances, got "
        f"{head.settings()}. Its ranking is not that of a dot product with one vector per token"
    )


def _architecture(folder: Path) -> str:
    """Return which of `LANGUAGE_MODELS` a folder holds."""
    path = folder / "config.json"
    if not path.is_file() or not any(folder.glob("*.safetensors")):
        raise ValueError(
            f"folder: expected a saved model (config.json and safetensors), got {str(folder)!r}"
        )
    fields = read_results(path)
    name = (fields.get("architectures") or ["HarmonicForMaskedLM"])[0]
    if fields.get("model_type") != "harmonic" or name not in LANGUAGE_MODELS:
        raise ValueError(f"folder: expected a harmonic language model, got a {name}")
    return name


def _native(model: HarmonicHeadModel, head: LinearHead) -> PreTrainedModel:
    """Return transformers' own causal language model with the same body, not copied."""
    config = copy.deepcopy(model.config.text_config)
    for name in CODE_FIELDS:
        vars(config).pop(name, None)
    config.tie_word_embeddings = False
    for field in FACTORS:  # the weight contains them
        if field in config.to_dict():
            setattr(config, field, 1.0)
        elif hasattr(config, field):  # in MiniCPM3 a property, 1 if these are equal
            config.dim_model_base = config.hidden_size
    if SOFTCAP in config.to_dict():
        setattr(config, SOFTCAP, model.dist_head.settings().get("softcap"))
    with torch.device("meta"):
        native = AutoModelForCausalLM.from_config(config)
    setattr(native, native.base_model_prefix, model.model.backbone)
    has_bias = native.get_output_embeddings().bias is not None
    if head.bias is not None and not has_bias:
        raise ValueError(
            f"head: expected one without a bias, since {type(native).__name__} has no place for "
            f"it, got {model.dist_head.settings()}. A linear head may go without, bias: "
            "false; a distance off the unit sphere needs one"
        )
    num_classes, hidden_size = head.weight.shape
    output = nn.Linear(hidden_size, num_classes, bias=has_bias, dtype=native.base_model.dtype)
    output.weight.data.copy_(head.weight)
    if has_bias:
        output.bias.data.copy_(torch.zeros(num_classes) if head.bias is None else head.bias)
    native.set_output_embeddings(output)
    native.generation_config = model.generation_config
    _unshare_(native)
    return native.eval()


def _unshare_(native: PreTrainedModel) -> None:
    """Copy weights that blocks share, as in Zamba: an untied model loads one for each block."""
    seen = set[int]()
    for module in native.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                setattr(module, name, nn.Parameter(parameter.detach().clone()))
            seen.add(id(parameter))


def _readme(model: HarmonicHeadModel, head: LinearHead, native: PreTrainedModel | None) -> str:
    """Return the README, for readers who have the folder alone."""
    settings, config = model.dist_head.settings(), model.config
    output = head if native is None else native.get_output_embeddings()
    has_softcap = native is not None and hasattr(native.config, SOFTCAP)
    is_kept = type(model.dist_head) is LinearHead and (not settings.get("softcap") or has_softcap)
    parts = ["# A linear head"]
    parts.append(KEPT if is_kept else REPLACED.format(json.dumps(settings)))
    if not is_kept or output.weight.dtype != torch.float32:
        parts.append(ROUNDED.format(str(output.weight.dtype).removeprefix("torch.")))
    if native is None:
        parts.append(ALONE)
    if base := public_base(config):
        revision = f" at commit {config.base_revision}" if config.base_revision else ""
        parts.append(
            f"The base is {base}{revision}. Its license, and that of the trained model, hold here."
        )
    return "\n\n".join(parts) + "\n"
