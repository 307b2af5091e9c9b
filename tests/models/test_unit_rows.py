import torch
import torch.nn.functional as F

from harmonic_sft.models.unit_rows import unit_rows


def test_it_is_normalize_with_its_gradient():
    torch.manual_seed(0)
    rows = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(7, 4)
    found, expected = unit_rows(rows), F.normalize(rows, dim=-1)
    torch.testing.assert_close(found, expected)
    pairs = [torch.autograd.grad((unit * upstream).sum(), rows)[0] for unit in (found, expected)]
    torch.testing.assert_close(*pairs)
    assert torch.autograd.gradcheck(unit_rows, (rows,))


def test_a_row_of_zeros_stays_finite():
    rows = torch.zeros(2, 3, requires_grad=True)
    unit = unit_rows(rows)
    assert unit.tolist() == [[0.0] * 3] * 2
    unit.sum().backward()
    assert rows.grad.isfinite().all()
