"""Every block of code in README and the guides runs, page by page, from the first to the last.

A page's Python blocks share one namespace, and its commands one folder. Names on the Hub are tiny
repos of `tests/hub_server.py`, and `configs/` holds the shipped files with `SMALL` settings.
"""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from transformers import (
    AutoModelForMaskedLM,
    BertTokenizer,
    ModernBertConfig,
    ModernBertForMaskedLM,
)

from harmonic_sft import NeoBERTConfig
from tests.conftest import SPECIAL, WORDS, save_tiny_base
from tests.decoders import save_decoder, save_tokenizer
from tests.elsewhere import Client
from tests.hub_server import Commit, HubServer
from tests.test_configs import FILES
from tests.test_docs import DOCS, FENCE, README, ROOT, SKILL, name

# tests/ecosystem/test_trl.py runs the program of docs/ecosystem.md.
PAGES = [page for page in (README, *DOCS, SKILL) if page.name != "ecosystem.md"]
NEOBERT = "chandar-lab/NeoBERT"
REVISION = "5424c8efeea6491b151d62dee55a752165407430"  # which configs/neobert.yaml pins
SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
NUM_WORDS = len(SPECIAL + WORDS)
# What a reader of a guide has, and what the pages' programs are cut down to.
READERS = """
import torch
hidden_states = torch.randn(4, 8, requires_grad=True)
prototypes = torch.randn(16, 8, requires_grad=True)
labels = torch.randint(16, (4,))
"""
# The Hub's data sets that a page reads, by their columns; the test server has models alone.
DATA_SETS = {
    "mteb/banking77": ("text", "label_text"),
    "nyu-mll/glue": ("sentence", "sentence1", "sentence2", "label"),
    "nyu-mll/blimp": ("sentence_good", "sentence_bad"),
    "Salesforce/wikitext": ("text",),
}
SMALL_DATA_SETS = f"""
import datasets
load_dataset = datasets.load_dataset

def small(name, subset=None, **options):
    columns = {DATA_SETS}.get(name)
    if columns is None:
        return load_dataset(name, subset, **options)
    texts = [f'{{c}}a \\"{{c}}b\\" {{c}}c' for c in 2 * "abcdefghijklmnopqrstuvwx"]
    labels = [i % 6 for i in range(len(texts))]
    found = {{column: labels if "label" in column else texts for column in columns}}
    return datasets.Dataset.from_dict(found)

datasets.load_dataset = small
"""
UNDRAWN = "from harmonic_sft.training import run; run.plot_run = lambda results, path: path"
SHORTER = ((r"max_steps=\d+", "max_steps=2"), (r"n_trials=\d+", "n_trials=1"))
SMALL = {
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "max_steps": 2,
    "save_steps": 2,
    "eval_steps": 2,
    "use_cpu": True,
    "disable_tqdm": True,
}
PROGRAMS = "harmonic-sft|accelerate|make|pip|hf|uv|python3?"
LAUNCH = "accelerate launch (-q )?scripts/sft.py"  # the launcher has tests of its own
CANNOT_RUN = {  # beginning of a command: why
    "accelerate launch --config_file configs/accelerate/multi_gpu.yaml -m experiments": (
        "needs ImageNet; tests/experiments/harmonic_loss/test_imagenet.py takes a few steps"
    ),
    "harmonic-sft verify": "minutes; tests/training/test_verify.py runs it in small",
    "hf auth login": "asks for a token",
    "make ": "installs packages; some targets take minutes",
    "pip install": "changes the environment of the tests",
    "python -m experiments": "minutes to hours; tests/experiments runs each in small",
    "python3 -m venv": "changes the environment of the tests",
    "uv run": "installs packages; tests/scripts/test_quickstart.py runs the program",
    "python scripts/": "minutes to hours; tests/scripts runs each in small",
}


def blocks(page: Path) -> list[tuple[str, str]]:
    """Fenced Python, lines of fenced shell and indented commands: languages and codes, in order."""
    text = re.sub(r"\\\n\s*", "", page.read_text())
    pattern = rf"{FENCE.pattern}|^    ((?:{PROGRAMS}) [^\n]*)$"
    found = []
    for language, fenced, indented in re.findall(pattern, text, re.MULTILINE | re.DOTALL):
        if language == "python":
            found.append(("python", fenced))
        elif language in ("", "sh", "bash"):
            lines = [indented, *fenced.splitlines()]
            commands = [line.partition("  #")[0].strip() for line in lines]
            found += [("sh", line) for line in commands if re.match(rf"({PROGRAMS}) ", line)]
    return found


def small(config: Path, base: Path) -> str:
    """Return a shipped configuration on tiny text, with few steps."""
    settings = yaml.safe_load(config.read_text())
    model, data = settings["model"], settings["data"]
    if model["base"].startswith(("package:", "runs/")):
        model["base"] = str(base)
    task = model.get("task", "masked_lm")
    path = {"masked_lm": "my.txt", "causal_lm": "chats.jsonl"}.get(task, "labelled.jsonl")
    source = {"path": path, "streaming": data["sources"][0].get("streaming", False)}
    held_out = {"source": {"path": "evaluated.jsonl"}}
    labelled = {"label_column": "label", "eval": held_out}
    settings["data"] = {
        **data,
        "sources": [source],
        "context_length": 24,
        **(labelled if path == "labelled.jsonl" else {"eval": {"documents": 8}}),
    }
    settings["training"] |= SMALL
    settings["check_base"] = False  # the weights are random
    return yaml.safe_dump(settings)


