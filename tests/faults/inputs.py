"""Damaged and random input: whatever it is, an error is one of ours, and comes in time."""

import gzip
import itertools
import json
import shutil
import signal
import sys
import traceback
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, BertConfig

from harmonic_sft.data import DataConfig
from harmonic_sft.data.loading import load_data
from harmonic_sft.eval.word_similarity import read_word_pairs
from harmonic_sft.training.checkpoints import last_checkpoint, read_manifest, write_manifest
from harmonic_sft.training.run_config import load_run_config
from tests.conftest import WORDS
from tests.faults.kills import World

LIMIT = 60  # seconds that one input may take
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
WORD = st.sampled_from(WORDS) | st.text(max_size=12)
TEXT = st.lists(WORD, max_size=8).map(" ".join)
JSON = st.recursive(
    PLAIN | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORD, inner, max_size=3),
    max_leaves=8,
)
ROLE = st.sampled_from(["user", "assistant", "system", "tool", "human", "gpt", ""]) | JSON
TURNS = st.lists(
    st.fixed_dictionaries({}, optional={"role": ROLE, "content": TEXT | JSON, "tool_calls": JSON})
    | st.fixed_dictionaries({}, optional={"from": ROLE, "value": TEXT | JSON})
    | JSON,
    max_size=4,
)
LABEL = st.sampled_from(["x", "y", 0, 1]) | JSON
ROWS = {  # of every format, and the first row of the file, which says the format
    "text": ({"text": "aa ab"}, {"text": TEXT | JSON}),
    "prompt_completion": (
        {"prompt": "aa", "completion": "ab"},
        {"prompt": TEXT | TURNS | JSON, "completion": TEXT | TURNS | JSON},
    ),
    "messages": (
        {"messages": [{"role": "user", "content": "aa"}, {"role": "assistant", "content": "ab"}]},
        {"messages": TURNS | JSON, "tools": JSON},
    ),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "aa"}, {"from": "gpt", "value": "ab"}]},
        {"conversations": TURNS | JSON, "system": JSON},
    ),
    "alpaca": (
        {"instruction": "aa", "output": "ab"},
        {"instruction": TEXT | JSON, "input": TEXT | JSON, "output": TEXT | JSON},
    ),
    "tokens": (
        {"input_ids": [7, 8, 9]},
        {
            "input_ids": st.lists(st.integers(-1, 120), max_size=8) | JSON,
            "labels": st.lists(st.integers(-100, 120), max_size=8) | JSON,
            "attention_mask": st.lists(st.integers(0, 1), max_size=8) | JSON,
        },
    ),
    "labeled_text": ({"text": "aa ab", "label": "x"}, {"text": TEXT | JSON, "label": LABEL}),
    "labeled_words": (
        {"tokens": ["aa", "ab"], "label": ["x", "y"]},
        {"tokens": st.lists(WORD, max_size=4) | JSON, "label": st.lists(LABEL, max_size=4) | JSON},
    ),
}
TASKS = {"labeled_text": "sequence_classification", "labeled_words": "token_classification"}
# Copied from the plain file: which byte, what becomes of it, and how much is cut off. The simplest
# damage, which is tried first, is none.
DAMAGE = st.tuples(
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=4),
    st.floats(0, 1),
    st.binary(max_size=16),
)


class Hung(BaseException):
    """An input took too long."""


def damaged(content, damage):
    """Return bytes with some of them replaced, the end cut off, and others put behind it."""
    changes, lost, more = damage
    content = bytearray(content)
    for place, value in changes:
        if content:
            content[int(place * len(content))] = value
    kept = int((1 - lost) * len(content)) if lost > 0.5 else None
    return bytes(content[:kept]) + more


