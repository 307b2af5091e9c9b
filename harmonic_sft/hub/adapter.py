"""The PEFT form of a LoRA run: its adapter, which PEFT puts on a harmonic model alone."""

from collections.abc import Iterable
from pathlib import Path

from peft import LoraConfig
from safetensors.torch import save_file
from torch import Tensor

from harmonic_sft.hub.run_folder import public_base

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # PEFT's, before every name
BACKBONE = "model.backbone"
HEAD = "dist_head"


def save_peft(
    config: LoraConfig,
    tensors: dict[str, Tensor],
    folder: Path,
    *,
    base: str | None,
    revision: str | None,
) -> None:
    """Write the two files of a PEFT adapter, ready to be published.

    `PeftModel.from_pretrained` puts them on `from_base` of the same class of model, base, dtype and
    head settings. Where parts trained in float32 on a bfloat16 body it needs
    `low_cpu_mem_usage=True`, since PEFT rounds them to the dtype of the body otherwise. Every
    target is a full name, which begins with `model.backbone`: on the base as others load it, PEFT
    finds none of them and says so. Of a base that is a local path only the last component is
    written.
    """
    config.base_model_name_or_path = public_base(base, revision)
    config.revision = revision
    config.inference_mode = True
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(str(folder))
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})


def covering_modules(trained: Iterable[str]) -> list[str]:
    """Return the modules PEFT saves whole: the head, and every layer with a trained parameter."""
    found = {n.rpartition(".")[0] for n in trained if not n.startswith(f"{HEAD}.")} | {HEAD}
    return sorted(
        name for name in found if not any(name.startswith(f"{other}.") for other in found)
    )
