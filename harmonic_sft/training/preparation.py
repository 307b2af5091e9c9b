"""Makes what `HarmonicTrainer` trains from its arguments: the model with its head, and the rows."""

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Literal

import datasets
import pandas as pd
import torch
from accelerate import PartialState
from accelerate.utils import is_compiled_module
from peft import LoraConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor
from torch.nn.functional import normalize
from torch.utils.data import IterableDataset, Subset
from transformers import PreTrainedModel, set_seed

from harmonic_sft.data.batches import MaskedRows, PaddingCollator, collate_padding_free
from harmonic_sft.data.loading import LoadedData, load_data
from harmonic_sft.data.masking import EVAL_EPOCH, IGNORE_INDEX
from harmonic_sft.data.row_maker import rows_sha256
from harmonic_sft.data.sources import GivenSource, stream_steps, unformatted
from harmonic_sft.data.streams import StreamedRows
from harmonic_sft.losses import DistillLoss
from harmonic_sft.models import (
    Base,
    HarmonicClassifier,
    HarmonicForQuestionAnswering,
    HarmonicHeadModel,
    Head,
    base_of,
    load_base,
    max_positions,
    random_base,
)
from harmonic_sft.models.backbones import trains
from harmonic_sft.models.bases import has_transform
from harmonic_sft.models.configuration_harmonic import quantization_method
from harmonic_sft.models.head import SphereHead
from harmonic_sft.models.heads import MappedHead, check_class
from harmonic_sft.models.modeling_backbone import HarmonicPreTrainedModel
from harmonic_sft.models.objective import negative_log_likelihood
from harmonic_sft.training.adapters import add_lora_, as_peft_config
from harmonic_sft.training.arguments import EVAL_NAME, TRAIN_NAME, HarmonicTrainingArguments
from harmonic_sft.training.batches import batches_on, labelled_states
from harmonic_sft.training.freezing import frozen_copy, unfreeze_
from harmonic_sft.training.loading import (
    check_base_config,
    check_package,
    from_base,
    load_base_config,
    load_tokenizer,
    on_the_right,
    with_padding,
)
from harmonic_sft.training.run_config import ModelConfig, PeftConfig, RunConfig
from harmonic_sft.training.tasks import (
    CLASSIFIERS,
    LANGUAGE_MODELS,
    MODELS,
    TASKS,
    task_of,
    token_task,
)

logger = logging.getLogger(__name__)
DEFAULT_LENGTH = 1024  # longest row where the arguments do not say, in tokens


