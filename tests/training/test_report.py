"""What is printed about runs."""

import copy

import pytest

from harmonic_sft.training.report import compare_runs

METRICS = {
    "loss": 4.25,
    "accuracy": 0.25,
    "error_cosine": 0.1,
    "ece": 0.05,
    "h_exp": -12.0,
    "post_hoc_loss": 4.0,
    "post_hoc_h_exp": -8.0,
}


def run(name, fingerprint, end=-12.0):
    return {
        "run": name,
        "steps": 6,
        "before": METRICS,
        "final": METRICS,
        "data": {} if fingerprint is None else {"eval_sha256": fingerprint},
        "config": {"h_exp": {"start": -12.0, "end": end}},
    }


def test_an_annealed_run_is_said_to_have_another_loss(caplog):
    caplog.set_level("INFO", logger="harmonic_sft")
    compare_runs([run("held", "a"), run("annealed", "a", end=-4.0)], None)
    said = [record.getMessage() for record in caplog.records if "h_exp went" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("annealed: h_exp went from -12 to -4. A smaller exponent makes")


@pytest.mark.parametrize(
    ("fingerprints", "message"),
    [
        (["a", "a", "a"], ""),
        (["a", "b", "a"], "Evaluation data: those of run1 differ from those of run0. Their losses"),
        (["a", None, "b"], "an earlier version did not record those of run1."),
    ],
)
def test_runs_on_different_evaluation_data_are_not_compared_in_silence(
    fingerprints, message, caplog, capsys
):
    compare_runs([run(f"run{i}", value) for i, value in enumerate(fingerprints)], None)
    assert "run2, after 6 steps" in " ".join(capsys.readouterr().out.split())
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert message in " ".join(warnings)
    assert bool(message) == bool(warnings)


def test_runs_of_versions_that_recorded_nothing_are_shown():
    old = copy.deepcopy(run("old", None))
    del old["data"]
    compare_runs([old], None)
