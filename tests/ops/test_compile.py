"""The fused losses under torch.compile, and their registration as custom operators."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from harmonic_sft.ops import cross_entropy, distance_cross_entropy, engine
from tests.ops.fused import KINDS, loss_of, random_inputs, with_metrics_of

OPTIONS = [
    "plain",
    "recompute",
    "label_smoothing",
    "soft target",
    "class_bias",
    "learned h_exp",
    "all",
]
CASES = [(option, kind) for option in OPTIONS for kind in KINDS]
CASES = [case for case in CASES if case[0] in ("plain", "all") or case[1] == "sphere"]


@pytest.fixture(autouse=True)
def forgotten_graphs():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make_inputs(num_tokens=6, seed=0):
    hidden_states, prototypes, labels = random_inputs(num_tokens, 600, 5, seed=seed)
    return hidden_states.requires_grad_(), prototypes.requires_grad_(), labels


def make_call(option, kind):
    """Tensors, learned ones first, and a function of them that gives the loss and metrics."""
    hidden_states, prototypes, labels = make_inputs()
    h_exp, bias, settings = -7.3, None, {}
    if option == "recompute":
        settings["gradients"] = "recompute"
    if option in ("label_smoothing", "all"):
        settings["label_smoothing"] = 0.1
    if option in ("soft target", "all"):
        labels = torch.stack([labels, labels.flip(0)], 1)
        settings["target_weights"] = torch.full(labels.shape, 0.5)
    if option == "all":
        settings |= {"z_loss": 0.01, "token_weights": torch.linspace(0, 1, 6)}
    if option in ("class_bias", "all"):
        bias = torch.linspace(-1, 1, 600).requires_grad_()
    if option in ("learned h_exp", "all") and kind != "linear":
        h_exp = torch.tensor(-7.0, requires_grad=True)
    leaves = [hidden_states, prototypes]
    leaves += [leaf for leaf in (bias, h_exp) if isinstance(leaf, torch.Tensor)]

    def call():
        tensors = hidden_states, prototypes, labels
        return with_metrics_of(kind, *tensors, h_exp=h_exp, class_bias=bias, **settings)

    return leaves, call


@pytest.mark.parametrize(("option", "kind"), CASES)
def test_compiled_and_eager_give_the_same(option, kind):
    leaves, call = make_call(option, kind)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    loss, metrics = call()
    compiled_loss, compiled_metrics = compiled()
    torch.testing.assert_close(compiled_loss, loss)
    torch.testing.assert_close(compiled_metrics, metrics)
    expected = torch.autograd.grad(loss.sum(), leaves)
    found = torch.autograd.grad(compiled_loss.sum(), leaves)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("reduction", "kind"), [("sum", "euclidean"), ("mean", "sphere"), ("weights", "linear")]
)
def test_a_compiled_reduction_gives_the_same_gradients(reduction, kind):
    hidden_states, prototypes, labels = make_inputs()
    weights = {"sum": 1.0, "mean": 1 / 6, "weights": torch.linspace(-1, 2, 6)}[reduction]

    def reduced():
        loss = loss_of(kind, hidden_states, prototypes, labels)
        return loss.mean() if reduction == "mean" else (loss * weights).sum()

    leaves = [hidden_states, prototypes]
    expected = torch.autograd.grad(reduced(), leaves)
    compiled = torch.compile(reduced, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(), leaves), expected)


@pytest.mark.parametrize("name", ["distance_cross_entropy", "linear_cross_entropy"])
def test_the_graph_holds_one_node_for_the_loss(name):
    counter = CompileCounterWithBackend("aot_eager")
    settings = {"h_exp": -14.0} if name.startswith("distance") else {}
    compiled = torch.compile(
        lambda *tensors: getattr(cross_entropy, name)(*tensors, **settings),
        fullgraph=True,
        backend=counter,
    )
    compiled(*make_inputs()).sum().backward()
    (graph,) = counter.graphs
    calls = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    ours = [target for target in calls if "harmonic_sft" in target]
    assert ours == ["harmonic_sft.chunked_loss.default"]
    assert not any("mm" in target or "linear" in target for target in calls if target not in ours)


@pytest.mark.parametrize(("learned", "graphs"), [(True, 1), (False, 2)])
def test_another_exponent_compiles_nothing_or_where_it_is_a_number_once_more(learned, graphs):
    counter = CompileCounterWithBackend("aot_eager")
    inputs = make_inputs()
    compiled = torch.compile(
        lambda h_exp: distance_cross_entropy(*inputs, h_exp=h_exp), fullgraph=True, backend=counter
    )
    for value in (-14.0, -7.3, -1.0, -0.5, -28.0):
        h_exp = torch.tensor(value, requires_grad=True) if learned else value
        loss = compiled(h_exp)
        loss.sum().backward()
        torch.testing.assert_close(loss, distance_cross_entropy(*inputs, h_exp=value))
        assert not learned or h_exp.grad.isfinite()
    assert counter.frame_count <= graphs


@pytest.mark.parametrize("kind", KINDS)
def test_another_number_of_tokens_compiles_nothing_after_the_second(kind):
    counter = CompileCounterWithBackend("aot_eager")

    def call(*tensors):
        return loss_of(kind, *tensors, h_exp=-7.3)

    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for num_tokens in (6, 9, 4, 17, 33):
        inputs = make_inputs(num_tokens, seed=num_tokens)
        loss = compiled(*inputs)
        expected = call(*inputs)
        torch.testing.assert_close(loss, expected)
        found = torch.autograd.grad(loss.sum(), inputs[:2])
        torch.testing.assert_close(found, torch.autograd.grad(expected.sum(), inputs[:2]))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_compiled_losses_need_no_gradient(mode):
    inputs = make_inputs()
    compiled = torch.compile(
        lambda *tensors: distance_cross_entropy(*tensors, h_exp=-3.0),
        fullgraph=True,
        backend="aot_eager",
    )
    with mode():
        loss = compiled(*inputs)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, distance_cross_entropy(*inputs, h_exp=-3.0).detach())


def recorded(monkeypatch, option, kind):
    """The operator with the arguments of a call, and those of its backward pass."""
    calls, chunked_op = [], engine.chunked_op

    def watch(*arguments):
        calls.append((chunked_op._opoverload, arguments))
        return chunked_op(*arguments)

    for module in (cross_entropy, engine):
        monkeypatch.setattr(module, "chunked_op", watch)
    _, call = make_call(option, kind)
    (call()[0] * torch.linspace(-1, 2, 6)).sum().backward()
    return calls


@pytest.mark.parametrize(("option", "kind"), CASES)
def test_the_operator_passes_the_checks_of_pytorch_in_both_passes(monkeypatch, option, kind):
    forward, backward = recorded(monkeypatch, option, kind)
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(*forward, test_utils=utils)
    operator, arguments = backward
    arguments = tuple(
        argument.detach() if isinstance(argument, torch.Tensor) else argument
        for argument in arguments
    )
    torch.library.opcheck(operator, arguments, test_utils=utils)
