"""Checkpoints that hold only what was trained: the rest comes from their base."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import load_state_dict
from transformers.utils import CONFIG_NAME, cached_file

from .backbones import cast_parameters_, load_backbone, load_checked
from .configuration_harmonic import HarmonicConfig

HEAD_FILE = "dist_head.safetensors"
BLOCKS_FILE = "trained_blocks.safetensors"
BACKBONE = "model.backbone."  # of parameter names
# What says where and how to fetch files, as `from_pretrained` takes it.
HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "token")
PLACE_OPTIONS = ("revision", "subfolder")


def commit_of(name: str, revision: str | None = None, **hub: Any) -> str | None:
    """Return the commit that a revision of a repo stands for, None for a folder."""
    if Path(name).is_dir():
        return None
    path = cached_file(name, CONFIG_NAME, revision=revision, **hub)
    found = re.search(r"/snapshots/([0-9a-f]{40})/", Path(path or "").as_posix())
    return found[1] if found else None


def partial_config(
    name: str, where: dict[str, Any], hub: dict[str, Any], options: dict[str, Any]
) -> HarmonicConfig:
    """Load a checkpoint's configuration, changed by what `options` has of its fields."""
    fields = HarmonicConfig.from_pretrained(name, **where, **hub).to_dict().keys() - {"dtype"}
    changes = {key: options.pop(key) for key in fields & options.keys()}
    return HarmonicConfig.from_pretrained(name, **where, **hub, **changes)


def complete_state_dict(
    name: str, config: HarmonicConfig, model_class: Any, *, where: dict[str, Any], **hub: Any
) -> dict[str, Tensor]:
    """Return all weights of a partial checkpoint: the base's, under the trained ones.

    Args:
        name: A folder or a name on the Hub.
        config: Its configuration, with the base's name and revision.
        model_class: What loads a base that is itself a harmonic model: `HarmonicModel`.
        where: `revision` and `subfolder` of the checkpoint.
        hub: `HUB_OPTIONS`, for checkpoint and base.

    Raises:
        ValueError: The base cannot be fetched, or is not the model that was trained on.
        OSError: The checkpoint's own files cannot be fetched.
    """
    trained: dict[str, Tensor] = {}
    for file in (HEAD_FILE, BLOCKS_FILE):
        optional = file == BLOCKS_FILE  # where only the head was trained
        path = cached_file(
            name, file, _raise_exceptions_for_missing_entries=not optional, **where, **hub
        )
        if path is not None:
            trained |= load_state_dict(path)
    missing = sorted(set(config.trained_parameters or ()) - trained.keys())
    if missing:
        raise ValueError(f"{name}: expected weights of all trained parameters, got no {missing[0]}")
    try:
        backbone = _load_base(config, model_class, hub)
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise ValueError(
            f"{name} holds only what was trained. base: expected {config.base_model} at revision "
            f"{config.base_revision}, whose weights it completes, got an error: {reason}. "
            "Check the network and your access to the base, or use a repo of the form `full`"
        ) from error
    state_dict = {f"{BACKBONE}{key}": value for key, value in backbone.state_dict().items()}
    strange = sorted(
        key
        for key, value in trained.items()
        if key.startswith(BACKBONE)
        and (key not in state_dict or state_dict[key].shape != value.shape)
    )
    if strange:
        raise ValueError(
            f"base {config.base_model}: expected a weight {strange[0]} of shape "
            f"{list(trained[strange[0]].shape)}, got none. It is not the model trained on"
        )
    return state_dict | trained


def _load_base(config: HarmonicConfig, model_class: Any, hub: dict[str, Any]) -> PreTrainedModel:
    """Load the backbone of the base in the precision that the run held it in."""
    name, revision = config.base_model, config.base_revision
    if name is None or revision is None:
        raise ValueError("its configuration does not name a base and a revision")
    fields, _ = PreTrainedConfig.get_config_dict(name, revision=revision, **hub)
    # Not `config.dtype`: callers may ask for another one, to which all weights are cast afterwards.
    dtype = getattr(torch, config.base_dtype or "float32")
    options = {"revision": revision, "dtype": dtype, **hub}
    if fields.get("model_type") != HarmonicConfig.model_type:
        return load_backbone(name, config.text_config, **options)
    base_config = HarmonicConfig.from_pretrained(name, revision=revision, **hub)
    backbone = load_checked(model_class, name, base_config, **options).backbone
    cast_parameters_(backbone, dtype)
    return backbone
