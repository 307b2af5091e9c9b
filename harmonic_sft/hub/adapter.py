"""The PEFT form of a trained model: what training changed, as an adapter on the harmonic base."""

from collections.abc import Iterable
from pathlib import Path

from peft import LoraConfig
from peft.utils.constants import DUMMY_TARGET_MODULES
from safetensors.torch import load_file, save_file
from torch import Tensor

from harmonic_sft.hub.run_folder import public_base, read_tensors
from harmonic_sft.models import HarmonicConfig

# Not the top of a checkpoint: transformers loads adapters that it finds there.
ADAPTER_FOLDER = "adapter"
WEIGHTS_NAME = "adapter_model.safetensors"
PREFIX = "base_model.model."  # PEFT's, before every name
BACKBONE = "model.backbone"
HEAD = "dist_head"


def write_adapter(
    folder: Path, target: Path, config: HarmonicConfig, metadata: dict[str, str]
) -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors` of a trained model.

    `PeftModel.from_pretrained` puts them on `from_base` of the same class of model, base, dtype and
    head settings. Where parts trained in float32 on a bfloat16 body it needs
    `low_cpu_mem_usage=True`, since PEFT rounds them to the dtype of the body otherwise.

    Args:
        folder: A saved harmonic model. With LoRA its adapter is copied; else whole modules are
            read from its weights, without loading the rest.
        target: Where the two files go; made if it does not exist.
        config: The model's configuration, which says what was trained.
        metadata: Goes into the header of the weights' file.

    Raises:
        ValueError: The weights lack a trained parameter.
    """
    adapter = folder / ADAPTER_FOLDER
    if adapter.is_dir():
        settings = LoraConfig.from_pretrained(str(adapter))
        settings.target_modules = sorted(settings.target_modules or [])
        tensors = load_file(adapter / WEIGHTS_NAME)
    else:
        trained = config.trained_parameters or []
        modules = covering_modules(trained)
        saved = dict(read_tensors(folder, tuple(f"{module}." for module in modules)))
        missing = sorted(set(trained) - saved.keys())
        if missing:
            raise ValueError(f"weights: expected {missing[0]!r} in {folder.name}, got none")
        settings = LoraConfig(target_modules=DUMMY_TARGET_MODULES, modules_to_save=modules)
        tensors = {f"{PREFIX}{name}": tensor for name, tensor in saved.items()}
    save_peft(
        settings,
        tensors,
        target,
        base=config.base_model,
        revision=config.base_revision,
        metadata=metadata,
    )


def save_peft(
    config: LoraConfig,
    tensors: dict[str, Tensor],
    folder: Path,
    *,
    base: str | None,
    revision: str | None,
    metadata: dict[str, str] | None = None,
) -> None:
    """Write the two files of a PEFT adapter.

    Args:
        config: The adapter's; its base and revision are set.
        tensors: By their names in the file.
        folder: Made if it does not exist.
        base: Name of the base. Of a local path only the last component is written.
        revision: The base's revision on the Hub.
        metadata: Goes into the header of the weights' file.
    """
    config.base_model_name_or_path = public_base(base, revision)
    config.revision = revision
    config.inference_mode = True
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(str(folder))
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / WEIGHTS_NAME, metadata=metadata or {"format": "pt"})


def covering_modules(trained: Iterable[str]) -> list[str]:
    """Return the modules that PEFT saves whole: the head, and every layer with a trained parameter.

    Args:
        trained: Names of parameters of a harmonic model.
    """
    found = {n.rpartition(".")[0] for n in trained if not n.startswith(f"{HEAD}.")} | {HEAD}
    return sorted(
        name for name in found if not any(name.startswith(f"{other}.") for other in found)
    )
