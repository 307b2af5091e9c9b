"""The start: losses before and after the swap, and the tokens that make up for it."""

import pytest

from harmonic_sft.experiments.head_start import measure_start, show_starts


def run(losses, *, old=3.0, swapped=None):
    swap = (
        {"old_head": {"loss": old}}
        if swapped is None
        else {"old_head": {"loss": old}, "swapped": {"loss": swapped}}
    )
    history = [
        {"eval_loss": loss, "num_input_tokens_seen": 100 * step} if step else {"eval_loss": loss}
        for step, loss in enumerate(losses)
    ]
    history.insert(1, {"loss": 9.9, "num_input_tokens_seen": 50})  # a training loss
    before, final = {"loss": losses[0]}, {"loss": losses[-1]}
    return {"swap": swap, "before": before, "final": final, "history": history}


def test_tokens_are_linear_between_evaluations():
    found = measure_start([run([5, 4, 2, 1], swapped=8.0), run([5, 3.5, 3, 1], swapped=10.0)])
    assert found["tokens"]["values"] == [150, 200]
    assert found["old_head"]["mean"] == 3.0
    assert found["swapped"]["mean"] == 9.0
    assert found["before"]["mean"] == 5.0
    assert found["after"]["mean"] == 1.0


def test_what_never_arrives_or_was_hardly_evaluated_has_no_count():
    assert measure_start([run([5, 4, 2, 1]), run([5, 4.5, 4, 3.5])])["tokens"] is None
    assert measure_start([run([5, 1])])["tokens"] is None
    assert measure_start([run([3, 1], old=3.0)])["tokens"]["mean"] == 0
    assert measure_start([run([5, 4, 2, 1])])["swapped"] is None


def test_without_the_old_head_there_is_no_start(capsys):
    assert measure_start([run([5, 1]), {"before": {}, "final": {}, "history": []}]) is None
    show_starts([{"name": "x", "start": None}, {"name": "failed"}])
    assert not capsys.readouterr().out


@pytest.mark.parametrize("swapped", [None, 7.0])
def test_the_table(swapped, capsys):
    rows = [{"name": "dist", "start": measure_start([run([5, 4, 2, 1], swapped=swapped)])}]
    show_starts(rows)
    shown = capsys.readouterr().out
    assert "150" in shown
    assert ("7.00" in shown) == (swapped is not None)
