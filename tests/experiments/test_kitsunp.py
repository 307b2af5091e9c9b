"""The claims run small, and two of them have known answers."""

import pytest
import torch

from experiments.__main__ import main
from experiments.kitsunp import PlainDistance, bfloat16, scale_invariance
from harmonic_sft.results import read_results


def test_five_claims_have_a_row_each(tmp_path, capsys):
    arguments = ["kitsunp", "--quick", "--seeds", "2", "--output", str(tmp_path)]
    assert main(arguments) == 0
    rows = read_results(tmp_path / "kitsunp.json")["rows"]
    assert len(rows) == 5
    assert all(isinstance(row["holds"], bool) for row in rows)
    assert all(len(one["values"]) == 2 for one in rows[3]["growth"].values())
    assert rows[1]["slopes"] == pytest.approx([1, 1], abs=0.2)
    assert "scale invariance" in capsys.readouterr().out


def test_the_scale_matters_off_the_sphere_and_to_their_formula_where_its_clamp_binds():
    row = scale_invariance()
    assert row["changes"]["their formula"] < 1e-4 < row["changes"]["ours off the sphere"]
    assert row["changes"]["ours on the sphere"] < 1e-4
    below = row["changes_at_1e-4"]
    assert below["ours on the sphere"] < 1e-4 < 0.5 < below["ours off the sphere"]
    assert below["their formula"] > 0.5
    assert row["holds"]


def test_distances_in_bfloat16_get_worse_with_the_width():
    errors = {
        (row["width"], row["distance"]): row["median_log_error"] for row in bfloat16()["rows"]
    }
    assert errors[64, 10.0] < errors[64, 1.0] < errors[768, 1.0]


def test_plain_distances_are_their_formula():
    head, states = PlainDistance(8, 5), torch.randn(3, 8)
    logits = head(states)
    for row, state in zip(logits, states, strict=True):
        distances = (state - head.weight).norm(dim=-1)
        torch.testing.assert_close(row, -28 * distances.log(), rtol=1e-4, atol=1e-4)
