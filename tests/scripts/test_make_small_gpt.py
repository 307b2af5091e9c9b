"""The shape of the small GPT is what training from scratch takes."""

import pytest
from transformers import AutoConfig, AutoTokenizer

from scripts import make_small_gpt


def test_the_folder_has_a_shape_and_a_tokenizer(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat\n" * 50)
    options = ["--vocab-size", "300", "--hidden-size", "64", "--layers", "2"]
    folder = make_small_gpt.main([str(text), str(tmp_path / "shape"), *options])
    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert (config.n_embd, config.n_layer, config.vocab_size) == (64, 2, len(tokenizer))
    assert tokenizer.eos_token_id == config.eos_token_id
    ids = tokenizer("the cat sat").input_ids
    assert tokenizer.decode(ids) == "the cat sat"
    with pytest.raises(ValueError, match="folder: expected an empty one or none"):
        make_small_gpt.main([str(text), str(folder)])
    with pytest.raises(ValueError, match="text: expected a file"):
        make_small_gpt.main([str(tmp_path / "none.txt"), str(tmp_path / "other")])
