"""Every run file of the repository can be read, and its header says how to start it."""

import json
import re
import shlex
from pathlib import Path

import pytest
from accelerate.commands.config import load_config_from_file

from harmonic_sft.config import parse, read_yaml, to_yaml
from harmonic_sft.training.run import train
from harmonic_sft.training.run_config import RunConfig, load_run_config
from scripts.make_neobert import main as make_neobert

ROOT = Path(__file__).parents[1]
FILES = sorted(
    path for path in (ROOT / "configs").rglob("*.yaml") if path.parent.name != "accelerate"
)
BASES = sorted((ROOT / "experiments").glob("*_base.yaml"))


@pytest.mark.parametrize("path", FILES + BASES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_file_can_be_read_and_names_itself(path, tmp_path):
    run = load_run_config(path)
    assert run.output_dir == Path("runs") / path.stem
    resolved = tmp_path / "run.yaml"
    resolved.write_text(to_yaml(run))
    assert parse(RunConfig, read_yaml(resolved)) == run
    run.training_arguments()
    header = path.read_text().split("model:")[0]
    assert all(line.startswith("#") for line in header.splitlines())
    assert str(path.relative_to(ROOT)) in header
    assert "Hardware:" in header


def test_the_header_of_gpt2_has_the_exponents_of_three_models_and_the_linear_one():
    path = ROOT / "configs" / "causal" / "gpt2_scratch.yaml"
    found = [load_run_config(path)]
    header = path.read_text().split("model:")[0]
    for name in ("text", "script"):
        override = re.search(rf"^#   {name} +'(.*?)'", header, re.M)[1]
        found.append(load_run_config(path, [override]))
    assert [run.h_exp.start for run in found] == [-28.0, -14.0, -768.0]
    assert all(run.h_exp.start == run.h_exp.end for run in found)
    lines = re.findall(r"^#   (('head=|'loss=).*)$", header, re.M)
    run = load_run_config(path, shlex.split(" ".join(line for line, _ in lines)))
    assert (run.head.name, run.head.tie, run.h_exp, run.loss.name) == (
        "linear",
        True,
        None,
        "cross_entropy",
    )


OTHER_ARMS = [path for path in FILES if "training.output_dir=" in path.read_text()]


@pytest.mark.parametrize("path", OTHER_ARMS, ids=lambda path: path.stem)
def test_the_other_arm_of_a_header_can_be_started(path):
    header = re.sub(r"^# ?", "", path.read_text().split("model:")[0], flags=re.M)
    words = re.search(r"('?head=|--head ).*? training\.output_dir=[\w/]+", header, re.S)[0]
    overrides = shlex.split(words)
    head = overrides[1] if overrides[0] == "--head" else None
    run = load_run_config(path, overrides[2 * bool(head) :], head=head)
    assert run.output_dir.name.startswith(path.stem.removesuffix("_dist"))
    assert run.head != load_run_config(path).head


def test_there_are_at_most_twenty_files():
    assert 0 < len(FILES) <= 20


def measured():
    """Return the losses of each recipe and of a linear head, as texts may round them."""
    demo = json.loads((ROOT / "docs" / "demo_results.json").read_text())
    final = {name: run["final"]["loss"] for name, run in demo.items()}
    rows = json.loads((ROOT / "docs" / "family_clean.json").read_text())["rows"]
    family = {row["name"]: row["metrics"]["post_hoc_loss"]["mean"] for row in rows}
    linear = f"{final['demo_linear']:.2f}"
    return {
        "neobert": (f"{final['demo']:.2f}", linear),
        "neobert_constant": (f"{final['demo_constant']:.2f}", linear),
        "neobert_euclid": (f"{family['dist_euclid']:.3f}", f"{family['linear_ce']:.3f}"),
    }


def test_what_a_recipe_costs_is_what_was_measured():
    guide = (ROOT / "docs" / "training.md").read_text()
    for name, losses in measured().items():
        header = (ROOT / "configs" / f"{name}.yaml").read_text().split("model:")[0]
        assert "unmeasured with NeoBERT" in header
        for text in (header, re.search(rf"^\| `configs/{name}\.yaml`.*$", guide, re.M)[0]):
            assert re.findall(r"([\d.]+) against ([\d.]+) nats", text) == [losses]
    best = json.loads((ROOT / "docs" / "demo_results.json").read_text())["demo"]["final"]
    for text in (guide, (ROOT / "configs" / "neobert.yaml").read_text()):
        assert f"{best['post_hoc_loss']:.2f} at the best exponent" in text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["recommended_encoder", "recommended_decoder"])
def test_a_recommendation_trains_and_keeps_the_head_of_its_base(
    name, causal_base, text_file, tmp_path
):
    rows = [{"instruction": text, "output": text} for text in text_file.read_text().splitlines()]
    path, base, length = text_file, tmp_path / "base", 16
    if name == "recommended_encoder":
        make_neobert(["--small", str(base)])
    else:
        path, base, length = tmp_path / "rows.jsonl", causal_base, 64
        path.write_text("\n".join(map(json.dumps, rows)))
    own = f"model.base={base}", "model.revision=null", "check_base=false"
    data = f'data.sources=[{{path: "{path}"}}]', f"data.context_length={length}"
    steps = "training.max_steps=2", "training.num_train_epochs=1", "training.save_steps=2"
    place = f"training.output_dir={tmp_path / 'run'}", "training.use_cpu=true"
    more = "data.eval.documents=8", "training.eval_steps=2"
    run = load_run_config(ROOT / "configs" / f"{name}.yaml", [*own, *data, *steps, *place, *more])
    results = train(run)
    assert results["before"]["loss"] == pytest.approx(results["swap"]["old_head"]["loss"], abs=1e-3)
    assert results["steps"] == 2
    assert results["final"]["loss"] != results["before"]["loss"]


def test_a_recommendation_says_what_earned_it():
    pages = {"encoder": "docs/results.md", "decoder": "experiments/README.md"}
    for name, page in pages.items():
        results = " ".join((ROOT / page).read_text().split())
        header = (ROOT / "configs" / f"recommended_{name}.yaml").read_text().split("model:")[0]
        assert "No distance head has earned a recommendation yet." in header
        for loss, half_width in re.findall(r"(\d\.\d{3}) \+- (\d\.\d{3})", header):
            assert f"{loss} \u00b1 {half_width}" in results
        assert page in header


ACCELERATE = sorted((ROOT / "configs" / "accelerate").glob("*.yaml"))


@pytest.mark.parametrize("path", ACCELERATE, ids=lambda path: path.stem)
def test_accelerate_takes_its_files_and_they_say_what_was_not_run(path):
    config = load_config_from_file(str(path))
    assert config.mixed_precision == "no"  # the head is float32
    assert config.fsdp_config.get("fsdp_version", 2) == 2
    assert bool(config.fsdp_config) == (path.stem == "fsdp2")
    header = path.read_text().split("compute_environment:")[0]
    assert f"configs/accelerate/{path.name}" in header
    assert "Not run on GPUs" in header
