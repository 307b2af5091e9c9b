"""TRL's five trainers through harmonic_sft.integrations.trl; they need this package.

Another version: .venv/ecosystem/bin/python -m pip install --no-deps trl==1.7.0, then this file.
"""

import re
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from packaging.version import Version
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from harmonic_sft import HarmonicForCausalLM, HarmonicTrainer, HarmonicTrainingArguments
from harmonic_sft.integrations.trl import patch
from harmonic_sft.training.callbacks import HeadCallback
from harmonic_sft.training.run_config import HExpConfig
from tests.decoders import save_decoder, save_tokenizer

trl = pytest.importorskip("trl", reason="make test-ecosystem installs it")
pytestmark = [pytest.mark.ecosystem, pytest.mark.filterwarnings("ignore")]  # TRL's own
VERSION = Version(trl.__version__)
HOOK = trl.trainer.utils, "add_fused_lm_head"  # what patch() replaces
if Version("1.15") > VERSION:
    HOOK = trl.trainer.sft_trainer, "_patch_chunked_ce_lm_head"
if Version("1.4") > VERSION:
    HOOK = trl.SFTTrainer, "compute_loss"
ORIGINAL = vars(HOOK[0])[HOOK[1]]

CHAT = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }} w119"
    "{% endgeneration %}{% else %}{{ m.content }} {% endif %}{% endfor %}"
)
WORDS = [[3 + (7 * row + column) % 110 for column in range(10)] for row in range(16)]


def text(words):
    return " ".join(f"w{word}" for word in words)


ROWS = {
    "tokens": [{"input_ids": words} for words in WORDS],
    "chat": [
        {
            "messages": [
                {"role": "user", "content": text(words[:4])},
                {"role": "assistant", "content": text(words[4:])},
            ]
        }
        for words in WORDS
    ],
    "preference": [
        {"prompt": text(w[:4]) + " ", "chosen": text(w[4:]), "rejected": text(w[:3])} for w in WORDS
    ],
    "good_or_bad": [
        {"prompt": text(words[:4]) + " ", "completion": text(words[4:]), "label": bool(row % 2)}
        for row, words in enumerate(WORDS)
    ],
    "prompt": [{"prompt": text(words[:4])} for words in WORDS],
}
# One step on all rows, so that its loss compares.
ONE = {"max_steps": 1, "per_device_train_batch_size": 16}
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["dist_head"])


@pytest.fixture(scope="module", autouse=True)
def patched():
    patch()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A harmonic decoder with its tokenizer."""
    base = save_decoder("llama", tmp_path_factory.mktemp("base"))
    save_tokenizer(base, eos="w119")
    folder = base / "harmonic"
    HarmonicForCausalLM.from_base(str(base), head={"name": "dist", "h_exp": -6.0}).save_pretrained(
        folder
    )
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.pad_token, tokenizer.chat_template = "w0", CHAT
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def make(folder, tmp_path):
    """Make one of TRL's trainers, on a model or its name."""

    def make(kind, model=None, rows=None, options=None, **fields):
        settings = {
            "output_dir": str(tmp_path / "out"),
            "max_steps": 3,
            "per_device_train_batch_size": 4,
            "learning_rate": 5e-3,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "use_cpu": True,
            "bf16": False,
            "disable_tqdm": True,
            "gradient_checkpointing": False,
        }
        if kind in ("GRPO", "RLOO"):
            settings |= {"max_completion_length": 6, "num_generations": 4}
            fields["reward_funcs"] = reward
        return getattr(trl, f"{kind}Trainer")(
            HarmonicForCausalLM.from_pretrained(folder) if model is None else model,
            args=getattr(trl, f"{kind}Config")(**{**settings, **(options or {})}),
            train_dataset=Dataset.from_list(ROWS[rows or DATA[kind]]),
            processing_class=AutoTokenizer.from_pretrained(folder),
            **fields,
        )

    return make


DATA = {
    "SFT": "tokens",
    "DPO": "preference",
    "KTO": "good_or_bad",
    "GRPO": "prompt",
    "RLOO": "prompt",
}


