"""Names the processes that do not answer the others."""

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
STARTED = "harmonic_sft/started/{}"  # how many exchanges a process has started
WARNING = 0.8  # share of the timeout, to warn before NCCL ends the process


@contextmanager
def naming_silent_peers(args: TrainingArguments) -> Generator[None]:
    """Raise an error that names the processes that did not answer within `ddp_timeout` seconds.

    This error comes with gloo, on CPUs. NCCL ends the process that waited and names no other, but
    by then the log has named those that are behind. Another error says what to do if
    DistributedDataParallel misses a gradient.
    """
    if args.world_size == 1:
        yield
        return
    # transformers 5.23 does not set the timeout on CPUs.
    distributed.distributed_c10d._get_default_group().set_timeout(args.ddp_timeout_delta)
    ended, behind = threading.Event(), []
    threading.Thread(target=_watch, args=(args, ended, behind), daemon=True).start()
    try:
        yield
    except RuntimeError as error:
        if "find_unused_parameters" in str(error):
            raise StoppedError(
                "training: expected all that trains to take part in every step, got weights that "
                "do not. Set training.ddp_find_unused_parameters=true, or name what trains in "
                "model.unfreeze.patterns"
            ) from error
        if "imed out" not in str(error):
            raise
        # `behind` is empty if process 0 is silent and holds the store, as it does without torchrun.
        raise StoppedError(
            f"training: expected every process to answer within training.ddp_timeout, "
            f"{args.ddp_timeout} seconds, got no answer from {behind or [0]} of {args.world_size}, "
            "counted from 0. Look what became of it; resume=true continues from the last checkpoint"
        ) from error
    finally:
        ended.set()


def _watch(args: TrainingArguments, ended: threading.Event, behind: list[int]) -> None:
    """After a long wait log which processes have started fewer exchanges; put them in `behind`."""
    store = distributed.distributed_c10d._get_default_store()
    group: Any = distributed.distributed_c10d._get_default_group()
    own, since, is_said = -1, time.monotonic(), False
    with suppress(RuntimeError):  # the store ended with its process
        while not ended.wait(1.0):
            before, own = own, group._get_sequence_number_for_group()
            waited = time.monotonic() - since
            if own != before:
                since, is_said = time.monotonic(), False
                store.set(STARTED.format(args.process_index), str(own))
            elif not is_said and waited > WARNING * args.ddp_timeout:
                is_said = True
                keys = [STARTED.format(rank) for rank in range(args.world_size)]
                counts = [int(store.get(key)) if store.check([key]) else 0 for key in keys]
                behind[:] = [rank for rank, count in enumerate(counts) if count < own]
                if behind:
                    logger.warning(
                        "Process %d has waited for %.0f seconds: %s of %d, counted from 0, have "
                        "started fewer exchanges. They are at work alone, or hang; "
                        "training.ddp_timeout ends the run after %d seconds.",
                        args.process_index,
                        waited,
                        behind,
                        args.world_size,
                        args.ddp_timeout,
                    )
