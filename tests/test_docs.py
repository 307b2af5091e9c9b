"""README and the guides: short enough, links that resolve, commands that parse."""

import argparse
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import yaml
from scipy import stats
from transformers import Trainer

from experiments.__main__ import main as experiments
from harmonic_sft import HarmonicTrainer, load_run_config
from harmonic_sft.training.resumable_trainer import ResumableTrainer
from harmonic_sft_cli import _parser

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
SKILL = ROOT / "skills" / "harmonic-sft" / "SKILL.md"
EXPERIMENTS = sorted((ROOT / "experiments").rglob("README.md"))
PROPOSAL = ROOT / "contrib" / "trl" / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *EXPERIMENTS, PROPOSAL, SKILL, *DOCS]
MAX_WORDS = 1500
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ANY = re.compile(r"\b(EXPERIMENT|NAME)\b")  # a command that stands for several
KEPT_LAYERS = ROOT / "docs" / "kept_layers.json"
LAYERS = {
    "linear, behind the layers": "linear_ce",
    "dist, behind the layers": "dist_behind",
    "dist alone": "dist_alone",
    "linear alone": "linear_alone",
}
SCALES = {"post_hoc_loss": 1, "accuracy": 100}
DEMO = {  # how a row of the demo's table begins, and what it shows
    "base: linear head": ("demo_base", "final"),
    "head replaced by": ("demo", "before"),
    "NeoBERT recipe": ("demo", "final"),
    "h_exp held": ("demo_constant", "final"),
    "the base's linear head": ("demo_linear", "final"),
}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def shell_lines(path: Path) -> list[str]:
    """Lines of indented and of unnamed fenced blocks, and code within a sentence."""
    text = re.sub(r"\\\n\s*", "", path.read_text())
    fenced = [block for language, block in FENCE.findall(text) if language in ("", "sh", "bash")]
    prose = FENCE.sub("", text)
    indented = re.findall(r"^    (\S.*)$", prose, re.MULTILINE)
    inline = re.findall(r"`([^`\n]+)`", prose)
    return [line.strip() for line in [*"\n".join(fenced).splitlines(), *indented, *inline]]


def commands(start: str) -> list[tuple[str, str]]:
    """(page, command) of every command that begins with the pattern `start`."""
    found = []
    for page in PAGES:
        for line in shell_lines(page):
            line = line.partition("  #")[0].strip()
            if re.match(start, line) and not ANY.search(line):
                found.append((name(page), line))
    return found


