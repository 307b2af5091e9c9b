"""Distillation against its formula in float64 loops; the tiles against the dense form."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers.modeling_outputs import BaseModelOutput

from harmonic_sft.losses import CrossEntropyLoss, DistillLoss
from harmonic_sft.models import build_head
from tests.ops.fused import assert_same

N, D, V = 7, 6, 11
HEADS = {
    "sphere": {"name": "dist", "h_exp": -7.0},
    "learned": {"name": "dist", "h_exp": -4.3, "learn_h_exp": True},
    "euclidean": {"name": "dist", "h_exp": -20.0, "unit_sphere": False},
    "linear": {"name": "linear"},
    "unbiased": {"name": "linear", "bias": False},
    "cosine": {"name": "cosine", "scale": 9.0},
}


@pytest.fixture
def parts():
    torch.manual_seed(0)
    old = build_head({"name": "linear"}, hidden_size=D, vocab_size=V)
    head = build_head({"name": "dist", "h_exp": -3.0}, hidden_size=D, vocab_size=V)
    with torch.no_grad():
        old.weight.mul_(30)
    head.double().renormalize_()
    return old.double(), head, torch.randn(N, D).double(), torch.randint(V, (N,))


def loop(old, head, hidden_states, labels, weight):
    losses = []
    for state, label in zip(hidden_states, labels, strict=True):
        q = old(state[None])[0].softmax(-1)
        p = head(state[None])[0].softmax(-1)
        divergence = sum(q[j] * (q[j].log() - p[j].log()) for j in range(V))
        losses.append(weight * divergence - (1 - weight) * p[label].log())
    return torch.stack(losses)


@pytest.mark.parametrize("progress", [0.0, 0.3, 0.5, 0.9])
def test_the_formula(parts, progress):
    old, head, hidden_states, labels = parts
    loss = DistillLoss(until=0.6).prepare(old)
    loss.anneal(progress)
    weight = max(0.0, 1 - progress / 0.6)
    found = loss(head, hidden_states, labels)
    torch.testing.assert_close(found, loop(old, head, hidden_states, labels, weight))
    if weight == 0:  # to the bit
        assert torch.equal(found, CrossEntropyLoss()(head, hidden_states, labels))


def test_the_teacher_is_a_copy(parts):
    old, head, hidden_states, labels = parts
    loss = DistillLoss().prepare(old)
    before = loss(head, hidden_states, labels)
    with torch.no_grad():
        old.weight.zero_()
    assert torch.equal(loss(head, hidden_states, labels), before)


def large_parts(settings):
    """Chunks and tiles enough, raw prototypes off the sphere, a captured and a confident token."""
    torch.manual_seed(0)
    old = build_head({"name": "linear"}, hidden_size=8, vocab_size=1700).double()
    head = build_head(settings, hidden_size=8, vocab_size=1700).double()
    hidden_states = torch.randn(300, 8, dtype=torch.float64)
    labels = torch.randint(1700, (300,))
    with torch.no_grad():
        for parameter in (*old.parameters(), *head.parameters()):
            if parameter.dim():
                parameter.normal_()
        hidden_states[0] = head.weight[labels[0]] + 1e-4
        hidden_states[1] = head.weight[(labels[1] + 1) % 1700] + 1e-3
    return old, head, hidden_states.requires_grad_(), labels


def dense(loss, head, hidden_states, labels):
    """The formula with all logits; the teacher's have no graph."""
    log_q = loss.teacher(hidden_states).log_softmax(-1).detach()
    log_p = head(hidden_states).log_softmax(-1)
    divergence = (log_q.exp() * (log_q - log_p)).sum(-1)
    own = log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return loss.weight * divergence - (1 - loss.weight) * own


class OldBody(torch.nn.Module):
    """Other hidden states than those that the head is trained on."""

    def __init__(self, states):
        super().__init__()
        self.states = states

    def forward(self, input_ids, use_cache):
        assert not torch.is_grad_enabled()
        return BaseModelOutput(last_hidden_state=self.states)


@pytest.mark.parametrize("softcap", [None, 30.0])  # by tiles, densely
def test_the_old_body_gives_the_teacher_its_hidden_states(parts, softcap):
    _, head, hidden_states, labels = parts
    settings = {"name": "linear"} | ({"softcap": softcap} if softcap else {})
    old = build_head(settings, hidden_size=D, vocab_size=V).double()
    rows = torch.full((2, 5), -100)
    rows[0, 1:], rows[1, 2:] = labels[:4], labels[4:]
    states = torch.randn(2, 5, D).double()
    loss = DistillLoss().prepare(old, OldBody(states))
    loss.anneal(0.2)
    loss.read({"input_ids": rows, "labels": rows})
    found = loss(head, hidden_states, labels)
    read = torch.cat([states[0, :4], states[1, 1:4]])
    q = old(read).log_softmax(-1)
    p = head(hidden_states).log_softmax(-1)
    target = torch.nn.functional.one_hot(labels, V)
    expected = 0.6 * (q.exp() * (q - p)).sum(-1) - 0.4 * (target * p).sum(-1)
    torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError, match="to have read these 7 tokens, got none"):
        loss(head, hidden_states, labels)  # every batch is read once
    loss.anneal(0.5)
    loss.read({"input_ids": rows, "labels": rows})
    plain = CrossEntropyLoss()(head, hidden_states, labels)
    assert torch.equal(loss(head, hidden_states, labels), plain)


