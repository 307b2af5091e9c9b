"""Tokenizers that several tests of words need."""

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast


@pytest.fixture
def tokenizer(tiny_base):
    return AutoTokenizer.from_pretrained(tiny_base)


@pytest.fixture
def byte_level():
    """Byte-level BPE: every byte, a space with an s, and these with a t."""
    alphabet = sorted(ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, "Ġs", "Ġst"])}
    backend = Tokenizer(BPE(vocab, [("Ġ", "s"), ("Ġs", "t")]))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), ByteDecoder()
    return PreTrainedTokenizerFast(tokenizer_object=backend)
