"""The demo in small, for scripts that start from it."""

import shutil
from pathlib import Path

import pytest
import torch
import yaml
from transformers import BertConfig, BertForMaskedLM

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def small_demo(shared, minilm_path, text_file):
    """A folder with `configs/demo.yaml` on a short text and a narrow `base`, all words in it."""

    def make(folder):
        settings = yaml.safe_load((ROOT / "configs" / "demo.yaml").read_text())
        settings["model"]["base"] = str(folder / "base")
        settings["data"]["sources"] = [{"path": str(text_file)}]
        (folder / "configs").mkdir()
        (folder / "configs" / "demo.yaml").write_text(yaml.safe_dump(settings))
        sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64}
        torch.manual_seed(0)
        config = BertConfig(hidden_size=32, intermediate_size=64, vocab_size=30_522, **sizes)
        BertForMaskedLM(config).save_pretrained(folder / "base")
        for path in [*minilm_path.glob("tokenizer*.json"), *minilm_path.glob("vocab.txt")]:
            shutil.copyfile(path, folder / "base" / path.name)

    return shared("small_demo", make)


@pytest.fixture
def use_small_demo(small_demo, monkeypatch):
    """Let a script's CONFIG and BASE be those of the small demo."""

    def use(script):
        monkeypatch.setattr(script, "CONFIG", small_demo / "configs" / "demo.yaml")
        monkeypatch.setattr(script, "BASE", str(small_demo / "base"))

    return use
