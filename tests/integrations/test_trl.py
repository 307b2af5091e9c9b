"""What TRL is told of each token; its trainers themselves are in tests/ecosystem."""

import copy
from types import SimpleNamespace

import pytest
import torch
import transformers

from harmonic_sft.integrations import trl
from harmonic_sft.models import HarmonicForCausalLM, build_head
from tests.decoders import save_decoder

D, V, N = 8, 30, 7
FIELDS = ("log_probs", "entropy", "is_top1", "mean_logits", "log_sum_sq_probs")
HEADS = {
    "dist": {"name": "dist", "h_exp": -6.0},
    "euclid": {"name": "dist", "h_exp": -3.0, "unit_sphere": False},
    "learned": {"name": "dist", "h_exp": -4.0, "learn_h_exp": True},
    "linear": {"name": "linear", "bias": True},
    "cosine": {"name": "cosine"},
    "multi": {"name": "multi_head", "num_heads": 2, "inner": {"name": "dist"}},
    "power": {"name": "power"},
}


def tokens():
    generator = torch.Generator().manual_seed(0)
    hidden_states = torch.randn(N, D, generator=generator, requires_grad=True)
    return hidden_states, torch.randint(V, (N,), generator=generator)


def plain(head, hidden_states, labels, temperature):
    logits = head(hidden_states) / temperature
    log_probs = logits.log_softmax(-1)
    probs = log_probs.exp()
    return {
        "log_probs": log_probs[torch.arange(N), labels],
        "entropy": -(probs * log_probs).sum(-1),
        "is_top1": logits.argmax(-1) == labels,
        "mean_logits": logits.mean(-1),
        "log_sum_sq_probs": probs.square().sum(-1).log(),
    }


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", HEADS)
def test_fields_and_gradients_are_those_of_the_logits(name, temperature):
    torch.manual_seed(1)
    head = build_head(HEADS[name], hidden_size=D, vocab_size=V)
    head.reset_parameters()
    hidden_states, labels = tokens()
    with torch.no_grad():
        labels[:3] = head(hidden_states)[:3].argmax(-1)
    found = trl.token_fields(head, hidden_states, labels, temperature=temperature, outputs=FIELDS)
    expected = plain(head, hidden_states, labels, temperature)
    assert found.keys() == expected.keys()
    for field in FIELDS:
        torch.testing.assert_close(found[field], expected[field], atol=2e-5, rtol=2e-5)
    assert found["is_top1"].sum() >= 3
    # A weight for each token, as DPO has, and an entropy bonus, as GRPO may have.
    weights = torch.linspace(-1, 2, N)
    sources = [hidden_states, *head.parameters()]
    gradients = [
        torch.autograd.grad(
            (weights * fields["log_probs"]).sum() + (weights * fields["entropy"]).sum(),
            sources,
            retain_graph=True,
        )
        for fields in (found, expected)
    ]
    for got, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", HEADS)
def test_a_temperature_rounds_no_hidden_state_of_16_bits(name):
    head = build_head(HEADS[name], hidden_size=D, vocab_size=V)
    hidden_states, labels = tokens()
    hidden_states = (30 * hidden_states).bfloat16()
    found = trl.token_fields(head, hidden_states, labels, temperature=0.7)["log_probs"]
    expected = plain(head, hidden_states.float(), labels, 0.7)["log_probs"]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_only_what_is_asked_for_is_returned():
    head = build_head(HEADS["dist"], hidden_size=D, vocab_size=V)
    assert trl.token_fields(head, *tokens()).keys() == {"log_probs"}
    frozen = head.requires_grad_(False)
    found = trl.token_fields(frozen, tokens()[0].detach(), tokens()[1], outputs=("entropy",))
    assert found.keys() == {"log_probs", "entropy"}
    assert not found["entropy"].requires_grad


