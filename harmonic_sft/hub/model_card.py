"""The README of a published model: what it is, how to use it, how it was made and measured."""

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import TrainingArguments

from harmonic_sft.data.files import file_kind
from harmonic_sft.data.sources import DOCSTRINGS, HUB_NAME
from harmonic_sft.hub.tasks import TaskWords, task_words
from harmonic_sft.models import BLOCKS_FILE, HEAD_FILE, HarmonicConfig

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
MAX_LOG_ROWS = 12
MODEL_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")  # on the Hub; old ones have no owner
# Of `training`: about this machine and its accounts, not about what was trained.
PRIVATE_SETTINGS = (
    *("output_dir", "logging_dir", "run_name", "report_to", "project", "trackio_", "hub_"),
    *("push_to_hub", "resume_from_checkpoint", "disable_tqdm", "log_level"),
)


class Base(NamedTuple):
    """How a card writes the base: as text, in code, and where to get it if not from the Hub."""

    text: str
    python: str
    hub_name: str | None = None
    import_line: str | None = None
    where: str | None = None


def model_card(
    config: HarmonicConfig,
    *,
    repo_id: str,
    form: Literal["full", "head", "peft"],
    run: dict[str, Any],
    results: dict[str, Any] | None,
    step: int | None,
    figure: str | None,
) -> str:
    """Write the model card; what is not known is left out.

    Args:
        config: Of the published model.
        repo_id: owner/name of the repo.
        form: The whole model, what was trained, or an adapter.
        run: The content of the run's `run.yaml`.
        results: The content of its `results/train.json`, which must be of these very weights; None
            before the end of training.
        step: Optimizer steps behind the weights.
        figure: File name of the training's figure in the repo.

    Returns:
        Markdown with a block of YAML metadata.
    """
    results = results or {}
    base = _base(config)
    name = repo_id.split("/")[-1]
    sections = {key: run.get(key) or {} for key in ("model", "h_exp", "data", "training", "peft")}
    trained = config.trained_parameters or []
    held_out = (sections["data"].get("eval") or {}).get("source")
    context: dict[str, Any] = {
        **{"show": _show, "escape": _escape, "code": _code, "python": _python, "quote": quote},
        "repo_id": repo_id,
        "name": name,
        "form": form,
        "head": config.head,
        "exponent": config.h_exp,
        "task": task_words(config),
        "labels": list((config.id2label or {}).values()),
        "pooling": config.pooling,
        "head_kind": HEAD_KINDS.get(config.head["name"], "an output head of its own kind"),
        "base": base,
        "revision": config.base_revision,
        "head_file": HEAD_FILE,
        "blocks_file": None if all(n.startswith("dist_head.") for n in trained) else BLOCKS_FILE,
        "step": results.get("steps") if step is None else step,
        "total": results.get("steps") or max(sections["training"].get("max_steps") or 0, 0),
        # Training ends with these weights, whatever checkpoints are pushed before.
        "is_best": bool(results) and sections["training"].get("load_best_model_at_end"),
        "dtype": None if config.dtype is None else str(config.dtype).removeprefix("torch."),
        "mixed": bool(config.float32_modules),
        "run": sections,
        "sources": [_source(source) for source in sections["data"].get("sources") or ()],
        "eval_source": None if held_out is None else _source(held_out),
        "hyperparameters": list(_hyperparameters(run)),
        "log": _log(results),
        "final": results.get("final") or {},
        "evaluation": _evaluation(results, has_h_exp=config.h_exp is not None),
        "figure": figure,
        "environment": results.get("environment") or {},
        "training_time": _duration(results.get("train_seconds")),
        "resumed": (results.get("config") or {}).get("resume"),
        "is_neobert": config.text_config.model_type == "neobert",
    }
    metadata = _metadata(config, name, form=form, base=base, run=run, results=results)
    card = ModelCard.from_template(metadata, str(TEMPLATE), None, **context)
    return re.sub(r"\n{3,}", "\n\n", str(card)).rstrip() + "\n"


def _metadata(
    config: HarmonicConfig,
    name: str,
    *,
    form: str,
    base: Base | None,
    run: dict[str, Any],
    results: dict[str, Any],
) -> ModelCardData:
    data = run.get("data") or {}
    sources = data.get("sources") or []
    datasets = [source["path"] for source in sources if _is_hub_dataset(source["path"])]
    task = task_words(config)
    held_out = (data.get("eval") or {}).get("source")
    evaluated = _eval_results(
        results.get("final") or {}, sources if held_out is None else [held_out], task
    )
    hub_name = base.hub_name if base is not None else None
    tags = [*(["harmonic-loss"] if config.h_exp is not None else []), task.tag, "harmonic-sft"]
    metadata = ModelCardData(
        # The Hub's own snippet for an adapter is another one.
        library_name="peft" if form == "peft" else "transformers",
        pipeline_tag=task.pipeline,
        base_model=hub_name,
        datasets=list(dict.fromkeys(datasets)) or None,
        tags=[*tags, "lora"] if run.get("peft") else tags,
        model_name=name if evaluated else None,
        eval_results=evaluated or None,
    )
    if hub_name is not None:
        metadata["base_model_relation"] = "adapter" if form == "peft" else "finetune"
    return metadata


