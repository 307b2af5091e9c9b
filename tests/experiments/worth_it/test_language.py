"""The schedules, the crossing of a loss, and the ceiling by the head itself."""

import math

import pytest
import torch
import torch.nn.functional as F

from experiments.worth_it import language
from experiments.worth_it.language import ARMS, at_loss, compare, needed_cosine, run_once
from harmonic_sft.models import DistLayer


@pytest.mark.parametrize(
    ("arm", "values"),
    [
        ("annealed", (-12, -8, -4)),
        ("annealed early", (-12, -4, -4)),
        ("there and back", (-12, -4, -12)),
        ("euclid annealed", (-12, -8, -4)),
        ("annealed, scale", (-12, -8, -4)),
    ],
)
def test_exponents_at_start_middle_and_end(arm, values):
    assert tuple(ARMS[arm].h_exp(done) for done in (0.0, 0.5, 1.0)) == values


def test_a_quantity_is_read_between_two_measurements():
    curve = [{"loss": 6.0, "share": 0.1}, {"loss": 4.0, "share": 0.3}, {"loss": 3.0, "share": 0.9}]
    assert at_loss(curve, "share", 5.0) == pytest.approx(0.2)
    assert at_loss(curve, "share", 3.0) == pytest.approx(0.9)


@pytest.mark.parametrize(("level", "expected"), [(7.0, 0.1), (6.0, 0.1), (2.0, 0.9)])
def test_a_level_outside_of_the_curve_has_the_value_of_the_nearer_end(level, expected):
    curve = [{"loss": 6.0, "share": 0.1}, {"loss": 4.0, "share": 0.3}, {"loss": 3.0, "share": 0.9}]
    assert at_loss(curve, "share", level) == expected


@pytest.mark.parametrize("h_exp", [-4.0, -12.0])
def test_the_needed_cosine_gives_the_probability(h_exp):
    cosine = needed_cosine(h_exp, 40, 0.9)
    weight = torch.eye(41)[:40]
    state = cosine * weight[0] + (1 - cosine**2) ** 0.5 * torch.eye(41)[40]
    head = DistLayer(41, 40, h_exp=h_exp).initialize_(weight)
    assert head(state.unsqueeze(0)).softmax(-1)[0, 0].item() == pytest.approx(0.9, abs=1e-4)


def test_three_steps_lower_nothing_but_write_all_that_is_compared():
    generator = torch.Generator().manual_seed(0)
    train = torch.randint(60, (400,), generator=generator)
    held_out = torch.randint(60, (4, 65), generator=generator)
    runs = {
        arm: [run_once(arm, 1e-3, 0, train, held_out, 3)] for arm in ARMS if arm != "annealed early"
    }
    rows = {row["arm"]: row for row in compare(runs)}
    assert rows["linear"]["share_ratio"]["mean"] == 1.0
    assert "behind" not in rows["linear"]
    behind = runs["annealed"][0]["best_loss"] - runs["dist -12"][0]["best_loss"]
    assert rows["annealed"]["behind"]["mean"] == behind
    assert "share_ratio" not in rows["euclid"]
    first, *others = language.compare_biases(runs)
    assert (first["arm"], first["over"], "rejected" in first) == ("linear, bias", "dist -12", False)
    assert all("rejected" in row for row in others)
    for row in (first, *others):
        gain = runs[row["over"]][0]["best_loss"] - runs[row["arm"]][0]["best_loss"]
        assert row["gain"]["mean"] == gain
    del runs["linear, bias"]
    assert language.compare_biases(runs) == []


@pytest.mark.parametrize("arm", language.WITHOUT)
def test_an_arm_with_a_bias_differs_by_the_bias_alone(arm):
    (body, head), (other_body, other) = (
        language.build(name, 3, 50) for name in (arm, language.WITHOUT[arm])
    )
    for one, same in zip(body.parameters(), other_body.parameters(), strict=True):
        assert torch.equal(one, same)
    states, labels = torch.randn(6, 64), torch.arange(6)
    torch.testing.assert_close(head(states), other(states))
    torch.nn.init.normal_(head.bias)
    losses = head.nll(states, labels)
    expected = F.cross_entropy(other(states) + head.bias, labels, reduction="none")
    torch.testing.assert_close(losses, expected)
    (gradient,) = torch.autograd.grad(losses.sum(), head.bias)
    onehot = F.one_hot(labels, 50).sum(0)
    torch.testing.assert_close(gradient, head(states).softmax(-1).sum(0) - onehot)


