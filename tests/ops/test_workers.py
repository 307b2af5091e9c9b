"""Threads, processes and modes of PyTorch around the fused losses."""

import functools
import multiprocessing
import os
from threading import Event, Thread

import pytest
import torch

from harmonic_sft.ops import tiles
from harmonic_sft.ops.workers import cpu_workers
from tests.ops import fused
from tests.ops.fused import KINDS

N, V, D = 20, 1600, 8  # four tiles
loss_of = functools.partial(fused.loss_of, h_exp=-3.5)
make_inputs = functools.partial(fused.random_inputs, N, V, D)


def run(kind="sphere", **settings):
    """Loss and both gradients."""
    hidden_states, prototypes, labels = make_inputs()
    leaves = [hidden_states.requires_grad_(), prototypes.requires_grad_()]
    loss = loss_of(kind, *leaves, labels, **settings)
    return [loss.detach(), *torch.autograd.grad(loss.sum(), leaves)]


def test_an_interrupt_as_the_threads_are_taken_leaves_their_number(monkeypatch):
    count, set_num_threads = torch.get_num_threads(), torch.set_num_threads

    def interrupted(number):
        set_num_threads(number)
        if number == 1:
            raise KeyboardInterrupt

    assert count == 2
    monkeypatch.setattr(torch, "set_num_threads", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run()
    assert torch.get_num_threads() == count


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_task_is_done_once_on_one_core_by_its_own_worker_or_by_whoever_is_free(count, fixed):
    torch.set_num_threads(count)
    seen = []
    with cpu_workers() as workers:
        assert workers.count == count
        workers.run(lambda *task: seen.append((*task, torch.get_num_threads())), 7, fixed=fixed)
    assert sorted(task for _, task, _ in seen) == list(range(7))
    assert all(cores == 1 for _, _, cores in seen)
    assert not fixed or all(task % count == worker for worker, task, _ in seen)
    assert torch.get_num_threads() == count


def fail(index, _):
    raise ArithmeticError(f"worker {index} fails")


@pytest.mark.parametrize("count", [1, 2])
def test_errors_of_workers_are_raised_and_threads_are_restored(count):
    torch.set_num_threads(count)
    with pytest.raises(ArithmeticError, match="worker 0 fails"), cpu_workers() as workers:
        workers.run(fail, count)
    assert torch.get_num_threads() == count
    with cpu_workers() as workers:  # the pool is still of use
        workers.run(lambda *_: None, count)


def test_an_error_in_a_tile_is_raised_and_the_next_call_works(monkeypatch):
    def broken(*_, **__):
        raise ArithmeticError("no statistics")

    before, threads = run(), torch.get_num_threads()
    with monkeypatch.context() as patch:
        patch.setattr(tiles.TorchTiles, "_logits", broken)
        with pytest.raises(ArithmeticError, match="no statistics"):
            run()
    assert torch.get_num_threads() == threads
    for first, second in zip(before, run(), strict=True):
        assert torch.equal(first, second)


SETTINGS = [{}, {"gradients": "recompute", "label_smoothing": 0.1}]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_number_of_threads_hardly_changes_results(kind, settings):
    found = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        found.append(run(kind, **settings))
    for other in found[1:]:
        for actual, expected in zip(other, found[0], strict=True):
            scale = expected.abs().max().item()
            torch.testing.assert_close(actual, expected, rtol=1e-6, atol=3e-6 * scale)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_the_same_where_no_gradient_is_wanted(kind, mode):
    expected = run(kind)[0]
    inputs = make_inputs()
    with mode():
        hidden_states, prototypes = (tensor.clone() for tensor in inputs[:2])
        torch.testing.assert_close(loss_of(kind, hidden_states, prototypes, inputs[2]), expected)
        leaves = [tensor.clone().requires_grad_() for tensor in inputs[:2]]
        loss = loss_of(kind, *leaves, inputs[2])
        assert not loss.requires_grad
        torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("frozen", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_side_gets_no_gradient_and_the_other_the_same(kind, frozen):
    expected = run(kind)[1:]
    *leaves, labels = make_inputs()
    leaves[1 - frozen].requires_grad_()
    loss_of(kind, *leaves, labels).sum().backward()
    assert leaves[frozen].grad is None
    torch.testing.assert_close(leaves[1 - frozen].grad, expected[1 - frozen])


@pytest.mark.parametrize("kind", KINDS)
def test_strided_inputs_are_as_good_as_contiguous_ones(kind):
    hidden_states, prototypes, labels = make_inputs()
    expected = run(kind)
    leaves = [tensor.T.contiguous().T.requires_grad_() for tensor in (hidden_states, prototypes)]
    strided = torch.stack([labels, labels], 1)[:, 0]
    loss = loss_of(kind, *leaves, strided)
    for actual, wanted in zip(
        [loss, *torch.autograd.grad(loss.sum(), leaves)], expected, strict=True
    ):
        scale = wanted.abs().max().item()  # one thread sums in another order than two
        torch.testing.assert_close(actual, wanted, rtol=1e-6, atol=3e-6 * scale)


@pytest.mark.parametrize("kind", KINDS)
def test_mixed_dtypes_compute_in_the_better_one(kind):
    hidden_states, prototypes, labels = make_inputs()
    leaves = [hidden_states.bfloat16().requires_grad_(), prototypes.double().requires_grad_()]
    same = [leaf.detach().double().requires_grad_() for leaf in leaves]
    losses = [loss_of(kind, *pair, labels) for pair in (leaves, same)]
    assert losses[0].dtype == torch.float64
    assert torch.equal(*losses)
    gradients = [
        torch.autograd.grad(losses[i].sum(), pair) for i, pair in enumerate((leaves, same))
    ]
    for leaf, actual, wanted in zip(leaves, *gradients, strict=True):
        assert actual.dtype == leaf.dtype
        torch.testing.assert_close(actual, wanted.to(leaf.dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_that_is_not_a_number_spoils_itself_alone(kind):
    expected = run(kind)
    hidden_states, prototypes, labels = make_inputs()
    hidden_states[3, 2] = torch.nan
    leaves = [hidden_states.requires_grad_(), prototypes]
    loss, metrics = fused.with_metrics_of(kind, *leaves, labels, h_exp=-3.5)
    loss.sum().backward()
    others = torch.arange(len(labels)) != 3
    for metric in (metrics.entropy, metrics.log_probs):
        assert metric[3].isnan()
        assert metric[others].isfinite().all()
    for actual, wanted in ((loss.detach(), expected[0]), (hidden_states.grad, expected[1])):
        assert actual[3].isnan().all()
        torch.testing.assert_close(actual[others], wanted[others])


@pytest.mark.parametrize("kind", KINDS)
def test_prototypes_that_are_not_numbers_spoil_every_token(kind):
    hidden_states, prototypes, labels = make_inputs()
    prototypes[1234, 0] = torch.nan
    labels[labels == 1234] = 0
    leaves = [hidden_states.requires_grad_(), prototypes.requires_grad_()]
    loss = loss_of(kind, *leaves, labels)
    found = torch.autograd.grad(loss.sum(), leaves)
    assert loss.isnan().all()
    assert found[0].isnan().any(1).all()


def _send(connection):
    torch.set_num_threads(2)
    hidden_states, prototypes, labels = make_inputs()
    loss = loss_of("sphere", hidden_states.requires_grad_(), prototypes, labels)
    connection.send(loss.detach().tolist())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_starts_threads_of_its_own():
    expected = run()[0]  # the parent has a pool now
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send, args=(sender,))
    child.start()
    try:
        assert receiver.poll(60), "the child does not end"
        torch.testing.assert_close(torch.tensor(receiver.recv()), expected)
    finally:
        child.kill()
        child.join()


def test_a_thread_that_began_inside_a_call_leaves_the_number_as_it_was():
    numbers, started = [], Event()

    def call():
        numbers.append(torch.get_num_threads())  # its first use of PyTorch
        started.set()
        run()

    with cpu_workers():
        inside = Thread(target=call)
        inside.start()
        assert started.wait(60)
    inside.join()
    later = Thread(target=lambda: numbers.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert numbers == [1, 2]


def test_workers_flush_denormals_and_the_caller_keeps_them():
    tiny = torch.tensor([1e-30])
    found = {}
    with cpu_workers() as workers:
        workers.run(lambda index, _: found.setdefault(index, float(tiny * 1e-10)), 2)
    if torch.set_flush_denormal(False):  # False where a processor cannot
        assert found == {0: 0.0, 1: 0.0}
    assert float(tiny * 1e-10) > 0
