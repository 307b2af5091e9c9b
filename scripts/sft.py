"""Train one run: accelerate launch scripts/sft.py configs/X.yaml [key=value ...]."""

import os
import sys
from collections.abc import MutableMapping

from harmonic_sft_cli import main


def free_threads(environment: MutableMapping[str, str]) -> None:
    """Let a single process take as many threads as PyTorch would, before PyTorch is imported.

    Without `--num_cpu_threads_per_process`, accelerate allows every process one thread, and it
    cannot be told from one that was asked for: `taskset` keeps a process to one core.
    """
    if environment.get("WORLD_SIZE", "1") == "1" and environment.get("OMP_NUM_THREADS") == "1":
        del environment["OMP_NUM_THREADS"]


if __name__ == "__main__":
    free_threads(os.environ)
    sys.exit(main(["train", *sys.argv[1:]]))
