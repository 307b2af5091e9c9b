"""Two processes train what one trains."""

import json
import re
import signal

import pytest
from safetensors.torch import load_file

from tests.elsewhere import run_python
from tests.encoders import save_bert_tokenizer, save_encoder
from tests.training import python_session
from tests.training.conftest import logged, start

HEAD = ("dist_head.weight", "bert.embeddings.word_embeddings.weight")  # where the first starts
DTYPES = {"float32": [], "bfloat16": ["model.dtype=bfloat16", "model.unfreeze.dtype=bfloat16"]}


def test_two_processes_equal_one(make_yaml, tmp_path, launch, tiny_base, text_file):
    """In float32, and with 16-bit weights, whose gradients we average ourselves.

    An epoch has 17 rows: in its last step one process has a single row and the other one none.
    """
    lines = text_file.read_text().splitlines()
    (tmp_path / "text.txt").write_text("\n".join(lines[:19]))
    path = make_yaml(
        data={"sources": [{"path": str(tmp_path / "text.txt")}], "eval": {"documents": 5}},
        training={"learning_rate": 1e-3, "gradient_accumulation_steps": 2, "max_steps": 4},
    )

    def commands(processes):
        size = f"training.per_device_train_batch_size={4 // processes}"
        for name, words in DTYPES.items():
            yield [*words, size, f"training.output_dir={tmp_path / name}{processes}"]

    for command in commands(1):
        start(path, *command)
    for command in commands(2):
        launch([path, *command], 2)
    base = load_file(tiny_base / "model.safetensors")
    for name, tolerance in (("float32", 1e-5), ("bfloat16", 1e-2)):
        folders = [tmp_path / f"{name}{processes}" for processes in (1, 2)]
        one, two = [json.loads((f / "results" / "train.json").read_text()) for f in folders]
        for key, rel in (("loss", tolerance), ("num_input_tokens_seen", 0)):
            expected = pytest.approx(logged(one["history"], key), rel=rel)
            assert logged(two["history"], key) == expected
        for key in ("loss", "tokens", "post_hoc_loss"):
            assert two["before"][key] == pytest.approx(one["before"][key], rel=tolerance)
        first, second = (load_file(folder / "model.safetensors") for folder in folders)
        block = [key for key in first if ".layer.2." in key and key.endswith("dense.weight")]
        for key in (*block, "dist_head.weight"):
            before = base[key.replace("model.backbone", "bert").replace(*HEAD)]
            moved = (first[key] - before).float().norm()
            assert (second[key] - first[key]).float().norm() < 2 * tolerance * moved, key


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_that_take_no_part_in_a_step_train_on_request(make_yaml, tmp_path, launch, dtype):
    """Longformer has some for global attention, which no token here has."""
    base = save_encoder("longformer", tmp_path / "base", attention_window=4)
    save_bert_tokenizer(base)
    lines = (" ".join(f"w{(7 * i + j) % 100}" for j in range(12)) for i in range(40))
    (tmp_path / "words.txt").write_text("\n".join(lines))
    path = make_yaml(
        model={"base": str(base), "dropout": 0.0},
        data={"sources": [{"path": str(tmp_path / "words.txt")}], "eval": {"documents": 8}},
        training={"max_steps": 3},
        check_base=False,
    )
    words = [path, *DTYPES[dtype], "training.ddp_find_unused_parameters=true"]
    launch([*words, "training.per_device_train_batch_size=4"], 2)
    alone = [*words, "training.per_device_train_batch_size=8"]
    one = start(*alone, f"training.output_dir={tmp_path / 'one'}")
    two = json.loads((tmp_path / "run" / "results" / "train.json").read_text())
    rel = 1e-5 if dtype == "float32" else 1e-2
    assert logged(two["history"]) == pytest.approx(logged(one["history"]), rel=rel)


def test_two_processes_in_python_equal_one(tmp_path, tiny_base, text_file, launch):
    """After an evaluation of the logits, on the user's rows, on numbers, with the user's loss.

    A search goes on after a trial that diverges.
    """
    one = python_session.train(tiny_base, text_file, tmp_path / "one")
    folder = tmp_path / "two"
    folder.mkdir()
    launch([tiny_base, text_file, folder], 2)
    two, other = [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]
    for name, expected in one.items():
        assert two[name]["weights"] == other[name]["weights"], name
        assert two[name]["labels"] == expected["labels"], name
        for key in ("losses", "evaluated", "training_loss"):
            assert two[name][key] == pytest.approx(expected[key], rel=1e-5), (name, key)
            assert two[name][key] == other[name][key], (name, key)
    assert (two["best"], other["best"]) == ({"learning_rate": 1e-3}, None)


@pytest.mark.slow
@pytest.mark.parametrize("save", ["full", "trainable"])
def test_a_sigterm_to_one_of_two_processes_ends_both_and_one_continues(
    make_yaml, tmp_path, launch, caplog, save
):
    """After the same step; the process that continues keeps the effective batch."""
    path = make_yaml(
        training={"per_device_train_batch_size": 4, "learning_rate": 1e-3, "save_strategy": "no"},
        save=save,
    )
    alone = ["training.per_device_train_batch_size=8", f"training.output_dir={tmp_path / 'alone'}"]
    whole = start(path, *alone)
    launch([path], 2, 2, signal.SIGTERM)
    assert [p.name for p in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-4"]
    again = start(path, "resume=true")
    assert "1 processes with 4 rows each accumulate over 2 micro-batches" in caplog.text
    assert logged(again["history"]) == pytest.approx(logged(whole["history"]), rel=1e-5)


FROZEN = """
import os, signal, sys
from harmonic_sft.training.trainer import HarmonicTrainer
from harmonic_sft_cli import main
from tests.training.processes import fork

training_step = HarmonicTrainer.training_step

def frozen(self, *arguments):
    if self.state.global_step == 2 and self.args.process_index == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGSTOP)
    return training_step(self, *arguments)

HarmonicTrainer.training_step = frozen
words = ["train", sys.argv[1], "training.ddp_timeout=30"]
children = fork(2, lambda rank: os._exit(main(words)))
stopped = children.pop(int(sys.argv[2]))
status = os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1])
os.kill(stopped, signal.SIGKILL)
sys.exit(status)
"""


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_frozen_process_is_named(make_yaml, rank):
    done = run_python("-c", FROZEN, make_yaml(), rank, status=1)
    message = f"within training.ddp_timeout, 30 seconds, got no answer from [{rank}] of 2"
    assert message in done.stderr
    # Said before; here process 0 has the store, under torchrun none of them.
    if rank == 1:
        said = r"Process 0 has waited for 2\d seconds: \[1\] of 2, counted from 0, have started few"
        assert re.search(said, done.stderr)
