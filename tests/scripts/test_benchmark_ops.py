"""The benchmark of the losses runs, and its arms do what they say."""

import json
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from scripts import benchmark_ops
from scripts.benchmark_ops_arms import ARMS, BASELINE, FLOOR, Arm, BareProducts, Inputs, Sizes

CPU = torch.device("cpu")
QUICK = "^(?!.*(compile|cut-cross))"  # compilers take their time
ON_CPU = [name for name, arm in ARMS.items() if "cpu" in arm.devices and re.match(QUICK, name)]


def run(rows: str, only: str, *options: str) -> dict[str, Any]:
    fixed = ["--repetitions", "3", "--device", "cpu"]
    return benchmark_ops.main(["--rows", rows, "--only", only, *fixed, *options])


def gradients(step: Arm, inputs: Inputs) -> list[torch.Tensor]:
    step.prepare(inputs)
    step(inputs)
    found = [inputs.hidden_states.grad.clone(), inputs.prototypes.grad.clone()]
    inputs.clear()
    return found


def test_arms_take_turns_and_the_figures_are_written(tmp_path, capsys):
    path = tmp_path / "ops.json"
    results = run("24x16x700,8x32x96", QUICK, "--json", str(path))
    saved = json.loads(path.read_text())
    assert saved == results
    assert saved["threads"] == torch.get_num_threads()
    assert "versions" in saved["environment"]
    assert [row["vocab_size"] for row in saved["rows"]] == [700, 96]
    for row in saved["rows"]:
        assert set(row["arms"]) == {*ON_CPU, FLOOR} - set(row["skipped"])
        assert row["arms"][BASELINE]["median_ratio"] == 1.0
        assert row["floor"] == FLOOR
        assert row["arms"][FLOOR]["ratio_to_products"] == 1.0
        recomputed = row["arms"]["harmonic, recompute"]
        assert recomputed["products"] == 4
        assert row["skipped"].keys() >= {"Liger", "harmonic, triton"}
        assert not [reason for reason in row["skipped"].values() if reason.startswith("failed")]
    out = capsys.readouterr().out
    assert "24x16x700" in out
    assert "skipped: Liger: only on cuda" in out


@pytest.mark.slow
def test_memory_is_measured():
    only = "^harmonic, (chunked|full logits)$"
    (row,) = run("512x16x16384", only, "--memory")["rows"]
    arms = row["arms"]
    # 32 MB of logits, a few times, against some chunks of tiles.
    full, chunked = (
        arms[name]["peak_bytes_above_gradients"] for name in (BASELINE, "harmonic, chunked")
    )
    assert full > 2**25
    assert arms["harmonic, chunked"]["peak_bytes"] - chunked == (512 + 16384) * 16 * 4
    assert chunked < full


@pytest.mark.parametrize(
    ("head", "label_smoothing"),
    [("linear", 0.0), ("euclidean", 0.0), ("sphere", 0.0), ("linear", 0.1), ("euclidean", 0.1)],
)
def test_arms_of_a_head_make_the_same_gradients(head, label_smoothing):
    inputs = Inputs.draw(Sizes(20, 16, 600), CPU, torch.float32)
    hidden_states = inputs.hidden_states.detach().double().requires_grad_()
    states, prototypes = hidden_states, inputs.prototypes.detach().double()
    if head == "sphere":
        states, prototypes = F.normalize(states), F.normalize(prototypes)
    logits = states @ prototypes.T
    if head != "linear":
        squared = (states[:, None] - prototypes).square().sum(-1)
        logits = -14 * (squared + 1e-6).log()
    loss = F.cross_entropy(logits, inputs.labels, label_smoothing=label_smoothing)
    (exact,) = torch.autograd.grad(loss, hidden_states)
    starts = {"linear": ("linear", "torch", "transformers"), "sphere": ("harmonic sphere",)}
    names = [
        name
        for name in ON_CPU
        if name.startswith(starts.get(head, ("harmonic,",)))
        and ("smoothing" in name) == (label_smoothing > 0)
        and not re.search("transport|distilled", name)
        and (hasattr(F, "linear_cross_entropy") or not name.startswith("torch"))  # older torch
    ]
    assert names
    for name in names:
        found = gradients(ARMS[name], inputs)[0].double()
        tolerance = 1e-2 if "bfloat16" in name else 1e-4
        assert (found - exact).norm() < tolerance * exact.norm(), name


def test_bare_products_are_those_of_the_gradients():
    step = BareProducts()
    inputs = Inputs.draw(Sizes(500, 16, 1100), CPU, torch.float32)
    hidden_states, prototypes = inputs.hidden_states.detach(), inputs.prototypes.detach()
    scores = hidden_states @ prototypes.T
    step.prepare(inputs)
    step(inputs)
    hidden_gradient, weight_gradient = step.gradients
    torch.testing.assert_close(hidden_gradient, scores @ prototypes, rtol=1e-4, atol=1e-3)
    rows = weight_gradient[: len(prototypes)]  # the others are of classes that fill up to 64
    torch.testing.assert_close(rows, scores.T @ hidden_states, rtol=1e-4, atol=1e-3)


def test_peers_of_float32_prototypes_work_on_rounded_ones():
    only = "^(harmonic, chunked|three bare products)$"
    (row,) = run("24x16x700", only, "--dtype", "mixed")["rows"]
    assert row["arms"]["harmonic, chunked"]["products"] == 4
    precisions = {name: arm["precision"] for name, arm in row["arms"].items()}
    rounded = {BASELINE: "bfloat16", FLOOR: "bfloat16"}
    assert precisions == {**rounded, "harmonic, chunked": "bfloat16, 2 terms"}
    inputs = Inputs.draw(Sizes(20, 16, 600), CPU, torch.bfloat16, torch.float32)
    found = gradients(ARMS[BASELINE], inputs)[1]
    assert found.dtype == torch.float32  # of the leaf
    same = Inputs.draw(Sizes(20, 16, 600), CPU, torch.bfloat16)
    assert torch.equal(found, gradients(ARMS[BASELINE], same)[1].float())


def test_a_failing_arm_is_reported_and_the_others_continue(monkeypatch, capsys):
    def fail(*_):
        raise RuntimeError("no compiler")

    broken = {"broken": Arm(fail), BASELINE: ARMS[BASELINE]}
    monkeypatch.setattr(benchmark_ops, "ARMS", broken)
    inputs = Inputs.draw(Sizes(4, 4, 8), CPU, torch.float32)
    skipped = benchmark_ops.warm_up(list(broken), inputs)
    assert skipped == {"broken": "failed: RuntimeError: no compiler"}
    assert "no compiler" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["12x3", "12x3x0", "axbxc", "1x2x3x4"])
def test_sizes_are_checked(text, capsys):
    with pytest.raises(SystemExit):
        benchmark_ops.main(["--rows", text, "--device", "cpu"])
    assert "rows: expected NxDxV, such as 1638x768x30522, got " in capsys.readouterr().err
