"""`make faults`: kills runs, feeds them damaged input, and counts what goes wrong."""

import argparse
import json
import os
import sys
from collections import Counter
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
WRONG = {
    "lost": "lost, or ended with other bits",
    "traceback": "tracebacks",
    "hang": "hangs over 60 s",
    "outside": "touched files outside the run's folder",
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="how many kills")
    parser.add_argument("--inputs", type=int, default=10_000, help="how many damaged inputs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes that kill runs")
    parser.add_argument(
        "--folder", type=Path, default=Path("build/faults"), help="what was done is kept here"
    )
    options = parser.parse_args()
    options.folder = options.folder.resolve()
    options.folder.mkdir(parents=True, exist_ok=True)
    wrong = Counter()
    if options.kills:
        wrong += kill_runs(options)
    if options.inputs:
        from tests.faults.inputs import feed

        wrong += feed(options.inputs, options.seed, options.folder / "inputs")
    for name, meaning in WRONG.items():
        sys.stdout.write(f"{wrong[name]:6} {meaning}\n")
    return 1 if wrong.total() else 0


def kill_runs(options):
    """Run trials in processes that have imported once; those done before are not repeated."""
    from tests.faults.kills import SCENARIOS  # imports what every session needs

    children = []
    for job in range(options.jobs):
        child = os.fork()
        if child == 0:
            work(job, options)
            os._exit(0)
        children.append(child)
    assert all(os.waitpid(child, 0)[1] == 0 for child in children), "a driver failed"
    counts, wrong = Counter(), Counter()
    for job in range(options.jobs):
        done = json.loads((options.folder / f"job-{options.seed}-{job}.json").read_text())
        counts.update(done["counts"])
        wrong.update(done["wrong"])
    sys.stdout.write(f"Killed in {len(SCENARIOS)} kinds of runs:\n")
    for name, count in sorted(counts.items()):
        sys.stdout.write(f"{count:6} {name}\n")
    return wrong


def work(job, options):
    """Take this process's share of the trials."""
    import torch

    from tests.faults.kills import World, trial

    torch.set_num_threads(1)
    folder = options.folder / f"world-{options.seed}-{job}"
    (folder / "tmp").mkdir(parents=True, exist_ok=True)
    record = options.folder / f"job-{options.seed}-{job}.json"
    done = {"next": 1000 * job, "counts": {}, "wrong": {}}
    if record.exists():
        done = json.loads(record.read_text())
    counts, wrong = Counter(done["counts"]), Counter(done["wrong"])
    world, wholes, number = World(folder), {}, done["next"]
    share = options.kills / options.jobs
    while sum(counts[name] for name in ("SIGKILL", "SIGTERM", "SIGINT")) < share:
        found, bad = trial(number, options.seed, world, wholes)
        counts, wrong, number = counts + found, wrong + bad, number + 1
        record.write_text(json.dumps({"next": number, "counts": counts, "wrong": wrong}))


if __name__ == "__main__":
    sys.exit(main())