class Preparation:
    """Makes the model and the rows of a `HarmonicTrainer`, which explains the arguments."""

    def __init__(
        self,
        model: str | os.PathLike | PreTrainedModel,
        args: HarmonicTrainingArguments,
        *,
        peft_config: PeftConfig | LoraConfig | None,
        tokenizer: Any,
        collator: Any,
        formatting_func: Callable[[dict[str, Any]], str] | None,
        is_stream: bool,
        has_own_loss: bool,
    ):
        model = os.fspath(model) if isinstance(model, os.PathLike) else model
        _check_model(model)
        if isinstance(tokenizer, str | os.PathLike):
            raise ValueError(
                f"processing_class: expected a tokenizer, got {str(tokenizer)!r}. Load it: "
                f"AutoTokenizer.from_pretrained({str(tokenizer)!r})"
            )
        is_ours = isinstance(collator, PaddingCollator) or collator in (None, collate_padding_free)
        if not is_ours and (formatting_func or args.weight_column) is not None:
            raise ValueError(
                "data_collator: expected nothing with formatting_func or weight_column, which it "
                "would not see, got one. Leave it out, or make the rows before"
            )
        self.model, self.args, self._is_stream = model, args, is_stream
        if isinstance(model, HarmonicHeadModel) and args.loss is None:
            has_own_loss |= not str(model.loss_fn.__module__).startswith("harmonic_sft.")
        self._has_own_loss = has_own_loss
        self._peft = as_peft_config(peft_config)
        self._format = formatting_func
        self._given_tokenizer = tokenizer
        self.makes_rows = collator is None
        self.collator = collator
        self._labels: list[str] | None = None  # class names of a classifier
        if isinstance(model, str):
            self._base = load_base_config(ModelConfig(base=model, revision=args.revision))
        else:
            self._base = model.config
        is_name = isinstance(model, str)
        kinds = self._base.architectures if is_name else [type(model).__name__]
        self._transforms = has_transform(self._base, kinds)
        self.data = self.configure().data  # with `_seed` it decides how rows are made
        self._seed = args.seed
        if self.config.model.task in CLASSIFIERS and self.config.head.init == "base_head":
            self._labels = [name for _, name in sorted((self._base.id2label or {}).items())]
        if isinstance(model, HarmonicHeadModel):
            _check_loaded(model, args, self.config)

    def configure(self) -> RunConfig:
        """Set `config` to the YAML equivalent of the arguments as they are now; return it."""
        task = self.args.task or task_of(self.model, self._base, self.args.label_column)
        has_head = isinstance(self.model, HarmonicHeadModel)
        if task in CLASSIFIERS and not has_head and token_task(self._base) == "causal_lm":
            raise ValueError(
                "label_column: expected an encoder for a classifier, got a decoder "
                f"({self._base.model_type}). Take another base, or leave label_column and task out"
            )
        if task in CLASSIFIERS and self._is_stream:
            raise ValueError(
                "train_dataset: expected a Dataset for a classifier, got a stream. Load it without "
                "streaming"
            )
        own_head = None
        # The head of a checkpoint for another task has other classes.
        is_own = has_head or TASKS.get((self._base.architectures or [""])[0]) == task
        if is_own and self.args.head is None:
            settings = self.model.dist_head.settings() if has_head else self._base.head
            own_head = {**settings, "tie": bool(self._base.tie_word_embeddings)}
        name = self._base.name_or_path or type(self.model).__name__
        longest = max_positions(self._base.get_text_config())
        self.config = self.args.config_for(
            self.model if isinstance(self.model, str) else name,
            task=task,
            own_head=own_head,
            has_transform=task == "masked_lm" and not self.args.from_scratch and self._transforms,
            peft=self._peft,
            is_stream=self._is_stream,
            context_length=min(longest, DEFAULT_LENGTH),
        )
        check_base_config(self.config, self._base)
        if self._has_own_loss:
            self.config = replace(self.config, loss=None)
        return self.config

    def configure_trial(self) -> RunConfig:
        """Set and return `config` for a trial of a search, which trains on the rows made before."""
        config, made = self.configure(), {**vars(self.data), "seed": self._seed}
        asked = {**vars(config.data), "seed": config.seed}
        if others := [key for key, value in asked.items() if value != made[key]]:
            raise ValueError(
                f"hp_space: expected the rows that were made before the search, got other {others}."
                " Make a trainer for each such value"
            )
        return config

    @property
    def known_tokenizer(self) -> Any:
        """The tokenizer that checkpoints are saved with, None where it is not known."""
        is_known = self._given_tokenizer is not None or isinstance(self.model, str)
        return self.tokenizer() if is_known else None

    def tokenizer(self) -> Any:
        """Return the tokenizer, that of the model if none was given."""
        if self._given_tokenizer is None:
            if not isinstance(self.model, str) and not self._base.name_or_path:
                raise ValueError(
                    "processing_class: expected the model's tokenizer, got nothing, and the model "
                    "has no name to load it by, or lost it to an earlier trainer"
                )
            self._given_tokenizer = load_tokenizer(self.config.model)
        return with_padding(self._given_tokenizer, self.config.model.task)

    def train_rows(self, data: Any) -> Any:
        """Return rows with `input_ids` and `labels`, tokenized, masked and packed.

        Only data sets of the datasets library are changed, and none if the trainer was given a
        collator.
        """
        is_raw = self._is_raw(data, TRAIN_NAME)
        h_exp, is_from_yaml = self.config.h_exp, isinstance(data, MaskedRows | StreamedRows)
        if h_exp is not None and h_exp.calibrate and not is_from_yaml:
            raise ValueError(
                "h_exp.calibrate: expected false from Python, got true. Only the run of a YAML "
                "file calibrates: harmonic_sft.train(load_run_config(...))"
            )
        if isinstance(data, dict):
            raise ValueError(
                f"train_dataset: expected one data set, got the splits {sorted(data)}. Name one: "
                f"data[{next(iter(data))!r}]"
            )
        if is_raw:
            data = self._load_rows(data, TRAIN_NAME).train
        if isinstance(data, MaskedRows) and data.class_names is not None:
            self._labels = data.class_names
        return data

    def eval_rows(self, data: Any) -> Any:
        """Tokenize and mask a data set to evaluate on, or each one of a dictionary.

        Every pass has the same masks, and rows are not packed; otherwise as `train_rows`.
        """
        if isinstance(data, dict) and data:
            return {name: self.eval_rows(part) for name, part in data.items()}
        if isinstance(data, MaskedRows) and data.fixed_epoch is None:
            # The training rows: evaluating them would change their epoch, and so their masks.
            return MaskedRows(data.rows, data.masker, packs=data.packs, fixed_epoch=EVAL_EPOCH)
        if not self._is_raw(data, EVAL_NAME):
            # Several processes would score some rows of a stream of unknown length twice.
            is_stream = isinstance(data, IterableDataset | datasets.IterableDataset)
            return list(data) if is_stream and self.args.world_size > 1 else data
        return self._load_rows(data, EVAL_NAME).eval

    def test_rows(self, data: Any) -> Any:
        """Tokenize a data set to predict: as `eval_rows`, but a classifier's may have no labels."""
        column, is_raw = self.data.label_column, self._is_raw(data, EVAL_NAME)
        if column is None or not is_raw:
            rows = self.eval_rows(data)
            if is_raw and isinstance(data, datasets.Dataset) and len(rows) != len(data):
                logger.warning(
                    "test_dataset: %d rows are predicted for %d texts. Empty ones are left out, "
                    "and long ones are several.",
                    len(rows),
                    len(data),
                )
            return rows
        # A test split without labels may hold None, -1 or -100 in the column.
        missing = {"-1", "-100"}.difference(self._labels or ())
        cells = (row.get(column) for row in unformatted(data))
        each = chain.from_iterable(cell if isinstance(cell, list) else [cell] for cell in cells)
        has_labels = any(label is not None and str(label) not in missing for label in each)
        loaded = self._load_rows(data, EVAL_NAME, has_labels=has_labels)
        if loaded.bad_rows.total:
            readable = len(loaded.eval)
            raise ValueError(
                f"test_dataset: expected all of {readable + loaded.bad_rows.total} rows with a "
                f"text, got only {readable} that can be read. Take the others out"
            )
        return loaded.eval

    def _is_raw(self, data: Any, name: str) -> bool:
        """Whether rows have to be made of a data set; refuse kinds of data without columns."""
        if not self.makes_rows:
            return False
        if isinstance(data, datasets.Dataset | datasets.IterableDataset):
            return True
        is_subset = isinstance(data, Subset) and isinstance(data.dataset, datasets.Dataset)
        is_nothing = isinstance(data, dict) and not data
        if is_subset or is_nothing or isinstance(data, pd.DataFrame | Sequence | os.PathLike):
            raise ValueError(
                f"{name}: expected a data set of the datasets library, got a "
                f"{type(data).__name__}. Make one with load_dataset or Dataset.from_dict"
            )
        return False

    def _load_rows(
        self,
        data: datasets.Dataset | datasets.IterableDataset,
        name: str,
        *,
        has_labels: bool = True,
    ) -> LoadedData:
        """Tokenize all rows of a data set, like the sources of a YAML file's data section."""
        settings, column, task = self.data, self.args.text_column, self.config.model.task
        row_format: Literal["auto", "text"] = "auto"
        columns = data.column_names or []
        has_text = self._format is not None or column in columns
        if task in CLASSIFIERS and "input_ids" in columns and not has_text:
            raise ValueError(
                f"{name}: expected rows of text for a classifier, got rows of input_ids. Pass "
                "data_collator=DataCollatorWithPadding(tokenizer)"
            )
        if not has_labels:
            settings = replace(settings, label_column=None)
        if self._format is not None:
            kept = (settings.label_column, settings.weight_column)
            data = self._formatted(data, self._format, kept)
            column = row_format = "text"
        streaming = name == TRAIN_NAME and isinstance(data, datasets.IterableDataset)
        if streaming:
            _check_stream(data)
        source = GivenSource(
            path=name, column=column, format=row_format, streaming=streaming, documents=data
        )
        with PartialState().main_process_first():  # one process fills the cache
            loaded = load_data(
                replace(settings, sources=[source]),
                base=self._base,
                tokenizer=on_the_right(self.tokenizer(), task),
                seed=self.args.seed,
                task=task,
                labels=self._labels,
                eval_only=name == EVAL_NAME,
            )
        self.collator = self.collator or loaded.collator
        return loaded

    def _formatted(
        self,
        data: datasets.Dataset | datasets.IterableDataset,
        text_of: Callable[[dict[str, Any]], str],
        kept: Sequence[str | None],
    ) -> datasets.Dataset | datasets.IterableDataset:
        """Return a data set with a column of text and the `kept` columns alone."""
        columns = [name for name in data.column_names or [] if name not in kept]
        data = unformatted(data)
        # Classifiers are exempt: their tokenizer reads special tokens that a text spells.
        for row in data.take(0 if self.config.model.task in CLASSIFIERS else 1):
            _check_plain(text_of(dict(row)), self.tokenizer())
        is_table = isinstance(data, datasets.Dataset)
        # The cache knows functions of modules by name, and would return rows of an older version.
        options = {"load_from_cache_file": False} if is_table else {}
        data = data.map(lambda row: {"text": text_of(dict(row))}, remove_columns=columns, **options)
        if is_table:
            data._fingerprint = rows_sha256(data)
        return data

    def build(self, train: Any) -> tuple[HarmonicHeadModel, Head | None]:
        """Return the model that trains, and the head that its base predicted with, if known."""
        set_seed(self.args.seed)
        run, task = self.config, self.config.model.task
        if isinstance(self.model, HarmonicHeadModel):
            if self.args.h_exp is not None and run.h_exp is not None:
                self.model.h_exp = run.h_exp.start
            if train is not None:
                old = self.model.loss_fn
                prepare_model_(self.model, run)
                is_default = run.loss is not None and self.args.loss is None
                if is_default and old not in (negative_log_likelihood, self.model.loss_fn):
                    logger.warning(
                        "loss: %s, the default, in place of the model's %s. Name the other to keep "
                        "it.",
                        run.loss.name,
                        type(old).__name__,
                    )
            return self.model, None
        old_head = None
        if task in CLASSIFIERS:
            built: HarmonicHeadModel = self._classifier(train)
        else:
            base = self._load_base()
            built = LANGUAGE_MODELS[task].on_base(
                base, head=run.head_settings(), init=run.head.init, tie=run.head.tie
            )
            # With new tokens the old head has fewer classes and cannot be compared with the new.
            has_new = task == "causal_lm" and self._add_missing_tokens_(built)
            old_head = None if has_new else base.head
        if isinstance(self.model, str) and self.model.startswith("package:"):
            built.config.base_model = self.model
        prepare_model_(built, run, old_head)
        return built, old_head

    def _load_base(self) -> Base:
        """Load the base with the head it has, or build a random one in its shape."""
        model, init = self.config.model, self.config.head.init
        dtype, dropout = getattr(torch, model.dtype), model.dropout
        model_class = MODELS[model.task]
        if not isinstance(self.model, str):
            if model.from_scratch or dropout is not None:
                raise ValueError(
                    "model: expected a name with from_scratch or dropout, got a loaded "
                    f"{type(self.model).__name__}. Set them when you build it"
                )
            if model.task == "masked_lm" and token_task(self.model.config) == "causal_lm":
                raise ValueError(
                    "task: expected causal_lm for a decoder, whose tokens do not see those behind "
                    f"them, got masked_lm with a {type(self.model).__name__}"
                )
            if dtype == torch.float32 and self.model.dtype != dtype:
                is_16_bit = self.model.dtype.itemsize == 2
                logger.warning(
                    "The loaded model is in %s and becomes float32%s.",
                    str(self.model.dtype).removeprefix("torch."),
                    "; dtype='bfloat16' keeps it in 16 bits" if is_16_bit else "",
                )
            return base_of(self.model, dtype=dtype, is_causal=model_class.is_causal)
        if model.from_scratch:
            return from_base(random_base, model, dtype=dtype, dropout=dropout)
        check_package(model.base)
        keeps_head = model.task in LANGUAGE_MODELS or init == "base_head"
        return from_base(
            load_base,
            model,
            head_class=model_class if keeps_head else None,
            is_causal=model_class.is_causal,
            dtype=dtype,
            dropout=dropout,
        )

    def _classifier(self, train: MaskedRows) -> HarmonicClassifier:
        """Put a head over the classes on the base, with prototypes that start as the run says."""
        run, model_class = self.config, CLASSIFIERS[self.config.model.task]
        if self._labels is None:
            raise ValueError(
                "train_dataset: expected a data set with a column of labels, which name the "
                "classes of a new head, got none. To bring rows and a collator of your own, make "
                f"the model first: {model_class.__name__}.from_base(...)"
            )
        from_means = run.head.init == "class_means"
        model = model_class.on_base(
            self._load_base(),
            labels=self._labels,
            head=run.head_settings(),
            init="random" if from_means else run.head.init,
            pooling=run.model.pooling,
        )
        if from_means:
            device, batch_size = self.args.device, self.args.per_device_eval_batch_size
            model.to(device)
            batches = batches_on(device, train, self.collator, batch_size)
            model.dist_head.initialize_(class_means(model, batches))
        return model

    def _add_missing_tokens_(self, model: HarmonicHeadModel) -> bool:
        """Give a decoder the tokens that only its tokenizer has; return whether there were any."""
        num_before = len(model.dist_head.weight)
        num_classes = max(num_before, len(self.tokenizer()))
        if num_classes == num_before:
            return False
        model.resize_token_embeddings(num_classes)
        logger.info(
            "New tokens: %d, which the tokenizer has and the base has not. Their embeddings and "
            "prototypes are drawn like the others.",
            num_classes - num_before,
        )
        if isinstance(self.config.loss, DistillLoss):
            raise ValueError(
                f"loss distill: expected a tokenizer with the base's own {num_before} tokens, got "
                f"one with {num_classes}, of which the old head knows nothing"
            )
        return True


