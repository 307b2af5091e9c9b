"""The old head of a decoder, in one of our heads, has the model's own logits."""

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSpeechSeq2Seq,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
)

from harmonic_sft.models import (
    HarmonicConfig,
    HarmonicForCausalLM,
    HarmonicForMaskedLM,
    HarmonicModel,
    max_positions,
)
from harmonic_sft.models.backbones import blocks_without_graph, check_whole
from harmonic_sft.models.bases import base_of, load_base
from harmonic_sft.training.freezing import unfreeze_
from harmonic_sft.training.run_config import UnfreezeConfig
from tests.decoders import FAMILIES, SIZES, V, save_decoder
from tests.saved_models import change_json

INPUTS = torch.randint(3, V, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_old_head_has_the_logits_of_transformers(family, tmp_path):
    folder = save_decoder(family, tmp_path)
    base = load_base(
        str(folder), None, head_class=None, dtype=torch.float32, dropout=None, is_causal=True
    )
    native = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        hidden_states = base.backbone.eval()(INPUTS).last_hidden_state
        torch.testing.assert_close(base.head(hidden_states), native(INPUTS).logits)
    assert base.generation_config.eos_token_id == 2
    changes = family in ("cohere", "granite", "gemma2")  # by a factor or a soft cap
    plain = torch.nn.functional.linear(hidden_states, native.get_output_embeddings().weight)
    if native.get_output_embeddings().bias is None:
        assert torch.allclose(plain, native(INPUTS).logits, rtol=1e-3) is not changes


@pytest.mark.parametrize("kind", ["clip", "reformer", "vit", "whisper"])
def test_what_is_not_of_text_alone_or_of_one_stream_is_refused(tmp_path, kind):
    AutoConfig.for_model(kind, is_encoder_decoder=False).save_pretrained(tmp_path)
    for model_class in (HarmonicForCausalLM, HarmonicForMaskedLM):
        with pytest.raises(ValueError, match=f"of text alone that .* knows, got .* type '{kind}'"):
            model_class.from_base(str(tmp_path))


def test_a_model_of_more_than_text_or_with_code_of_its_own_is_refused():
    class Own(LlamaConfig):
        model_type = "own"

    config = AutoConfig.for_model("whisper", d_model=24, encoder_layers=1, decoder_layers=1)
    speech = AutoModelForSpeechSeq2Seq.from_config(config)
    own = LlamaForCausalLM(Own(**SIZES))
    for model, kind in ((speech, "whisper"), (own, "own")):
        with pytest.raises(ValueError, match=f"of text alone that .* knows, got .* type '{kind}'"):
            base_of(model, dtype=torch.float32, is_causal=True)


def test_a_base_whose_configuration_asks_for_no_cache_is_taken(tmp_path):
    folder = save_decoder("llama", tmp_path, use_cache=False)
    model = HarmonicForCausalLM.from_base(str(folder))
    options = {"max_new_tokens": 4, "do_sample": False}
    expected = model.generate(INPUTS, use_cache=False, **options)
    assert torch.equal(model.generate(INPUTS, use_cache=True, **options), expected)


HYBRID = {
    "mamba_d_state": 8,
    "mamba_d_ssm": 64,
    "mamba_d_head": 8,
    "mamba_n_heads": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
    "head_dim": 8,
}


def test_a_hybrid_is_loaded_again_and_refuses_to_go_back(tmp_path):
    """Falcon-H1 has a buffer that no checkpoint holds, and a state that cannot be rewound."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(CONFIG_MAPPING["falcon_h1"](**SIZES, **HYBRID))
    base.save_pretrained(tmp_path / "base")
    model = HarmonicForCausalLM.from_base(str(tmp_path / "base"))
    model.save_pretrained(tmp_path / "saved")
    again = HarmonicForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(again(INPUTS).logits, model(INPUTS).logits)
    for one in (again, again.model):
        assert one._is_stateful
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful"):
        again.generate(INPUTS, prompt_lookup_num_tokens=2, max_new_tokens=2)


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FLOAT32 = {  # families with weights that stay in float32; the second does not name them
    "ernie4_5_moe": {**EXPERTS, "moe_num_experts": 4, "moe_k": 2},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "head_dim": 8},
}


@pytest.mark.parametrize("family", FLOAT32)
def test_what_transformers_keeps_in_float32_is_not_rounded(tmp_path, family):
    """Not in a block that trains either, nor after the model was saved."""
    config = CONFIG_MAPPING[family](**SIZES, **FLOAT32[family])
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    native = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    kept = {n for n, p in native.model.named_parameters() if p.dtype == torch.float32}
    assert kept
    model = HarmonicForCausalLM.from_base(str(tmp_path), dtype=torch.bfloat16)
    unfreeze_(model, UnfreezeConfig(last_blocks=1, dtype="bfloat16"))
    model.save_pretrained(tmp_path / "saved")
    again = HarmonicForCausalLM.from_pretrained(tmp_path / "saved")
    expected = native.model(INPUTS).last_hidden_state
    for one in (model, again):
        backbone = one.model.backbone
        assert {n for n, p in backbone.named_parameters() if p.dtype == torch.float32} == kept
        assert torch.equal(one.eval().model(INPUTS).last_hidden_state, expected)


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("bert", "whose tokens see those behind them"),
        ("llama4_text", "expected a decoder whose body stands apart from its head, got a Llama4F"),
        ("mamba", "expected a decoder with a cache of keys and values"),
        ("minimax", "got a MiniMaxForCausalLM, which keeps another state"),
        ("modernbert-decoder", "expected logits of one linear layer"),
        # Another one, of another width. In transformers 5.17 its tokens see those behind them.
        ("rembert", "expected (logits of one linear layer|a decoder, got)"),
    ],
)
def test_what_is_no_decoder_with_a_linear_head_is_refused(tmp_path, model_type, message):
    sizes = {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}
    own = {
        "rembert": {"is_decoder": True, "input_embedding_size": 16},
        "minimax": {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 2},
    }
    fields = {**sizes, "pad_token_id": 0, **own.get(model_type, {})}
    config = CONFIG_MAPPING[model_type](**fields)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        HarmonicForCausalLM.from_base(str(tmp_path))


def test_a_decoder_that_transformers_cannot_run_in_a_precision_is_refused(tmp_path):
    sizes = {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48, "vocab_size": V}
    config = CONFIG_MAPPING["xlnet"](**sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="runs in this precision, got an error of its XLNet"):
        HarmonicForCausalLM.from_base(str(tmp_path), dtype=torch.bfloat16)


def test_a_base_without_token_embeddings_is_refused(tmp_path, monkeypatch):
    folder = str(save_decoder("llama", tmp_path))
    for answer in (lambda self: None, lambda self: (_ for _ in ()).throw(NotImplementedError)):
        monkeypatch.setattr(LlamaModel, "get_input_embeddings", answer)
        with pytest.raises(ValueError, match="expected token embeddings, got none in a LlamaModel"):
            HarmonicForCausalLM.from_base(folder)


def test_dropout_of_gpt2_is_replaced_and_runs_where_it_trains(tmp_path):
    folder = str(save_decoder("gpt2", tmp_path))
    model = HarmonicForCausalLM.from_base(folder, dropout=0.3).train()
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Dropout)]
    assert {layer.p for layer in layers} == {0.3}
    assert all(layer.training for layer in layers)  # that of the embeddings has no weights
    model.requires_grad_(False)
    model.dist_head.requires_grad_(True)
    assert not any(layer.training for layer in layers if model.train())


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("gptq", r"quantized by one of \['bitsandbytes', 'torchao'\], got 'gptq'"),
        ("torchao", "expected package torchao, which its weights are quantized with, got none"),
    ],
)
def test_what_quantized_bases_are_refused(tmp_path, method, message):
    folder = save_decoder("llama", tmp_path)
    change_json(folder / "config.json", quantization_config={"quant_method": method})
    with pytest.raises(ValueError, match=message):
        HarmonicForCausalLM.from_base(str(folder))
    with pytest.raises(ValueError, match=f"expected weights in a floating dtype, got '{method}'"):
        HarmonicForMaskedLM.from_base(str(folder))


@pytest.mark.parametrize("family", ["mpnet", "ibert", "roberta-prelayernorm", "yoso"])
def test_positions_are_counted_from_0_whatever_the_backbone(family):
    sizes = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    more = {"intermediate_size": 32, "max_position_embeddings": 24, "pad_token_id": 1}
    torch.manual_seed(0)
    backbone = AutoModel.from_config(CONFIG_MAPPING[family](**sizes, **more)).eval()
    model = HarmonicModel._from_config(HarmonicConfig(text_config=backbone.config)).eval()
    model.backbone = backbone
    length = max_positions(backbone.config)
    assert length == (24 if family == "yoso" else 22)
    rows = torch.randint(5, 40, (2, length))
    with torch.no_grad():
        expected = backbone(rows).last_hidden_state
        found = model(rows, position_ids=torch.arange(length)[None]).last_hidden_state
    torch.testing.assert_close(found, expected)


# transformers before 5.23 scripts functions of DeBERTa-v2, which torch deprecates.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_frozen_parts_have_no_dropout():
    sizes = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    tables = {"relative_attention": True, "pos_att_type": ["c2p"], "conv_kernel_size": 3}
    config = CONFIG_MAPPING["deberta-v2"](**sizes, **tables, intermediate_size=32)
    model = HarmonicModel._from_config(HarmonicConfig(text_config=config))
    model.requires_grad_(False)
    model.backbone.encoder.layer[1].requires_grad_(True)
    model.train()
    assert not model.backbone.encoder.conv.training
    assert model.backbone.encoder.layer[1].training
    assert list(blocks_without_graph(model.backbone)) == [model.backbone.encoder.layer[0]]


def test_weights_that_may_not_be_read_are_not_called_missing(neobert_base, monkeypatch):
    """As those of another user are, which safetensors 0.8 writes for that user alone."""
    path = neobert_base / "model.safetensors"
    check_whole([path])

    def denied(self, *_):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr("pathlib.Path.open", denied)  # whoever is root may read everything
    with pytest.raises(PermissionError, match=r"Permission denied: '.*model.safetensors'"):
        check_whole([path])