def slugs(path: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


def test_the_readme_is_short():
    assert len(README.read_text().split()) <= MAX_WORDS


def test_the_skill_is_short_and_its_file_is_a_whole_configuration(tmp_path):
    text = SKILL.read_text()
    assert len(text.splitlines()) <= 150
    about = yaml.safe_load(text.split("---")[1])
    assert about["name"] == SKILL.parent.name
    [written] = [block for language, block in FENCE.findall(text) if language == "yaml"]
    (tmp_path / "my.yaml").write_text(written)
    assert load_run_config(tmp_path / "my.yaml").model.base == "answerdotai/ModernBERT-base"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_relative_link_resolves(page):
    text = FENCE.sub("", page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"\w+:", target):
            continue
        place, _, anchor = target.partition("#")
        path = (page.parent / place) if place else page
        assert path.exists(), f"{name(page)}: {target}"
        if anchor:
            assert anchor in slugs(path), f"{name(page)}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_file_that_is_named_exists(page):
    folders = "configs|docs|experiments|harmonic_sft|scripts|tests"
    for path in re.findall(rf"(?<![\w./])((?:{folders})/[\w./-]*\w)", page.read_text()):
        assert (ROOT / path).exists(), f"{name(page)}: {path}"


def test_every_results_file_and_picture_is_on_a_page():
    """A picture's name stands for its JSON file too: it is drawn from that."""
    text = "".join(page.read_text() for page in PAGES)
    for path in (ROOT / "docs").rglob("*.*"):
        stem = str(path.relative_to(ROOT / "docs").with_suffix(""))
        assert path.suffix in (".md", ".py") or re.search(rf"\b{stem}\.(json|png)", text), name(
            path
        )


def cells(page: Path, start: str) -> list[str]:
    """Cells of the first table row that begins with a text, without bold type."""
    lines = page.read_text().replace("*", "").splitlines()
    row = next(line for line in lines if line.startswith(f"| {start}"))
    return [cell.strip() for cell in row.split("|")[2:-1]]


@pytest.mark.parametrize("page", [README, ROOT / "docs" / "results.md"], ids=name)
def test_the_table_of_the_demo_shows_what_was_measured(page):
    results = json.loads((ROOT / "docs" / "demo_results.json").read_text())
    for start, (run, when) in DEMO.items():
        found = results[run][when]
        loss, accuracy, best = found["loss"], 100 * found["accuracy"], found["post_hoc_loss"]
        *shown, h_exp, fitted = cells(page, start)
        assert shown == [f"{loss:.2f}", f"{accuracy:.1f}", f"{found['error_cosine']:.3f}"]
        assert h_exp == (f"{found['h_exp']:g}" if "h_exp" in found else "")
        at = f" at {found['post_hoc_h_exp']:.1f}" if "h_exp" in found else ""
        assert fitted == f"{best:.2f}{at}"


@pytest.mark.parametrize(
    ("family", "again"),
    [("family_clean", ""), ("causal_family", ""), ("family_exponents", ", 2026-11-27")],
)
def test_the_table_of_a_family_shows_what_was_measured(family, again):
    page = ROOT / ("experiments/README.md" if family == "causal_family" else "docs/results.md")
    columns = {"loss": 3, "post_hoc_loss": 3, "accuracy": 1, "post_hoc_ece": 1, "error_cosine": 3}
    for row in json.loads((ROOT / "docs" / f"{family}.json").read_text())["rows"]:
        expected = []
        for key, digits in columns.items():
            found, scale = row["metrics"][key], 100 if digits == 1 else 1  # %
            mean, half_width = scale * found["mean"], scale * found["half_width"]
            expected.append(f"{mean:.{digits}f} \u00b1 {half_width:.{digits}f}")
        assert cells(page, f"`{row['name']}`{again}")[:5] == expected


def difference(losses: dict[str, list[float]], row: str, against: str) -> tuple[float, float]:
    """The mean of the paired differences, and half of their 95 % t interval."""
    differences = np.subtract(losses[row], losses[against])
    interval = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
    return differences.mean(), (interval.high - interval.low) / 2


def test_the_gains_of_steeper_exponents_are_those_measured():
    rows = json.loads((ROOT / "docs" / "family_exponents.json").read_text())["rows"]
    losses = {row["name"]: row["metrics"]["post_hoc_loss"]["values"] for row in rows}
    readme = " ".join(README.read_text().split())
    section = (ROOT / "docs" / "results.md").read_text().split("### Other exponents")[1]
    pairs = [("dist_h24", "dist_harmonic"), ("dist_h48", "dist_harmonic")]
    pairs += [(row, "linear_ce") for row in ("dist_harmonic", "dist_h24", "dist_h48")]
    for row, against in pairs:
        mean, half_width = difference(losses, row, against)
        assert f"{mean:+.3f} \u00b1 {half_width:.3f}" in section
        if row == "dist_h24":
            assert f"{abs(mean):.3f} \u00b1 {half_width:.3f}" in readme


def test_what_a_bases_own_layers_are_worth_is_what_was_measured():
    rows = {row["name"]: row for row in json.loads(KEPT_LAYERS.read_text())["rows"]}
    page = ROOT / "docs" / "results.md"
    section = page.read_text().split("### Behind the base's own layers")[1].split("\n## ")[0]
    for start, name in LAYERS.items():
        before = rows[name]["start"]["before"]["mean"]
        found = [(rows[name]["metrics"][key], scale) for key, scale in SCALES.items()]
        shown = [
            f"{scale * one['mean']:.{digits}f} \u00b1 {scale * one['half_width']:.{digits}f}"
            for (one, scale), digits in zip(found, (3, 1), strict=True)
        ]
        assert cells(page, start) == [f"{before:.2f}", *shown]
    losses = {name: row["metrics"]["post_hoc_loss"]["values"] for name, row in rows.items()}
    in_readme = ("dist_behind", "linear_ce")
    for pair in (("dist_behind", "dist_alone"), in_readme, ("linear_alone", "linear_ce")):
        mean, half_width = difference(losses, *pair)
        shown = f"{abs(mean):.3f} \u00b1 {half_width:.3f}"
        assert shown in " ".join(section.split())
        if pair == in_readme:
            assert shown in " ".join(README.read_text().split())


@pytest.mark.parametrize("figure", ["2", "4", "6", "7", "10", "12"])
def test_every_cell_of_the_papers_figures_is_on_their_page(figure):
    text = (ROOT / "docs" / "harmonic_loss.md").read_text()
    path = ROOT / "docs" / "harmonic_loss" / f"figure_{figure}.json"
    for row in json.loads(path.read_text())["rows"]:
        mean, half_width = row["mean_percent"], row["interval_percent"]
        least, most = min(row["variance_percent"]), max(row["variance_percent"])
        assert f"{mean:.1f} \u00b1 {half_width:.1f}; {least:.0f} to {most:.0f} |" in text, row[
            "name"
        ]


def test_every_guide_is_in_the_table_of_contents():
    contents = (ROOT / "docs" / "README.md").read_text()
    for page in DOCS:
        assert page.name == "README.md" or f"({page.name})" in contents, page.name


def test_the_tree_names_every_file():
    """Of the package, the experiments and the scripts, each in its folder, and no other."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    named, folders = set(), [ROOT]
    for line in FENCE.findall(text)[0][1].splitlines():
        word, depth = line.split()[0], (len(line) - len(line.lstrip())) // 2
        if word.endswith("/"):
            folders[depth + 1 :] = [folders[depth] / word]
        assert (folders[depth] / word).exists(), word
        named.add(folders[depth] / word)
    for folder in ("harmonic_sft", "experiments", "scripts"):
        for path in (ROOT / folder).rglob("*.py"):
            assert path.name == "__init__.py" or path in named, name(path)


@pytest.mark.parametrize(("page", "command"), commands(r"harmonic-sft \w+ \S"))
def test_every_command_is_accepted(page, command):
    _, rest = _parser().parse_known_args(shlex.split(command.partition(" > ")[0])[1:])
    assert all("=" in word and not word.startswith("-") for word in rest), page


def test_the_architecture_names_every_override_of_the_trainer():
    text = (ROOT / "docs" / "architecture.md").read_text()
    ours = {**vars(ResumableTrainer), **vars(HarmonicTrainer)}
    for name, member in ours.items():
        if callable(member) and hasattr(Trainer, name) and not name.startswith("__"):
            assert f"`{name}`" in text, name


class Parsed(Exception):
    """Raised in place of running what was parsed."""


@pytest.fixture
def parsing_only(monkeypatch):
    def stopping(parse):
        def parse_and_stop(*arguments):
            parse(*arguments)
            raise Parsed

        return parse_and_stop

    for method in ("parse_args", "parse_intermixed_args"):
        parse = getattr(argparse.ArgumentParser, method)
        monkeypatch.setattr(argparse.ArgumentParser, method, stopping(parse))


@pytest.mark.parametrize(("page", "command"), commands(r"python -m experiments \w"))
def test_every_experiment_is_accepted(page, command, parsing_only):
    with pytest.raises(Parsed):
        experiments(shlex.split(command)[3:])


def test_every_fault_that_a_run_survives_names_a_test_that_exists():
    """A row ends with the name of its test, which links to the file."""
    tables = (ROOT / "docs" / "survives.md").read_text().split("| fault |")[1:]
    rows = [row for table in tables for row in table.split("\n\n")[0].splitlines()[2:]]
    assert len(rows) >= 15
    for row in rows:
        [(test, path)] = re.findall(r"\[`(test_\w+)`\]\(\.\./(tests/[\w/]+\.py)\) \|$", row)
        assert f"def {test}(" in (ROOT / path).read_text(), test
