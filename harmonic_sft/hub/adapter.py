"""The PEFT form of a trained model: what training changed, as an adapter on the harmonic base."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from peft import LoraConfig
from peft.utils.constants import DUMMY_TARGET_MODULES
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from harmonic_sft.hub.run_folder import weight_files
from harmonic_sft.models import HarmonicConfig, HarmonicForMaskedLM

ADAPTER_FOLDER = (
    "adapter"  # not the top of a checkpoint: transformers loads adapters it finds there
)
WEIGHTS_NAME = "adapter_model.safetensors"
PREFIX = "base_model.model."  # PEFT's, before every name
BACKBONE = "model.backbone"


def write_adapter(folder: Path, target: Path, *, base: str, revision: str | None) -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors` of a trained model.

    `PeftModel.from_pretrained` puts them on `from_base` of the same class of model, base, dtype and
    head settings. Where parts trained in float32 on a bfloat16 body it needs
    `low_cpu_mem_usage=True`, since PEFT rounds them to the dtype of the body otherwise.

    Args:
        folder: A saved harmonic model. With LoRA its adapter is copied; else whole modules are
            taken from its weights.
        target: Where the two files go; made if it does not exist.
        base: Name of the base. Of a local path only the last component is written.
        revision: Of the base on the Hub.

    Raises:
        ValueError: The folder does not say what was trained, lacks weights, or has a tied head.
    """
    adapter = folder / ADAPTER_FOLDER
    if adapter.is_dir():
        config = LoraConfig.from_pretrained(str(adapter))
        config.target_modules = sorted(config.target_modules or [])
        tensors = load_file(adapter / WEIGHTS_NAME)
    else:
        modules, tensors = _trained_modules(folder)
        config = LoraConfig(target_modules=DUMMY_TARGET_MODULES, modules_to_save=modules)
    save_peft(config, tensors, target, base=base, revision=revision)


def save_peft(
    config: LoraConfig,
    tensors: dict[str, Tensor],
    folder: Path,
    *,
    base: str | None,
    revision: str | None,
) -> None:
    """Write the two files of a PEFT adapter.

    Args:
        config: The adapter's; its base and revision are set.
        tensors: By their names in the file.
        folder: Made if it does not exist.
        base: Name of the base. Of a local path only the last component is written.
        revision: Of the base on the Hub.
    """
    config.base_model_name_or_path = public_name(base) if base else None
    config.revision = revision
    config.inference_mode = True
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(str(folder))
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / WEIGHTS_NAME, metadata={"format": "pt"})


def public_name(base: str) -> str:
    """Return `base` without the folders above it where it is a local path."""
    local = base.startswith((".", "/", "~")) or base.count("/") > 1 or Path(base).is_dir()
    return Path(base).expanduser().resolve().name if local else base


def covering_modules(model: nn.Module, trained: Iterable[str]) -> list[str]:
    """Return the names of the modules that hold the parameters `trained`, the fewest possible.

    A module all of whose parameters are trained stands for its parts, up to a whole block or the
    head. A module that holds a trained parameter is named even if others of it are not trained:
    PEFT saves whole modules.

    Args:
        model: A harmonic model; its weights are not looked at.
        trained: Names of parameters of `model`.
    """
    names = set(trained)
    found = {_widest_module(model, name.rpartition(".")[0], names) for name in names}
    return sorted(
        name for name in found if not any(name.startswith(f"{other}.") for other in found)
    )


def _widest_module(model: nn.Module, owner: str, trained: set[str]) -> str:
    parent = owner.rpartition(".")[0]
    if not parent.startswith(f"{BACKBONE}."):
        return owner  # the head, or a direct part of the backbone
    module = model.get_submodule(parent)
    parameters = {f"{parent}.{name}" for name, _ in module.named_parameters()}
    if isinstance(module, nn.ModuleList) or not parameters <= trained:
        return owner  # a list of blocks has no forward that PEFT could wrap
    return _widest_module(model, parent, trained)


def _trained_modules(folder: Path) -> tuple[list[str], dict[str, Tensor]]:
    """Return the modules that training changed, and their tensors under PEFT's names."""
    config = HarmonicConfig.from_pretrained(folder)
    if not config.trained_parameters:
        raise ValueError(
            f"trained_parameters: expected names in {folder.name}/config.json, got none. "
            "Push the form full, or train again with this version"
        )
    if config.tie_word_embeddings:
        raise ValueError(
            "tie_word_embeddings: expected false for the form peft, got true. Push the form full, "
            "since an adapter would untie the head"
        )
    with torch.device("meta"):
        model = HarmonicForMaskedLM(config)
    unknown = sorted(
        set(config.trained_parameters) - {name for name, _ in model.named_parameters()}
    )
    if unknown:
        raise ValueError(
            f"trained_parameters: expected parameters of the model in {folder.name}/config.json, "
            f"got {unknown[0]!r}. Push the form full"
        )
    modules = covering_modules(model, config.trained_parameters)
    prefixes = tuple(f"{module}." for module in modules)
    names = [name for name in model.state_dict() if name.startswith(prefixes)]
    tensors = _read_tensors(folder, names)
    return modules, {f"{PREFIX}{name}": tensor for name, tensor in tensors.items()}


def _read_tensors(folder: Path, names: Sequence[str]) -> dict[str, Tensor]:
    """Read single tensors of a checkpoint, in one file or in shards."""
    tensors = {}
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            stored = set(file.keys())
            tensors |= {name: file.get_tensor(name) for name in names if name in stored}
    missing = sorted(set(names) - tensors.keys())
    if missing:
        raise ValueError(
            f"weights: expected {missing[0]!r} in {folder.name}, got a checkpoint without it"
        )
    return tensors
