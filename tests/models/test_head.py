"""What heads are made of: rows of norm 1."""

import torch
import torch.nn.functional as F

from harmonic_sft.models.head import unit_rows


def test_it_is_normalize_with_its_gradient():
    torch.manual_seed(0)
    rows = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(7, 4)
    found, expected = unit_rows(rows), F.normalize(rows, dim=-1)
    torch.testing.assert_close(found, expected)
    pairs = [torch.autograd.grad((unit * upstream).sum(), rows)[0] for unit in (found, expected)]
    torch.testing.assert_close(*pairs)
    assert torch.autograd.gradcheck(unit_rows, (rows,))


def test_a_row_without_a_direction_is_zero_and_gets_no_gradient():
    rows = torch.tensor([[0.0] * 3, [1e-13] * 3], requires_grad=True)
    unit = unit_rows(rows)
    unit.sum().backward()
    assert unit.tolist() == rows.grad.tolist() == [[0.0] * 3] * 2


def test_autocast_changes_no_gradient():
    rows = torch.randn(7, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    upstream = torch.linspace(-1, 1, 28).view(7, 4)
    (expected,) = torch.autograd.grad(unit_rows(rows), rows, upstream)
    with torch.autocast("cpu", torch.bfloat16):
        (found,) = torch.autograd.grad(unit_rows(rows), rows, upstream)
    assert torch.equal(found, expected)
