"""Tensors as on a device without float64, such as Apple's GPUs."""

import torch
from torch.utils._pytree import tree_map_only


class NoFloat64(torch.Tensor):
    """Whatever is computed with it is on its device too, until `cpu()`."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.cpu:
            return args[0].as_subclass(torch.Tensor)
        return tree_map_only(
            cls, _refuse_float64, super().__torch_function__(func, types, args, kwargs or {})
        )


def _refuse_float64(tensor):
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.dtype == torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
    return tensor


def without_float64(tensor):
    return tensor.as_subclass(NoFloat64)
