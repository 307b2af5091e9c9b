"""Every head under torch.export, torch.compile and ONNX, without storage, and in 16 bits."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import BertConfig, GPT2Config, LlamaConfig

from harmonic_sft.losses import CrossEntropyLoss
from harmonic_sft.models import (
    HarmonicConfig,
    HarmonicForCausalLM,
    HarmonicForMaskedLM,
    NeoBERTConfig,
    build_head,
    mean_token_loss,
    negative_log_likelihood,
    scored_positions,
)
from harmonic_sft.models.head import squared_distances
from tests.head_variants import VARIANTS, D, V, moved_head

SIZES = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
BODIES = {
    "bert": (HarmonicForMaskedLM, BertConfig),
    "neobert": (HarmonicForMaskedLM, NeoBERTConfig),
    "llama": (HarmonicForCausalLM, LlamaConfig),
}
IDS = torch.arange(3, 13).view(2, 5)
every_head = pytest.mark.parametrize("name", VARIANTS)
# Of torch's own tracer, and of libraries that it imports.
own_warnings = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def forgotten_graphs():
    yield
    torch._dynamo.reset()


def make_head(name):
    """A head with every parameter moved from its start, and states, some close to prototypes."""
    head, states = moved_head(name), torch.randn(6, D)
    states[:3] = 1.001 * head.prototypes[:3].detach()
    return head.eval(), states


def make_model(body="bert", name="dist", **fields):
    torch.manual_seed(0)
    model_class, config_class = BODIES[body]
    backbone = config_class(vocab_size=V, hidden_size=D, pad_token_id=0, **SIZES)
    config = HarmonicConfig(
        text_config=backbone, head=VARIANTS[name], is_causal=model_class.is_causal, **fields
    )
    return model_class(config).eval()


@pytest.mark.parametrize(
    "name", [n if n == "dist" else pytest.param(n, marks=pytest.mark.slow) for n in VARIANTS]
)
@own_warnings
def test_a_head_exports_with_fixed_and_free_shapes(name):
    head, states = make_head(name)
    rows = {"hidden_states": {0: torch.export.Dim("n")}}
    for shapes, inputs in ((None, states), (rows, torch.cat([states, torch.randn(3, D)]))):
        program = torch.export.export(head, (states,), dynamic_shapes=shapes)
        found, expected = program.module()(inputs), head(inputs)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.softmax(-1), expected.softmax(-1), rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("positions", [False, True])
@own_warnings
def test_a_model_exports_with_fixed_and_free_shapes(body, positions):
    model, free = make_model(body), torch.export.Dim.DYNAMIC
    arguments = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    arguments["attention_mask"][0, 3:] = 0
    if positions:
        arguments["position_ids"] = torch.arange(IDS.shape[1]).expand_as(IDS)
    other = {key: value[:, :4].repeat(2, 1) for key, value in arguments.items()}
    no_cache = {"use_cache": False} if model.is_causal else {}
    for shapes, inputs in ((None, arguments), ({0: free, 1: free}, other)):
        dynamic = None if shapes is None else dict.fromkeys(arguments, shapes)
        dynamic = dynamic and {**dynamic, **dict.fromkeys(no_cache)}
        program = torch.export.export(
            model, (), {**arguments, **no_cache}, dynamic_shapes=dynamic, strict=False
        )
        attended = inputs["attention_mask"].bool()  # what padding says is nobody's business
        found = program.module()(**inputs, **no_cache).logits[attended]
        expected = model(**inputs).logits[attended]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.ecosystem
@every_head
@own_warnings
def test_onnx_runtime_computes_a_heads_logits(name):
    head, states = make_head(name)
    rows = {"hidden_states": {0: torch.export.Dim("n", min=1)}}
    found = run_onnx(head, {"hidden_states": states}, rows, {"hidden_states": states[:4]})
    torch.testing.assert_close(found, head(states[:4]).detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.ecosystem
@pytest.mark.parametrize("body", BODIES)
@own_warnings
def test_onnx_runtime_computes_a_models_logits(body):
    model, free = make_model(body), {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    arguments = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    other = {key: value[:, :4].repeat(2, 1) for key, value in arguments.items()}
    shapes = dict.fromkeys(arguments, free)
    if model.is_causal:
        arguments["use_cache"], shapes["use_cache"] = False, None
    found = run_onnx(model, arguments, shapes, other)
    torch.testing.assert_close(found, model(**other).logits.detach(), rtol=1e-5, atol=1e-5)


def run_onnx(module, arguments, dynamic_shapes, inputs):
    """Export with torch's exporter, and return what ONNX Runtime makes of other inputs."""
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    program = torch.onnx.export(
        module, (), kwargs=arguments, dynamo=True, dynamic_shapes=dynamic_shapes, verbose=False
    )
    assert program is not None
    session = runtime.InferenceSession(program.model_proto.SerializeToString())
    return torch.from_numpy(session.run(None, {k: v.numpy() for k, v in inputs.items()})[0])


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("unit_sphere", [False, True])
@pytest.mark.parametrize("labelled", [False, True])
def test_distances_are_as_accurate_as_stated(monkeypatch, compiled, unit_sphere, labelled):
    torch.manual_seed(0)
    states, prototypes = torch.randn(40, 96), torch.randn(400, 96)
    for row in range(40):
        for near in range(5):
            gap = 10 ** -(6 * torch.rand(1))
            prototypes[5 * row + near] = states[row] + gap * torch.randn(96)
    states[39] = 0 if unit_sphere else states[39]
    labels = torch.randint(400, (40, 1)) if labelled else None
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiled)
    found = squared_distances(states, prototypes, labels, unit_sphere=unit_sphere)
    states, prototypes = states.double(), prototypes.double()
    if unit_sphere:
        states, prototypes = (nn.functional.normalize(side) for side in (states, prototypes))
    exact = (states.unsqueeze(1) - prototypes).square().sum(-1)  # [N, V]
    exact[39] += int(unit_sphere)  # at a right angle to every other
    norms = [side.norm(dim=-1) for side in (states, prototypes)]
    errors = (found.sqrt() - exact.sqrt()).abs() / (norms[0].unsqueeze(-1) + norms[1])
    recomputed = exact.topk(5, largest=False).indices[:39]
    recomputed = recomputed if labels is None else torch.cat([recomputed, labels[:39]], 1)
    assert errors[:39].gather(1, recomputed).max() < 1e-6
    scale = norms[0].square().unsqueeze(-1) + norms[1].square()
    assert ((found - exact).abs() / scale).max() < 1e-6


