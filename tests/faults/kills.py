"""Runs that are killed and resumed, each compared bit for bit with its uninterrupted end."""

import hashlib
import json
import multiprocessing
import os
import random
import select
import shutil
import signal
import time
import traceback
from collections import Counter
from pathlib import Path

import torch
from tqdm.std import TqdmDefaultWriteLock
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from harmonic_sft.training import publishing, resumable_trainer
from harmonic_sft.training import run as runs
from harmonic_sft.training import trainer as trainers
from harmonic_sft_cli import main
from tests.conftest import (
    SPECIAL,
    WORDS,
    save_tiny_base,
    settings_of_a_run,
    successor_texts,
    write_run,
)

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
STEPS = 6
AIMS = {"save": b"S", "rotation": b"R", "evaluation": b"E", "push": b"P", "results": b"W"}
EARLIEST = 0.02  # seconds of its own: before, Python has no handler yet
AIMED = 0.06  # seconds of its own that a kill comes at most after what it aims at
HUNG = 60.0  # seconds of its own that a session may take; others share the machine
LORA = {"r": 2, "target_modules": ["query"]}
BFLOAT16 = {"dtype": "bfloat16", "unfreeze": {"last_blocks": 1, "dtype": "bfloat16"}}
BEST = {
    "load_best_model_at_end": True,
    "metric_for_best_model": "post_hoc_loss",
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_total_limit": 1,
}
SCENARIOS = {  # what differs from the plain run
    "table": {},
    "stream": {"model": {"dropout": 0.2}},
    "packing": {"data": {"packing": True}, "model": {"dropout": 0.2}},
    "best model": {"training": BEST},
    "what trains": {"save": "trainable", "model": {"dropout": 0.2}},
    "LoRA": {"peft": LORA, "model": {"unfreeze": {"last_blocks": 0}}},
    "bfloat16 masters": {"model": BFLOAT16},
    "accumulation": {"training": {"gradient_accumulation_steps": 2}, "model": {"dropout": 0.2}},
    "decoder": {"model": {"task": "causal_lm"}},
    "neighbors": {"loss": {"name": "knn_label_smoothing", "num_neighbors": 3, "refresh_every": 3}},
    "pushes": {"hub": {"push": True, "repo_id": "me/x", "every_save": True}},
}


class World:
    """The files that runs read, and where they write."""

    def __init__(self, folder):
        self.folder = folder
        self.given = folder / "given"
        if not self.given.exists():
            # Not in the driver: after a first progress bar all sessions would share tqdm's lock,
            # and one that is killed while it holds it stops every later one at its first bar.
            maker = multiprocessing.get_context("fork").Process(
                target=save_given, args=(self.given,)
            )
            maker.start()
            maker.join()
            assert maker.exitcode == 0, "the given files could not be made"
        self.home = folder / "home"
        self.home.mkdir(exist_ok=True)

    def yaml_of(self, scenario, output_dir):
        base = self.given / ("decoder" if scenario == "decoder" else "encoder")
        settings = settings_of_a_run(self.given / "*.jsonl", base, output_dir)
        settings["data"] |= {"context_length": 16, "eval": {"documents": 4}, "window": 8}
        settings["data"] |= {"on_bad_row": "skip"}
        settings["training"] |= {"per_device_train_batch_size": 4, "max_steps": STEPS}
        settings["training"] |= {"save_steps": 2, "save_total_limit": 2}
        settings["check_base"] = False
        settings["data"]["sources"][0]["streaming"] = scenario == "stream"
        return write_run(output_dir.with_suffix(".yaml"), settings, SCENARIOS[scenario])

    def listing(self):
        """Return what no run may change: the given files, and the home and current folders."""
        paths = [*self.given.rglob("*"), *self.home.rglob("*")]
        return {str(p): (p.stat().st_size, p.stat().st_mtime_ns) for p in paths if p.is_file()}


def save_given(folder):
    torch.set_num_threads(1)  # as in a session
    folder.mkdir(parents=True)
    (folder / "encoder").mkdir()
    save_tiny_base(folder / "encoder")
    AutoTokenizer.from_pretrained(folder / "encoder").save_pretrained(folder / "decoder")
    torch.manual_seed(0)
    sizes = {"vocab_size": len(SPECIAL + WORDS), "n_embd": 32, "n_layer": 2, "n_head": 4}
    GPT2LMHeadModel(GPT2Config(**sizes, n_positions=64)).save_pretrained(folder / "decoder")
    texts = successor_texts(48)
    for name, part in (("a", texts[:24]), ("b", texts[24:])):
        rows = [json.dumps({"text": text}) for text in part]
        rows.insert(7, '{"text": null}')
        (folder / f"{name}.jsonl").write_text("".join(f"{row}\n" for row in rows))


def session(words, home, log, told):
    """Train in this process, a child that has forked off, and tell what it is at."""
    torch.set_num_threads(1)  # first of all: PyTorch's pool of the parent is gone
    os.chdir(home)
    os.environ |= {"HOME": str(home), "TMPDIR": str(home.parent / "tmp")}
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def watch(owner, name, aim):
        found = getattr(owner, name)

        def watched(*args, **kwargs):
            os.write(told, AIMS[aim])
            return found(*args, **kwargs)

        setattr(owner, name, watched)

    watch(trainers.HarmonicTrainer, "_save_checkpoint", "save")
    watch(resumable_trainer, "write_manifest", "save")
    watch(resumable_trainer, "rotate", "rotation")
    watch(trainers.HarmonicTrainer, "evaluate", "evaluation")
    watch(runs, "write_results", "results")
    # There is no Hub here: what would be sent is made, and not sent.
    publishing.upload = lambda *_: time.sleep(0.02)
    publishing.push = lambda *_: "nowhere"
    watch(publishing, "stage", "push")
    watch(publishing, "upload", "push")
    runs.check_destination = runs.check_model = lambda *_: None
    runs.draw = lambda *_: None
    status = 1
    try:
        status = main(["train", *words])
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    os._exit(status)


