"""The old head of a decoder, in one of our heads, has the model's own logits."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, BertConfig, BertModel

from harmonic_sft.models import HarmonicForCausalLM
from harmonic_sft.models.decoders import MULTIPLIED, SOFT_CAPPED, load_decoder
from tests.decoders import FAMILIES, SIZES, V, save_decoder

INPUTS = torch.randint(3, V, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_old_head_has_the_logits_of_transformers(family, tmp_path):
    folder = save_decoder(family, tmp_path)
    config = AutoConfig.from_pretrained(folder)
    decoder = load_decoder(str(folder), config)
    native = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        hidden_states = decoder.backbone.eval()(INPUTS).last_hidden_state
        torch.testing.assert_close(decoder.head(hidden_states), native(INPUTS).logits)
    assert decoder.generation_config.eos_token_id == 2
    # The families that the tables are about would have other logits without them.
    changes = family in MULTIPLIED or decoder.head.softcap is not None
    plain = torch.nn.functional.linear(hidden_states, native.get_output_embeddings().weight)
    if native.get_output_embeddings().bias is None:
        assert torch.allclose(plain, native(INPUTS).logits, rtol=1e-3) is not changes


def test_the_tables_name_fields_that_configurations_have():
    from transformers import CONFIG_MAPPING

    fields = {**{t: f for t, (f, _) in MULTIPLIED.items()}, **SOFT_CAPPED}
    known = {t: f for t, f in fields.items() if t in CONFIG_MAPPING}
    assert len(known) >= 10
    for model_type, field in known.items():
        assert hasattr(CONFIG_MAPPING[model_type](), field), model_type


def test_an_encoder_of_images_is_no_decoder(tmp_path):
    sizes = {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}
    BertModel(BertConfig(**sizes)).save_pretrained(tmp_path)
    config = AutoConfig.for_model("clip")
    with pytest.raises(ValueError, match=r"expected a causal language model .* type 'clip'"):
        load_decoder(str(tmp_path), config)


def test_a_quantized_base_is_refused(tmp_path):
    folder = save_decoder("llama", tmp_path)
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    fields["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    path.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=r"expected weights in a floating dtype, got .*bitsand"):
        HarmonicForCausalLM.from_base(str(folder))