def _check_model(model: Any) -> None:
    """Refuse anything but a name or a model, and a model with a PEFT adapter."""
    if is_compiled_module(model):
        raise ValueError(
            "model: expected one that is not compiled yet, got what torch.compile returned. Give "
            "the model itself, and torch_compile=True among the arguments"
        )
    if not isinstance(model, str | PreTrainedModel | PeftModel):
        raise ValueError(
            "model: expected a name, a folder or a model of transformers, got "
            f"{model.__name__ if isinstance(model, type) else type(model).__name__}"
        )
    if isinstance(model, str):
        return
    if any(isinstance(part, BaseTunerLayer | AuxiliaryTrainingWrapper) for part in model.modules()):
        raise ValueError(
            f"model: expected one without a PEFT adapter, got a {type(model).__name__} with one. "
            "Merge it first: PeftModel.from_pretrained(...).merge_and_unload(), or of one that was "
            "trained here, save it and load it again. Or give peft_config"
        )
    if model.config.model_type == "harmonic" and not isinstance(model, HarmonicPreTrainedModel):
        raise ValueError(
            f"model: expected a class of this package, got a {type(model).__name__} of the code "
            "that came with it. Import harmonic_sft before you load the model"
        )


def _check_plain(text: Any, tokenizer: Any) -> None:
    """Refuse text with special tokens, which a chat template may have written."""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    # Texts may write about masks, and corpora write <unk> for unknown words.
    special -= {tokenizer.mask_token, tokenizer.unk_token} - {tokenizer.eos_token}
    found = [token for token in special if isinstance(text, str) and token in text]
    if found:
        raise ValueError(
            "formatting_func: expected text without special tokens, got "
            f"{min(found, key=text.index)!r}, which would be tokenized as text. Leave it out of "
            "the text; `messages` without a formatting_func are written with the chat template"
        )