def reward(completions, **kwargs):
    return [float(sum(map(ord, completion)) % 17) for completion in completions]


def logs(trainer, key="loss"):
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def harmonic_loss(model, rows, first=1):
    """The mean loss from the definition, of labels from position `first` on."""
    return -label_probs(model, rows)[:, first - 1 :].log().mean().item()


def label_probs(model, rows):
    """The probability of every label, from the definition."""
    ids = torch.tensor(rows)
    with torch.no_grad():
        states = model.eval().model(input_ids=ids).last_hidden_state[:, :-1].double()
    states = torch.nn.functional.normalize(states, dim=-1)
    prototypes = torch.nn.functional.normalize(model.dist_head.weight.detach().double(), dim=-1)
    squared = (states.unsqueeze(2) - prototypes).square().sum(-1)  # [B, T - 1, V]
    probs = (squared + 1e-6) ** model.h_exp
    probs = probs / probs.sum(-1, keepdim=True)
    return probs.gather(-1, ids[:, 1:, None]).squeeze(-1)  # [B, T - 1]


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("how", ["object", "name", "lora"])
def test_every_trainer_trains_a_harmonic_model(make, folder, kind, how):
    before = HarmonicForCausalLM.from_pretrained(folder).state_dict()
    trainer = make(
        kind,
        model=str(folder) if how == "name" else None,
        options={"per_device_train_batch_size": 16},  # all rows, so that losses compare
        **({"peft_config": LORA} if how == "lora" else {}),
    )
    trainer.train()
    assert len(logs(trainer)) == 3
    assert all(torch.isfinite(torch.tensor(logs(trainer))))
    after = trainer.model.merge_and_unload() if how == "lora" else trainer.model
    assert isinstance(after, HarmonicForCausalLM)
    moved = (after.dist_head.weight - before["dist_head.weight"]).abs().max()
    assert moved > 1e-3
    if kind in ("SFT", "DPO", "KTO"):
        assert logs(trainer)[-1] < logs(trainer)[0]


