"""AdamW for 16-bit weights: float32 copies of them and of their gradients, nothing rounded away."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class MasterWeightsAdamW(torch.optim.AdamW):
    """AdamW that steps on float32 master copies of every 16-bit parameter.

    bfloat16 has 8 bits: a step below 1/256 of a weight rounds to nothing, which at a learning rate
    of 2e-4 is most of them. The gradients of these parameters accumulate in float32 too: a sum of
    16 micro-batches in bfloat16 would be 0.4 % off. The masters are in `param_groups`, in place of
    the parameters they stand for, and in `state_dict`, so that a resumed run continues exactly.

    DistributedDataParallel reduces gradients in the dtype of their parameters: let it ignore 16-bit
    ones, and call `average_gradients` before every step.

    Source:
        Micikevicius et al. 2018, Mixed Precision Training, arXiv:1710.03740, section 3.1.
    """

    def __init__(self, params: Iterable[Any], **options: Any):
        self._weights: list[tuple[nn.Parameter, nn.Parameter]] = []  # (16-bit weight, its master)
        groups = [
            dict(group) if isinstance(group, dict) else {"params": [group]} for group in params
        ]
        for group in groups:
            group["params"] = [self._master_of(weight) for weight in group["params"]]
        super().__init__(groups, **options)

    def _master_of(self, weight: nn.Parameter) -> nn.Parameter:
        if weight.dtype.itemsize >= 4:
            return weight
        master = nn.Parameter(weight.detach().float())
        weight.grad_dtype = torch.float32
        self._weights.append((weight, master))
        return master

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step the masters with the weights' gradients and round the result into the weights."""
        assert closure is None, "a closure would compute gradients after they were handed on"
        for weight, master in self._weights:
            # Masters follow weights that were set since the last step, as by the best checkpoint.
            master.copy_(torch.where(master.to(weight.dtype) == weight, master, weight.float()))
            master.grad = weight.grad
        loss = super().step()
        for weight, master in self._weights:
            weight.copy_(master)
            master.grad = None
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters, those with masters too."""
        super().zero_grad(set_to_none)
        for weight, _ in self._weights:
            weight.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return AdamW's state and the masters."""
        masters = [master.detach().clone() for _, master in self._weights]
        return {**super().state_dict(), "masters": masters}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore AdamW's state and the masters."""
        state_dict = dict(state_dict)
        masters = state_dict.pop("masters")
        super().load_state_dict(state_dict)
        for (_, master), saved in zip(self._weights, masters, strict=True):
            master.copy_(saved)


def average_gradients(weights: Iterable[nn.Parameter]) -> None:
    """Average gradients over all processes."""
    for weight in weights:
        if weight.grad is None:  # it took no part here, but may have in another process
            weight.grad = torch.zeros_like(weight, dtype=torch.float32)
        torch.distributed.all_reduce(weight.grad)
        weight.grad /= torch.distributed.get_world_size()


def low_precision_weights(model: nn.Module) -> list[nn.Parameter]:
    """Return what trains in 16 bits; make DDP leave its gradients to `average_gradients`."""
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    low_precision = {n: p for n, p in trained.items() if p.dtype.itemsize < 4}
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(low_precision))
    return list(low_precision.values())


def check_optimizer(model: nn.Module, optimizer: Any, scheduler: Any, *, is_given: bool) -> None:
    """Refuse an optimizer that would not train everything, or a schedule of another optimizer."""
    low_precision = [p.dtype for p in model.parameters() if p.requires_grad and p.itemsize < 4]
    if is_given and low_precision:
        raise ValueError(
            f"optimizers: expected none with {low_precision[0]} weights, which need float32 "
            "masters, got one. Leave the dtype in unfreeze at float32"
        )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ValueError(
            "optimizers: expected a schedule of the optimizer beside it, got one of another, which "
            "would not be what trains. Pass both: optimizers=(optimizer, schedule)"
        )
    if optimizer is None:
        return
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in held]
    if missing:
        raise ValueError(
            "optimizers: expected one that holds all that trains, got one without "
            f"{missing[0]}. Make the model first and pass it instead of its name, or use "
            "optimizer_cls_and_kwargs"
        )
