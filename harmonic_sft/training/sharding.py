"""FSDP2 for training loops of your own: the model in shards, the head in float32."""

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from harmonic_sft.models import HarmonicHeadModel, find_blocks


def shard_(model: HarmonicHeadModel, mesh: DeviceMesh, *, dtype: torch.dtype | None = None) -> None:
    """Shard every block, the head, and the rest over processes, with `fully_shard`.

    Losses call methods of the head and read its weight. If it were gathered for `forward` alone,
    they would see a shard, so it is gathered for these methods and kept until the backward pass.

    Args:
        model: Changed in place; make the optimizer afterwards.
        mesh: The processes to shard over.
        dtype: Dtype that the backbone computes in; default: that of its weights. The head computes
            in float32.

    Raises:
        ValueError: The head shares its weight with embeddings that compute in 16 bits, or its
            `lazy_logits` is None.
    """
    weight = model.dist_head.weight
    with torch.no_grad():
        lazy = model.dist_head.lazy_logits(weight.new_empty(1, weight.shape[1]))
    if lazy is None:  # gathered for a method that returns None it would get no gradient
        raise ValueError(
            "dist_head: expected a head of dot products, cosines or distances in shards, got "
            f"{model.dist_head.settings()}, whose weighted losses would not train it"
        )
    is_tied = model.config.tie_word_embeddings
    if is_tied and dtype is not None:
        raise ValueError(f"dtype: expected None for a tied head, which is float32, got {dtype}")
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    for block in find_blocks(model.model.backbone)[1]:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    if not is_tied:  # a shared weight has to be in one group: that of the rest
        own = MixedPrecisionPolicy(cast_forward_inputs=False)
        fully_shard(model.dist_head, mesh=mesh, mp_policy=own, reshard_after_forward=False)
        for method in ("lazy_logits", "nll"):
            register_fsdp_forward_method(model.dist_head, method)
    fully_shard(model, mesh=mesh, mp_policy=policy)