@pytest.mark.parametrize("upstream", ["sum", "uneven"])
@pytest.mark.parametrize("name", HEADS)
def test_tiles_against_dense_logits(name, upstream):
    old, head, hidden_states, labels = large_parts(HEADS[name])
    loss = DistillLoss().prepare(old)
    loss.anneal(0.15)
    weights = None if upstream == "sum" else torch.rand(300)
    wanted = [hidden_states, *(p for p in head.parameters() if p.requires_grad)]
    found, expected = loss(head, hidden_states, labels), dense(loss, head, hidden_states, labels)
    assert_same(found, expected, wanted, weights, rtol=1e-6, atol=1e-9)
    assert not any(p.requires_grad for p in loss.teacher.parameters())


@pytest.mark.parametrize("name", HEADS)
def test_tiles_in_float32_against_float64(name):
    exact = large_parts(HEADS[name])
    old, head, hidden_states, labels = large_parts(HEADS[name])
    old, head = old.float(), head.float()
    hidden_states = hidden_states.detach().float().requires_grad_()
    loss, reference = DistillLoss().prepare(old), DistillLoss().prepare(exact[0])
    for each in (loss, reference):
        each.anneal(0.15)
    found, expected = loss(head, hidden_states, labels), dense(reference, *exact[1:])
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    found = torch.autograd.grad(found.sum(), [hidden_states, head.weight])
    expected = torch.autograd.grad(expected.sum(), [exact[2], exact[1].weight])
    for gradient, of in zip(found, expected, strict=True):
        errors = (gradient.double() - of).norm(dim=-1) / of.norm(dim=-1).clamp_min(1e-9)
        assert errors.median() < 1e-5


@pytest.mark.parametrize(
    "settings", [{"name": "power"}, {"name": "multi_head", "num_heads": 2}], ids=["power", "multi"]
)
def test_a_batch_may_have_more_tokens_than_there_are_classes(parts, settings):
    old = parts[0]
    head = build_head(settings, hidden_size=D, vocab_size=V).double()
    hidden_states, labels = torch.randn(40, D).double(), torch.randint(V, (40,))
    loss = DistillLoss().prepare(old)
    loss.anneal(0.2)
    found = loss(head, hidden_states, labels)
    torch.testing.assert_close(found, loop(old, head, hidden_states, labels, loss.weight))


def test_a_failed_transform_of_torch_func_leaves_the_teacher_as_it_was(parts):
    old, head, hidden_states, labels = parts
    loss = DistillLoss().prepare(old)
    before, weight = loss(head, hidden_states, labels), loss.teacher.weight
    with pytest.raises(NotImplementedError, match=r"a transform of torch\.func"):
        torch.func.grad(lambda states: loss(head, states, labels).sum())(hidden_states)
    assert loss.teacher.weight is weight
    assert type(weight.data) is torch.Tensor
    assert torch.equal(loss(head, hidden_states, labels), before)


@pytest.mark.parametrize("head", ["euclidean", "cosine"])  # fused, and dense by chunks
def test_classes_that_the_teacher_rules_out_have_no_share(head):
    """A whole tile of them, too."""
    torch.manual_seed(0)
    old = build_head({"name": "linear"}, hidden_size=D, vocab_size=1600).double()
    new = build_head(HEADS[head], hidden_size=D, vocab_size=1600).double()
    with torch.no_grad():
        old.bias[1536:] = -torch.inf
    states, labels = torch.randn(N, D, dtype=torch.float64), torch.arange(N)
    found = DistillLoss().prepare(old)(new, states, labels)
    q, log_p = old(states).softmax(-1), new(states).log_softmax(-1)
    wanted = -torch.special.entr(q).sum(-1) - (q * log_p).sum(-1)
    torch.testing.assert_close(found, wanted)


def test_another_weight_compiles_nothing_after_the_second(parts):
    old, head, hidden_states, labels = parts
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    head, hidden_states = head.float(), hidden_states.float()
    loss = DistillLoss(until=1.0).prepare(old.float())
    compiled = torch.compile(loss, fullgraph=True, backend=counter)
    for progress in (0.0, 0.1, 0.3, 0.45, 0.9):
        loss.anneal(progress)
        found = compiled(head, hidden_states, labels)
        torch.testing.assert_close(found, loss(head, hidden_states, labels))
    assert counter.frame_count <= 2
    loss.anneal(1.0)
    torch.testing.assert_close(
        compiled(head, hidden_states, labels), loss(head, hidden_states, labels)
    )
