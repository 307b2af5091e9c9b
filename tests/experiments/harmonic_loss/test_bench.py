"""Training many seeds at once is training them one at a time; heads and losses are formulas."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from experiments.harmonic_loss import bench
from experiments.harmonic_loss.bench import Cell, head_logits, losses, run, train
from experiments.harmonic_loss.compiled import CompiledTrainer, library
from experiments.harmonic_loss.data import TASKS
from experiments.stacked import seeded_generators
from harmonic_sft.models import build_head


@pytest.fixture
def states():
    """Hidden states `[3, 20, 16]`, prototypes `[3, 31, 16]` and a bias `[3, 1, 31]`."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, n, d, generator=generator) for n, d in ((20, 16), (31, 16), (1, 31))]


@pytest.mark.parametrize(
    ("head", "settings"),
    [
        ("dist", {"name": "dist", "h_exp": -1.0, "unit_sphere": False, "eps": 1e-4}),
        ("dist", {"name": "dist", "h_exp": -7.0, "unit_sphere": False, "eps": 1e-4}),
        ("l2_squared", {"name": "l2", "scale": 1.0, "learn_scale": False}),
        ("dot_harmonic", {"name": "power", "power": -1.0, "eps": 1e-4}),
        ("linear", {"name": "linear", "bias": False}),
    ],
)
def test_heads_are_those_of_the_package(head, settings, states):
    hidden_states, prototypes, _ = states
    logits = head_logits(hidden_states, prototypes, None, head, settings.get("h_exp", -1.0))
    product = build_head(settings, hidden_size=16, vocab_size=31)
    for seed in range(3):
        with torch.no_grad():
            product.weight.copy_(prototypes[seed])
        expected = product(hidden_states[seed]).log_softmax(-1)
        torch.testing.assert_close(logits[seed].log_softmax(-1), expected, rtol=1e-4, atol=1e-4)


def test_an_unsquared_distance_and_a_bias_enter_the_logits(states):
    hidden_states, prototypes, bias = states
    distances = -torch.cdist(hidden_states, prototypes)
    torch.testing.assert_close(
        head_logits(hidden_states, prototypes, None, "l2", -1.0), distances, rtol=1e-4, atol=1e-4
    )
    with_bias = head_logits(hidden_states, prototypes, bias, "linear", -1.0)
    torch.testing.assert_close(with_bias, hidden_states @ prototypes.mT + bias)


def plain_contrastive(outputs, labels):
    """Pairs in two loops; an example is a negative pair with itself, as released."""
    pull, push = [], []
    for i, one in enumerate(outputs):
        for j, other in enumerate(outputs):
            distance = (one - other).norm()
            if i != j and labels[i] == labels[j]:
                pull.append(distance**2)
            else:
                push.append(max(0, 1 - distance) ** 2)
    return sum(pull) / len(pull) + sum(push) / len(push)


def plain_soft_nn(outputs, labels):
    outputs, total = F.normalize(outputs, dim=-1), 0.0
    for i, one in enumerate(outputs):
        near = [((one - other).square().sum() / -0.1).exp() for other in outputs]
        same = [near[j] for j in range(len(near)) if j != i and labels[j] == labels[i]]
        ratio = sum(same) / (sum(near) - near[i]) if same else torch.tensor(1e-8)
        total = total - ratio.log()
    return total / len(outputs)


def plain_spherical(outputs, labels):
    total = 0.0
    for row, label in zip(outputs, labels, strict=True):
        powers = (row / row.norm()) ** 2 + 1e-4
        total = total - (powers[label] / powers.sum()).log()
    return total / len(outputs)


def plain_nll(outputs, labels):
    picked = [row.log_softmax(-1)[label] for row, label in zip(outputs, labels, strict=True)]
    return -sum(picked) / len(picked)


@pytest.mark.parametrize(
    ("loss", "plain"),
    [
        ("nll", plain_nll),
        ("contrastive", plain_contrastive),
        ("soft_nn", plain_soft_nn),
        ("spherical", plain_spherical),
    ],
)
def test_losses_are_their_formulas(loss, plain):
    generator = torch.Generator().manual_seed(0)
    outputs = 0.1 * torch.randn(2, 9, 5, generator=generator, dtype=torch.float64)
    labels = torch.tensor([[0, 0, 1, 1, 2, 3, 3, 3, 4], [2, 2, 2, 1, 1, 0, 4, 3, 3]])
    expected = torch.stack([plain(*one) for one in zip(outputs, labels, strict=True)])
    torch.testing.assert_close(losses(outputs, labels, loss), expected)