def test_the_form_for_compilers_has_the_gradients_of_the_other(monkeypatch):
    found = []
    for compiled in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda compiled=compiled: compiled)
        head, states = make_head("dist")
        states.requires_grad_()
        head.nll(states, torch.arange(6)).sum().backward()
        found.append((states.grad, head.weight.grad))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.fixture
def batch():
    torch.manual_seed(0)
    labels = torch.randint(V, (3, 7))
    labels[torch.rand(3, 7) < 0.5] = -100
    return build_head({"name": "dist"}, hidden_size=D, vocab_size=V), torch.randn(3, 7, D), labels


@pytest.mark.parametrize(
    "loss_fn",
    [negative_log_likelihood, pytest.param(CrossEntropyLoss(), marks=pytest.mark.slow)],
    ids=["the head's own", "fused"],
)
@own_warnings
@torch.no_grad()
def test_an_evaluation_step_is_one_graph_for_any_number_of_labels(batch, loss_fn):
    head, states, labels = batch
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(mean_token_loss, fullgraph=True, backend=counter)
    for kept in (3, 1, 0):
        fewer = labels.where(torch.arange(3).unsqueeze(-1) < kept, -100)
        expected = mean_token_loss(loss_fn, head, states, fewer, causal=True)
        torch.testing.assert_close(step(loss_fn, head, states, fewer, causal=True), expected)
    assert counter.frame_count == 1


@pytest.mark.parametrize("by", ["model", pytest.param("collator", marks=pytest.mark.slow)])
@own_warnings
def test_a_training_step_breaks_at_the_selection_of_labels_alone(batch, by):
    head, states, labels = batch
    expected = mean_token_loss(CrossEntropyLoss(), head, states, labels)
    selected = None if by == "model" else scored_positions(labels, num_classes=V)
    torch._dynamo.utils.counters.clear()
    step = torch.compile(mean_token_loss, fullgraph=by == "collator", backend="aot_eager")
    states.requires_grad_()
    loss = step(CrossEntropyLoss(), head, states, labels, label_positions=selected)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    assert states.grad[labels == -100].abs().max() == 0
    assert states.grad[labels != -100].abs().sum(-1).min() > 0
    breaks = torch._dynamo.utils.counters["graph_break"]
    assert bool(breaks) == (by == "model")
    assert all("nonzero" in reason for reason in breaks)


@pytest.mark.slow
@every_head
@own_warnings
@torch.no_grad()
def test_forward_and_evaluation_are_one_graph(name):
    model = make_model(name=name)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    labels = IDS.where(torch.rand(IDS.shape) < 0.5, -100)
    found, expected = compiled(IDS, labels=labels), model(IDS, labels=labels)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(compiled(IDS).logits, expected.logits, rtol=1e-5, atol=2e-5)


