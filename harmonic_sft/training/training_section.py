"""The section training: transformers' arguments, our defaults, and what is forced or refused."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harmonic_sft.config import check_fields

if TYPE_CHECKING:
    from harmonic_sft.training.run_config import RunConfig

METRICS = {  # of an evaluation: whether more is better
    "loss": False,
    "accuracy": True,
    "top_5_accuracy": True,
    "error_cosine": True,
    "ece": False,
    "brier": False,
    "post_hoc_loss": False,
    "post_hoc_ece": False,
    "post_hoc_brier": False,
}
DEFAULTS: dict[str, Any] = {
    "adam_beta1": 0.95,
    "adam_beta2": 0.95,
    "learning_rate": 2e-4,
    "weight_decay": 0.0,
    "logging_steps": 10,
    "save_total_limit": 3,
    "enable_jit_checkpoint": True,  # our own callback, at the end of a step
    "ddp_find_unused_parameters": False,  # DDP needs no search to ignore frozen ones
    "seed": 42,
}
FORCED: dict[str, tuple[Any, str]] = {  # the value, and why
    "remove_unused_columns": (
        False,
        "your data_collator gets rows as they are; use dataset.remove_columns([...])",
    ),
    "logging_nan_inf_filter": (False, "it would hide what the trainer stops at"),
    "include_num_input_tokens_seen": ("non_padding", "speeds count no padding"),
    "dataloader_in_order": (True, "the order of rows would depend on how fast the workers are"),
}
POSITIVE = (
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
    "eval_accumulation_steps",
    "logging_steps",
    "save_steps",
    "eval_steps",
    "learning_rate",
    "num_train_epochs",
)
RANGES = {  # the least value, and the first that is too large
    "adam_beta1": (0, 1),
    "adam_beta2": (0, 1),
    "adam_epsilon": (0, math.inf),
    "weight_decay": (0, math.inf),
    "max_grad_norm": (0, math.inf),
    "warmup_steps": (0, math.inf),
    "dataloader_num_workers": (0, math.inf),
}
OWN_WEIGHTS = "it keeps weights of its own, and prototypes would lose norm 1"
REFUSED = {  # arguments of transformers that another section decides, or that break the recipe
    "use model.dtype: bfloat16, in Python dtype='bfloat16'; prototypes need more than 16 bits": (
        "fp16",
        "bf16",
    ),
    "it would cast the head to 16 bits": ("fp16_full_eval", "bf16_full_eval"),
    "prototypes need all digits of float32": ("tf32",),
    "the loss section decides": ("label_smoothing_factor",),
    "it replaces the head's loss": ("use_liger_kernel",),
    "it changes the effective batch; use oom_fallback": ("auto_find_batch_size",),
    "write hub: {push: true, repo_id: owner/name}": ("push_to_hub", "hub_model_id"),
    "write hub: {push: true, every_save: true}": ("hub_strategy",),
    "write hub: {private: true}": ("hub_private_repo",),
    "write hub: {revision: a branch}": ("hub_revision",),
    "a push that is at work is waited for": ("hub_always_push",),
    "log in with `hf auth login`; a token in a file leaks": ("hub_token",),
    "use resume: true": ("resume_from_checkpoint",),
    "such a checkpoint cannot be resumed": ("save_only_model",),
    "all nodes share one folder": ("save_on_each_node",),
    "every process reads its own rows, and after a resume the same": ("accelerator_config",),
    "it fails with gradient accumulation": ("ddp_static_graph",),
    "a resumed run would read other rows": ("ignore_data_skip",),
    "dropout would not be that of a resumed run": ("dataloader_persistent_workers",),
    "training.seed decides": ("data_seed", "train_sampling_strategy"),
    f"{OWN_WEIGHTS}; use DDP": ("deepspeed",),
    "it is not supported yet; use DDP": ("fsdp", "fsdp_config", "parallelism_config"),
    "use gradient_checkpointing": (
        "activation_checkpointing",
        "activation_checkpointing_kwargs",
        "gradient_checkpointing_kwargs",
    ),
}


def checked_training(run: "RunConfig") -> dict[str, Any]:
    """Return the arguments for transformers, converted to their types, over our defaults.

    Raises:
        ValueError: A key is unknown or refused, or a value is wrong.
    """
    from transformers import TrainingArguments

    check_refused(run.training)
    training = check_fields(
        TrainingArguments, {**DEFAULTS, **run.training}, "training", elsewhere=run.key_names
    )
    if not training.get("output_dir"):
        raise ValueError("training.output_dir: expected a folder, got nothing")
    output_dir = os.path.expanduser(training["output_dir"])
    if output_dir.startswith("~"):
        raise ValueError(f"training.output_dir: expected a home that exists, got {output_dir!r}")
    training["output_dir"] = str(Path(output_dir))
    for key, (value, reason) in FORCED.items():
        if (got := training.get(key, value)) != value:
            raise ValueError(f"training.{key}: expected {value!r}, got {got!r}; {reason}")
    _check_numbers(training, is_stream=any(source.streaming for source in run.data.sources))
    is_annealed = run.h_exp is not None and run.h_exp.start != run.h_exp.end
    _check_best_model(training, is_annealed=is_annealed)
    optim = str(training.get("optim", "adamw_torch"))
    if optim.startswith("schedule_free"):
        raise ValueError(
            f"training.optim: expected another one, got {optim!r}, whose averages of the "
            "prototypes are not of norm 1"
        )
    pairs = training.get("optim_args")
    if pairs and any(pair.count("=") != 1 for pair in pairs.split(",")):
        raise ValueError(
            "training.optim_args: expected NAME=VALUE,NAME=VALUE without commas in a value, got "
            f"{pairs!r}. The betas have keys: training.adam_beta1 and training.adam_beta2"
        )
    is_adamw = optim in ("adamw_torch", "adamw_torch_fused")
    if pairs and (is_adamw or optim == "adafactor"):
        raise ValueError(
            f"training.optim_args: expected nothing with {optim}, of which transformers would pass "
            f"none on, got {pairs!r}. Its other arguments have keys of their own"
        )
    if run.model.unfreeze.dtype == "bfloat16" and not is_adamw:
        raise ValueError(
            f"training.optim: expected adamw_torch for bfloat16 weights, got {optim!r}. "
            "Or set model.unfreeze.dtype: float32"
        )
    return training


def check_refused(training: Mapping[str, Any]) -> None:
    """Refuse the arguments of transformers that are listed in `REFUSED`."""
    for instead, keys in REFUSED.items():
        for key in keys:
            if training.get(key) or (key == "data_seed" and training.get(key) == 0):
                got = "a secret" if key == "hub_token" else " ".join(repr(training[key]).split())
                raise ValueError(f"training.{key}: expected nothing, got {got}; {instead}")


def _check_numbers(training: Mapping[str, Any], *, is_stream: bool) -> None:
    for key in POSITIVE:
        value = training.get(key)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"training.{key}: expected a number above 0, got {value}")
    for key, (least, limit) in RANGES.items():
        if not least <= (value := training.get(key) or 0) < limit:
            below = "" if limit == math.inf else f" and below {limit}"
            hint = "; 0 is no clipping" if key == "max_grad_norm" else ""
            raise ValueError(f"training.{key}: expected {least} or more{below}, got {value}{hint}")
    for key, value in training.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"training.{key}: expected a finite number, got {value}")
    if not 0 <= training["seed"] < 2**32:
        raise ValueError(f"training.seed: expected 0 to {2**32 - 1}, got {training['seed']}")
    max_steps = training.get("max_steps", -1)
    if is_stream and max_steps <= 0:
        raise ValueError("training.max_steps: expected a number above 0 for a stream, got none")
    if max_steps == 0 or max_steps < -1:
        raise ValueError(
            f"training.max_steps: expected a number above 0, or -1 for epochs, got {max_steps}"
        )


def _check_best_model(training: Mapping[str, Any], *, is_annealed: bool) -> None:
    metric = str(training.get("metric_for_best_model") or "loss").removeprefix("eval_")
    if metric not in METRICS:
        raise ValueError(
            f"training.metric_for_best_model: expected one of {list(METRICS)}, got {metric!r}"
        )
    is_read = (
        training.get("metric_for_best_model") is not None
        or training.get("load_best_model_at_end")
        or training.get("save_strategy") == "best"
        or str(training.get("lr_scheduler_type")) in ("reduce_lr_on_plateau", "greedy")
    )
    if is_annealed and is_read and metric == "loss":
        raise ValueError(
            "training.metric_for_best_model: expected 'post_hoc_loss' while h_exp is annealed, "
            "got the raw loss, which rises by itself"
        )
