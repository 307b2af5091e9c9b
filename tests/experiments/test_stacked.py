"""Stacked seeds: one of them is the product's head and loss, and a plain PyTorch MLP."""

import pytest
import torch
from sklearn.decomposition import PCA
from torch import nn

from experiments.stacked import (
    StackedMLP,
    multi_head_log_probs,
    principal_components,
    seeded_generators,
)
from harmonic_sft.losses import LOSSES
from harmonic_sft.models import build_head

SIZES = {"vocab_size": 31, "num_inputs": 2, "hidden_size": 16}


@pytest.fixture
def model() -> StackedMLP:
    return StackedMLP(seeded_generators([3, 4, 5]), **SIZES)


@pytest.fixture
def input_ids() -> torch.Tensor:
    return torch.randint(31, (3, 20, 2), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("num_heads", [1, 2, 8, 16])
def test_one_seed_is_the_multi_head_head_with_its_loss_and_gradients(model, input_ids, num_heads):
    hidden_states, labels = model(input_ids).detach(), input_ids[..., 0]
    prototypes = model.embedding.detach().requires_grad_()
    log_probs = multi_head_log_probs(hidden_states, prototypes, num_heads)
    losses = -log_probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    losses.sum().backward()
    settings = {"num_heads": num_heads, "inner": {"name": "linear", "bias": False}}
    head = build_head({"name": "multi_head", **settings}, hidden_size=16, vocab_size=31)
    loss = LOSSES["cross_entropy"]().prepare(head)
    for seed in range(3):
        head.zero_grad()
        head.initialize_(prototypes[seed].detach())
        expected = loss(head, hidden_states[seed], labels[seed])
        expected.sum().backward()
        torch.testing.assert_close(losses[seed], expected)
        torch.testing.assert_close(log_probs[seed], head(hidden_states[seed]))
        torch.testing.assert_close(prototypes.grad[seed], head.weight.grad)


def test_one_seed_is_an_embedding_and_two_linear_layers(model, input_ids):
    hidden_states = model(input_ids)
    for seed in range(3):
        first, last = nn.Linear(32, 100), nn.Linear(100, 16)
        with torch.no_grad():
            first.weight.copy_(model.weight_in[seed].T)
            first.bias.copy_(model.bias_in[seed, 0])
            last.weight.copy_(model.weight_out[seed].T)
            last.bias.copy_(model.bias_out[seed, 0])
        inputs = torch.stack([model.embedding[seed][pair].flatten() for pair in input_ids[seed]])
        expected = last(nn.functional.silu(first(inputs)))
        torch.testing.assert_close(hidden_states[seed], expected)


def test_a_seed_draws_the_same_beside_any_others(model):
    alone = StackedMLP(seeded_generators([4]), **SIZES)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter[1], alone.get_parameter(name)[0])
        assert not torch.equal(parameter[0], parameter[1])


def test_weights_start_as_linear_layers_do(model):
    for parameter, fan_in in [
        (model.embedding, 16),
        (model.weight_in, 32),
        (model.bias_in, 32),
        (model.weight_out, 100),
        (model.bias_out, 100),
    ]:
        largest = parameter.abs().max().item()
        assert 0.9 * fan_in**-0.5 < largest <= fan_in**-0.5


def test_principal_components_are_those_of_scikit_learn(model):
    shares, coordinates = principal_components(model.embedding.detach() + 7.0)
    for seed in range(3):
        pca = PCA(2)
        places = torch.from_numpy(pca.fit_transform(model.embedding[seed].detach().double()))
        expected = torch.from_numpy(pca.explained_variance_ratio_)
        torch.testing.assert_close(shares[seed], expected, rtol=1e-5, atol=0)
        torch.testing.assert_close(coordinates[seed].abs(), places.abs(), rtol=0, atol=1e-5)