@pytest.mark.parametrize("found", ["0.29.1", "0.99", "1.17.0", "2.0"])
def test_an_untested_version_is_refused_with_its_number(monkeypatch, found):
    monkeypatch.setattr(trl, "version", lambda name: found)
    with pytest.raises(ValueError, match=rf"trl: expected version 1.0 to 1.16, got {found}. Run"):
        trl.patch()
    monkeypatch.setattr(trl, "version", lambda name: "1.16.3")
    trl.check_version()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A decoder as TRL gets it, and one as it was."""
    base = save_decoder("llama", tmp_path_factory.mktemp("base"))
    models = [HarmonicForCausalLM.from_base(str(base), head=HEADS["dist"]) for _ in range(2)]
    trl.add_harmonic_head_(
        models[0], SimpleNamespace, temperature=1.0, outputs=("log_probs", "is_top1")
    )
    return models


def test_labels_are_shifted_ignored_and_counted(model):
    patched, plain = model
    ids = torch.arange(3, 15).view(2, 6)
    labels = ids.clone()
    labels[0, :4] = -100
    found = patched(input_ids=ids, labels=labels, fused_lm_head=True)
    log_probs = plain(ids).logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    mask = labels[:, 1:] != -100
    assert torch.equal(found.label_mask, mask)
    torch.testing.assert_close(found.log_probs, log_probs * mask, atol=1e-4, rtol=1e-5)
    assert found.loss.item() == pytest.approx(plain(ids, labels=labels).loss.item(), rel=1e-5)
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    again = patched(input_ids=ids, shift_labels=shifted, num_items_in_batch=14, fused_lm_head=True)
    assert again.log_probs.shape == (2, 6)
    assert again.loss.item() == pytest.approx(found.loss.item() * 7 / 14, rel=1e-6)


def test_without_labels_there_is_a_differentiable_zero(model):
    ids = torch.arange(3, 9).view(1, 6)
    found = model[0](input_ids=ids, labels=torch.full_like(ids, -100), fused_lm_head=True)
    assert found.loss.item() == 0
    found.loss.backward()


def test_without_the_flag_the_model_is_as_before(model):
    patched, plain = model
    ids = torch.arange(3, 9).view(1, 6)
    assert torch.equal(patched(ids).logits, plain(ids).logits)
    assert torch.equal(patched(ids, labels=ids).loss, plain(ids, labels=ids).loss)
    words = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    assert torch.equal(patched.generate(ids, **words), plain.generate(ids, **words))


def test_the_sums_of_a_chunked_loss_are_those_of_the_logits(model):
    plain = copy.deepcopy(model[1])
    chunked = copy.deepcopy(plain)
    trl.add_chunked_head_(chunked, SimpleNamespace)
    ids = torch.arange(3, 15).view(2, 6)
    labels = ids.clone()
    labels[0, :4] = -100
    found = chunked(input_ids=ids, labels=labels)
    logits = plain(ids).logits[:, :-1][labels[:, 1:] != -100]
    targets = ids[:, 1:][labels[:, 1:] != -100]
    entropy = torch.distributions.Categorical(logits=logits).entropy().sum().item()
    assert found.loss.item() == pytest.approx(plain(ids, labels=labels).loss.item(), rel=1e-5)
    assert found.entropy_sum.item() == pytest.approx(entropy, rel=1e-4)
    assert found.num_correct_tokens == (logits.argmax(-1) == targets).sum()
    assert found.num_valid_tokens == len(targets) == 7
    assert torch.equal(chunked(ids).logits, plain(ids).logits)


def test_before_1_15_the_sft_trainer_gets_logits_and_our_chunked_loss(model, monkeypatch):
    monkeypatch.setattr(transformers, "HarmonicForCausalLM", None, raising=False)

    class Trainer:
        def compute_loss(self, model, inputs):
            return inputs

    others = []
    sft = SimpleNamespace(
        SFTTrainer=Trainer,
        _ChunkedCELMHeadOutput=SimpleNamespace,
        _patch_chunked_ce_lm_head=lambda model, size: others.append(model),
    )
    trl._patch_older(sft)
    other = SimpleNamespace(config=SimpleNamespace(model_type="llama"))
    for owner, loss_type, expected in (
        (model[1], "nll", {"output_logits": True}),
        (model[1], "chunked_nll", {}),
        (other, "nll", {}),
    ):
        trainer = Trainer()
        trainer.model, trainer.args = owner, SimpleNamespace(loss_type=loss_type)
        assert trainer.compute_loss(owner, {}) == expected
    decoder = copy.deepcopy(model[1])
    sft._patch_chunked_ce_lm_head(decoder, 8)
    assert decoder(torch.tensor([[3, 4]]), labels=torch.tensor([[3, 4]])).num_valid_tokens == 1
    sft._patch_chunked_ce_lm_head(other, 8)
    assert others == [other]
    assert transformers.HarmonicForCausalLM is HarmonicForCausalLM


def test_a_copy_of_a_patched_model_computes_with_its_own_weights(model):
    original = copy.deepcopy(model[1])
    trl.add_chunked_head_(original, SimpleNamespace)
    another = copy.deepcopy(original)
    with torch.no_grad():
        original.dist_head.weight.copy_(original.dist_head.weight.flip(0))
    ids = torch.arange(3, 9).view(1, 6)
    assert torch.equal(another(ids).logits, model[1](ids).logits)
    chunked = another(ids, labels=ids).loss
    assert trl._for_any(abs)(another, -3) == 3  # no method, as under accelerate's hooks
    assert chunked.item() == pytest.approx(model[1](ids, labels=ids).loss.item(), rel=1e-5)


def test_a_router_loss_is_refused(model):
    ids = torch.arange(3, 9).view(1, 6)
    with pytest.raises(ValueError, match="router_aux_loss_coef: expected 0 on a harmonic model"):
        model[0](ids, labels=ids, fused_lm_head=True, output_router_logits=True)
