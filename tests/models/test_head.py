"""What heads are made of: rows of norm 1."""

import pytest
import torch

from harmonic_sft.models import build_head, check_prototypes
from harmonic_sft.models.head import find_not_finite, unit_rows
from tests.head_variants import VARIANTS, D, V


def test_a_row_without_a_direction_is_zero_and_gets_no_gradient():
    rows = torch.tensor([[0.0] * 3, [1e-13] * 3], requires_grad=True)
    unit = unit_rows(rows)
    unit.sum().backward()
    assert unit.tolist() == rows.grad.tolist() == [[0.0] * 3] * 2


def head_of(settings, damage=lambda table: table):
    head = build_head(settings, hidden_size=D, vocab_size=V)
    rows = torch.randn(V, D, generator=torch.Generator().manual_seed(0))
    head.initialize_(rows)
    with torch.no_grad():
        head.weight.copy_(damage(head.weight))
    return head


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
def test_a_healthy_head_of_every_kind_has_no_problem(settings):
    assert check_prototypes(head_of(settings), is_tied=False) == []
    with torch.device("meta"):
        head = build_head(settings, hidden_size=D, vocab_size=V)
    assert check_prototypes(head, is_tied=False) == []


NAN, FREE, FEW = torch.tensor([1]), {"unit_sphere": False}, (torch.arange(V) > 2)[:, None]
FINITE = "1 of 40 prototypes are not finite"
EQUAL = "all prototypes are equal: the head has collapsed"
OFF = "40 of 40 prototypes are off the unit sphere"


@pytest.mark.parametrize(
    ("damage", "fields", "problem"),
    [
        (lambda table: table.index_fill(0, NAN, torch.nan), {}, FINITE),
        (lambda table: table.index_fill(0, NAN, torch.inf), FREE, FINITE),
        (lambda table: table * 0, {}, EQUAL),
        (lambda table: table * 0, FREE, EQUAL),
        (lambda table: table[:1].expand(V, D).clone(), {}, EQUAL),
        (lambda table: table * 2.1, {}, OFF),
        (lambda table: table * 0.4, {}, OFF),
        (lambda table: table * 1.9, {}, None),
        (lambda table: table * 100, FREE, None),
        (lambda table: table * FEW, {}, None),
    ],
)
def test_prototypes_that_predict_nothing_are_described(damage, fields, problem):
    head = head_of({"name": "dist", **fields}, damage)
    assert check_prototypes(head, is_tied=False) == ([] if problem is None else [problem])
    assert check_prototypes(head, is_tied=True) == ([] if problem in (None, OFF) else [problem])


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize(("h_exp", "is_flat"), [(-1e-9, True), (-1e-3, True), (-0.1, False)])
def test_an_exponent_at_which_all_classes_are_alike_is_described(h_exp, learned, is_flat):
    head = head_of({"name": "dist", "h_exp": h_exp, "learn_h_exp": learned})
    problem = f"h_exp is {h_exp:.3g}, at which all classes are alike"
    assert check_prototypes(head, is_tied=False) == [problem] * is_flat


def test_large_weights_are_finite_though_their_sum_is_not():
    large = torch.full((4,), torch.finfo(torch.float32).max)
    packed = torch.full((4,), torch.nan).to(torch.float8_e4m3fn)
    assert find_not_finite([("a", large), ("b", torch.ones(2).int()), ("c", packed)]) is None
    for value in (torch.nan, torch.inf):
        assert find_not_finite([("a", large), ("d", torch.tensor([1, value]))]) == "d"
