"""The picture of what an exponent does shows the cosines that docs/results.md lists."""

import pytest
import torch

from experiments.__main__ import main
from experiments.exponent import probabilities


@pytest.mark.parametrize(
    ("h_exp", "half", "most"), [(-4.0, 0.924, 0.956), (-12.0, 0.577, 0.648), (-24.0, 0.350, 0.407)]
)
def test_a_probability_needs_its_cosine(h_exp, half, most):
    found = probabilities(torch.tensor([half, most]), h_exp)
    assert found.tolist() == pytest.approx([0.5, 0.9], abs=0.02)


def test_the_picture_is_written(tmp_path):
    assert main(["exponent", str(tmp_path / "exponent.png")]) == 0
    assert (tmp_path / "exponent.png").read_bytes().startswith(b"\x89PNG")