def _check_stream(data: datasets.IterableDataset) -> None:
    """Refuse a stream that cannot be resumed, or that is one process's part of another stream."""
    if data._distributed is not None:
        raise ValueError(
            "train_dataset: expected the stream of all processes, got one split by node. Leave "
            "split_dataset_by_node out: every process takes its own rows"
        )
    if any(type(step).__name__ == "BufferShuffledExamplesIterable" for step in stream_steps(data)):
        raise ValueError(
            "train_dataset: expected a stream without a shuffle buffer, which a resumed run "
            "cannot refill, got shuffle(). Leave it out: rows are shuffled in windows"
        )


@torch.no_grad()
def class_means(model: HarmonicClassifier, batches: Iterable[dict[str, Tensor]]) -> Tensor:
    """Return the mean of the frozen features of every class, weighted by row.

    For a head on the unit sphere the features are normalized first, so that the normalized mean is
    the direction of highest likelihood under a von Mises-Fisher distribution.

    Args:
        model: In evaluation mode.
        batches: `input_ids`, `attention_mask`, `labels` and perhaps `label_weights`, on the model's
            device.

    Returns:
        `[V, D]`, float32, on the CPU, since some devices have no float64 for the sums.
    """
    head = model.dist_head
    on_sphere = any(isinstance(part, SphereHead) and part.unit_sphere for part in head.modules())
    shape = (model.num_classes(model.config), model.config.text_config.hidden_size)
    totals = torch.zeros(shape, dtype=torch.float64, device="cpu")  # [V, D]
    counts = totals.new_zeros(len(totals))  # [V]
    for batch in batches:
        states, labels = labelled_states(model, batch)  # [N, D], [N]
        weights = batch.get("label_weights", torch.ones_like(batch["labels"]))
        weights = weights[batch["labels"] != IGNORE_INDEX].cpu().double()  # [N]
        weights = weights.clamp_min(1e-12)  # rows of weight 0 count in a class without others
        part, states = head, states.to(head.weight.device)
        while isinstance(part, MappedHead):  # it compares mapped states
            part, states = part.inner, part.mapped(states)
        features = states.cpu().double()
        features = normalize(features, dim=-1) if on_sphere else features
        labels = labels.cpu()
        totals.index_add_(0, labels, features * weights.unsqueeze(-1))
        counts.index_add_(0, labels, weights)
    empty = (counts == 0).nonzero().flatten().tolist()
    if empty:
        names = [(model.config.id2label or {})[index] for index in empty[:3]]
        raise ValueError(
            f"head.init: expected training rows of every class for class_means, got none of {names}"
            f"{' ...' if len(empty) > 3 else ''}. Add rows, or set head.init: random"
        )
    return (totals / counts.unsqueeze(-1)).float()