def _eval_results(
    final: dict[str, Any], sources: list[dict[str, Any]], task: TaskWords
) -> list[EvalResult]:
    """Return the metrics of `model-index` on rows of `sources`, with their units in the names."""
    datasets = [source["path"] for source in sources if _is_hub_dataset(source["path"])]
    names = [DOCSTRINGS if s["path"] == DOCSTRINGS else _last_part(s["path"]) for s in sources]
    names = [s["path"] if s["path"] in datasets else n for s, n in zip(sources, names, strict=True)]
    known = ", ".join(_one_line(name) for name in names if name is not None)
    best, per = _best_value(final), f"(nats per {task.item})"
    now = f" at h_exp {final['h_exp']:g}" if final.get("h_exp") is not None else ""
    metrics = [
        ("accuracy", "accuracy", f"{task.metric} (share, 0 to 1)"),
        ("loss", "loss", f"Loss{now} {per}"),
        ("post_hoc_loss", "loss", f"Loss at the best post-hoc {best} {per}"),
        ("tokens", "num_tokens", f"{task.items} evaluated"),
    ]
    return [
        EvalResult(
            task_type=task.pipeline,
            task_name=task.title,
            dataset_type=datasets[0] if len(sources) == len(datasets) == 1 else "unknown",
            dataset_name=f"Held-out {task.where} of {known}" if known else f"Held-out {task.where}",
            metric_type=metric_type,
            metric_name=metric_name,
            metric_value=final[key],
        )
        for key, metric_type, metric_name in metrics
        if final.get(key) is not None
    ]


def _best_value(final: dict[str, Any]) -> str:
    if final.get("post_hoc_h_exp") is not None:
        return f"h_exp {final['post_hoc_h_exp']:g}"
    factor = final.get("post_hoc_inverse_temperature")
    return "value" if factor is None else f"inverse temperature {factor:g}"


def _base(config: HarmonicConfig) -> Base | None:
    """Name the base; of a folder, only the last part of its path."""
    name = config.base_model
    if name is None:
        return None
    if name.startswith("package:"):
        package = name.removeprefix("package:")
        return Base(
            text=f"the Python package {_code(package)}",
            python=f'str(files({_python(package)}) / "model")',
            import_line="from importlib.resources import files",
            where=f"it comes with the Python package {_code(package)}.",
        )
    # Training records a commit for what it fetched from the Hub, and none for a folder.
    is_public = config.base_revision is not None and not Path(name).exists()
    if is_public and MODEL_NAME.fullmatch(name):
        link = f"[{_escape(name)}](https://huggingface.co/{name})"
        return Base(text=link, python=_python(name), hub_name=name)
    folder = _last_part(name)
    if folder is None:
        return Base(text="A local model", python='"base"', where="put it into the folder `base`.")
    where = f"put it into the folder {_code(folder)}."
    return Base(text=_code(folder), python=_python(folder), where=where)


def _last_part(path: str) -> str | None:
    """Return a path's last part, None if that would be a home or a dot."""
    parts = [part for part in re.split(r"[\\/]+", path) if part.strip(".")]
    return parts[-1] if parts and not parts[-1].startswith("~") else None


def _is_hub_dataset(path: str) -> bool:
    is_local = path.startswith((".", "~")) or file_kind(path) is not None
    return bool(HUB_NAME.fullmatch(path)) and not is_local and not Path(path).exists()


def _source(source: dict[str, Any]) -> str:
    """Describe one source of documents."""
    path = source["path"]
    if path == DOCSTRINGS:
        return "the docstrings of Python's standard library"
    if not _is_hub_dataset(path):
        name = _last_part(path)
        return "local files" if name is None else f"local files, {_code(name)}"
    details = [f"[{_escape(path)}](https://huggingface.co/datasets/{path})"]
    for key, word in (("name", "configuration"), ("split", "split"), ("revision", "revision")):
        if source.get(key) is not None:
            details.append(f"{word} {_code(source[key])}")
    files = source.get("data_files") or []
    parts = [_last_part(file) for file in ([files] if isinstance(files, str) else files)]
    details += [f"file {_code(part)}" for part in parts if part is not None]
    return ", ".join([*details, "streamed"] if source.get("streaming") else details)


