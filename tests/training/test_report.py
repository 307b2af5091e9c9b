"""What is printed about runs."""

import re
from types import SimpleNamespace

import pytest
import torch

from harmonic_sft.results import write_results
from harmonic_sft.training.report import (
    GIB,
    compare_runs,
    show_closing_table,
    show_estimate,
    show_metrics,
)
from harmonic_sft_cli import main


@pytest.fixture(autouse=True)
def informed(caplog):
    caplog.set_level("INFO", logger="harmonic_sft")


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


@pytest.mark.parametrize(
    ("metrics", "shown"),
    [
        ({"h_exp": -8.0, "post_hoc_h_exp": -127.99}, "<= -128"),
        ({"h_exp": -8.0, "post_hoc_h_exp": -0.50001}, ">= -0.5"),
        ({"post_hoc_inverse_temperature": 0.0625}, "<= 0.0625"),
        ({"post_hoc_inverse_temperature": 15.9999}, ">= 16"),
        ({"post_hoc_inverse_temperature": 0.93}, "4.00 0.93"),
    ],
)
def test_a_best_value_at_the_end_of_its_search_is_marked(metrics, shown, capsys):
    without = {key: value for key, value in METRICS.items() if "h_exp" not in key}
    both = {"final": without | metrics, "before": without | metrics}
    compare_runs([run("one", "a") | both], None)
    assert shown in " ".join(capsys.readouterr().out.split())


def test_an_error_cosine_without_errors_is_left_out(capsys):
    perfect = {key: value for key, value in METRICS.items() if key != "error_cosine"}
    compare_runs([run("one", "a") | {"before": perfect, "final": perfect}], None)
    assert "4.25 25.0 - 5.0" in " ".join(capsys.readouterr().out.split())


def test_an_annealed_run_is_said_to_have_another_loss(caplog):
    compare_runs([run("held", "a"), run("annealed", "a", end=-4.0)], None)
    [message] = [message for message in caplog.messages if "h_exp went" in message]
    assert message.startswith("annealed: h_exp went from -12 to -4. Losses at different exponents")
    assert "rises" not in message


def test_runs_with_other_held_out_data_are_refused(capsys):
    compare_runs([run(f"run{i}", "a") for i in range(3)], None)
    printed = " ".join(capsys.readouterr().out.split())
    assert "run2, before" in printed
    assert "run2, after 6 steps" in printed
    message = "expected runs with the held-out data of run0, got others in run1, run2. "
    with pytest.raises(ValueError, match=message):
        compare_runs([run("run0", "a"), run("run1", "b"), run("run2", None)], None)
    with pytest.raises(ValueError, match=r"got others in run1\. Their losses cannot"):
        compare_runs([run("run0", None), run("run1", None)], None)
    compare_runs([run("run0", None)], None)


def seeds_of(name, end, losses):
    runs = [run(f"{name}{seed}", "a", end) for seed in range(len(losses))]
    for seed, (one, loss) in enumerate(zip(runs, losses, strict=True)):
        one["config"]["training"] = {"seed": seed, "output_dir": one["run"]}
        accuracy = 0.25 + (0.001 if seed % 2 else -0.001)
        more = {"loss": loss, "accuracy": accuracy, "tokens": 500.0, "documents": 20}
        one["final"] = METRICS | more
    return runs


def test_arms_are_compared_over_their_seeds(capsys, caplog):
    base = seeds_of("base", -12.0, [4.0, 4.1, 4.2, 4.0, 4.1])
    other = seeds_of("other", -4.0, [4.31, 4.4, 4.52, 4.3, 4.42])
    for one in other:
        one["final"]["accuracy"] += 0.01 if one["run"] in ("other0", "other3") else -0.012
    compare_runs([*base, *other], None)
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "Holm" not in line]
    differences = [" ".join(row) for row in rows if row[:1] == ["other0"]]
    # t of 4 degrees of freedom is 2.776; differences .31 .30 .32 .30 .32.
    assert "other0 loss, nats 0.310 \u00b1 0.012 5 0.000 higher" in differences
    assert any("accuracy, %" in line and line.endswith("undecided") for line in differences)
    assert not any("cosine" in line for line in differences)  # every run has embeddings of its own
    assert "Measured on 500 masked tokens of 20 documents." in caplog.text


@pytest.mark.parametrize(("num_seeds", "word"), [(4, "undecided"), (5, "higher")])
def test_fewer_than_five_seeds_decide_nothing(num_seeds, word, capsys, caplog):
    base = seeds_of("base", -12.0, [4.0] * num_seeds)
    compare_runs([*base, *seeds_of("other", -4.0, [9.0, 9.01] * 2 + [9.0][: num_seeds - 4])], None)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    (row,) = (row for row in rows if row[:3] == ["other0", "loss,", "nats"])
    assert row[-3:] == [str(num_seeds), "0.000", word]
    assert "with fewer than 5 seeds a difference is undecided" in caplog.text


