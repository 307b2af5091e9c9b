"""What a run would train, on what data and in how much memory; no weights are loaded."""

import copy
import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedConfig
from transformers.initialization import no_init_weights
from transformers.modeling_utils import local_torch_dtype

from harmonic_sft.config import to_yaml
from harmonic_sft.data.inspection import inspect_data
from harmonic_sft.data.row_maker import check_length
from harmonic_sft.losses import CrossEntropyLoss, DistillLoss, HarmonicLoss
from harmonic_sft.models import HarmonicConfig, HarmonicHeadModel, NeoBERTConfig, max_positions
from harmonic_sft.models.configuration_harmonic import quantization_fields
from harmonic_sft.ops import workspace_bytes
from harmonic_sft.results import without_secrets
from harmonic_sft.training.adapters import add_lora_
from harmonic_sft.training.checkpoints import rows_per_step
from harmonic_sft.training.freezing import Part, parts, unfreeze_
from harmonic_sft.training.loading import check_base_config, load_base_config, load_run_data
from harmonic_sft.training.report import log_data, show_classes, show_estimate, show_parts
from harmonic_sft.training.run import check_run
from harmonic_sft.training.run_config import RunConfig
from harmonic_sft.training.tasks import MODELS

logger = logging.getLogger(__name__)
NEOBERT = "chandar-lab/NeoBERT"


def dry_run(run: RunConfig) -> None:
    """Print the configuration, the parameter table and a memory estimate; load no weights."""
    check_run(run)
    config = _base_config(run)
    check_base_config(run, config)
    check_length(
        run.data.context_length,
        max_positions=max_positions(config.get_text_config()),
        pad_to_multiple_of=run.data.pad_to_multiple_of or 1,
    )
    batch_size = run.training_arguments().per_device_train_batch_size
    rows, estimate = estimate_step(run, config, batch_size=batch_size)
    logger.info("%s", without_secrets(to_yaml(run)))
    show_parts(run, rows)
    show_estimate(estimate, batch=f"{batch_size} x {run.data.context_length} tokens")
    is_known = isinstance(run.loss, CrossEntropyLoss | HarmonicLoss | DistillLoss)
    if not is_known or getattr(run.loss, "impl", "") == "reference":
        logger.info("In this estimate the loss counts as that of cross-entropy without logits.")


def _base_config(run: RunConfig) -> PreTrainedConfig:
    """Load the base's configuration; without a network NeoBERT's is known: ours has its values."""
    try:
        return load_base_config(run.model)
    except ValueError:
        if run.model.base != NEOBERT:
            raise
        logger.info("%s cannot be reached; its published configuration is used.", NEOBERT)
        return NeoBERTConfig()


def show_data(run: RunConfig) -> None:
    """Load the data of a run and print counts, lengths, fill rate, one row, and steps."""
    tokenizer, data = load_run_data(run)
    if data.labels is not None:
        show_classes(data)
        log_data(data)
        return
    args = run.training_arguments()
    inspect_data(
        data,
        tokenizer=tokenizer,
        rows_per_step=rows_per_step(args),
        batch_size=args.per_device_train_batch_size,
        seed=run.seed,
    )


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors made under it that are alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._live = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation and count the storages of its results, except those of arguments."""
        result = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(result):
            key, size = storage._cdata, storage.nbytes()
            if key not in given and key not in self._seen:
                self._seen.add(key)
                self._live += size
                self.peak = max(self.peak, self._live)
                weakref.finalize(storage, self._forget, key, size)
        return result

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self._live -= size


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def build_fake_model(run: RunConfig, config: PreTrainedConfig) -> HarmonicHeadModel:
    """Build the run's model without memory; call it under a `FakeTensorMode`.

    A classifier gets two classes, since only its data would tell how many it has.
    """
    config = copy.deepcopy(config.get_text_config())
    config.dtype = getattr(torch, run.model.dtype)  # transformers builds the model in it
    # Fake tensors have no values, which some initializations read, such as ModernBERT's.
    with local_torch_dtype(config.dtype), no_init_weights():
        model = MODELS[run.model.task](
            HarmonicConfig(
                text_config=config,
                head=run.head_settings(),
                tie_word_embeddings=run.head.tie,
                is_causal=run.model.task == "causal_lm",
            )
        )
    model.tie_weights()  # which the initialization would do
    unfreeze_(model, run.model.unfreeze)
    if run.peft is not None:
        add_lora_(model, run.peft)
    return model


def estimate_step(
    run: RunConfig, config: PreTrainedConfig, *, batch_size: int
) -> tuple[list[Part], dict[str, int]]:
    """Estimate the peak memory of one training step.

    Returns:
        The parameters by part, and the bytes of a step at its peak by what they are for. The CUDA
        context and fragmentation come on top, about 1 GiB.
    """
    with FakeTensorMode():
        model = build_fake_model(run, config).train()
        if run.training.get("gradient_checkpointing"):
            model.gradient_checkpointing_enable()
        num_scored = _num_scored(run, batch_size)
        activations = _activation_peak(model, batch_size, run.data.context_length, num_scored)
        if not run.model.from_scratch:
            _pack_(model, quantization_fields(config))
        rows = parts(model)
        workspace = workspace_bytes(num_scored, *model.dist_head.weight.shape, "cuda")
    weights, training = sum(p.bytes for p in rows), sum(p.training_bytes for p in rows)
    if isinstance(run.loss, DistillLoss):
        weights += _teacher_bytes(model)
    return rows, {
        "weights": weights,
        "gradients and optimizer": training,
        "activations and head, at the peak": activations,
        "a chunk of the loss": workspace,
    }


def _pack_(model: HarmonicHeadModel, quantization: Mapping[str, Any]) -> None:
    """Give frozen linear layers the size that bitsandbytes packs them to, scales left out."""
    is_4_bit = quantization.get("load_in_4bit", False)
    if not is_4_bit and not quantization.get("load_in_8bit"):
        return
    plain = tuple(quantization.get("llm_int8_skip_modules") or ())
    for name, module in model.model.backbone.named_modules():
        is_frozen = isinstance(module, nn.Linear) and not module.weight.requires_grad
        if is_frozen and not name.removesuffix(".base_layer").endswith(plain):
            size, dtype = module.weight.numel(), torch.int8
            if is_4_bit:  # two weights in a byte
                size, dtype = size // 2, torch.uint8
            module.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)


def _activation_peak(
    model: HarmonicHeadModel, batch_size: int, length: int, num_scored: int
) -> int:
    input_ids = torch.zeros(batch_size, length, dtype=torch.int64)
    positions = labels = torch.zeros(num_scored, dtype=torch.int64)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)  # counted with the weights
    live = LiveBytes()
    with live:
        hidden_states = model.model(input_ids=input_ids).last_hidden_state
        hidden_states = hidden_states.flatten(0, 1)[positions]  # [N, D]
        CrossEntropyLoss()(model.dist_head, hidden_states, labels).sum().backward()
    return live.peak


def _teacher_bytes(model: HarmonicHeadModel) -> int:
    """Return what the old model adds: its head, and a copy of what trains in the body, bar LoRA."""
    copied = [
        parameter.nbytes
        for name, parameter in model.model.named_parameters()
        if parameter.requires_grad and ".lora_" not in name
    ]
    return sum(copied) + model.dist_head.weight.nbytes


def _num_scored(run: RunConfig, batch_size: int) -> int:
    if run.model.task == "sequence_classification":
        return batch_size
    share = run.data.mask.probability if run.model.task == "masked_lm" else 1.0  # of all positions
    return round(batch_size * run.data.context_length * share)