def add_repos(hub: HubServer, root: Path) -> None:
    """Put tiny models under the names that stand on the pages."""
    words = [*SPECIAL, *WORDS[:-2], "capital", "the"]  # of the pages
    tokenizer = BertTokenizer(vocab={word: i for i, word in enumerate(words)})
    torch.manual_seed(0)
    ids = {"pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2}
    modern = ModernBertConfig(
        vocab_size=NUM_WORDS, intermediate_size=64, **SIZES, **ids, eos_token_id=3
    )
    ModernBertForMaskedLM(modern).save_pretrained(root / "modern")
    neobert = NeoBERTConfig(vocab_size=NUM_WORDS, intermediate_size=96, max_length=64, **SIZES)
    AutoModelForMaskedLM.from_config(neobert).save_pretrained(root / "neobert")
    save_tokenizer(save_decoder("llama", root / "llama"))
    for folder in ("modern", "neobert"):
        tokenizer.save_pretrained(root / folder)
    for repo_id, folder in {
        "answerdotai/ModernBERT-base": "modern",
        NEOBERT: "neobert",
        "HuggingFaceTB/SmolLM2-135M": "llama",
    }.items():
        hub.add_repo(repo_id, {p.name: p.read_bytes() for p in (root / folder).iterdir()})
    repo = hub.repos[NEOBERT]
    repo.branches["main"] = repo.fixed[REVISION] = Commit((REVISION,), repo.at("main").files)


@pytest.fixture(scope="module")
def site(tmp_path_factory, text_file):
    """A client of a Hub that knows `me`, and a folder as a reader has it, with a finished run."""
    root = tmp_path_factory.mktemp("site")
    (root / "bert").mkdir()
    save_tiny_base(root / "bert")
    clone = root / "clone"
    for path in FILES:
        copied = clone / path.relative_to(ROOT)
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_text(small(path, root / "bert"))
    for file in ("my.txt", "other.txt"):
        shutil.copy(text_file, clone / file)
    tables = {
        "chats": [{"prompt": f"w5 w6 w{i}", "completion": "w8 w9"} for i in range(40)],
        "labelled": [{"text": word, "label": word[0]} for word in WORDS[:16]],
        "evaluated": [{"text": f"{word} {word}", "label": word[0]} for word in WORDS[:16]],
    }
    for file, rows in tables.items():
        (clone / f"{file}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for file, rows in (("train", tables["labelled"]), ("test", tables["evaluated"])):
        lines = ["review,topic", *(f"{row['text']},{row['label']}" for row in rows)]
        (clone / f"{file}.csv").write_text("\n".join(lines))
    with HubServer(users={"hf_test_token_me": "me"}) as hub:
        add_repos(hub, root)
        on_cpu = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}  # one thread: tiny models
        client = Client(hub.environment(root / "home") | on_cpu)
        client.program(f"import os; os.chdir({str(clone)!r})")
        done = client("train", "configs/neobert.yaml", f"training.output_dir={root / 'run'}")
        assert done["status"] == 0, done["err"]
        client.program(UNDRAWN)  # one picture is enough
        client.program(SMALL_DATA_SETS)
        yield client, root
        client.close()


def make_runs(code: str, run: Path) -> None:
    """Copy the finished run to the folders of `runs/` that a block reads and nobody has made."""
    for word in re.findall(r"\bruns/(?:demo|neobert|causal)\w*", code):
        if not Path(run.parent / "page" / word).exists():
            shutil.copytree(run, run.parent / "page" / word)


def words_of(code: str, folder: Path) -> list[str]:
    """Return the words of `harmonic-sft`; the name of a shipped file becomes the small file."""
    command = re.sub(f"^{LAUNCH}", "harmonic-sft train", code.partition(" > ")[0])
    program, *words = shlex.split(command)
    assert program == "harmonic-sft", code
    if words[0] == "train" and (folder / "configs" / f"{words[1]}.yaml").is_file():
        words[1] = f"configs/{words[1]}.yaml"
    return words


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=name)
def test_every_block_runs(page, site):
    client, root = site
    shutil.rmtree(root / "page", ignore_errors=True)
    shutil.copytree(root / "clone", root / "page")
    client.program(f"import os; os.chdir({str(root / 'page')!r})")
    client.send({"page": name(page), "code": READERS})
    for language, code in blocks(page):
        for pattern, shorter in SHORTER:
            code = re.sub(pattern, shorter, code)
        if language == "python":
            make_runs(code, root / "run")
            done = client.send({"page": name(page), "code": code})
        elif code.startswith(tuple(CANNOT_RUN)):
            continue
        else:
            words = words_of(code, root / "page")
            if words[0] not in ("train", "data"):
                make_runs(code, root / "run")
            done = client(*words)
            if " > " in code:
                (root / "page" / code.partition(" > ")[2]).write_text(done["out"])
        assert done["status"] == 0, f"{code}\n{done['err']}"


def test_what_cannot_run_stands_on_a_page():
    commands = [code for page in PAGES for language, code in blocks(page) if language == "sh"]
    for beginning in CANNOT_RUN:
        assert any(command.startswith(beginning) for command in commands), beginning