def test_the_first_loss_is_that_of_our_own_trainer(make, folder, tmp_path):
    theirs = make("SFT", options=ONE)
    theirs.train()
    own = HarmonicTrainer(
        HarmonicForCausalLM.from_pretrained(folder),
        HarmonicTrainingArguments(
            str(tmp_path / "own"),
            **ONE,
            h_exp=-6.0,
            unfreeze=["*"],
            context_length=16,
            logging_steps=1,
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(ROWS["tokens"]),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    own.train()
    expected = harmonic_loss(HarmonicForCausalLM.from_pretrained(folder), WORDS)
    assert logs(theirs)[0] == pytest.approx(expected, rel=1e-5)
    assert logs(theirs)[0] == pytest.approx(logs(own)[0], rel=1e-5)


@pytest.mark.parametrize("loss_type", ["nll", "dft", "chunked_nll"])
def test_every_loss_of_the_sft_trainer_is_one_of_the_head(make, folder, loss_type):
    if loss_type == "chunked_nll" and Version("1.4") > VERSION:
        pytest.skip("TRL before 1.4 has no chunked_nll")
    trainer = make(
        "SFT",
        options={**ONE, "loss_type": loss_type},
        eval_dataset=Dataset.from_list(ROWS["tokens"]),
    )
    probs = label_probs(HarmonicForCausalLM.from_pretrained(folder), WORDS)
    weights = probs if loss_type == "dft" else torch.ones_like(probs)
    expected = pytest.approx(-(weights * probs.log()).mean().item(), rel=1e-5)
    assert trainer.evaluate()["eval_loss"] == expected
    trainer.train()
    assert logs(trainer)[0] == expected


def test_packed_rows_are_kept_apart(make, folder):
    options = {"per_device_train_batch_size": 8, "packing": True, "max_length": 24}
    trainer = make("SFT", options={**ONE, **options})
    assert len(trainer.train_dataset) == 8  # of two rows each
    trainer.train()
    expected = harmonic_loss(HarmonicForCausalLM.from_pretrained(folder), WORDS)
    assert logs(trainer)[0] == pytest.approx(expected, rel=1e-5)


def test_only_the_assistant_is_scored(make, folder):
    trainer = make("SFT", rows="chat", options={**ONE, "assistant_only_loss": True})
    trainer.train()
    rows = [[*words, 119] for words in WORDS]
    expected = harmonic_loss(HarmonicForCausalLM.from_pretrained(folder), rows, first=4)
    assert logs(trainer)[0] == pytest.approx(expected, rel=1e-5)


def test_the_metrics_are_those_of_the_head(make, folder):
    trainer = make("SFT", options=ONE)
    trainer.train()
    ids = torch.tensor(WORDS)
    with torch.no_grad():
        logits = HarmonicForCausalLM.from_pretrained(folder)(ids).logits
    log_probs = logits.log_softmax(-1)
    entropies = -(log_probs.exp() * log_probs).sum(-1)  # [B, T]
    scored = slice(None) if Version("1.3") > VERSION else slice(-1)  # TRL before 1.3 takes all
    entropy = entropies[:, scored].mean().item()
    accuracy = (logits[:, :-1].argmax(-1) == ids[:, 1:]).float().mean().item()
    assert logs(trainer, "entropy")[0] == pytest.approx(entropy, rel=1e-4)
    assert logs(trainer, "mean_token_accuracy")[0] == pytest.approx(accuracy, abs=1e-6)


def test_the_exponent_is_annealed_and_prototypes_keep_norm_1(make):
    callback = HeadCallback(HExpConfig(start=-6.0, end=-3.0))
    trainer = make("SFT", callbacks=[callback])
    trainer.train()
    assert trainer.model.h_exp == -3.0
    norms = trainer.model.dist_head.weight.norm(dim=-1)
    torch.testing.assert_close(norms, torch.ones_like(norms))


def test_other_models_are_treated_as_before(folder):
    owner, name = HOOK
    ours = vars(owner)[name]
    assert ours is not ORIGINAL
    if Version("1.4") > VERSION:
        return  # no function to call: the trainer's method reads the kind of model
    codes = []
    for add in (ours, ORIGINAL):
        llama = AutoModelForCausalLM.from_pretrained(folder.parent)
        add(llama, 64) if Version("1.15") > VERSION else add(llama)
        codes.append(llama.forward.__func__.__code__)
    assert codes[0] is codes[1]


BY_NAME = """
import tempfile, datasets
from trl import SFTConfig, SFTTrainer
from harmonic_sft.integrations.trl import patch
patch()
rows = datasets.Dataset.from_dict({"input_ids": [[5, 6, 7, 8]] * 4})
args = SFTConfig(
    tempfile.mkdtemp(), max_steps=1, use_cpu=True, bf16=False, report_to="none", disable_tqdm=True,
    model_init_kwargs={"trust_remote_code": True}, logging_steps=1, save_strategy="no",
)
trainer = SFTTrainer("alice/decoder", args=args, train_dataset=rows)
trainer.train()
print("\\nloss", trainer.state.log_history[0]["loss"])
"""


def test_a_repo_is_trained_by_name(client, repos):
    written = client.program(BY_NAME)
    model = HarmonicForCausalLM.from_pretrained(repos["decoder"])
    expected = harmonic_loss(model, [[5, 6, 7, 8]])
    [line] = [line for line in written.splitlines() if line.startswith("loss ")]
    assert float(line.split()[1]) == pytest.approx(expected, rel=1e-4)


def test_the_program_of_the_guide_runs(client, repos, tmp_path):
    guide = (Path(__file__).parents[2] / "docs" / "ecosystem.md").read_text()
    [program] = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    for old, new in {
        "HuggingFaceTB/SmolLM2-135M": str(repos["decoder"]),
        '"runs/trl", max_steps=10': f'"{tmp_path}", max_steps=1, use_cpu=True, bf16=False',
        "The capital of France is Paris.": "w5 w6 w7 w8",
    }.items():
        assert old in program
        program = program.replace(old, new)
    client.program(program)
