"""Master weights: nothing is rounded away, and a resumed optimizer goes on exactly."""

import torch
from torch import nn

from harmonic_sft.training.master_weights import MasterWeightsAdamW

OPTIONS = {"lr": 1e-4, "betas": (0.95, 0.95), "weight_decay": 0.0}


def gradients(steps, shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).bfloat16() for _ in range(steps)]


def backward(weight, grad):
    """Give a weight this gradient as the engine does, in the dtype of the weight."""
    (weight * grad.to(weight.dtype)).sum().backward()


def run(optimizer_class, weight, grads, optimizer=None):
    optimizer = optimizer or optimizer_class([weight], **OPTIONS)
    for grad in grads:
        backward(weight, grad)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def start(seed=1):
    return torch.randn(400, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_bfloat16_weights_follow_float32_training():
    grads = gradients(50, 400)
    exact = nn.Parameter(start().float())
    run(torch.optim.AdamW, exact, grads)
    weight = nn.Parameter(start())
    optimizer = run(MasterWeightsAdamW, weight, grads)
    master = optimizer.param_groups[0]["params"][0]
    assert torch.equal(master, exact)
    assert torch.equal(weight, exact.bfloat16())


def test_gradients_of_16_micro_batches_are_summed_in_float32():
    """Against float64; in the weight's own dtype the sum is 0.4 % off."""
    parts = gradients(16, 400)
    exact = torch.stack(parts).double().sum(0)
    errors = []
    for masters in (True, False):
        weight = nn.Parameter(start())
        if masters:
            MasterWeightsAdamW([weight], **OPTIONS)
        for part in parts:
            backward(weight, part)
        errors.append(((weight.grad.double() - exact).norm() / exact.norm()).item())
    assert errors[0] < 1e-6
    assert 2e-3 < errors[1] < 1e-2


def test_plain_adamw_loses_what_master_weights_keep():
    """The measurement behind the class: most steps round to nothing in bfloat16."""
    grads = [torch.ones(400).bfloat16()] * 50  # always the same direction
    exact = nn.Parameter(start().float())
    run(torch.optim.AdamW, exact, grads)
    plain, kept = nn.Parameter(start()), nn.Parameter(start())
    run(torch.optim.AdamW, plain, grads)
    run(MasterWeightsAdamW, kept, grads)
    moved = (exact - start().float()).abs().mean()
    lost = (plain.float() - exact).abs().mean() / moved
    rounding = (kept.float() - exact).abs().mean() / moved
    assert lost > 0.9
    assert rounding < 0.4  # of the weights' own grid; the masters are exact, as tested above


def test_a_resumed_optimizer_goes_on_exactly(tmp_path):
    grads = gradients(20, 400)
    whole = nn.Parameter(start())
    run(MasterWeightsAdamW, whole, grads)
    first = nn.Parameter(start())
    optimizer = run(MasterWeightsAdamW, first, grads[:10])
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    second = nn.Parameter(first.detach().clone())
    resumed = MasterWeightsAdamW([second], **OPTIONS)
    resumed.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    run(MasterWeightsAdamW, second, grads[10:], resumed)
    assert torch.equal(second, whole)
    assert resumed.param_groups[0]["params"][0].dtype == torch.float32


def test_parameters_without_a_gradient_stay():
    used, unused = nn.Parameter(start()), nn.Parameter(start())
    optimizer = MasterWeightsAdamW([{"params": [used, unused]}], **OPTIONS)
    backward(used, torch.ones(400))
    optimizer.step()
    assert torch.equal(unused, start())
    assert not torch.equal(used, start())
    optimizer.zero_grad()
    assert used.grad is None
