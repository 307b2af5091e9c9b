"""The benchmark runs, and its arms do what they say."""

import json

import pytest

from scripts import benchmark_step


@pytest.mark.slow
def test_the_arms_take_turns_and_the_figures_are_written(tmp_path, capsys, use_small_demo):
    use_small_demo(benchmark_step)
    path = tmp_path / "step.json"
    results = benchmark_step.main(["--steps", "3", "--json", str(path)])
    saved = json.loads(path.read_text())
    assert saved["arms"] == results
    assert saved["steps"] == 3
    plain = results[benchmark_step.PLAIN]
    assert plain["time_ratio"] == 1.0
    # Memory, unlike time, is the same on every machine: no logits for unlabelled tokens.
    assert results["harmonic head"]["peak_bytes"] < 0.6 * plain["peak_bytes"]
    assert "ratio" in capsys.readouterr().out


def test_a_peak_is_rounded_to_the_nearest_mebibyte(capsys, monkeypatch):
    found = {"arm": {"seconds": 1.0, "time_ratio": 1.0, "peak_bytes": 7 * 2**20 - 1}}
    monkeypatch.setattr(benchmark_step, "build_arms", lambda *_: {})
    monkeypatch.setattr(benchmark_step, "measure", lambda *_, **__: found)
    assert benchmark_step.main([]) == found
    assert capsys.readouterr().out.split()[-1] == "7"
