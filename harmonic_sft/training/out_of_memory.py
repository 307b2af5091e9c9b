"""Out of memory: how an error says so, and a batch in parts."""

import math
from typing import Any

import torch
from accelerate.utils.memory import should_reduce_batch_size


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether a RuntimeError says that the device, or the host, has no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or should_reduce_batch_size(error)


def split_batch(batch: dict[str, Any], num_chunks: int) -> list[dict[str, Any]]:
    """Split every tensor of a batch along its rows into at most `num_chunks` parts."""
    size = math.ceil(len(batch["input_ids"]) / num_chunks)
    parts = {key: value.split(size) for key, value in batch.items()}
    return [dict(zip(parts, values, strict=True)) for values in zip(*parts.values(), strict=True)]