def prepare_model_(model: HarmonicHeadModel, run: RunConfig, old_head: Head | None = None) -> None:
    """Freeze what the run does not train, add LoRA if it has a section, and set the loss."""
    unfreeze_(model, run.model.unfreeze)
    noise = run.training.get("neftune_noise_alpha")
    if noise is not None and not trains(model.get_input_embeddings()):
        raise ValueError(
            f"training.neftune_noise_alpha: expected nothing with frozen input embeddings, which "
            f"get no noise, got {noise}. Unfreeze them, or leave it out"
        )
    changes = run.peft is not None or trains(model.model)
    if changes and getattr(model.config.text_config, "output_router_logits", False):
        logger.warning("The router's own loss, which output_router_logits asks for, is not added.")
    old_body = frozen_copy(model.model) if changes and isinstance(run.loss, DistillLoss) else None
    if run.peft is not None:
        add_lora_(model, run.peft)
    if isinstance(run.loss, DistillLoss):
        if old_head is None:
            raise ValueError("loss distill: expected a base with a head of its own, got none")
        model.loss_fn = run.loss.prepare(old_head, old_body)
    elif run.loss is not None:
        model.loss_fn = run.loss.prepare(model.dist_head)


def _check_loaded(
    model: HarmonicHeadModel, args: HarmonicTrainingArguments, run: RunConfig
) -> None:
    """Refuse arguments that cannot change a model that is loaded already."""
    check_class(model.dist_head)  # now: saving, after the training, would refuse it
    asked, task = run.model, task_of(model, model.config, None)
    learns = any("log_steepness" in name for name, _ in model.dist_head.named_parameters())
    dtypes = {str(parameter.dtype) for parameter in model.model.parameters()}
    other = sorted(dtypes & {"torch.float16", "torch.float64"})
    if other and quantization_method(model.config) is None:
        raise ValueError(
            f"model: expected weights in float32 or bfloat16, got {', '.join(other)}. Call "
            "model.float() first, or model.bfloat16()"
        )
    is_span = isinstance(model, HarmonicForQuestionAnswering)
    has_no_loss = is_span or model.has_free_labels(torch.empty(0).long())
    ignored = {
        "head": (args.head, args.head is not None),
        "task": (args.task, args.task not in (None, task)),
        "loss": (args.loss, args.loss is not None and has_no_loss),
        "label_column": (args.label_column, asked.task != task),
        "dropout": (asked.dropout, asked.dropout is not None),
        "from_scratch": (True, asked.from_scratch),
        "pooling": (asked.pooling, asked.pooling not in (None, model.config.pooling)),
        "dtype": (asked.dtype, asked.dtype != "float32" and f"torch.{asked.dtype}" not in dtypes),
        "h_exp.schedule": ("learned", run.learns_h_exp and not learns),
    }
    for name, (value, is_ignored) in ignored.items():
        if is_ignored:
            raise ValueError(
                f"{name}: expected nothing with a {type(model).__name__} that is loaded, got "
                f"{value!r}. Give the name of its base or folder, or change the model before"
            )
