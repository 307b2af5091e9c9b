"""The penalty against exact transport by linear programming."""

import itertools

import numpy as np
import pytest
import torch
from scipy.optimize import linprog

from scripts.grpo_example import w2_penalty

N, V, D = 6, 7, 3


@pytest.fixture
def parts():
    torch.manual_seed(0)
    logits = 2 * torch.randn(2, N, V, dtype=torch.float64)
    return logits[0], logits[1], torch.randn(V, D, dtype=torch.float64)


def exact(policy, reference, prototypes):
    """Squared 2-Wasserstein distance of two distributions `[V]`."""
    size = len(policy)
    costs = torch.cdist(prototypes, prototypes).square().numpy().ravel()
    rows = np.kron(np.eye(size), np.ones(size))
    columns = np.kron(np.ones(size), np.eye(size))
    masses = np.concatenate([policy.numpy(), reference.numpy()])
    return linprog(costs, A_eq=np.concatenate([rows, columns]), b_eq=masses).fun


def test_it_is_an_upper_bound_of_the_distance(parts):
    upper = w2_penalty(*parts)
    policy, reference = (logits.softmax(-1) for logits in parts[:2])
    for row in range(N):
        assert exact(policy[row], reference[row], parts[2]) <= upper[row] + 1e-9
    assert (upper > 1e-3).all()


def test_the_formula(parts):
    policy_logits, reference_logits, prototypes = parts
    p, r = policy_logits.softmax(-1), reference_logits.softmax(-1)
    for row in range(N):
        a, b = (p[row] - r[row]).clamp_min(0), (r[row] - p[row]).clamp_min(0)
        expected = sum(
            a[j] * b[k] * (prototypes[j] - prototypes[k]).square().sum() / a.sum()
            for j, k in itertools.product(range(V), repeat=2)
        )
        torch.testing.assert_close(w2_penalty(*parts)[row], expected)


def test_autocast_changes_no_digit(parts):
    parts = [part.float() for part in parts]
    with torch.autocast("cpu"):
        found = w2_penalty(*parts)
    assert torch.equal(found, w2_penalty(*parts))
    halves = [part.bfloat16() for part in parts]  # rounded before, and not on the way
    assert torch.equal(w2_penalty(*halves), w2_penalty(*[half.float() for half in halves]))


def test_it_is_exact_against_a_dirac(parts):
    policy_logits, _, prototypes = parts
    dirac = torch.full((N, V), -1e9, dtype=torch.float64)
    dirac[:, 2] = 0
    found = w2_penalty(policy_logits, dirac, prototypes)
    costs = (prototypes - prototypes[2]).square().sum(-1)
    torch.testing.assert_close(found, policy_logits.softmax(-1) @ costs)


def test_agreement_costs_nothing_and_has_no_gradient(parts):
    logits = parts[0].clone().requires_grad_()
    loss = w2_penalty(logits, parts[0], parts[2])
    assert torch.equal(loss, torch.zeros(N, dtype=torch.float64))
    loss.sum().backward()
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_a_mean_of_all_prototypes_costs_no_digits():
    torch.manual_seed(0)
    prototypes = torch.randn(64) + 0.05 * torch.randn(500, 64)
    policy = 2 * torch.randn(5, 500)
    inputs = policy, policy + 1e-4 * torch.randn(5, 500), prototypes
    expected = w2_penalty(*(tensor.double() for tensor in inputs))
    torch.testing.assert_close(w2_penalty(*inputs).double(), expected, rtol=1e-2, atol=0)


def test_gradients(parts):
    policy_logits, reference_logits, prototypes = parts
    assert torch.autograd.gradcheck(
        lambda logits: w2_penalty(logits, reference_logits, prototypes),
        policy_logits.requires_grad_(),
    )


def test_a_difference_in_the_last_digits_has_finite_gradients():
    logits = torch.tensor([[0.0, -60.0, -70.0]], requires_grad=True)
    reference = torch.tensor([[0.0, -60.01, -69.99]])
    w2_penalty(logits, reference, torch.eye(3)).sum().backward()
    assert logits.grad.isfinite().all()
