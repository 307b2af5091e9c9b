"""Tiny decoders of every family that the tests go through."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerFast

V, D = 120, 32
SIZES = {
    "vocab_size": V,
    "hidden_size": D,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6}
OWN = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": 6},
    "smollm3": {},
    "olmo2": {},
    "phi3": {"sliding_window": 6},
    "gemma": {"head_dim": 8},
    "gemma2": {**GEMMA, "final_logit_softcapping": 2.0},
    "gemma3_text": GEMMA,
    "cohere": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 3.0},
    "phi": {},  # its output layer has a bias
    "gpt2": {},
}
FAMILIES = tuple(OWN)


def decoder_config(family: str, **own):
    sizes = dict(SIZES)
    if family == "gpt2":
        del sizes["num_key_value_heads"], sizes["intermediate_size"]
    return CONFIG_MAPPING[family](**{**sizes, **OWN.get(family, {}), **own})


def save_decoder(family: str, folder: Path, **own) -> Path:
    """Save one with weights so large that anything that leaks shows."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(decoder_config(family, **own))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return folder


def save_tokenizer(folder: Path, *, extra: int = 0, eos: str | None = "w2") -> None:
    """Save one whose words are w0, w1 and so on."""
    words = {f"w{index}": index for index in range(V + extra)}
    plain = Tokenizer(models.WordLevel(words, unk_token="w0"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=plain, eos_token=eos).save_pretrained(folder)