@pytest.mark.parametrize(
    "settings",
    [
        {"head": "linear"},
        {"head": "dist"},
        {"head": "linear", "model": "transformer"},
        {"head": "dist", "model": "transformer"},
        {"head": "l2"},
        {"head": "l2_squared"},
        {"head": "dot_harmonic"},
        {"head": "dist", "loss": "contrastive"},
        {"head": "dist", "loss": "soft_nn"},
        {"head": "dist", "loss": "spherical"},
    ],
)
def test_seeds_trained_together_are_those_trained_alone_over_50_steps(settings):
    cell = Cell(task="modular_addition", num_epochs=2, **settings)
    together, *_, accuracy = train(cell, [0, 1, 2])
    for seed in range(3):
        alone, *_, expected = train(cell, [seed])
        assert accuracy[:, seed].tolist() == expected[:, 0].tolist()
        for name, parameter in together.named_parameters():
            one = alone.get_parameter(name)[0]
            torch.testing.assert_close(parameter[seed], one, rtol=0, atol=1e-5)


def test_a_step_is_adamw_on_loss_and_penalty(monkeypatch):
    """One epoch of one seed of the MLP, with modules of PyTorch and batches of its own order."""
    cell = Cell(task="permutation", head="dist", num_epochs=1, penalty=0.01)
    generators = seeded_generators([0])
    examples = bench.draw_examples(TASKS["permutation"](), "released", 0.8, generators)
    network = bench.Network(cell, TASKS["permutation"](), generators)
    first, last = nn.Linear(32, 100), nn.Linear(100, 16)
    embedding = nn.Parameter(network.body.embedding[0].detach().clone())
    with torch.no_grad():
        first.weight.copy_(network.body.weight_in[0].T)
        first.bias.copy_(network.body.bias_in[0, 0])
        last.weight.copy_(network.body.weight_out[0].T)
        last.bias.copy_(network.body.bias_out[0, 0])
    parameters = [embedding, *first.parameters(), *last.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.01)
    for rows in torch.randperm(460, generator=generators[0]).split(32):
        hidden_states = last(F.silu(first(embedding[examples.inputs[0, rows]].flatten(1))))
        powers = ((hidden_states[:, None] - embedding).square().sum(-1) + 1e-4) ** -1
        probs = powers / powers.sum(-1, keepdim=True)
        nll = -probs.gather(1, examples.labels[0, rows, None]).log().mean()
        optimizer.zero_grad()
        (nll + 0.01 * embedding.square().mean(0).sqrt().mean()).backward()
        optimizer.step()
    trained, *_ = train(cell, [0])
    torch.testing.assert_close(trained.body.embedding[0], embedding, rtol=0, atol=1e-4)


@pytest.mark.parametrize("loss", ["contrastive", "soft_nn"])
def test_a_loss_on_pairs_predicts_the_nearest_mean(loss):
    cell = Cell(task="in_context", head="dist", loss=loss, num_epochs=30)
    found = run(cell, range(2))
    assert min(found["test_accuracy"]) > 3 * found["chance_accuracy"]
    assert len(found["variance"]) == 2
    assert all(0.2 < shares[1] <= 1 for shares in found["variance"])


def test_harmonic_prototypes_of_the_transformer_are_weights_of_their_own():
    task = TASKS["equivalence"]()
    for head, is_tied in (("linear", True), ("dist", False)):
        cell = Cell(task="equivalence", model="transformer", head=head)
        network = bench.Network(cell, task, seeded_generators([0]))
        assert (network.prototypes is None) == is_tied
        assert network.bias is None
    assert bench.Network(Cell(task="equivalence"), task, seeded_generators([0])).bias is not None


def test_chance_levels_are_those_of_random_rows():
    assert 0.25 < bench.chance_cumulative(31, 16)[1] < 0.35
    assert bench.chance_cumulative(3, 16)[1] == pytest.approx(1.0)


@pytest.mark.parametrize("task", ["in_context", "permutation"])  # the latter: a batch of 12
@pytest.mark.parametrize("head", ["linear", "dist", "l2", "l2_squared", "dot_harmonic"])
def test_compiled_code_trains_as_pytorch_does_over_50_steps(head, task, monkeypatch):
    if library() is None:
        pytest.skip("no C++ compiler")
    num_epochs = 2 if task == "in_context" else 4
    cell = Cell(task=task, head=head, h_exp=-2.0, num_epochs=num_epochs, penalty=0.01)
    compiled, *_ = train(cell, [0, 1])
    monkeypatch.setattr(bench, "library", lambda: None)
    expected, *_ = train(cell, [0, 1])
    for name, parameter in compiled.named_parameters():
        # AdamW turns the rounding of a gradient near 0 into a part of its step of 2e-3.
        torch.testing.assert_close(parameter, expected.get_parameter(name), rtol=0, atol=5e-5)


def test_compiled_gates_do_not_overflow():
    """Far below zero exp(-x) is infinite, of whose reciprocal fast arithmetic makes NaN."""
    if (code := library()) is None:
        pytest.skip("no C++ compiler")
    cell = Cell(task="permutation", head="l2")
    generators = seeded_generators([0])
    examples = bench.draw_examples(TASKS["permutation"](), "released", 0.8, generators)
    network = bench.Network(cell, TASKS["permutation"](), generators)
    with torch.no_grad():
        network.body.weight_in.mul_(1e4)
    trainer = CompiledTrainer(code, cell, network.body, network.bias, examples)
    trainer.train(torch.arange(460).view(1, 1, 460))
    assert all(parameter.isfinite().all() for parameter in network.parameters())
