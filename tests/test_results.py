"""Result files, the description of the machine, and tables."""

import json
import os
import re
import resource
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

from harmonic_sft import results
from harmonic_sft.results import (
    environment,
    peak_memory_bytes,
    read_results,
    show_table,
    without_secrets,
    write_results,
)


def test_what_is_written_reads_back(tmp_path):
    payload = {
        "run": "demo",
        "final": {"loss": 4.25, "steps": 3, "best": None},
        "words": ["na\u00efve"],
    }
    path = write_results(tmp_path / "new" / "results", "train", payload)
    assert path == tmp_path / "new" / "results" / "train.json"
    assert read_results(path) == payload
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = write_results(tmp_path, "train", {"loss": 1.0})

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_results(tmp_path, "train", {"loss": 2.0})
    assert read_results(path) == {"loss": 1.0}
    assert os.listdir(tmp_path) == ["train.json"]


def test_results_are_on_the_disk_before_they_replace_the_old_ones(tmp_path, monkeypatch):
    order = []
    for name in ("fsync", "replace"):
        call = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, n=name, c=call: (order.append(n), c(*a)))
    write_results(tmp_path, "train", {"loss": 1.0})
    assert order == ["fsync", "replace"]


@pytest.mark.parametrize("value", [float("nan"), -float("inf"), torch.tensor(1.0)])
def test_what_json_cannot_hold_is_refused_before_writing(tmp_path, value):
    with pytest.raises(ValueError, match="train: expected JSON values, got others: "):
        write_results(tmp_path, "train", {"final": [{"loss": value}]})
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "expected an existing JSON file"), ("{", "expected JSON"), ("[]", "got list")],
)
def test_a_file_that_holds_no_results_is_refused(tmp_path, text, message):
    path = tmp_path / "train.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_results(path)


def test_the_environment_is_complete_and_json(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "PACKAGES", (*results.PACKAGES, "no-such-package"))
    found = environment()
    assert found["versions"].pop("no_such_package") is None
    assert read_results(write_results(tmp_path, "environment", found)) == found
    assert found["versions"]["torch"].startswith(torch.__version__.split("+")[0])
    names = "python torch transformers datasets accelerate peft harmonic_sft"
    assert " ".join(found["versions"]) == names
    assert found["hardware"]["cpu"]
    assert found["hardware"]["cores"] >= 1
    assert found["hardware"]["memory_bytes"] > 2**28
    assert len(found["hardware"]["gpus"]) == torch.cuda.device_count()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert environment()["hardware"]["gpus"] == ["mps"]
    assert abs((datetime.now(UTC) - datetime.fromisoformat(found["date"])).total_seconds()) < 60


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *arguments]
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_the_commit_is_that_of_the_tracked_file(tmp_path):
    tracked, untracked = tmp_path / "tracked.py", tmp_path / "untracked.py"
    tracked.touch()
    assert results._git_state(tracked) == {"git_commit": None, "dirty": None}
    _git(tmp_path, "init")
    _git(tmp_path, "add", "tracked.py")
    assert results._git_state(tracked) == {"git_commit": None, "dirty": None}
    _git(tmp_path, "commit", "-m", "first")
    commit = _git(tmp_path, "rev-parse", "HEAD")
    untracked.touch()
    assert results._git_state(tracked) == {"git_commit": commit, "dirty": False}
    assert results._git_state(untracked) == {"git_commit": None, "dirty": None}
    tracked.write_text("pass\n")
    assert results._git_state(tracked) == {"git_commit": commit, "dirty": True}


def test_no_git_is_no_error(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert environment()["git_commit"] is None


ROWS = [
    ["annealed, at the best post-hoc h_exp", 4.302, 0.282, "28.2 %", None, 1234567],
    ["[MASK] [bold]", 12345.6, 2e-4, "9.1 %", -1.5, 3],
]
COLUMNS = ["run", "loss", "rate", "accuracy", "h_exp", "tokens"]


def test_a_table_in_a_file_shows_every_cell_on_one_line(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    show_table("Losses in nats", COLUMNS, [[f"{'a long name ' * 8}end", *ROWS[0][1:]], *ROWS])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].strip() == "Losses in nats"
    assert any(f"{'a long name ' * 8}end" in line and "1,234,567" in line for line in lines)
    assert any("[MASK] [bold]" in line for line in lines)


def test_wide_characters_are_not_folded(capsys):
    show_table("Nearest prototypes", ["词", "最近的原型"], [["人工智能", "机器学习 深度学习"]])
    printed = capsys.readouterr().out
    assert "人工智能   机器学习 深度学习" in printed
    assert "最近的原型" in printed


def test_numbers_stand_to_the_right_and_names_to_the_left(capsys):
    show_table("Losses", COLUMNS, ROWS)
    first, second = capsys.readouterr().out.splitlines()[-3:-1]
    for left, right in [
        ("4.302", "12,346"),
        ("0.282", "0.0002"),
        ("28.2 %", "9.1 %"),
        ("1,234,567", "3"),
    ]:
        assert first.index(left) + len(left) == second.rindex(right) + len(right)
    assert first.index("annealed") == second.index("[MASK]")
    assert " - " in first


def test_bounds_and_intervals_stand_to_the_right_as_numbers_do(capsys):
    show_table(
        "Best", ["run", "h_exp"], [["a", "<= 0.06"], ["b", "9"], ["c", "1 ± 2"], ["d", "1 to 2"]]
    )
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()[-5:-1]]
    assert len({len(line) for line in lines}) == 1


