"""Partial checkpoints, which hold what was trained; the rest of a model comes from its base."""

import os
import re
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import load_state_dict
from transformers.utils import cached_file

from .backbones import cast_parameters_, load_backbone
from .configuration_harmonic import HarmonicConfig

# The files of a partial checkpoint, which holds only what was trained.
HEAD_FILE = "dist_head.safetensors"
BLOCKS_FILE = "trained_blocks.safetensors"  # left out where only the head was trained
RESUME_FILE = "trained_weights.safetensors"  # only the run itself can load it, to continue
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")  # old names have no owner
COMMIT = re.compile(r"[0-9a-f]{40}")
BACKBONE = "model.backbone."  # prefix of the backbone's parameter names
# The options of `from_pretrained` that say where and how to fetch files.
HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "token")
PLACE_OPTIONS = ("revision", "subfolder")


def check_not_partial(folder: str | os.PathLike) -> None:
    """Refuse a checkpoint from which only its run can continue."""
    if os.path.isfile(os.path.join(folder, RESUME_FILE)):
        raise ValueError(
            f"{folder}: expected a model, got a checkpoint that holds only what trains (save: "
            "trainable). Continue its run with resume=true; the result is a whole model"
        )


def hub_base(config: HarmonicConfig) -> str | None:
    """Return the base's name on the Hub, or None if no commit is recorded, as for a folder."""
    base, revision = config.base_model or "", config.base_revision or ""
    return base if HUB_NAME.fullmatch(base) and COMMIT.fullmatch(revision) else None


def complete_state_dict(
    name: str, config: HarmonicConfig, hub: dict[str, Any]
) -> dict[str, Tensor]:
    """Return all weights of a partial checkpoint: the base's, with the trained ones in place.

    Raises:
        ValueError: The base cannot be fetched, or is not the model that was trained on.
        OSError: The checkpoint's own files cannot be fetched.
    """
    trained: dict[str, Tensor] = {}
    for file in (HEAD_FILE, BLOCKS_FILE):
        must_exist = file == HEAD_FILE
        path = cached_file(name, file, _raise_exceptions_for_missing_entries=must_exist, **hub)
        if path is not None:
            trained |= load_state_dict(path)
    missing = sorted(set(config.trained_parameters or ()) - trained.keys())
    if missing:
        raise ValueError(f"{name}: expected weights of all trained parameters, got no {missing[0]}")
    state_dict = base_state_dict(name, config, hub)
    for key, value in sorted(trained.items()):
        if key.startswith(BACKBONE) and (
            key not in state_dict or state_dict[key].shape != value.shape
        ):
            raise ValueError(
                f"base {config.base_model}: expected a weight {key} of shape "
                f"{list(value.shape)}, got none. It is not the model trained on"
            )
    # Blocks may share a weight, as in Zamba. It is saved under its first name only, so the base's
    # values of it are dropped under every name.
    old = {state_dict[key].data_ptr() for key in trained.keys() & state_dict.keys()} - {0}
    return {k: v for k, v in state_dict.items() if v.data_ptr() not in old} | trained


def base_state_dict(name: str, config: HarmonicConfig, hub: dict[str, Any]) -> dict[str, Tensor]:
    """Return the weights of the base of a partial checkpoint, called `name`, by a model's names.

    Raises:
        ValueError: The base cannot be fetched.
    """
    base = hub_base(config)
    if base is None:
        raise ValueError(
            f"{name} holds only what was trained. base_model: expected a name on the Hub at a "
            f"commit, got {config.base_model!r} at {config.base_revision!r}. Use a repo of the "
            "form `full`"
        )
    if os.path.exists(base):  # transformers would load this folder instead
        raise ValueError(
            f"{name} holds only what was trained. base: expected {base} on the Hub, got "
            f"{os.path.abspath(base)!r} of this machine, which hides it. Load it from another "
            "current folder, or rename that one"
        )
    if (base, config.base_revision) == (name, hub["revision"]):
        raise ValueError(
            f"{name}: expected another repo as base, got itself. Use a repo of the form `full`"
        )
    try:
        options = {key: hub[key] for key in HUB_OPTIONS if key in hub}
        backbone = _load_base_of(base, config, {**options, "revision": config.base_revision})
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        hint = " Check the network and your access to the base, or use a repo of the form `full`"
        hint = hint if isinstance(error, OSError) else ""
        raise ValueError(
            f"{name} holds only what was trained. base: expected {base} at revision "
            f"{config.base_revision}, whose weights it completes, got an error: {reason}.{hint}"
        ) from error
    return {f"{BACKBONE}{key}": value for key, value in backbone.state_dict().items()}


def _load_base_of(name: str, config: HarmonicConfig, hub: dict[str, Any]) -> PreTrainedModel:
    """Load the backbone of a checkpoint's base in the precision that the run held it in."""
    fields, _ = PreTrainedConfig.get_config_dict(name, **hub)
    base_config, kept = config.text_config, None
    if fields.get("model_type") == "harmonic":
        base_config = HarmonicConfig.from_pretrained(name, **hub)
        kept = base_config.float32_modules
    # Not `config.dtype`: callers may ask for another one, to which all weights are cast afterwards.
    dtype = getattr(torch, config.base_dtype or "float32")
    backbone = load_backbone(name, base_config, dtype=dtype, **hub)
    cast_parameters_(backbone, dtype, kept)
    return backbone