def test_the_wide_control_has_the_body_of_linear_and_rows_of_norm_one():
    body, head = language.build("linear, wide", 3, 500)
    other_body, other = language.build("linear", 3, 500)
    for one, same in zip(body.parameters(), other_body.parameters(), strict=True):
        assert torch.equal(one, same)
    assert head.weight.norm(dim=-1).mean().item() == pytest.approx(1.0, abs=0.02)
    assert other.weight.norm(dim=-1).mean().item() == pytest.approx(0.16, abs=0.01)


def test_a_scale_is_learned_while_the_exponent_is_annealed():
    (body, head), (other_body, other) = (
        language.build(name, 3, 50) for name in ("annealed, scale", "annealed")
    )
    for one, same in zip(body.parameters(), other_body.parameters(), strict=True):
        assert torch.equal(one, same)
    states, labels = torch.randn(6, 64), torch.arange(6)
    torch.testing.assert_close(head.nll(states, labels), other.nll(states, labels))
    head.h_exp, other.h_exp = -4.0, -10.0
    torch.nn.init.constant_(head.log_scale, math.log(2.5))
    torch.testing.assert_close(head(states), other(states))
    losses = head.nll(states, labels)
    torch.testing.assert_close(losses, other.nll(states, labels))
    (gradient,) = torch.autograd.grad(losses.sum(), head.log_scale)
    logits = other(states)
    expected = ((logits.softmax(-1) - F.one_hot(labels, 50)) * logits).sum()
    torch.testing.assert_close(gradient, expected)


def test_the_learned_scale_is_written_and_is_trained():
    rows = torch.randint(60, (4, 65), generator=torch.Generator().manual_seed(0))
    run = run_once("annealed, scale", 1e-3, 0, rows.flatten(), rows, 3)
    assert run["scale"] != 1.0
    assert "scale" not in run_once("annealed", 1e-3, 0, rows.flatten(), rows, 1)


def test_another_exponent_is_better_by_margin_interval_and_holm():
    def runs(*losses):
        return [{"best_loss": loss} for loss in losses]

    found = {
        "dist -12": runs(4.3, 4.4, 4.5),
        "linear, wide": runs(4.2, 4.3, 4.4),
        "dist -24": runs(4.25, 4.349, 4.451),
        "dist -48": runs(4.29, 4.391, 4.489),
        "dist, learned exponent": runs(4.2, 4.4, 4.45),
    }
    rows = language.compare_exponents(found)
    assert [row["verdict"] for row in rows] == ["worth it", "not worth it", "undecided"]
    assert rows[0]["gain"]["mean"] == pytest.approx(0.05)
    assert rows[0]["over_wide"]["mean"] == pytest.approx(-0.05)
    # Holm over the three: an interval above 0 alone is not enough.
    found |= {arm: runs(4.25, 4.368, 4.432) for arm in language.STEEPER}
    rows = language.compare_exponents(found)
    assert all(row["gain"]["mean"] > row["gain"]["half_width"] for row in rows)
    assert {row["verdict"] for row in rows} == {"undecided"}
    del found["dist -48"]
    assert language.compare_exponents(found) == []


def test_the_learned_exponent_starts_at_12_and_is_written():
    rows = torch.randint(60, (4, 65), generator=torch.Generator().manual_seed(0))
    runs = [run_once("dist, learned exponent", 1e-3, 0, rows.flatten(), rows, n) for n in (1, 9)]
    assert runs[0]["h_exp"] == pytest.approx(-12, abs=0.1)
    assert runs[1]["h_exp"] != runs[0]["h_exp"]
    assert "h_exp" not in run_once("dist -24", 1e-3, 0, rows.flatten(), rows, 1)
