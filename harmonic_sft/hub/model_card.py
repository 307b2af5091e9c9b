"""The README of a published model: what it is, how to use it, how it was made and measured."""

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import TrainingArguments

from harmonic_sft.data.files import file_kind
from harmonic_sft.data.sources import DOCSTRINGS, HUB_NAME
from harmonic_sft.hub.run_folder import Destination, TrainedFolder, last_part
from harmonic_sft.models import BLOCKS_FILE, HEAD_FILE, HarmonicConfig
from harmonic_sft.models.configuration_harmonic import quantization_method
from harmonic_sft.models.partial_checkpoint import hub_base
from harmonic_sft.results import leaves, show_best, without_secrets

TEMPLATE = Path(__file__).with_name("card.md.jinja")
HEAD_KINDS = {
    "linear": "a linear softmax head",
    "dist": "a distance head",
    "cosine": "a cosine head",
    "vmf": "a von Mises-Fisher head",
    "l2": "a head of squared distances",
    "power": "a head of powers of dot products",
    "rotation": "a learned rotation before its output head",
    "multi_head": "a mean of several softmaxes",
}
NEEDS = ("torch>=2.10", "transformers>=5.10.1")  # as in pyproject.toml
NEEDS_FOR_ADAPTERS = ("peft>=0.19",)
# Keys of `training` about this machine and its accounts, not about what was trained.
PRIVATE_SETTINGS = re.compile(
    r"output_dir|logging_dir|run_name|report_to|project|trackio_|hub_|push_to_hub|resume_from"
    r"|disable_tqdm|log_level|.*token$"
)


class Task(NamedTuple):
    """How a card speaks of what a model predicts."""

    pipeline: str  # its tag on the Hub, which is also the name of the pipeline
    title: str  # name of the task; in lower case with hyphens a further tag
    purpose: str  # what the model was fine-tuned to do
    item: str  # what the loss is a mean over
    choice: str  # what the head chooses among, `token` or `class`

    @property
    def where(self) -> str:
        """What the evaluation kept out."""
        return "documents" if self.choice == "token" else "rows"


CARD_TASKS = {
    "HarmonicForMaskedLM": Task(
        "fill-mask", "Masked language modeling", "to fill masked tokens", "masked token", "token"
    ),
    "HarmonicForCausalLM": Task(
        "text-generation", "Causal language modeling", "to predict the next token", "token", "token"
    ),
    "HarmonicForSequenceClassification": Task(
        "text-classification", "Text classification", "to classify texts", "text", "class"
    ),
    "HarmonicForTokenClassification": Task(
        "token-classification", "Token classification", "to classify words", "word", "class"
    ),
    "HarmonicForQuestionAnswering": Task(
        "question-answering", "Question answering", "to find answers in a text", "answer", "class"
    ),
}


def model_card(
    trained: TrainedFolder, to: Destination, *, figure: str | None, license: Mapping[str, Any]
) -> str:
    """Write the model card, Markdown with a block of YAML metadata; what is not known is left out.

    `figure` is a file of the repo, and `license` has the metadata of the weights' license:
    `license`, `license_name`, `license_link`.
    """
    config, repo_id, form, step = trained.config, to.repo_id, to.form, trained.step
    results: dict[str, Any] = trained.results or {}
    documents = (results.get("data") or {}).get("held_out") or {}
    seen = _seen(documents)
    if seen == "yes":  # then the numbers tell nothing
        results = {**results, "before": {}, "final": {}, "history": []}
    run = without_secrets(trained.run)
    run = {**run, **{key: run.get(key) or {} for key in ("model", "h_exp", "data", "training")}}
    known = (name for name in config.architectures or () if name in CARD_TASKS)
    architecture = next(known, "HarmonicForMaskedLM")
    task, name, hub_name = CARD_TASKS[architecture], repo_id.split("/")[-1], hub_base(config)
    changed, sources = config.trained_parameters or [], run["data"].get("sources") or []
    held_out = (run["data"].get("eval") or {}).get("source")
    # A multi-head's exponent is no factor on its logits: an inverse temperature is fitted.
    final = results.get("final") or {}
    has_factor = "post_hoc_inverse_temperature" in final
    fitted = "inverse temperature" if config.h_exp is None or has_factor else "h_exp"
    needs = [*NEEDS, *(NEEDS_FOR_ADAPTERS if form == "peft" else ())]
    if method := quantization_method(config):  # which is also the package's name
        needs.append(method)
    context: dict[str, Any] = {
        "show": _show,
        "escape": _escape,
        "code": _code,
        "python": _python,
        "quote": quote,
        "repo_id": repo_id,
        "name": name,
        "form": form,
        "config": config,
        "head": config.head,
        "architecture": architecture,
        "task": task,
        "head_kind": _kind(config.head),
        "base": _base(config),
        "hub_name": hub_name,
        "head_file": HEAD_FILE,
        "blocks_file": None if all(n.startswith("dist_head.") for n in changed) else BLOCKS_FILE,
        "step": results.get("steps") if step is None else step,
        "total": results.get("steps") or max(run["training"].get("max_steps") or 0, 0),
        # Training ends with these weights, whatever checkpoints are pushed before.
        "is_best": bool(results) and run["training"].get("load_best_model_at_end"),
        "dtype": str(config.dtype or "").removeprefix("torch."),
        "run": run,
        "sources": [_source(source) for source in sources],
        "documents": documents,
        "seen": seen,
        "eval_source": None if held_out is None else _source(held_out),
        "hyperparameters": list(_hyperparameters(run)),
        "log": _log(results),
        "final": final,
        "at_bound": {"h_exp", "post_hoc_h_exp"} <= final.keys() and show_best(final)[0] in "<>",
        "fitted": fitted,
        "evaluation": _evaluation(results, fitted),
        "figure": figure,
        "environment": results.get("environment") or {},
        "verified": results.get("verified") or {},
        "minutes": (results.get("train_seconds") or 0) / 60,
        "needs": needs,
        "license": license.get("license_name") or license.get("license"),
        "resumed": (results.get("config") or {}).get("resume"),
    }
    evaluated = _eval_results(final, sources if held_out is None else [held_out], task)
    tags = ["harmonic-loss"] if config.h_exp is not None else []
    tags += [task.title.lower().replace(" ", "-"), "harmonic-sft"]
    metadata = ModelCardData(
        **license,
        # Not "peft": the Hub's snippet for that would load the base without its head.
        library_name="harmonic-sft" if form == "peft" else "transformers",
        pipeline_tag=task.pipeline,
        base_model=hub_name,
        datasets=list(dict.fromkeys(filter(_is_hub_dataset, _paths(sources)))) or None,
        tags=[*tags, "lora"] if run.get("peft") else tags,
        model_name=name if evaluated else None,
        eval_results=evaluated or None,
    )
    if hub_name is not None:
        metadata["base_model_relation"] = "adapter" if form == "peft" else "finetune"
    card = ModelCard.from_template(metadata, str(TEMPLATE), None, **context)
    return re.sub(r"\n{3,}", "\n\n", str(card)).rstrip() + "\n"


