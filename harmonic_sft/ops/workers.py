"""Threads that share the tiles of one operation, one core each.

Every PyTorch operation on the CPU opens a parallel region over all cores. A loop over small tiles
opens thousands of them, and each may take up to 40 times as long if another process holds a core.
Threads that run single-threaded operations wait for each other only a few times.
"""

import os
import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

_POOLS: dict[int, ThreadPoolExecutor] = {}
_LOCK = threading.RLock()


def _forget_threads() -> None:
    global _LOCK
    _POOLS.clear()
    _LOCK = threading.RLock()


os.register_at_fork(after_in_child=_forget_threads)  # a child has none of its parent's threads


class Workers:
    """Runs a function on numbered tasks, side by side.

    Args:
        count: How many workers there are.
    """

    def __init__(self, count: int):
        self.count = count

    def run(self, work: Callable[[int, int], None], num_tasks: int, *, fixed: bool = True) -> None:
        """Call `work(worker, task)` for every task and wait for all; errors are raised here.

        Args:
            work: One task of one worker.
            num_tasks: The number of tasks of all workers together.
            fixed: Every worker has its own share, so that what it sums keeps its order; otherwise
                whoever is free takes the next.
        """
        if self.count == 1:
            for task in range(num_tasks):
                work(0, task)
            return
        free = iter(range(num_tasks))
        inference = torch.is_inference_mode_enabled()

        def call(worker: int) -> None:
            with torch.inference_mode(inference), torch.no_grad():
                for task in range(worker, num_tasks, self.count) if fixed else free:
                    work(worker, task)

        futures = [_POOLS[self.count].submit(call, worker) for worker in range(self.count)]
        for future in futures:
            future.result()


@contextmanager
def cpu_workers() -> Generator[Workers]:
    """Give as many workers as PyTorch may use cores, and keep every operation to one core.

    Calls of several Python threads wait for each other.
    """
    with _LOCK:
        count = _num_cores()
        try:
            torch.set_num_threads(1)
            if count > 1 and count not in _POOLS:
                _POOLS[count] = ThreadPoolExecutor(count, "tiles", _prepare_thread)
            yield Workers(count)
        finally:
            torch.set_num_threads(count)


def _num_cores() -> int:
    """Return how many cores PyTorch may use.

    Outside the main thread a new thread is asked: one that first used PyTorch while another was in
    `cpu_workers` would answer 1 ever after.
    """
    if threading.current_thread() is threading.main_thread():
        return torch.get_num_threads()
    with ThreadPoolExecutor(1) as new_thread:
        return new_thread.submit(torch.get_num_threads).result()


def _prepare_thread() -> None:
    torch.set_num_threads(1)
    # Weights of far tokens are often below 1e-38, and some processors take 20 times as long then.
    torch.set_flush_denormal(True)
