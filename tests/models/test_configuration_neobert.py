import json

import pytest

from harmonic_sft.models.configuration_neobert import NeoBERTConfig
from tests.conftest import NEOBERT


def test_the_published_config_becomes_ours_and_round_trips(tmp_path):
    config = NeoBERTConfig.from_pretrained(NEOBERT)
    assert config.max_position_embeddings == 64
    assert (config.norm_eps, config.rope_theta, config.tie_word_embeddings) == (1e-5, 1e4, False)
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    stray = {"max_length", "dim_head", "kwargs", "auto_map", "trust_remote_code"}
    assert not saved.keys() & (stray | {"pretrained_model_name_or_path"})
    assert saved["max_position_embeddings"] == 64
    assert NeoBERTConfig.from_pretrained(tmp_path).to_dict() == config.to_dict()


def test_the_default_config_is_the_published_one():
    published = json.loads((NEOBERT / "config.json").read_text())
    sizes = {"hidden_size": 768, "intermediate_size": 3072, "max_length": 4096}
    sizes |= {"num_attention_heads": 12, "num_hidden_layers": 28, "vocab_size": 30522}
    full_size = NeoBERTConfig.from_dict({**published, **sizes, "dim_head": 64})
    assert full_size.max_position_embeddings == 4096
    default = NeoBERTConfig(architectures=["NeoBERTLMHead"], dtype="float32")
    default.transformers_version = full_size.transformers_version
    assert full_size.to_dict() == default.to_dict()


def test_an_auto_map_of_our_own_files_is_kept():
    auto_map = {"AutoConfig": "configuration_neobert.NeoBERTConfig"}
    assert NeoBERTConfig.from_dict({"auto_map": auto_map}).to_dict()["auto_map"] == auto_map
    stale = {"AutoConfig": "chandar-lab/NeoBERT--model.NeoBERTConfig"}
    assert "auto_map" not in NeoBERTConfig.from_dict({"auto_map": stale}).to_dict()


def test_head_widths_that_cannot_be_are_refused():
    message = "hidden_size: expected an even multiple of num_attention_heads=12, got"
    for hidden_size in (770, 36):
        with pytest.raises(ValueError, match=f"{message} {hidden_size}"):
            NeoBERTConfig(hidden_size=hidden_size)
    with pytest.raises(
        ValueError, match="dim_head: expected hidden_size // num_attention_heads = 64, got 32"
    ):
        NeoBERTConfig.from_dict({"dim_head": 32})
