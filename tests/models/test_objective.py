"""The reduction: labelled positions only, summed, divided once."""

import functools

import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from harmonic_sft.models import (
    DistLayer,
    LinearHead,
    mean_token_loss,
    negative_log_likelihood,
    scored_positions,
)

B, T, D, V = 3, 7, 8, 20
mean_loss = functools.partial(mean_token_loss, negative_log_likelihood)


@pytest.fixture
def batch():
    torch.manual_seed(0)
    labels = torch.randint(V, (B, T))
    labels[torch.rand(B, T) < 0.5] = -100
    return DistLayer(D, V), torch.randn(B, T, D), labels


@pytest.mark.parametrize("causal", [False, True])
def test_every_label_counts_as_much_as_it_weighs(batch, causal):
    head, states, labels = batch
    weights = torch.rand(B, T)
    start, expected, count = int(causal), 0.0, 0
    for b in range(B):
        for t in range(start, T):
            if labels[b, t] != -100:
                expected += weights[b, t] * head.nll(states[b, t - start][None], labels[b, t][None])
                count += 1
    found = mean_loss(head, states, labels, label_weights=weights, causal=causal)
    torch.testing.assert_close(found, expected.squeeze() / count)


def test_parts_of_a_batch_sum_to_the_whole(batch):
    head, states, labels = batch
    count = (labels != -100).sum()
    whole = mean_loss(head, states, labels)
    parts = [
        mean_loss(head, states[i : i + 1], labels[i : i + 1], num_items_in_batch=count)
        for i in range(B)
    ]
    torch.testing.assert_close(torch.stack(parts).sum(), whole)


@pytest.mark.parametrize("count", [None, 0, torch.tensor(0)])
def test_nothing_labelled_is_a_zero_with_a_graph(batch, count):
    head, states, labels = batch
    nothing = torch.full_like(labels, -100)
    loss = mean_loss(head, states, nothing, num_items_in_batch=count)
    loss.backward()
    assert loss.item() == 0
    assert head.weight.grad is not None


def test_a_label_out_of_range_is_refused(batch):
    head, states, labels = batch
    labels[0, 0] = V
    with pytest.raises(ValueError, match=f"labels: expected values from 0 to {V - 1} or -100"):
        mean_loss(head, states, labels)


@pytest.mark.parametrize("causal", [False, True])
def test_positions_from_a_collator_change_nothing(batch, causal):
    head, states, labels = batch
    found = []
    for positions in (None, scored_positions(labels, num_classes=V, causal=causal)):
        leaf = states.clone().requires_grad_()
        loss = mean_loss(head, leaf, labels, label_positions=positions, causal=causal)
        loss.backward()
        found.append((loss, leaf.grad))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_all_is_moved_to_the_device_of_the_head(batch):
    head, states, labels = batch
    weights = torch.rand(B, T)
    loss = mean_token_loss(
        negative_log_likelihood, head.to("meta"), states, labels, label_weights=weights
    )
    assert loss.is_meta


def test_with_positions_no_value_is_looked_at():
    """Fake tensors have none: whatever asks for one, or for a shape that depends on it, raises."""
    with FakeTensorMode():
        head = LinearHead(D, V)
        states, labels = torch.randn(B, T, D, requires_grad=True), torch.zeros(B, T).long()
        positions = torch.zeros(5).long()
        count = torch.tensor(5)
        loss = mean_loss(head, states, labels, label_positions=positions, num_items_in_batch=count)
        loss.backward()
        assert states.grad.shape == states.shape
        with pytest.raises(DynamicOutputShapeException):
            mean_loss(head, states, labels)


def test_labels_of_another_shape_or_kind_are_refused(batch):
    head, states, labels = batch
    message = rf"^labels: expected one class number for each of \[{B}, {T}\], got torch\."
    longer = torch.cat([labels, labels[:, :1]], 1)
    for bad in (labels[:, 1:], labels[:1], longer, labels.float()):
        with pytest.raises(ValueError, match=message):
            mean_loss(head, states, bad)


@pytest.mark.parametrize("shape", [(B, T + 1), (B,), (T, B), (B * T,), ()], ids=str)
def test_label_weights_of_another_shape_are_refused(batch, shape):
    head, states, labels = batch
    message = rf"^label_weights: expected one for each of \[{B}, {T}\], got \["
    with pytest.raises(ValueError, match=message):
        mean_loss(head, states, labels, label_weights=torch.ones(shape))


def test_the_weights_of_whole_texts_may_be_a_row_or_a_column(batch):
    head, states, labels = batch
    weights = torch.rand(B)
    row, column = (
        mean_loss(head, states[:, :1], labels[:, :1], label_weights=each)
        for each in (weights, weights.unsqueeze(1))
    )
    assert row == column


def test_labels_of_32_bits_are_those_of_64(batch):
    head, states, labels = batch
    found = mean_loss(head, states, labels.int())
    assert found == mean_loss(head, states, labels)