@pytest.mark.slow
@every_head
@own_warnings
def test_a_compiled_model_generates_the_same_with_a_static_cache(name):
    model = make_model("llama", name)
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    expected = model.generate(IDS, **options)
    model.forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    assert torch.equal(model.generate(IDS, cache_implementation="static", **options), expected)


@every_head
def test_a_head_without_storage_has_logits_without_storage(name):
    head = make_head(name)[0].to("meta")
    logits = head(torch.empty(6, D, device="meta"))
    assert logits.is_meta
    assert logits.shape == (6, V)
    losses = head.nll(torch.empty(6, D, device="meta"), torch.empty(6, device="meta").long())
    assert losses.shape == (6,)


@pytest.mark.parametrize("mask", [None, torch.tensor([[1] * 5, [0, 0, 1, 1, 1]])])
@own_warnings
@torch.no_grad()
def test_a_decoder_with_positions_is_one_graph(mask):
    model = make_model("llama")
    positions = torch.tensor([[0, 1, 0, 1, 2], [0, 0, 0, 1, 2]])  # two documents; padding
    inputs = {"input_ids": IDS, "position_ids": positions, "attention_mask": mask}
    expected = model(**inputs).logits
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    shown = ... if mask is None else mask.bool()
    close = {"rtol": 1e-5, "atol": 2e-5}
    torch.testing.assert_close(compiled(**inputs).logits[shown], expected[shown], **close)
    exported = torch.export.export(model, (), {**inputs, "use_cache": False}).module()
    found = exported(**inputs, use_cache=False).logits
    torch.testing.assert_close(found[shown], expected[shown], **close)
    assert model.to("meta")(IDS.to("meta"), position_ids=positions.to("meta")).logits.is_meta


@pytest.mark.parametrize("body", BODIES)
def test_a_model_without_storage_has_a_forward_pass(body):
    model, ids = make_model(body).to("meta"), IDS.to("meta")
    assert model(ids).logits.shape == (2, 5, V)
    cache = {"use_cache": True} if model.is_causal else {}
    assert model.train()(ids, labels=ids, **cache).loss.is_meta


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ("bert", "dist"),
        ("neobert", "rotation of dist"),
        ("llama", "dist"),
        ("bert", "multi_head of dist"),
    ],
)
def test_a_tied_table_stays_in_float32_under_a_body_in_16_bits(body, name, tmp_path):
    model = make_model(body, name, tie_word_embeddings=True)
    model.renormalize_prototypes_()  # which leaves tied ones
    model.save_pretrained(tmp_path)
    keys = load_file(tmp_path / "model.safetensors").keys()
    assert not [key for key in keys if key.startswith("dist_head") and key.endswith("weight")]
    expected = model(IDS).logits.detach()
    weight = model.dist_head.weight.detach().clone()
    options = {"head": VARIANTS[name], "tie": True, "dtype": torch.bfloat16}
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    on_base = type(model).from_base(str(tmp_path), **options)
    for low in (loaded, model.to(torch.bfloat16), on_base):
        table = low.get_input_embeddings().weight
        assert low.dist_head.weight is table
        assert table.dtype == torch.float32
        others = {p.dtype for n, p in low.model.named_parameters() if p is not table}
        assert others == {torch.bfloat16}
        # A base is loaded in the precision that was asked for.
        kept = weight.bfloat16().float() if low is on_base else weight
        assert torch.equal(table, kept)
        logits = low(IDS).logits
        assert logits.dtype == torch.float32
        assert (logits.log_softmax(-1) - expected.log_softmax(-1)).abs().max() < 0.5


@pytest.mark.parametrize(
    ("config", "supported"),
    [
        (BertConfig(vocab_size=V, hidden_size=D, **SIZES), True),
        (NeoBERTConfig(vocab_size=V, hidden_size=D, **SIZES), False),
        (GPT2Config(vocab_size=V, n_embd=D, n_layer=1, n_head=2, eos_token_id=1), False),
    ],
    ids=["bert", "neobert", "gpt2"],
)
def test_flex_attention_is_for_the_bodies_that_have_it(config, supported):
    model = HarmonicForMaskedLM(HarmonicConfig(text_config=config))
    assert model._supports_flex_attn == model.model._supports_flex_attn == supported
    if not supported:
        with pytest.raises(ValueError, match=r"does not support .*flex_attention"):
            model.set_attn_implementation("flex_attention")
