"""What heads are made of: rows of norm 1."""

import pytest
import torch

from harmonic_sft.models import build_head, check_prototypes
from harmonic_sft.models.head import unit_rows
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
