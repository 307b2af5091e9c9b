"""Which of several processes did not answer the others."""

import logging
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any

from torch import distributed
from transformers import TrainingArguments

from harmonic_sft.training.callbacks import StoppedError

logger = logging.getLogger(__name__)
KEY = "harmonic_sft/waited_in_vain/{}"  # of a process
STARTED = "harmonic_sft/started/{}"  # how many exchanges a process has started
PATIENCE = 10.0  # seconds: the others notice at about the same time
WARN_AFTER = 0.8  # of the timeout: before NCCL ends the process


@contextmanager
def naming_silent_peers(args: TrainingArguments) -> Generator[None]:
    """Say which processes did not answer, when this one has waited for `ddp_timeout` seconds.

    That error comes with gloo, on CPUs. NCCL ends a process that waited, and names none: the log
    has named those that are behind by then.

    Args:
        args: Of the trainer.

    Raises:
        StoppedError: Some did not answer.
    """
    # transformers 5.23 forgets it on CPUs; torch has no public way to set it later.
    if args.world_size > 1:
        distributed.distributed_c10d._set_pg_timeout(args.ddp_timeout_delta)
    ended = threading.Event()
    if args.world_size > 1:
        threading.Thread(target=_watch, args=(args, ended), daemon=True).start()
    try:
        yield
    except RuntimeError as error:
        if args.world_size == 1 or "imed out" not in str(error):
            raise
        raise StoppedError(
            f"training: expected every process to answer within training.ddp_timeout, "
            f"{args.ddp_timeout} seconds, got no answer from {_silent(args)} of {args.world_size}, "
            "counted from 0. Look what became of it; resume=true continues from the last checkpoint"
        ) from error
    finally:
        ended.set()


def _watch(args: TrainingArguments, ended: threading.Event) -> None:
    """Log which processes have started fewer exchanges than this one, when it has waited long."""
    store = distributed.distributed_c10d._get_default_store()
    group: Any = distributed.distributed_c10d._get_default_group()
    own, since = -1, time.monotonic()
    with suppress(RuntimeError):  # the store went with its process
        while not ended.wait(1.0):
            before, own = own, group._get_sequence_number_for_group()
            waited = time.monotonic() - since
            if own != before:
                since = time.monotonic()
                store.set(STARTED.format(args.process_index), str(own))
            elif waited > WARN_AFTER * args.ddp_timeout:
                keys = [STARTED.format(rank) for rank in range(args.world_size)]
                found = [int(store.get(key)) if store.check([key]) else 0 for key in keys]
                if behind := [rank for rank, count in enumerate(found) if count < own]:
                    logger.error(
                        "Process %d has waited for %.0f of the %d seconds of training.ddp_timeout; "
                        "behind are %s of %d, counted from 0.",
                        args.process_index,
                        waited,
                        args.ddp_timeout,
                        behind,
                        args.world_size,
                    )
                    return


def _silent(args: TrainingArguments) -> list[int]:
    """Return the processes that have not waited in vain as this one has."""
    found: list[list[int]] = []

    def ask() -> None:
        store = distributed.distributed_c10d._get_default_store()
        store.set(KEY.format(args.process_index), "")
        end = time.monotonic() + PATIENCE
        silent = list(range(args.world_size))
        while silent and time.monotonic() < end:
            silent = [rank for rank in silent if not store.check([KEY.format(rank)])]
            time.sleep(0.1)
        found.append(silent)

    # The store lives in process 0 unless torchrun holds it, and has no timeout of its own.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(2 * PATIENCE)
    return found[0] if found else [0]
