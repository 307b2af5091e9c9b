"""Sessions of training runs in processes of their own, which share one process's imports."""

import multiprocessing
import os
import signal
import sys


def run_session(words: list[str], environment: dict[str, str], kill_in_step: int | None) -> None:
    """Run `harmonic-sft train`, perhaps killed in the middle of a step."""
    from harmonic_sft.training.trainer import HarmonicTrainer
    from harmonic_sft_cli import main

    os.environ.update(environment)
    multiprocessing.set_start_method("fork", force=True)  # of the data loader's workers
    training_step = HarmonicTrainer.training_step

    def killed(self, *arguments):
        loss = training_step(self, *arguments)
        if self.state.global_step + 1 == kill_in_step:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss

    HarmonicTrainer.training_step = killed
    sys.exit(main(["train", *words]))
