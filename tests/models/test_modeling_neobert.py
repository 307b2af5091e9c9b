import math

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import varlen
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM

from harmonic_sft.models.configuration_neobert import NeoBERTConfig
from harmonic_sft.models.modeling_neobert import (
    NeoBERTForMaskedLM,
    NeoBERTModel,
    NeoBERTRMSNorm,
    NeoBERTSwiGLU,
    apply_rotary_embedding,
    document_boundaries,
    rotary_embedding,
    turn_complex,
)
from tests.conftest import NEOBERT

both_attentions = pytest.mark.parametrize("attention", ["sdpa", "eager"])


def tensors(name: str) -> dict[str, Tensor]:
    return load_file(NEOBERT / f"{name}.safetensors")


@pytest.fixture
def load(neobert_base):
    return lambda attention="sdpa": NeoBERTForMaskedLM.from_pretrained(
        neobert_base, attn_implementation=attention
    )


def difference(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


@both_attentions
@pytest.mark.parametrize("suffix", ["", "_nopad"])
@torch.no_grad()
def test_outputs_are_those_of_the_published_code(load, attention, suffix):
    model, expected = load(attention), tensors(f"outputs{suffix}")
    inputs = tensors(f"inputs{suffix}")
    hidden_states = model.model(**inputs).last_hidden_state
    assert difference(hidden_states, expected["last_hidden_state"]) < 1e-4
    logits = model(**inputs).logits
    assert difference(logits, expected["logits"]) < 1e-4
    if suffix:  # no mask is a mask of ones
        assert difference(model(input_ids=inputs["input_ids"]).logits, logits) < 1e-5


@both_attentions
@torch.no_grad()
def test_every_hidden_state_is_that_of_the_published_code(load, attention):
    model, expected, blocks = load(attention), tensors("hidden_states"), []
    for block in model.model.transformer_encoder:
        block.register_forward_hook(lambda *call: blocks.append(call[-1]))
    hidden_states = model(**tensors("inputs"), output_hidden_states=True).hidden_states
    assert len(hidden_states) == 4
    for name, got in zip(expected, [hidden_states[0], *blocks], strict=True):
        assert difference(got, expected[name]) < 1e-4, name
    assert all(a is b for a, b in zip(hidden_states[1:3], blocks, strict=False))
    assert difference(hidden_states[3], tensors("outputs")["last_hidden_state"]) < 1e-4


@torch.no_grad()
def test_auto_classes_load_the_published_layout_without_remote_code(neobert_base):
    import harmonic_sft  # noqa: F401, registers the classes

    assert type(AutoConfig.from_pretrained(neobert_base)) is NeoBERTConfig
    inputs, expected = tensors("inputs"), tensors("outputs")
    for auto, model_class, key in (
        (AutoModelForMaskedLM, NeoBERTForMaskedLM, "logits"),
        (AutoModel, NeoBERTModel, "last_hidden_state"),
    ):
        model, report = auto.from_pretrained(neobert_base, output_loading_info=True)
        assert type(model) is model_class
        assert not any(report.values()), report
        assert difference(model(**inputs)[key], expected[key]) < 1e-4


@pytest.mark.parametrize(
    ("model_class", "count"), [(NeoBERTModel, 221_665_536), (NeoBERTForMaskedLM, 245_136_954)]
)
def test_the_default_config_has_the_size_of_the_published_model(model_class, count):
    with torch.device("meta"):
        model = model_class(NeoBERTConfig())
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    assert not list(model.buffers())


def rotate(vector: Tensor, position: int) -> Tensor:
    """RoPE of one vector of float64, one complex number at a time."""
    rotated = []
    for i in range(0, len(vector), 2):
        angle = position * 10000.0 ** (-i / len(vector))
        number = complex(vector[i], vector[i + 1]) * complex(math.cos(angle), math.sin(angle))
        rotated += [number.real, number.imag]
    return torch.tensor(rotated, dtype=torch.float64)


@pytest.mark.parametrize(("position", "tolerance"), [(0, 0), (1, 1e-6), (63, 1e-5), (4095, 1e-3)])
def test_rope_turns_neighbors_as_complex_numbers(position, tolerance):
    vector = torch.linspace(-1, 1, 64)
    cos, sin = rotary_embedding(torch.tensor([[position]]), 64, 10000.0)
    got = apply_rotary_embedding(vector, cos[0, 0], sin[0, 0])
    assert difference(got, rotate(vector.double(), position)) <= tolerance


def test_rope_by_complex_numbers_is_that_by_real_ones():
    cos, sin = rotary_embedding(torch.arange(64)[None], 64, 10000.0)
    states = torch.randn(2, 64, 3, 2, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    tables = [table[:, :, None, None] for table in (cos, sin)]
    turned = turn_complex(states.unflatten(-1, (-1, 2)), *tables).flatten(-2)
    assert turned.dtype == torch.float32
    assert difference(turned, apply_rotary_embedding(states.float(), *tables)) < 1e-6


def test_rope_is_computed_in_float32_for_a_bfloat16_input():
    cos, sin = rotary_embedding(torch.arange(4096)[None], 64, 10000.0)
    states = torch.randn(1, 4096, 64, generator=torch.Generator().manual_seed(0))
    half = apply_rotary_embedding(states.bfloat16(), cos, sin)
    assert half.dtype == torch.bfloat16
    full = apply_rotary_embedding(states.bfloat16().float(), cos, sin)
    assert torch.equal(half, full.bfloat16())


def test_swiglu_is_two_thirds_as_wide_rounded_up_to_eight():
    ffn = NeoBERTSwiGLU(NeoBERTConfig(intermediate_size=100))
    assert ffn.w12.weight.shape == (2 * 72, 768)
    assert ffn.w3.weight.shape == (768, 72)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_rms_norm_is_computed_in_float32(weight_dtype, dtype, tolerance):
    norm = NeoBERTRMSNorm(768, 0.25, dtype=weight_dtype)
    x = 300 * torch.randn(768, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = x.double() / (x.double().square().mean() + 0.25).sqrt()
    assert norm(x).dtype == dtype
    assert difference(norm(x) / expected, torch.ones(768)) < tolerance


def test_norms_read_eps_from_the_config():
    model = NeoBERTModel(NeoBERTConfig(num_hidden_layers=1, hidden_size=48, norm_eps=0.5))
    norms = [module for module in model.modules() if isinstance(module, torch.nn.RMSNorm)]
    assert [norm.eps for norm in norms] == [0.5] * 3


def test_loss_is_the_mean_over_labels_or_the_sum_over_the_given_count(load):
    model, inputs = load(), tensors("inputs")
    labels = torch.full((4, 23), -100)
    labels[0, :3], labels[3, 16] = torch.tensor([7, 8, 9]), 11
    output = model(**inputs, labels=labels)
    log_probs = output.logits.double().log_softmax(-1)
    chosen = [log_probs[0, 0, 7], log_probs[0, 1, 8], log_probs[0, 2, 9], log_probs[3, 16, 11]]
    assert output.loss.item() == pytest.approx(-sum(chosen).item() / 4, abs=1e-5)
    summed = model(**inputs, labels=labels, num_items_in_batch=torch.tensor(10)).loss
    assert summed.item() == pytest.approx(-sum(chosen).item() / 10, abs=1e-5)
    assert model(**inputs).loss is None


@torch.no_grad()
def test_a_cast_to_bfloat16_leaves_rope_intact(load):
    model, inputs = load(), tensors("inputs_nopad")
    logits = tensors("outputs_nopad")["logits"]

    model.to(torch.bfloat16)
    error = (model(**inputs).logits.float() - logits).norm() / logits.norm()
    assert error < 0.05  # 0.3 and more where a cast of complex tables drops their imaginary parts


# Deprecated in transformers 5.23 for a name that 5.17 does not have.
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")
def test_reentrant_checkpointing_gives_equal_gradients(load):
    """Our other models refuse it, and are tested without."""
    calls, gradients = [], []
    for checkpointing in (False, True):
        model, inputs = load().train(), tensors("inputs")
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": True})
            block = model.model.transformer_encoder[1]
            block.wo.register_forward_hook(lambda *call: calls.append(1))
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert len(calls) == 2, "the block was not computed again"
    assert all(torch.equal(found, expected) for expected, found in zip(*gradients, strict=True))


@torch.no_grad()
def test_eager_attention_returns_its_weights(load):
    inputs = tensors("inputs")
    weights = load("eager")(**inputs, output_attentions=True).attentions
    assert [tuple(layer.shape) for layer in weights] == [(4, 4, 23, 23)] * 3
    for layer in weights:
        assert difference(layer.sum(-1), torch.ones(4, 4, 23)) < 1e-5
        hidden = layer * (1 - inputs["attention_mask"])[:, None, None]
        assert hidden.abs().max() == 0


@torch.no_grad()
def test_token_types_are_ignored_and_embeddings_are_accepted(load):
    model, inputs = load(), tensors("inputs")
    expected = model(**inputs).logits
    assert torch.equal(model(**inputs, token_type_ids=torch.ones(4, 23).long()).logits, expected)
    embeds = model.get_input_embeddings()(inputs.pop("input_ids"))
    assert torch.equal(model(inputs_embeds=embeds, **inputs).logits, expected)
    assert torch.equal(model(inputs_embeds=embeds, **inputs, return_dict=False)[0], expected)
    model.config.return_dict = False
    assert torch.equal(model(inputs_embeds=embeds, **inputs)[0], expected)


def test_embeddings_and_decoder_are_found_and_replaced(load):
    model = load()
    for owner in (model, model.model):
        assert owner.get_input_embeddings() is model.model.encoder
    assert model.get_output_embeddings() is model.decoder
    assert model.model.get_output_embeddings() is None
    new = torch.nn.Embedding(7, 48)
    model.set_input_embeddings(new)
    assert model.model.encoder is new
    model.set_output_embeddings(decoder := torch.nn.Linear(48, 7))
    assert model.decoder is decoder


@pytest.mark.parametrize("tie", [False, True])
def test_the_decoder_is_tied_only_on_request(tie):
    config = NeoBERTConfig(num_hidden_layers=1, hidden_size=48, tie_word_embeddings=tie)
    model = NeoBERTForMaskedLM(config)
    assert (model.decoder.weight is model.model.encoder.weight) is tie


def test_initial_weights_are_those_of_the_published_code():
    torch.manual_seed(0)
    config = NeoBERTConfig(num_hidden_layers=2, hidden_size=48)
    config.embedding_init_range, config.decoder_init_range = 0.5, 0.1
    model = NeoBERTForMaskedLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            assert (parameter == 1).all()
        elif name == "decoder.bias":
            assert (parameter == 0).all()
        else:
            bound = 0.5 if name == "model.encoder.weight" else 0.1
            assert parameter.abs().max() <= bound
            assert parameter.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
    assert (model.model.encoder.weight[0] != 0).any()


def test_bad_inputs_are_refused(load):
    model, ids = load(), torch.ones(1, 65, dtype=torch.long)
    with pytest.raises(ValueError, match=r"expected at most 64 tokens .*, got 65\. Truncate"):
        model(ids)
    with pytest.raises(ValueError, match="expected either this or inputs_embeds, got neither"):
        model()
    with pytest.raises(ValueError, match="expected either this or inputs_embeds, got both"):
        model(ids, inputs_embeds=torch.zeros(1, 65, 48))
    boundaries = torch.tensor([0, 3, 5], dtype=torch.int32)
    with pytest.raises(ValueError, match="position_ids: expected one per token beside cu_seq_lens"):
        model(ids[:, :5], cu_seq_lens_q=boundaries, cu_seq_lens_k=boundaries)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="attention_mask: expected None beside packed"):
        model(ids[:, :4], torch.ones(1, 4), position_ids=torch.tensor([[0, 1, 0, 1]]))


@torch.no_grad()
def test_masks_of_any_dtype_mean_the_same(load):
    model, inputs = load(), tensors("inputs")
    expected = model(**inputs).logits
    for dtype in (torch.bool, torch.float32):
        mask = inputs["attention_mask"].to(dtype)
        assert torch.equal(model(inputs["input_ids"], attention_mask=mask).logits, expected)


@both_attentions
def test_packed_documents_see_neither_each_other_nor_padding(load, attention):
    """Under a mask, which our other models make a part of the positions."""
    model, inputs = load(attention), tensors("inputs")
    kept = inputs["attention_mask"] == 1
    lengths = [*kept.sum(1).tolist(), 3]
    input_ids = torch.cat([inputs["input_ids"][kept], torch.zeros(3).long()])[None]
    position_ids = torch.cat([torch.arange(length) for length in lengths])[None]
    mask = torch.ones_like(input_ids)
    mask[:, -3:] = 0
    logits = model(input_ids, attention_mask=mask, position_ids=position_ids).logits
    assert difference(logits[0, :-3], model(**inputs).logits[kept]) < 1e-5
    logits.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@torch.no_grad()
def test_a_packed_row_may_be_longer_than_the_model(load):
    model, input_ids = load(), tensors("inputs_nopad")["input_ids"]
    position_ids = torch.arange(64).repeat(2)[None]
    logits = model(input_ids.reshape(1, 128), position_ids=position_ids).logits
    assert difference(logits.view(2, 64, -1), tensors("outputs_nopad")["logits"]) < 1e-4
    with pytest.raises(ValueError, match="sequence length: expected at most 64 tokens"):
        model(input_ids.reshape(1, 128), position_ids=torch.arange(128)[None])


PADDED = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
PACKED = torch.tensor([[0, 1, 0, 1], [0, 1, 2, 0]])


@pytest.mark.parametrize(
    ("mask", "positions", "boundaries"),
    [
        (PADDED, None, [0, 4, 6, 8]),
        (torch.ones(2, 4), PACKED, [0, 2, 4, 7, 8]),
        (PADDED, PACKED, [0, 2, 4, 6, 8]),  # padding is one piece whatever its positions
        (torch.ones(2, 4), torch.arange(4).expand(2, -1), [0, 4, 8]),
        (PADDED.flip(1), None, None),  # a row that goes on behind padding
        (torch.tensor([[1, 0, 1, 1]]), None, None),
        (torch.tensor([[1, 0, 1, 1]]), torch.tensor([[0, 0, 0, 1]]), [0, 1, 2, 4]),
    ],
)
def test_boundaries_are_where_documents_and_padding_begin(mask, positions, boundaries):
    found = document_boundaries(mask == 1, positions)
    assert boundaries == (None if found is None else found.tolist())


def attend_in_pieces(query, key, value, boundaries, others, longest, _):
    """What torch's flash kernels do with documents, in plain torch: a CPU has none."""
    assert torch.equal(boundaries, others)
    assert longest == boundaries.diff().max()
    pieces = [states.tensor_split(boundaries[1:-1].long()) for states in (query, key, value)]
    return torch.cat(
        [
            F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in piece)).transpose(0, 1)
            for piece in zip(*pieces, strict=True)
        ]
    )


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_flash_kernels_give_what_masks_give(load, monkeypatch, packed):
    model, inputs = load(), tensors("inputs")
    kept = inputs["attention_mask"] == 1
    if packed:
        positions = torch.cat([torch.arange(length) for length in kept.sum(1)])[None]
        inputs = {"input_ids": inputs["input_ids"][kept][None], "position_ids": positions}
        kept = torch.ones_like(positions, dtype=torch.bool)
    calls = []
    monkeypatch.setattr(NeoBERTModel, "_has_flash_kernels", lambda *_: True)
    monkeypatch.setattr(
        varlen, "varlen_attn", lambda *args: calls.append(args) or attend_in_pieces(*args)
    )
    logits = model(**inputs).logits[kept]
    assert len(calls) == 3  # one for each block
    logits.square().sum().backward()
    gradient = model.model.encoder.weight.grad.clone()
    monkeypatch.undo()
    model.zero_grad()
    expected = model(**inputs).logits[kept]
    expected.square().sum().backward()
    assert difference(logits, expected) < 1e-5
    assert difference(gradient, model.model.encoder.weight.grad) < 1e-4 * gradient.abs().max()