def _seen(documents: dict[str, Any]) -> str:
    """Say whether a base was trained on the held-out documents: yes, no or unknown."""
    verdicts = [entry["verdict"] for entry in documents.get("lineage") or ()]
    if "seen" in verdicts:
        return "yes"
    return "unknown" if "unknown" in verdicts else "no"


def _eval_results(
    final: dict[str, Any], sources: list[dict[str, Any]], task: Task
) -> list[EvalResult]:
    """Return the metrics of `model-index` on rows of `sources`, with their units in the names."""
    paths = _paths(sources)
    names = [p if p == DOCSTRINGS or _is_hub_dataset(p) else last_part(p) for p in paths]
    known = ", ".join(_one_line(name) for name in names if name is not None)
    per = f"(nats per {task.item})"
    now = f" at h_exp {final['h_exp']:g}" if final.get("h_exp") is not None else ""
    accuracy = f"{task.item.replace(' ', '-').capitalize()} accuracy"
    metrics = {"accuracy": f"{accuracy} (share, 0 to 1)", "loss": f"Loss{now} {per}"}
    is_one_dataset = len(paths) == 1 and _is_hub_dataset(paths[0])
    return [
        EvalResult(
            task_type=task.pipeline,
            task_name=task.title,
            dataset_type=paths[0] if is_one_dataset else "unknown",
            dataset_name=f"Held-out {task.where}" + (f" of {known}" if known else ""),
            metric_type=key,
            metric_name=name,
            metric_value=final[key],
        )
        for key, name in metrics.items()
        if final.get(key) is not None
    ]


def _kind(head: dict[str, Any]) -> str:
    if head["name"] == "transform":
        return f"{_kind(head['inner'])} behind a dense layer and a norm"
    return HEAD_KINDS.get(head["name"], "an output head of its own kind")


def _base(config: HarmonicConfig) -> str | None:
    """Name the base; for a folder only the last part of its path."""
    name = config.base_model
    if name is None:
        return None
    if hub_base(config) is not None:
        return f"[{_escape(name)}](https://huggingface.co/{name})"
    if name.startswith("package:"):
        return f"the model in the Python package {_code(name.removeprefix('package:'))}"
    folder = last_part(name)
    return "a local model" if folder is None else f"the local model {_code(folder)}"


def _paths(sources: list[dict[str, Any]]) -> list[str]:
    return [source["path"] for source in sources]


def _is_hub_dataset(path: str) -> bool:
    is_local = path.startswith((".", "~")) or file_kind(path) is not None
    return bool(HUB_NAME.fullmatch(path)) and not is_local and not Path(path).exists()


def _source(source: dict[str, Any]) -> str:
    """Describe one source of documents."""
    path = source["path"]
    if path == DOCSTRINGS:
        return "the docstrings of Python's standard library"
    if not _is_hub_dataset(path):
        name = last_part(path)
        return "local files" if name is None else f"local files, {_code(name)}"
    details = [f"[{_escape(path)}](https://huggingface.co/datasets/{path})"]
    for key, word in (("name", "configuration"), ("split", "split"), ("revision", "revision")):
        if source.get(key) is not None:
            details.append(f"{word} {_code(source[key])}")
    files = source.get("data_files") or []
    parts = [last_part(file) for file in ([files] if isinstance(files, str) else files)]
    details += [f"file {_code(part)}" for part in parts if part is not None]
    return ", ".join([*details, "streamed"] if source.get("streaming") else details)


