"""What holds for every head in every geometry."""

import copy
import json
import math
import re

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import BertConfig

from harmonic_sft.losses import CrossEntropyLoss
from harmonic_sft.models import HEADS, DistLayer, HarmonicConfig, HarmonicForMaskedLM, build_head
from harmonic_sft.models.heads import heads_in
from tests.head_definitions import definition
from tests.head_variants import VARIANTS, D, V, moved_head

N = 6
every_head = pytest.mark.parametrize("name", VARIANTS)


def make(name, *, hidden_size=D, vocab_size=V, dtype=torch.float32):
    """A head whose parameters are all moved from where they start, states and labels."""
    head = moved_head(name, hidden_size=hidden_size, vocab_size=vocab_size, dtype=dtype)
    states = torch.randn(N, hidden_size, dtype=dtype)
    return head, states, torch.randint(vocab_size, (N,))


def gradients(losses, head, states):
    found = torch.autograd.grad(losses.sum(), [states, *head.parameters()], allow_unused=True)
    return [gradient for gradient in found if gradient is not None]


@every_head
def test_probabilities_and_losses_are_those_of_the_definition(name):
    head, states, labels = make(name)
    # The definition reads the head's own settings.
    for given, settings in zip(heads_in(VARIANTS[name]), heads_in(head.settings()), strict=False):
        own = {key: value for key, value in given.items() if key != "inner"}
        assert own == {key: settings[key] for key in own}
    expected = torch.stack([definition(head, state) for state in states.double()]).log_softmax(-1)
    found = head(states).log_softmax(-1).double()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    losses = -expected.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(head.nll(states, labels).double(), losses, rtol=1e-4, atol=1e-5)


@every_head
def test_states_may_have_any_axes_before_the_last(name):
    head, states, _ = make(name)
    logits = head(states)
    close(head(states.unflatten(0, (2, -1))), logits.unflatten(0, (2, -1)))
    close(head(states[0]), head(states[:1])[0])
    assert head(states.new_empty(2, 0, states.shape[1])).shape == (2, 0, logits.shape[1])


@every_head
@pytest.mark.parametrize("num_rows", [1, 3])
def test_prototypes_start_at_one_vector_for_each_class(name, num_rows):
    head, *_ = make(name)
    given = torch.randn(num_rows, head.weight.shape[1])
    with pytest.raises(ValueError, match=r"^embeddings: expected \[.*\], got \[[13], \d+\]$"):
        head.initialize_(given)


def test_every_head_has_a_variant():
    assert {settings["name"] for settings in VARIANTS.values()} == set(HEADS)


def close(found, expected):
    """In the last digits of float32 some processors' products depend on where tensors lie."""
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@every_head
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_over_all_classes_are_float32_for_every_precision_of_the_states(name, dtype):
    head, states, labels = make(name)
    states = states.to(dtype)
    logits = head(states)
    assert logits.shape == (N, V)
    assert logits.dtype == head.nll(states, labels).dtype == torch.float32
    assert logits.isfinite().all()
    close(logits, head(states.float()))
    assert head.prototypes.shape == head.weight.shape == (V, D)


@every_head
def test_logits_are_float32_under_autocast(name):
    head, states, labels = make(name)
    expected = head(states), head.nll(states, labels)
    with torch.autocast("cpu", torch.bfloat16):
        found = head(states), head.nll(states, labels)
    close(found[0], expected[0])
    close(found[1], expected[1])


@every_head
def test_a_cast_to_16_bits_leaves_parameters_in_float32(name):
    head, states, _ = make(name)
    expected = head(states)
    head.to(torch.bfloat16)
    assert {parameter.dtype for parameter in head.parameters()} == {torch.float32}
    assert torch.equal(head(states), expected)


@every_head
def test_gradients_are_finite_on_top_of_a_prototype(name):
    torch.manual_seed(0)
    head = build_head(VARIANTS[name], hidden_size=D, vocab_size=V)
    for labels in (torch.arange(N), torch.arange(N) + 1):  # the label's, and another one's
        states = head.prototypes.detach()[:N].clone().requires_grad_()
        losses = head.nll(states, labels)
        assert losses.isfinite().all()
        assert all(gradient.isfinite().all() for gradient in gradients(losses, head, states))
        logits = head(states).logsumexp(-1)
        assert all(gradient.isfinite().all() for gradient in gradients(logits, head, states))


@every_head
@pytest.mark.parametrize("norm", [0.0, 1e4])
def test_gradients_are_finite_far_out_and_without_a_direction(name, norm):
    head, states, labels = make(name)
    states = (norm * nn.functional.normalize(states, dim=-1)).requires_grad_()
    losses = head.nll(states, labels)
    assert losses.isfinite().all()
    found = gradients(losses, head, states)
    assert all(gradient.isfinite().all() for gradient in found)
    if norm == 0:
        assert all(gradient.abs().max() < 1e4 for gradient in found)


