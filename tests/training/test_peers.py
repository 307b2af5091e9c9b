"""Which processes are named, and when: with a clock and a store of the test's own."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch import distributed

from harmonic_sft.training import peers
from harmonic_sft.training.callbacks import StoppedError


class Store(dict):
    def set(self, key, value):
        self[key] = value

    def check(self, keys):
        return all(key in self for key in keys)


@pytest.mark.parametrize(
    ("timeout", "steps", "expected"),
    [
        (1800, range(10, 1800, 10), []),  # every exchange is answered soon
        (1800, [], [1440]),
        (30, [], [24]),
        (1800, [300], [1440]),
    ],
)
def test_a_process_that_is_behind_is_named_once_in_a_wait(
    monkeypatch, caplog, timeout, steps, expected
):
    now = [0]

    def wait(seconds):
        now[0] += 1
        return now[0] > 1790

    group = SimpleNamespace(
        _get_sequence_number_for_group=lambda: 5 + sum(step <= now[0] for step in steps)
    )
    store, behind = Store({peers.STARTED.format(1): "3"}), []
    monkeypatch.setattr(distributed.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(distributed.distributed_c10d, "_get_default_group", lambda: group)
    monkeypatch.setattr(peers, "time", SimpleNamespace(monotonic=lambda: now[0]))
    args = SimpleNamespace(ddp_timeout=timeout, process_index=0, world_size=2)
    peers._watch(args, SimpleNamespace(wait=wait), behind)
    assert behind == ([1] if expected else [])
    waited = [int(text.split("waited for ")[1].split()[0]) for text in caplog.messages]
    assert waited == [seconds + 1 for seconds in expected]


def test_the_timeout_holds_for_the_processes_that_accelerate_connected(monkeypatch):
    monkeypatch.setattr(peers, "_watch", lambda *args: None)
    limit = timedelta(seconds=30)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        with peers.naming_silent_peers(SimpleNamespace(world_size=2, ddp_timeout_delta=limit)):
            backend = distributed.group.WORLD._get_backend(torch.device("cpu"))
            assert backend.options._timeout == limit
        with (
            pytest.raises(StoppedError, match="ddp_find_unused_parameters=true, or name"),
            peers.naming_silent_peers(SimpleNamespace(world_size=2, ddp_timeout_delta=limit)),
        ):
            raise RuntimeError("pass the keyword argument `find_unused_parameters=True` to")
    finally:
        distributed.destroy_process_group()
