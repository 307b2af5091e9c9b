"""Processes that train together: forks of this one, or programs on several nodes."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.elsewhere import ROOT


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return str(free.getsockname()[1])


def fork(count: int, work: Callable[[int], object]) -> list[int]:
    """Call `work(rank)` in so many processes that know of each other, and return their numbers."""
    port, children = free_port(), []
    for rank in range(count):
        if child := os.fork():
            children.append(child)
            continue
        if count > 1:
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
        sys.exit(work(rank))
    return children


def run_together(*nodes: tuple[Sequence[object], Mapping[str, str], Path]) -> list[tuple[int, str]]:
    """Run Python with words, further variables and a folder each; return statuses and output."""
    started = [
        subprocess.Popen(
            [sys.executable, *map(str, words)],
            env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
        )
        for words, variables, folder in nodes
    ]
    written = [node.communicate()[0] for node in started]
    return [(node.returncode, text) for node, text in zip(started, written, strict=True)]