@every_head
def test_prototypes_on_a_sphere_are_brought_back_to_it_and_others_stay(name):
    head, states, _ = make(name)
    logits, prototypes = head(states), head.prototypes.clone()
    head.renormalize_()
    torch.testing.assert_close(head(states), logits, rtol=1e-4, atol=1e-4)
    close(head.prototypes, prototypes)
    close(head.weight, prototypes)
    embeddings = 3 * torch.randn(V, D)
    embeddings[4] = 0  # a padding token: no direction
    assert head.initialize_(embeddings) is head
    parts = list(heads_in(head.settings()))
    if parts[-1]["name"] not in ("cosine", "vmf") and not parts[-1].get("unit_sphere"):
        assert torch.equal(head.weight, embeddings)
        return
    num_slices = max(part.get("num_heads", 1) for part in parts)  # each on a sphere of its own
    given, found = (table.view(V, num_slices, -1) for table in (embeddings, head.weight))
    close(found.norm(dim=-1), torch.ones(V, num_slices))
    close(found[:4], nn.functional.normalize(given[:4], dim=-1))


@every_head
def test_settings_rebuild_the_head(name):
    head, states, _ = make(name)
    settings = json.loads(json.dumps(head.settings()))
    assert settings["name"] == VARIANTS[name]["name"]
    again = build_head(settings, hidden_size=D, vocab_size=V)
    assert type(again) is type(head)
    again.load_state_dict(head.state_dict())
    assert again.settings() == head.settings()
    assert again.h_exp == head.h_exp
    for same in (again, copy.deepcopy(head)):  # which leave no state out
        assert torch.equal(same(states), head(states))


@every_head
def test_the_fused_loss_is_the_heads_own(name):
    head, states, labels = make(name)
    states.requires_grad_()
    expected = head.nll(states, labels)
    found = CrossEntropyLoss()(head, states, labels)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    pairs = zip(gradients(found, head, states), gradients(expected, head, states), strict=True)
    for actual, wanted in pairs:
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5 * wanted.abs().max())


@every_head
def test_permuted_tokens_give_permuted_logits(name):
    head, states, _ = make(name)
    order, rows = torch.randperm(V), torch.randperm(N)
    expected = head(states)[rows][:, order]
    with torch.no_grad():
        for parameter in head.parameters():
            if len(parameter.shape) and len(parameter) == V:
                parameter.copy_(parameter[order].clone())
    torch.testing.assert_close(head(states[rows]), expected, rtol=1e-4, atol=1e-4)


@every_head
def test_no_rows_give_no_losses_with_a_gradient(name):
    head, _, _ = make(name)
    loss = head.nll(torch.zeros(0, D), torch.zeros(0, dtype=torch.long)).sum()
    loss.backward()
    assert loss.item() == 0
    assert head.weight.grad.abs().max() == 0


@every_head
def test_a_head_without_storage_is_filled_by_reset_parameters(name):
    with torch.device("meta"):
        head = build_head(VARIANTS[name], hidden_size=D, vocab_size=V)
    assert all(parameter.is_meta for parameter in head.parameters())
    head.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.fill_(torch.nan)
    head.reset_parameters()
    assert all(parameter.isfinite().all() for parameter in head.parameters())
    assert head(torch.randn(N, D)).isfinite().all()


def small_model():
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    backbone = BertConfig(vocab_size=V, hidden_size=D, **sizes)
    return HarmonicForMaskedLM(HarmonicConfig(text_config=backbone))


class Mirrored(DistLayer):
    """A user's own, whose settings are those of its parent."""

    def lazy_logits(self, hidden_states):
        return super().lazy_logits(-hidden_states)


class Unnamed(DistLayer):
    """A user's own, of which `HEADS` knows nothing."""

    def settings(self):
        return {**super().settings(), "name": "unnamed"}


@pytest.mark.parametrize(
    ("own", "said", "outer"),
    [(Mirrored, "dist", False), (Mirrored, "dist", True), (Unnamed, "unnamed", False)],
)
def test_a_head_that_would_be_loaded_as_another_is_not_saved(own, said, outer, tmp_path):
    model = small_model()
    model.dist_head = make("rotation")[0] if outer else own(D, V)
    if outer:
        model.dist_head.inner = own(D, V)
    message = (
        f"dist_head: expected a class of HEADS, got {own.__name__}, whose settings say '{said}'"
    )
    with pytest.raises(ValueError, match=message):
        model.save_pretrained(tmp_path)
    assert not [*tmp_path.iterdir()]


def test_a_head_that_is_sharded_is_saved(tmp_path):
    """Without several processes: `fully_shard` makes a class in this way."""
    model = small_model()
    model.dist_head.__class__ = type("FSDPDistLayer", (FSDPModule, DistLayer), {})
    model.save_pretrained(tmp_path)
    assert type(HarmonicForMaskedLM.from_pretrained(tmp_path).dist_head) is DistLayer


