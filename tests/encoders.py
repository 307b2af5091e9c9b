"""Tiny encoders of every family that the tests go through."""

from pathlib import Path

import torch
from transformers import CONFIG_MAPPING, AutoModelForMaskedLM, BertTokenizer

import harmonic_sft  # noqa: F401, registers NeoBERT

V = 120
SIZES = {
    "vocab_size": V,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
}
SPECIAL = {"bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
OWN = {
    "bert": {},
    "roberta": {"pad_token_id": 0},
    "modernbert": {**SPECIAL, "pad_token_id": 0},
    "neobert": {},
}
FAMILIES = tuple(OWN)


def save_encoder(family: str, folder: Path, **changes) -> Path:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**{**SIZES, **OWN.get(family, {}), **changes})
    AutoModelForMaskedLM.from_config(config).save_pretrained(folder)
    return folder


def save_bert_tokenizer(folder: Path) -> None:
    """Save one whose words are w0, w1 and so on."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(V - 5))]
    BertTokenizer(vocab={word: i for i, word in enumerate(words)}).save_pretrained(folder)