def _hyperparameters(run: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield name and value of what the run set, private things left out."""
    model = run.get("model") or {}
    sections = {
        "model": {key: model.get(key) for key in ("dtype", "dropout", "unfreeze")},
        **{key: run.get(key) for key in ("head", "h_exp", "loss", "schedule", "peft")},
        "training": _changed_arguments(run.get("training") or {}),
    }
    for name, value in _leaves(sections):
        if value is not None and value != [] and not _holds_path(value):
            whole = isinstance(value, float) and value.is_integer()
            shown = value if isinstance(value, str) else json.dumps(int(value) if whole else value)
            yield _code(name), _code(shown)


def _changed_arguments(training: dict[str, Any]) -> dict[str, Any]:
    """Return those of transformers' arguments that are not at their defaults."""
    defaults = {
        field.name: field.default
        for field in dataclasses.fields(TrainingArguments)
        if field.default is not dataclasses.MISSING
    }
    return {
        name: value
        for name, value in training.items()
        if value != defaults.get(name)
        and not (value is False and defaults.get(name) is None)
        and not name.startswith(PRIVATE_SETTINGS)
        and not name.endswith("token")
    }


def _leaves(node: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten nested mappings to `a.b`, value."""
    if not isinstance(node, Mapping):
        yield name, node
        return
    for key, value in node.items():
        yield from _leaves(value, f"{name}.{key}" if name else str(key))


def _holds_path(value: Any) -> bool:
    if isinstance(value, str):
        return "/" in value or ":\\" in value or value.startswith("~")
    return isinstance(value, list) and any(_holds_path(item) for item in value)


def _log(results: dict[str, Any]) -> str:
    """Return the table of what was logged, at most `MAX_LOG_ROWS` steps of it."""
    steps: dict[int, dict[str, Any]] = {}
    for entry in results.get("history") or []:
        if entry.get("step") is not None:
            steps.setdefault(entry["step"], {}).update(entry)
    rows = []
    for step, entry in sorted(steps.items()):
        # An evaluation is made at the exponent after its step, the training loss before it.
        h_exp = entry.get("eval_h_exp", entry.get("h_exp"))
        cells = [
            _show(entry.get("loss"), ".3f"),
            _show(entry.get("eval_loss"), ".3f"),
            _show(entry.get("eval_post_hoc_loss"), ".3f"),
            _show(h_exp, ".4g"),
            _show(entry.get("learning_rate"), ".3g"),
        ]
        if any(cell is not None for cell in cells[:3]):
            rows.append((f"{step:,}", *cells))
    evaluated = _spread([row for row in rows if row[2] is not None], MAX_LOG_ROWS)
    others = [row for row in rows if row[2] is None]
    kept = {*evaluated, *_spread(others, MAX_LOG_ROWS - len(evaluated))}
    columns = ("step", "loss", "evaluation loss", "post-hoc loss", "h_exp", "learning rate")
    return _table(columns, [row for row in rows if row in kept])


def _spread(rows: Sequence[Any], count: int) -> list[Any]:
    """Choose `count` rows, evenly and with both ends."""
    if len(rows) <= count:
        return list(rows)
    last = len(rows) - 1
    return [rows[round(index * last / max(count - 1, 1))] for index in range(count)]


def _evaluation(results: dict[str, Any], *, has_h_exp: bool) -> str:
    """Return the table of metrics before and after training."""
    before, final = results.get("before") or {}, results.get("final") or {}
    unigrams = _show(results.get("unigram_loss"), ".3f")
    best = "h_exp" if has_h_exp else "inverse temperature"
    columns = (
        *("", "loss, nats", "accuracy, %", "ECE, %", "error cosine", "h_exp"),
        *(f"loss at the best {best}, nats", f"best {best}"),
    )
    rows = [_metrics("before training", before), _metrics("after training", final)]
    if any(cell is not None for row in rows for cell in row[1:]):
        rows.append(("frequencies of the training text alone", unigrams, *[None] * 6))
    return _table(columns, rows)


def _metrics(name: str, metrics: dict[str, Any]) -> tuple[str | None, ...]:
    best = metrics.get("post_hoc_h_exp", metrics.get("post_hoc_inverse_temperature"))
    shares = [metrics.get(key) for key in ("accuracy", "ece")]
    return (
        name,
        _show(metrics.get("loss"), ".3f"),
        *(_show(None if share is None else 100 * share, ".1f") for share in shares),
        _show(metrics.get("error_cosine"), ".3f"),
        _show(metrics.get("h_exp"), "g"),
        _show(metrics.get("post_hoc_loss"), ".3f"),
        _show(best, "g"),
    )


def _duration(seconds: float | None) -> str | None:
    if not seconds:  # a run that was resumed after its last step has 0
        return None
    if seconds < 120:
        return f"{seconds:.1f} seconds"
    return f"{seconds / 60:.1f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"


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
    """Write text so that Markdown and HTML take none of it for their own."""
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
