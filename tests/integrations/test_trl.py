"""What TRL is told of each token; its trainers themselves are in tests/ecosystem."""

import pytest
import torch

from harmonic_sft.integrations import trl
from harmonic_sft.models import build_head

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


def tokens(seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden_states = torch.randn(N, D, generator=generator, requires_grad=True)
    return hidden_states, torch.randint(V, (N,), generator=generator)


def plain(head, hidden_states, labels, temperature):
    """The fields by their definitions."""
    logits = head(hidden_states) / temperature
    log_probs = logits.log_softmax(-1)
    probs = log_probs.exp()
    return {
        "log_probs": log_probs[torch.arange(N), labels],
        "entropy": -(probs * log_probs).sum(-1),
        "is_top1": (logits.argmax(-1) == labels).float(),
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
        torch.testing.assert_close(found[field].float(), expected[field], atol=2e-5, rtol=2e-5)
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


def test_only_what_is_asked_for_is_returned():
    head = build_head(HEADS["dist"], hidden_size=D, vocab_size=V)
    assert trl.token_fields(head, *tokens()).keys() == {"log_probs"}
    frozen = head.requires_grad_(False)
    found = trl.token_fields(frozen, tokens()[0].detach(), tokens()[1], outputs=("entropy",))
    assert found.keys() == {"log_probs", "entropy"}
    assert not found["entropy"].requires_grad


@pytest.mark.parametrize("found", ["0.29.1", "1.0.0", "1.14.2", "1.17.0", "2.0"])
def test_an_untested_version_is_refused_with_its_number(monkeypatch, found):
    monkeypatch.setattr(trl, "version", lambda name: found)
    with pytest.raises(ValueError, match=rf"trl: expected version 1.15 to 1.16, got {found}. Run"):
        trl.patch()


def test_a_tested_version_is_not(monkeypatch):
    monkeypatch.setattr(trl, "version", lambda name: "1.16.3")
    trl.check_version()


def test_without_trl_it_says_what_to_install(monkeypatch):
    def missing(name):
        raise trl.PackageNotFoundError(name)

    monkeypatch.setattr(trl, "version", missing)
    with pytest.raises(ValueError, match=r"got none. Run pip install 'harmonic-sft\[trl\]'"):
        trl.patch()