class Feeder:
    """Where the inputs are written, and what reads them."""

    def __init__(self, folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.folder = folder
        self.world = World(folder)
        self.tokenizer = AutoTokenizer.from_pretrained(self.world.given / "encoder")
        self.tokenizer.chat_template = (
            "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
        )
        self.run_yaml = self.world.yaml_of("table", folder / "run").read_text()
        self.checkpoint = self.make_checkpoint()
        texts = [f"{a} {b}" for a, b in itertools.pairwise(WORDS)]
        lines = "".join(f'{{"text": "{text}"}}\n' for text in texts)
        self.files = {"a.jsonl": lines.encode(), "a.txt": lines.encode()}
        self.files["a.jsonl.gz"] = gzip.compress(lines.encode(), mtime=0)
        self.files["a.csv"] = "\n".join(["text,n", *(f"{text},1" for text in texts)]).encode()
        self.files["a.json"] = json.dumps([json.loads(x) for x in lines.splitlines()]).encode()
        sink = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_pylist(json.loads(self.files["a.json"])), sink)
        self.files["a.parquet"] = sink.getvalue().to_pybytes()
        self.files["a.jsonl.zst"] = pa.compress(lines.encode(), "zstd", asbytes=True)

    def make_checkpoint(self):
        """A folder as a run leaves it, with small files."""
        folder = self.folder / "plain" / "checkpoint-4"
        folder.mkdir(parents=True)
        for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
            torch.save({"a": torch.ones(3)}, folder / name)
        (folder / "model.safetensors").write_bytes(bytes(64))
        (folder / "trainer_state.json").write_text('{"global_step": 4}')
        write_manifest(folder, rows_per_step=4)
        return folder

    def read_rows(self, file, skip, streaming=False, name="text"):
        """Make rows of a file, as a table or a stream, for every kind of model."""
        from harmonic_sft.config import parse

        task = TASKS.get(name, "causal_lm" if skip else "masked_lm")
        section = {
            "sources": [{"path": str(file), "streaming": streaming and name not in TASKS}],
            "context_length": 16,
            "eval": {"documents": 1},
            "on_bad_row": "skip" if skip else "error",
        }
        if name in TASKS:
            section["label_column"] = "label"
            section["sources"][0]["column"] = next(iter(ROWS[name][0]))
        base = BertConfig(vocab_size=109, max_position_embeddings=64)
        options = {"base": base, "tokenizer": self.tokenizer, "seed": 0, "task": task}
        data = load_data(parse(DataConfig, section), **options)
        data.collator(list(itertools.islice(data.train, 8)))  # a stream has no end

    def yaml(self, content):
        path = self.folder / "fuzzed.yaml"
        path.write_bytes(content)
        load_run_config(path)

    def value(self, changes):
        """Put values at places of a run's file."""
        tree = yaml.safe_load(self.run_yaml)
        for place, value in changes:
            node, keys = tree, place.split(".")
            for key in keys[:-1]:
                node = node.setdefault(key, {}) if isinstance(node, dict) else {}
            if isinstance(node, dict):
                node[keys[-1]] = value
        self.yaml(yaml.safe_dump(tree, allow_unicode=True).encode("utf-8", "surrogatepass"))

    def rows(self, name, rows, skip, streaming):
        path = self.folder / "rows.jsonl"
        text = "".join(f"{json.dumps(row)}\n" for row in [ROWS[name][0], *rows])
        path.write_text(text)
        self.read_rows(path, skip, streaming, name)

    def archive(self, name, damage, skip, streaming):
        path = self.folder / name
        path.write_bytes(damaged(self.files[name], damage))
        self.read_rows(path, skip, streaming)

    def checkpoints(self, name, damage, manifest):
        """Damage a file of the newer one of two checkpoints: it is skipped, or as it was."""
        run = self.folder / "run"
        shutil.rmtree(run, ignore_errors=True)
        for step in (2, 4):
            shutil.copytree(self.checkpoint, run / f"checkpoint-{step}")
        (run / "run.yaml").write_text(self.run_yaml)
        path = run / "checkpoint-4" / name
        before = path.read_bytes()
        path.write_bytes(damaged(before, damage))
        if manifest is not None:
            path = run / "checkpoint-4" / "manifest.json"
            before = path.read_bytes()
            path.write_text(json.dumps(manifest))
        is_same = path.read_bytes() == before and not manifest
        found = last_checkpoint(run)
        assert found.name == ("checkpoint-4" if is_same else "checkpoint-2") or (
            json.loads(before) == manifest
        )
        read_manifest(found)

    def pairs(self, content):
        path = self.folder / "pairs.tsv"
        path.write_bytes(content)
        read_word_pairs(path)


