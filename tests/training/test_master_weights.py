"""Master weights: nothing is rounded away, and a resumed optimizer goes on exactly."""

import torch
from torch import nn

from harmonic_sft.training.master_weights import MasterWeightsAdamW

OPTIONS = {"lr": 1e-4, "betas": (0.95, 0.95), "weight_decay": 0.0}


def gradients(steps):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(steps, 400, generator=generator).bfloat16()


def backward(weight, grad):
    """Give a weight this gradient as the engine does, in the dtype of the weight."""
    (weight * grad.to(weight.dtype)).sum().backward()


def run(optimizer, weight, grads):
    for grad in grads:
        backward(weight, grad)
        optimizer.step()
        optimizer.zero_grad()


def start():
    return torch.randn(400, generator=torch.Generator().manual_seed(1)).bfloat16()


def test_bfloat16_weights_follow_float32_training():
    exact, weight = nn.Parameter(start().float()), nn.Parameter(start())
    run(torch.optim.AdamW([exact], **OPTIONS), exact, gradients(50))
    optimizer = MasterWeightsAdamW([weight], **OPTIONS)
    run(optimizer, weight, gradients(50))
    master = optimizer.param_groups[0]["params"][0]
    assert torch.equal(master, exact)
    assert torch.equal(weight, exact.bfloat16())


def test_gradients_of_16_micro_batches_are_summed_in_float32():
    """Against float64; in the weight's own dtype the sum is 0.4 % off."""
    parts = gradients(16)
    exact = parts.double().sum(0)
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


def test_a_resumed_optimizer_goes_on_exactly(tmp_path):
    grads = gradients(20)
    whole, first = nn.Parameter(start()), nn.Parameter(start())
    run(MasterWeightsAdamW([whole], **OPTIONS), whole, grads)
    optimizer = MasterWeightsAdamW([first], **OPTIONS)
    run(optimizer, first, grads[:10])
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    second = nn.Parameter(first.detach().clone())
    resumed = MasterWeightsAdamW([second], **OPTIONS)
    resumed.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    run(resumed, second, grads[10:])
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


def test_weights_that_were_set_since_are_kept():
    weight = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = MasterWeightsAdamW([weight], lr=0.0)
    with torch.no_grad():
        weight.fill_(3.0)  # as the best checkpoint does
    weight.grad = torch.ones(8)
    optimizer.step()
    assert (weight == 3).all()