def cpu_seconds(pid):
    """Return the processor time that a child has used; it may have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Kill:
    """When to kill a session: after so much work, or so much after it began something again."""

    def __init__(self, generator, scenario, seconds):
        aims = [aim for aim in AIMS if aim != "push" or scenario == "pushes"]
        self.signal = generator.choice(SIGNALS)
        self.aim = generator.choice([None] * len(aims) + aims)
        self.number = generator.randint(1, 2)  # which time
        least, most = (EARLIEST, seconds) if self.aim is None else (0.0, AIMED)
        self.after = generator.uniform(least, most)


def take(words, world, log, kill=None):
    """Run a session, perhaps killed; return its exit status, None if it hung, and its seconds."""
    assert not hasattr(TqdmDefaultWriteLock, "mp_lock"), "sessions would share it"
    read, told = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            session(words, world.home, log, told)
        finally:
            os._exit(1)  # whatever it is, the trials are the parent's
    os.close(told)
    counts, begun, sent = Counter(), 0.0 if kill and kill.aim is None else None, False
    start = time.monotonic()
    seconds, waits = 0.0, 0.002
    while True:
        if select.select([read], [], [], waits)[0]:
            found = os.read(read, 64)
            if not found:
                waits = 0.05
                time.sleep(0.002)
            counts.update(bytes([byte]) for byte in found)
        seconds = cpu_seconds(child) or seconds
        if kill and begun is None and counts[AIMS[kill.aim]] >= kill.number:
            begun = seconds
        if kill and not sent and begun is not None and seconds - begun >= kill.after:
            os.kill(child, kill.signal)
            sent = True
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            os.close(read)
            return os.waitstatus_to_exitcode(status), seconds
        if seconds > HUNG or time.monotonic() - start > 20 * HUNG:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(read)
            return None, seconds


def outcome(folder):
    results = json.loads((folder / "results" / "train.json").read_text())
    keys = ("loss", "grad_norm", "learning_rate", "eval_loss")
    # A run that was killed after its last checkpoint has no last entry with the mean of its losses.
    steps = [entry for entry in results["history"] if "loss" in entry or "eval_loss" in entry]
    history = [[entry.get(key) for key in ("step", *keys)] for entry in steps]
    weights = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    left_out = results["data"]["rows_left_out"]
    return weights, results["final"], results["before"], history, left_out


def has_checkpoint(folder):
    """Whether there may be a whole one."""
    return any(folder.glob("checkpoint-*/manifest.json"))


def uninterrupted(scenario, world, wholes):
    """Return how a run ends, and the seconds that it takes, after running it once."""
    if scenario not in wholes:
        folder = world.folder / f"whole {scenario}"
        shutil.rmtree(folder, ignore_errors=True)
        log = folder.with_suffix(".log")
        status, seconds = take([str(world.yaml_of(scenario, folder))], world, log)
        assert status == 0, log.read_text()[-3000:]
        wholes[scenario] = outcome(folder), seconds
    return wholes[scenario]


def trial(number, seed, world, wholes):
    """Kill a run up to three times, resume it after each, and compare its end.

    Returns what is counted, and what went wrong.
    """
    generator = random.Random(f"{seed} {number}")
    scenario = list(SCENARIOS)[(number + seed) % len(SCENARIOS)]
    whole, seconds = uninterrupted(scenario, world, wholes)
    folder = world.folder / f"run-{number}"
    path, log = world.yaml_of(scenario, folder), folder.with_suffix(".log")
    before, kills = world.listing(), [Kill(generator, scenario, seconds) for _ in range(3)]
    kills = kills[: generator.randint(1, 3)]
    counts, wrong, killed = Counter(), [], 0
    words = [str(path)]
    for kill in kills:
        status, _ = take(words, world, log, kill)
        if status is None:
            wrong.append("hang")
        if status == 0:
            break  # it ended before
        killed += 1
        counts[kill.signal.name] += 1
        counts[f"aimed at {kill.aim}" if kill.aim else "aimed at nothing"] += 1
        is_early = not has_checkpoint(folder) and generator.random() < 0.5
        words = [str(path)] if is_early else [str(path), "resume=true"]
    else:
        status, _ = take(words, world, log)
    if status != 0 or outcome(folder) != whole:
        wrong.append("hang" if status is None else "lost")
    text = log.read_text()
    # Python ignores a Ctrl-C that comes while an object is deleted, and says so.
    if text.count("Traceback") > text.count("Exception ignored in"):
        wrong.append("traceback")
    if world.listing() != before:
        wrong.append("outside")
    counts["ends compared" if killed else "ended before the kill"] += 1
    if wrong:
        plan = [(k.signal.name, k.aim, k.number, round(k.after, 3)) for k in kills]
        kept = world.folder / f"wrong {number}.log"
        kept.write_text(f"{scenario} {wrong} {plan} {words}\n{text}")
    else:
        shutil.rmtree(folder)
        log.unlink()
        path.unlink()
    return counts, Counter(wrong)
