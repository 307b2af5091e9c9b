"""`make soak`: a long run of a tiny model; memory and the time of a step have to stay flat."""

import argparse
import itertools
import os
import resource
import shutil
import sys
import time
from pathlib import Path
from statistics import fmean

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
MOST = {"memory": 1.05, "processor time of a step": 1.15}  # last tenth over first tenth


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--folder", type=Path, default=Path("build/soak"))
    options = parser.parse_args()

    import torch
    from transformers import PrinterCallback, TrainerCallback

    from harmonic_sft.training.run import train
    from harmonic_sft.training.run_config import load_run_config
    from harmonic_sft.training.trainer import HarmonicTrainer
    from tests.faults.kills import World

    torch.set_num_threads(1)
    seconds, memory = [], []

    class Clock(TrainerCallback):
        """Takes the memory and the processor time of this process at every step."""

        def on_step_end(self, args, state, control, **kwargs):
            seconds.append(time.process_time())
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            memory.append(pages * resource.getpagesize())
            if state.global_step % max(1, options.steps // 20) == 0:
                line = (
                    f"{state.global_step} steps, {memory[-1] / 2**20:.0f} MiB, {seconds[-1]:.0f} s"
                )
                sys.stderr.write(f"{line}\n")

    begin = HarmonicTrainer.__init__

    def with_clock(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        self.remove_callback(PrinterCallback)
        self.add_callback(Clock())

    HarmonicTrainer.__init__ = with_clock
    shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True)
    path = World(options.folder.resolve()).yaml_of("table", options.folder.resolve() / "run")
    every = max(1, options.steps // 10)
    words = [f"training.max_steps={options.steps}", f"training.save_steps={every}"]
    words += ["training.eval_strategy=steps", f"training.eval_steps={every}"]
    train(load_run_config(path, words))
    tenth = len(seconds) // 10
    steps = [after - before for before, after in itertools.pairwise(seconds)]
    found = {
        "memory": fmean(memory[-tenth:]) / fmean(memory[:tenth]),
        "processor time of a step": fmean(steps[-tenth:]) / fmean(steps[:tenth]),
    }
    for name, ratio in found.items():
        sys.stdout.write(f"{name}: last tenth over first tenth {ratio:.3f}\n")
    return 1 if any(found[name] > most for name, most in MOST.items()) else 0


if __name__ == "__main__":
    sys.exit(main())