def _hyperparameters(run: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield name and value of what the run set, private things left out."""
    defaults = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    sections = {
        "model": {key: run["model"].get(key) for key in ("dtype", "dropout", "unfreeze")},
        **{key: run.get(key) for key in ("head", "h_exp", "loss", "schedule", "peft")},
        "training": {
            name: value
            for name, value in run["training"].items()
            if value != defaults.get(name)
            and not (value is False and defaults.get(name) is None)
            and not PRIVATE_SETTINGS.match(name)
        },
    }
    if run.get("loss", "") is None:
        sections["loss"] = "a function of the author's own"
    for name, value in leaves(sections).items():
        if value is not None and value != [] and not _holds_path(value):
            whole = isinstance(value, float) and value.is_integer()
            shown = value if isinstance(value, str) else json.dumps(int(value) if whole else value)
            yield _code(name), _code(shown)


def _holds_path(value: Any) -> bool:
    if isinstance(value, str):
        return "/" in value or ":\\" in value or value.startswith("~")
    return isinstance(value, list) and any(_holds_path(item) for item in value)


def _log(results: dict[str, Any]) -> str:
    """Return a table of about a dozen evaluations, with the last training loss before each."""
    columns = {  # what was logged: heading and format
        "loss": ("loss", ".3f"),
        "eval_loss": ("evaluation loss", ".3f"),
        "eval_post_hoc_loss": ("post-hoc loss", ".3f"),
        "eval_h_exp": ("h_exp", ".4g"),
        "learning_rate": ("learning rate", ".3g"),
    }
    evaluated: dict[int, tuple[str | None, ...]] = {}
    latest: dict[str, Any] = {}
    for entry in results.get("history") or []:
        latest |= entry
        if "eval_loss" in entry:
            cells = (_show(latest.get(key), spec) for key, (_, spec) in columns.items())
            evaluated[entry["step"]] = (f"{entry['step']:,}", *cells)
    rows = list(evaluated.values())
    stride = math.ceil(len(rows) / 12) or 1
    headings = ("step", *(heading for heading, _ in columns.values()))
    return _table(headings, [*rows[:-1:stride], *rows[-1:]])


def _evaluation(results: dict[str, Any], best: str) -> str:
    """Return the table of metrics before and after training; `best` names what was fitted."""
    columns = {  # metric: heading, factor and format
        "loss": ("loss, nats", 1, ".3f"),
        "accuracy": ("accuracy, %", 100, ".1f"),
        "ece": ("ECE, %", 100, ".1f"),
        "error_cosine": ("error cosine", 1, ".3f"),
        "h_exp": ("h_exp", 1, "g"),
        "post_hoc_loss": (f"loss at the best {best}, nats", 1, ".3f"),
    }
    found = f"post_hoc_{best.replace(' ', '_')}"
    rows = []
    for name, moment in (("before training", "before"), ("after training", "final")):
        metrics = results.get(moment) or {}
        cells = ((metrics.get(key), factor, spec) for key, (_, factor, spec) in columns.items())
        shown = [None if v is None else _show(v * f, spec) for v, f, spec in cells]
        rows.append((name, *shown, show_best(metrics) if found in metrics else None))
    if any(cell is not None for row in rows for cell in row[1:]):
        unigrams = _show(results.get("unigram_loss"), ".3f")
        rows.append(("frequencies of the training text alone", unigrams, *[None] * 6))
    return _table(("", *(heading for heading, _, _ in columns.values()), f"best {best}"), rows)


def _table(columns: Sequence[str], rows: Sequence[tuple[str | None, ...]]) -> str:
    """Write a table without its empty rows and columns; nothing at all if none is left."""
    rows = [row for row in rows if any(cell is not None for cell in row[1:])]
    if not rows:
        return ""
    kept = [i for i in range(len(columns)) if any(row[i] is not None for row in rows)]
    lines = [[columns[i] for i in kept], ["---", *["---:"] * (len(kept) - 1)]]
    lines += [[row[i] or "" for i in kept] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _show(value: Any, spec: str) -> str | None:
    """Format a number, None staying None."""
    return None if value is None else f"{value:{spec}}"


def _one_line(text: object) -> str:
    return " ".join(str(text).split())


def _escape(text: object) -> str:
    """Write text so that Markdown and HTML show it as it is."""
    special = r"[^\w\s./:,@+()-]|(?<![^\W_])_|_(?![^\W_])"
    return re.sub(special, lambda found: f"&#{ord(found[0])};", _one_line(text))


def _code(text: object) -> str:
    """Write text as code, also where it holds what would end the code."""
    line = _one_line(text)
    return f"`{line}`" if line and "`" not in line else f"<code>{_escape(line)}</code>"


def _python(value: Any) -> str:
    """Write a JSON value as a Python literal on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_python(k)}: {_python(v)}" for k, v in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
