import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from harmonic_sft.models import LinearHead, build_head
from harmonic_sft.ops.dense_chunks import by_chunks
from tests.ops.fused import assert_same

V, D = 12, 6
nll = LinearHead.nll


def problem(num_tokens=7):
    torch.manual_seed(0)
    head = LinearHead(D, V).double()
    states = torch.randn(num_tokens, D, dtype=torch.float64, requires_grad=True)
    return head, states, torch.randint(V, (num_tokens,))


@pytest.mark.parametrize("rows", [1, 3, None])
@pytest.mark.parametrize("uniform", [True, False])
def test_chunks_give_the_loss_and_the_gradients_of_the_whole(rows, uniform):
    head, states, labels = problem()
    found = by_chunks(nll, head, states, labels, rows=rows)
    inputs, upstream = [states, *head.parameters()], None if uniform else torch.rand(7)
    assert_same(found, head.nll(states, labels), inputs, upstream)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_chunks_can_be_checkpointed(use_reentrant):
    head, states, labels = problem()
    expected = torch.autograd.grad(by_chunks(nll, head, states, labels).sum(), states)
    losses = checkpoint(
        lambda states: by_chunks(nll, head, states, labels), states, use_reentrant=use_reentrant
    )
    losses.sum().backward()
    assert torch.equal(states.grad, expected[0])


def test_nothing_is_computed_twice_under_a_sum():
    head, states, labels = problem()
    calls = []

    def counting(*arguments):
        calls.append(len(arguments[1]))
        return nll(*arguments)

    (by_chunks(counting, head, states, labels, rows=3).sum() / 7).backward()
    assert calls == [3, 3, 1]
    (by_chunks(counting, head, states, labels, rows=3) * torch.rand(7)).sum().backward()
    assert calls == [3, 3, 1] * 3


def test_what_needs_no_gradient_gets_none():
    head, states, labels = problem()
    head.bias.requires_grad_(False)
    by_chunks(nll, head, states.detach(), labels, rows=2).sum().backward()
    assert head.bias.grad is None
    assert head.weight.grad.abs().sum() > 0


def test_without_gradients_no_graph_is_made():
    head, states, labels = problem()

    def watching(*arguments):
        loss = nll(*arguments)
        assert not loss.requires_grad
        return loss

    with torch.no_grad():
        found = by_chunks(watching, head, states, labels, rows=2)
    torch.testing.assert_close(found, nll(head, states, labels).detach())


@pytest.mark.parametrize("uniform", [True, False])
def test_a_second_derivative_is_refused_not_wrong(uniform):
    head, states, labels = problem()
    losses = by_chunks(nll, head, states, labels)
    weights = torch.rand(7, dtype=torch.float64, requires_grad=True)
    loss = losses.sum() if uniform else (losses * weights).sum()
    with pytest.raises(RuntimeError, match="expected one derivative, got create_graph=True"):
        torch.autograd.grad(loss, states, create_graph=True)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_weighted_losses_of_parameters_that_are_gone_are_refused_not_wrong(is_frozen):
    head, states, labels = problem()
    head.requires_grad_(not is_frozen)
    call = nn.Module()
    call.head, call.forward = head, lambda: by_chunks(nll, head, states, labels)
    others = {
        f"head.{name}": p.detach().clone().requires_grad_(not is_frozen)
        for name, p in head.named_parameters()
    }
    with pytest.raises(RuntimeError, match="expected the head's weights and h_exp of the for"):
        (functional_call(call, others, ()) * torch.arange(7)).sum().backward()
    functional_call(call, others, ()).sum().backward()
    assert states.grad.any()
    assert is_frozen or others["head.weight"].grad.any()


@pytest.mark.parametrize("is_frozen", [False, True])
def test_weights_that_were_changed_in_place_are_refused_not_wrong(is_frozen):
    head, states, labels = problem()
    head.requires_grad_(not is_frozen)
    losses = by_chunks(nll, head, states, labels)
    with torch.no_grad():
        head.weight.mul_(3)
    with pytest.raises(RuntimeError, match="expected the head's weights and h_exp of the for"):
        (losses * torch.arange(7)).sum().backward()


@pytest.mark.parametrize("learned", [False, True])
def test_an_exponent_that_was_changed_is_refused_not_wrong(learned):
    inner = {"name": "dist", "h_exp": -12.0, "learn_h_exp": learned}
    head = build_head({"name": "rotation", "inner": inner}, hidden_size=4, vocab_size=9)
    states, labels = torch.randn(7, 4, requires_grad=True), torch.arange(7)
    losses = by_chunks(nll, head, states, labels)
    head.inner.h_exp = -3.0
    with pytest.raises(RuntimeError, match="expected the head's weights and h_exp of the forward"):
        (losses * torch.arange(7)).sum().backward()


def test_a_head_of_inference_mode_has_a_loss():
    with torch.inference_mode():
        head, states, labels = problem()
        torch.testing.assert_close(by_chunks(nll, head, states, labels), nll(head, states, labels))


def test_other_than_one_label_for_each_row_is_refused():
    head, states, _ = problem()
    with pytest.raises(ValueError, match=r"^labels: expected 7, one for each row, got 2$"):
        by_chunks(nll, head, states, torch.tensor([1, 2]))