@pytest.fixture
def lines_of(capsys, monkeypatch):
    """Print a table to a terminal of some width, and return its lines."""

    def show(width, columns, *rows):
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setenv("FORCE_COLOR", "1")
        show_table("run: masked tokens of the evaluation split", columns, rows)
        return re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()

    return show


def test_a_table_fits_a_terminal_of_80_columns_without_breaking_a_word(lines_of):
    columns = ["", "loss, nats", "accuracy, %", "error cosine (**)", "ECE, %", "h_exp", "best loss"]
    numbers = ["14.25", "25.5", "-0.111", "96.5", "-12", "4"]
    first = ["annealed, after 10000 steps of training", *numbers]
    lines = lines_of(80, columns, first, ["the base's own head", *numbers[:-1], "14.00"])
    assert all(len(line) <= 80 for line in lines)
    words = " ".join(lines).split()
    assert {"annealed,", "training", "accuracy,", "cosine", "14.00", "h_exp"} <= set(words)


def test_text_gives_way_to_columns_of_numbers_that_still_fit(lines_of):
    columns = ["set", "metric", "linear", "dist", "cosine"]
    intervals = ["0.123 to 0.456"] * 3
    row = ["banking77 with typos", "accuracy of class means", *intervals]
    lines = lines_of(80, columns, row)
    assert all(len(line) <= 80 for line in lines)
    assert any(line.split()[-9:] == " ".join(intervals).split() for line in lines)


def test_a_table_is_wider_than_a_narrow_terminal_rather_than_folding_numbers(lines_of):
    columns = ["run", *(f"a long head {number}" for number in range(6))]
    lines = lines_of(40, columns, ["a_name_of_one_word", *["1,234,567.8"] * 6])
    assert any(line.split() == ["a_name_of_one_wo", *["1,234,567.8"] * 6] for line in lines)


def test_no_number_is_cut_or_folded_at_the_edge_of_a_terminal(lines_of):
    words = ["abcdefghijk", "abcdefg", "abcdefghijkl", "abcdefghijkl"]
    texts = ["xy xyzuv x " * 4, "xyz xyzuvw xy " * 4, "xyzuvw xyzuv xyzuv", "xyzu xyzuvw xy"]
    columns = ["loss, nats", *words, "loss", "right, %", "tokens"]
    lines = lines_of(80, columns, [-121324.5, *texts, 70873.5, "12.5 %", -817501])
    assert any(line.split()[-4:] == ["70,874", "12.5", "%", "-817,501"] for line in lines)


def test_a_token_that_cannot_be_read_hides_no_error(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path))
    assert without_secrets("https://me:secret@host/file") == "https://host/file"


def test_peak_memory_is_in_bytes(monkeypatch):
    by_rusage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    by_rusage *= 1 if sys.platform == "darwin" else 1024
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 0)  # where there is a GPU
    assert 2**26 < peak_memory_bytes() <= 1.01 * by_rusage
    monkeypatch.setattr(Path, "is_file", lambda path: False)
    assert peak_memory_bytes() == pytest.approx(by_rusage, rel=0.01)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems count a process alone")
def test_peak_memory_is_not_that_of_whoever_started_the_process():
    held = b"x" * 2**30
    code = "from harmonic_sft.results import peak_memory_bytes as p; print(p())"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert int(child.stdout) < len(held)


@pytest.mark.cuda
def test_peak_memory_on_a_gpu_is_that_of_the_gpu():
    torch.cuda.reset_peak_memory_stats()
    tensor = torch.empty(2**26, dtype=torch.uint8, device="cuda")
    assert tensor.numel() <= peak_memory_bytes() == torch.cuda.max_memory_allocated()


def test_a_token_that_is_a_word_is_left_in_a_text(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "prototype")
    assert without_secrets("one prototype per token") == "one prototype per token"
    monkeypatch.setenv("HF_TOKEN", "eyJhbGciOiJub25l.e30.")
    assert without_secrets("eyJhbGciOiJub25l.e30. is not valid") == "hf_... is not valid"


def test_a_long_word_in_a_message_takes_no_time():
    """It took half a minute: an address was looked for at every letter."""
    word, start = "a" * 100_000, time.process_time()
    assert without_secrets(f"expected words, got {word}") == f"expected words, got {word}"
    assert time.process_time() - start < 5


def test_no_signature_is_in_a_results_file(tmp_path):
    address = "https://me:secret@files.org/a.jsonl?X-Amz-Signature=secret#secret"
    payload = {"sources": [{"path": address}], "note": f"row 3 of {address} is bad", "loss": 1.0}
    text = write_results(tmp_path, "train", payload).read_text()
    assert "secret" not in text
    assert json.loads(text)["sources"] == [{"path": "https://files.org/a.jsonl"}]
    assert json.loads(text)["note"] == "row 3 of https://files.org/a.jsonl is bad"
    assert payload["sources"][0]["path"] == address