@every_head
def test_gradcheck(name):
    head, states, labels = make(name, hidden_size=24, vocab_size=7, dtype=torch.float64)
    states, labels = states[:3].requires_grad_(), labels[:3]
    inputs = (states, *head.parameters())  # which gradcheck changes in place
    for call in (lambda *_: head.nll(states, labels), lambda *_: head(states)):
        assert torch.autograd.gradcheck(call, inputs, atol=1e-5, fast_mode=True)


@every_head
def test_an_unknown_field_is_refused(name):
    settings = VARIANTS[name]
    with pytest.raises(ValueError, match=f"head {settings['name']}: expected its own fields"):
        build_head({**settings, "dropout": 0.1}, hidden_size=D, vocab_size=V)


NOT_ABOVE_0 = [-1.0, 0.0, math.inf, math.nan]
NOT_BELOW_0 = [0.5, 0.0, -math.inf, math.nan]
NUMBERS = {  # head and field: values out of range, and what is expected
    ("dist", "h_exp"): (NOT_BELOW_0, "a number below 0"),
    ("dist", "eps"): (NOT_ABOVE_0, "a number above 0"),
    ("power", "power"): ([0.0, math.inf, math.nan], "a number other than 0"),
    ("power", "eps"): (NOT_ABOVE_0, "a number above 0"),
    ("l2", "scale"): (NOT_ABOVE_0, "a number above 0"),
    ("cosine", "scale"): (NOT_ABOVE_0, "a number above 0"),
    ("linear", "softcap"): (NOT_ABOVE_0, "a number above 0"),
    ("multi_head", "num_heads"): ([0, -2, 5], f"a divisor of hidden_size {D}"),
}


@pytest.mark.parametrize(("name", "field"), NUMBERS)
def test_a_number_out_of_its_range_is_refused(name, field):
    values, expected = NUMBERS[name, field]
    for value in values:
        with pytest.raises(ValueError, match=f"^{field}: expected {expected}, got {value}"):
            build_head({"name": name, field: value}, hidden_size=D, vocab_size=V)


def around(outer, **inner):
    return {"name": outer, "inner": inner}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "dit"}, f"head name: expected one of {re.escape(str(sorted(HEADS)))}, got 'dit'"),
        ({"name": "dist", "metric": "manhattan"}, "metric: expected one of .* got 'manhattan'"),
        ({"name": "dist", "rank": 2}, "rank: expected nothing for metric euclidean, got 2"),
        ({"name": "dist", "metric": "mahalanobis", "rank": D + 1}, f"rank: expected .* 0 to {D}"),
        (around("rotation", name="dit"), "head name: expected one of .*, got 'dit'"),
        (around("rotation", name="linear", eps=1.0), "head linear: expected its own fields"),
        (
            around("multi_head", name="rotation"),
            r"multi_head inner: expected one of \['cosine', 'dist', 'linear'\], got 'rotation'",
        ),
        (around("multi_head", name="multi_head"), "inner: expected one of .*'multi_head'"),
        (around("multi_head", bias=True), "multi_head inner: expected one of .*got None"),
        (around("multi_head", name="linear", eps=1.0), "head linear: expected its own fields"),
        (
            around("multi_head", name="dist", metric="mahalanobis"),
            "multi_head inner metric: expected euclidean, got mahalanobis",
        ),
        (
            around("multi_head", name="linear", softcap=30.0),
            "multi_head inner softcap: expected none, got 30.0. Leave it out",
        ),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        build_head(settings, hidden_size=D, vocab_size=V)


def test_sizes_are_those_of_a_head():
    for empty in ("hidden_size", "vocab_size"):
        message = rf"head: expected at least one dimension and one class, got .*{empty} 0"
        with pytest.raises(ValueError, match=message):
            build_head({"name": "dist"}, **{"hidden_size": D, "vocab_size": V, empty: 0})
    message = "per_class: expected a hidden size of at least 16, got 15"
    with pytest.raises(ValueError, match=message):
        build_head({"name": "vmf", "per_class": True}, hidden_size=15, vocab_size=V)
    assert (
        build_head({"name": "vmf"}, hidden_size=15, vocab_size=V).settings()["per_class"] is False
    )


@pytest.mark.parametrize("value", NOT_BELOW_0)
def test_an_exponent_is_set_below_0(value):
    head = build_head({"name": "dist", "learn_h_exp": True}, hidden_size=D, vocab_size=V)
    with pytest.raises(ValueError, match=f"h_exp: expected a number below 0, got {value}"):
        head.h_exp = value


def test_a_head_without_an_exponent_takes_none():
    for settings in ({"name": "linear"}, {"name": "rotation", "inner": {"name": "linear"}}):
        head = build_head(settings, hidden_size=D, vocab_size=V)
        assert head.h_exp is None
        assert not head.scaled_by_h_exp
        with pytest.raises(ValueError, match="h_exp: expected a dist head, got linear"):
            head.h_exp = -2.0