def places(tree, prefix=""):
    """Name every key of a run's file."""
    for key, value in tree.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from places(value, f"{prefix}{key}.")


def strategies(feeder):
    """Return what is fed, and with which arguments."""
    keys = [*places(yaml.safe_load(feeder.run_yaml)), "data.mask.policy", "schedule", "peft.r"]
    keys += ["loss.weight", "data.eval.seed", "head.eps", "head.init", "training.save_strategy"]
    plain = feeder.run_yaml.encode()
    ratings = b"word1\tword2\tscore\naa\tab\t1\nba\tbb\t2.5\n"
    row = st.sampled_from(sorted(ROWS)).flatmap(
        lambda name: st.tuples(
            st.just(name),
            st.lists(st.fixed_dictionaries({}, optional=ROWS[name][1]) | JSON, max_size=4),
            st.booleans(),
            st.booleans(),
        )
    )
    files = sorted(path.name for path in feeder.checkpoint.iterdir() if path.suffix != ".json")
    return {
        "YAML, bytes": (feeder.yaml, st.tuples(DAMAGE.map(lambda d: damaged(plain, d)))),
        "YAML, values": (
            feeder.value,
            st.tuples(st.lists(st.tuples(st.sampled_from(keys), JSON), min_size=1, max_size=3)),
        ),
        "rows": (feeder.rows, row),
        "archives": (
            feeder.archive,
            st.tuples(st.sampled_from(sorted(feeder.files)), DAMAGE, st.booleans(), st.booleans()),
        ),
        "checkpoint folders": (
            feeder.checkpoints,
            st.tuples(st.sampled_from(files), DAMAGE, st.none() | JSON),
        ),
        "pair files": (feeder.pairs, st.tuples(DAMAGE.map(lambda d: damaged(ratings, d)))),
    }


def feed(count, number, folder):
    """Feed inputs of every kind, print how many, and return what went wrong.

    Where it began is kept with every fault: the first input of each place in the code.
    """
    feeder = Feeder(folder)
    wrong: Counter[str] = Counter()
    kinds = strategies(feeder)

    signal.signal(signal.SIGALRM, stopped)
    for name, (read, arguments) in kinds.items():
        counts: Counter[str] = Counter()
        take = taker(name, read, counts, wrong, feeder.folder)
        options = settings(
            max_examples=-(-count // len(kinds)),
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        seed(number)(options(given(arguments)(take)))()
        sys.stdout.write(f"{counts['inputs']:6} {name}, of which {counts['taken']} were valid\n")
        sys.stdout.flush()
    return wrong


def stopped(*_):
    raise Hung


def taker(name, read, counts, wrong, folder):
    """Return what feeds one input; an error has to be one of ours, of a few lines."""

    def take(words):
        counts["inputs"] += 1
        signal.alarm(LIMIT)
        try:
            read(*words)
            counts["taken"] += 1
        except Hung:
            note(folder, name, words, "hang", wrong)
        except (ValueError, OSError) as error:
            if not str(error).strip():
                note(folder, name, words, "traceback", wrong)
        except Exception:
            note(folder, name, words, "traceback", wrong)
        finally:
            signal.alarm(0)

    return take


def note(folder: Path, name, words, kind, wrong):
    """Count a fault, and write down the first input of each place."""
    wrong[kind] += 1
    text = traceback.format_exc()
    frames = [line.strip() for line in text.splitlines() if line.strip().startswith("File")]
    ours = [frame for frame in frames if "/harmonic_sft/" in frame]
    place = (ours or frames)[-1].split("/")[-1].replace('"', "").replace(" ", "_")
    path = folder / f"{kind}-{name.split(',')[0].replace(' ', '_')}-{place}.txt"
    if not path.exists():
        path.write_text(f"{words!r}\n{text}")