def test_a_second_run_of_a_seed_is_named_and_left_out_of_the_differences(capsys, caplog):
    base = seeds_of("base", -12.0, [4.0, 4.1])
    other = seeds_of("other", -4.0, [4.3, 4.42])
    again = {**base[1], "run": "again", "final": {**base[1]["final"], "loss": 9.0}}
    compare_runs([*base, *other, again], None)
    printed = " ".join(capsys.readouterr().out.split())
    assert "again" in printed  # in the table of runs
    assert "other0 loss, nats 0.310 ±" in printed
    assert "again has the settings and the seed of base1. Differences are" in caplog.text


def test_runs_whose_folders_have_one_name_are_told_apart(tmp_path, capsys):
    arms = {"a": (-12.0, [4.0, 4.1]), "b": (-4.0, [4.5, 4.62]), "c": (-8.0, [3.9, 4.02])}
    folders = []
    for arm, (end, losses) in arms.items():
        for one in seeds_of("seed", end, losses):
            folders.append(tmp_path / arm / one["run"])
            write_results(folders[-1] / "results", "train", one)
    assert main(["compare", *map(str, folders)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"Difference from {folders[0]} " in printed
    assert f"{folders[2]} loss, nats 0.510 \u00b1" in printed
    assert f"{folders[4]} loss, nats -0.090 \u00b1" in printed


@pytest.mark.parametrize("seeds", [([0], [0]), ([0, 1], [2, 3])])
def test_runs_that_share_no_two_seeds_are_undecided(seeds, capsys, caplog):
    base, other = seeds_of("base", -12.0, [4.0] * 4), seeds_of("other", -4.0, [9.0] * 4)
    compare_runs([*(base[n] for n in seeds[0]), *(other[n] for n in seeds[1])], None)
    assert "Difference" not in capsys.readouterr().out
    assert "Undecided, since they share no two seeds with base0: other" in caplog.text


def test_an_arm_without_two_shared_seeds_is_named_beside_the_others(capsys, caplog):
    settings = (("a", -12.0, [4, 5]), ("b", -4.0, [4, 6]), ("c", -8.0, [4]), ("d", -6.0, [4]))
    compare_runs([one for setting in settings for one in seeds_of(*setting)], None)
    assert "b0 loss, nats 0.500" in " ".join(capsys.readouterr().out.split())
    assert "Undecided, since they share no two seeds with a0: c0, d0. Give runs" in caplog.text


@pytest.mark.parametrize("name", ["x.foo", "Makefile"])
def test_a_figure_is_refused_before_the_table_if_it_is_no_picture_by_name(tmp_path, capsys, name):
    write_results(tmp_path / "run" / "results", "train", run("run", "a"))
    path = tmp_path / name
    path.write_text("mine")
    assert main(["compare", str(tmp_path / "run"), "--figure", str(path)]) == 1
    printed = capsys.readouterr()
    assert printed.err == (
        f"error: --figure: expected a name that ends in .png, .svg or .pdf, got {str(path)!r}\n"
    )
    assert (printed.out, path.read_text()) == ("", "mine")


def test_documents_without_a_scored_token_are_not_scored(caplog):
    more = {"tokens": 50.0, "documents": 7, "loss_interval": None}
    final = {**METRICS, **more, "ece_floor": 0.01, "ece_debiased": 0.04}
    show_metrics("run", {"final": final, "documents": 10})
    assert "Scored: 7 documents, 50 masked tokens." in caplog.text


@pytest.mark.parametrize(
    ("has_gpu", "device", "size"), [(False, "", 24), (True, " of NVIDIA H100", 80)]
)
def test_what_fits_leaves_a_gib_to_the_device(has_gpu, device, size, caplog, monkeypatch):
    gpu = SimpleNamespace(name="NVIDIA H100", total_memory=80 * GIB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    for gib, said in ((size - 1, "Fits"), (size, "Does not fit")):
        show_estimate({"weights": GIB, "activations": (gib - 1) * GIB}, batch="8 rows")
        assert caplog.messages[-1].startswith(f"{said} {size} GiB{device}, with 1 GiB")


@pytest.mark.parametrize(("unigrams", "is_said"), [(4.0, True), (4.1, False), (None, False)])
def test_a_model_that_knows_no_more_than_frequencies_is_named(unigrams, is_said, caplog, capsys):
    results = {**run("a", "x"), "unigram_loss": unigrams}
    results |= {"neighbors_before": {"aa": ["x"], "ba": ["y"]}, "neighbors_after": {"ba": ["z"]}}
    results |= {"train_seconds": 1.0, "tokens_per_second": 1.0, "peak_memory_bytes": 1}
    results["config"]["model"] = {"task": "masked_lm"}
    if unigrams == 4.1:  # fitted on few rows, the best temperature may lose
        results["final"] = {**results["final"], "post_hoc_loss": 9.0, "loss": 4.0}
    show_closing_table(results)
    assert re.findall("(aa|ba) +([xyz]) +([xyz])", capsys.readouterr().out) == [("ba", "y", "z")]
    assert ("a: after training it predicts no better than frequencies" in caplog.text) == is_said