AT = torch.arange(64).expand(2, -1)
MASKS = {
    "none": None,
    "ones": AT >= 0,
    "left": AT >= 9,
    "gap": AT != 9,
    "pairs": torch.ones(2, 1, 64, 64, dtype=torch.bool).tril(),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@torch.no_grad()
def test_whole_rows_and_gaps_are_left_to_sdpa(load, monkeypatch, mask):
    model, input_ids = load(), tensors("inputs_nopad")["input_ids"][:2]
    expected = model(input_ids, attention_mask=mask).logits
    monkeypatch.setattr(NeoBERTModel, "_has_flash_kernels", lambda *_: True)
    assert torch.equal(model(input_ids, attention_mask=mask).logits, expected)


@torch.no_grad()
def test_a_mask_of_another_length_is_refused(load, monkeypatch):
    """By what makes masks: boundaries of other rows would be taken for those of these."""
    monkeypatch.setattr(NeoBERTModel, "_has_flash_kernels", lambda *_: True)
    input_ids = tensors("inputs_nopad")["input_ids"][:2, :60]
    with pytest.raises(RuntimeError, match="size"):
        load()(input_ids, attention_mask=AT < 50)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_documents_on_a_gpu(dtype, packed):
    """Logits and gradients, which flash kernels make there, against masks in float32 on the CPU."""
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_hidden_layers": 2}
    model = NeoBERTForMaskedLM(NeoBERTConfig(**sizes, intermediate_size=192, vocab_size=101)).eval()
    model.config._attn_implementation = "sdpa"
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    lengths = torch.tensor([300, 17, 128])
    input_ids = torch.randint(101, (3, 300), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(300) < lengths[:, None]).long()
    kept, inputs = mask == 1, {"input_ids": input_ids, "attention_mask": mask}
    if packed:
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        inputs = {"input_ids": input_ids[kept][None], "position_ids": positions}
        kept = torch.ones_like(positions, dtype=torch.bool)
    expected = model(**inputs).logits[kept]
    expected.square().mean().backward()
    gradient = model.model.encoder.weight.grad.clone()
    model.zero_grad()
    model = model.to("cuda", dtype)
    assert model.model._has_flash_kernels(model.model.encoder.weight)
    logits = model(**{name: one.cuda() for name, one in inputs.items()}).logits[kept.cuda()]
    logits.float().square().mean().backward()
    got = model.model.encoder.weight.grad.float().cpu()
    assert difference(logits.float().cpu(), expected) < 0.05 * expected.std()
    assert difference(got, gradient) < 0.05 * gradient.abs().max()
