"""The Trainer: transformers' own, with the harmonic recipe."""

import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

import datasets
import torch
from accelerate.data_loader import IterableDatasetShard
from peft import LoraConfig
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import (
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import (
    EvalLoopOutput,
    EvalPrediction,
    HPSearchBackend,
    TrainOutput,
)

from harmonic_sft.config import unknown_key
from harmonic_sft.data.batches import MaskedRows, collate_padding_free
from harmonic_sft.data.streams import StreamedRows
from harmonic_sft.eval import documents_of, score, summarize
from harmonic_sft.hub import check_destination, push
from harmonic_sft.losses import Distillation
from harmonic_sft.models import (
    HarmonicForQuestionAnswering,
    HarmonicForSequenceClassification,
    HarmonicHeadModel,
    LinearHead,
)
from harmonic_sft.training.arguments import (
    HarmonicTrainingArguments,
    changed,
    check_launch,
    metric_of,
)
from harmonic_sft.training.batches import (
    COUNTS,
    OF_LABELS,
    CountingCollator,
    MemoryFallback,
    head_inputs,
    last_batch_rows,
    save_bad_step,
)
from harmonic_sft.training.callbacks import (
    EarlyStopping,
    HeadCallback,
    label_bars_,
    not_finite,
    place_events_,
)
from harmonic_sft.training.checkpoints import rows_at_once
from harmonic_sft.training.master_weights import (
    MasterWeightsAdamW,
    average_gradients,
    check_optimizer,
    low_precision_weights,
)
from harmonic_sft.training.preparation import Preparation
from harmonic_sft.training.publishing import PushCallback, destination_of, finish_pushes
from harmonic_sft.training.resumable_trainer import ResumableTrainer
from harmonic_sft.training.run_config import HExpConfig, PeftConfig
from harmonic_sft.training.training_section import METRICS

logger = logging.getLogger(__name__)


class HarmonicTrainer(ResumableTrainer):
    """transformers' Trainer for models with a geometry-aware head.

    The loss is computed inside the model's `forward`. Around it this class adds: a new head on a
    model that has none of ours, rows of text that it tokenizes, masks and packs, the
    warmup-stable-decay schedule by ratio, the annealed exponent, prototypes re-normalized after
    every optimizer step, float32 master weights for 16-bit parameters, token-weighted evaluation
    with the best post-hoc exponent, a stop at the first non-finite loss or gradient, and a fallback
    after running out of memory. Its base class `ResumableTrainer` saves checkpoints, resumes, and
    keeps the output folder.

    Args:
        model: A name on the Hub, a folder, one of our models, or a model of transformers, whose
            head is replaced and whose body is not copied.
        args: Default: the NeoBERT recipe, in the folder `trainer_output`.
        data_collator: Makes batches of the rows, which then go to it as they are. Default: text is
            tokenized and padded, or packed.
        train_dataset: A data set of the datasets library with a column of text, messages, prompt
            and completion, a label, or `input_ids`; or any rows with `input_ids` and `labels`, of
            one length unless `data_collator` pads them.
        eval_dataset: The same, or a dictionary of several. None is split off `train_dataset`.
        processing_class: The tokenizer. Default: that of the model.
        compute_loss_func: Called with outputs, labels and `num_items_in_batch` in place of the
            model's loss; the logits of every position are then computed.
        compute_metrics: Called with predictions and labels. An evaluation then reads the data a
            second time, with the logits of every position.
        callbacks: Further callbacks.
        optimizers: Optimizer and schedule, in place of those in `args`.
        optimizer_cls_and_kwargs: Class and arguments of the optimizer, in place of `args.optim`.
        preprocess_logits_for_metrics: Reduces logits before they are kept for `compute_metrics`.
        peft_config: LoRA on frozen blocks, of ours or of PEFT.
        formatting_func: Makes one text of a row.

    Raises:
        ValueError: The model, the data and the arguments do not go together.
    """

    _initial_global_step = 0  # transformers sets it from 5.19 on; `_get_grad_norm` adds to it

    def __init__(
        self,
        model: str | os.PathLike | PreTrainedModel,
        args: HarmonicTrainingArguments | None = None,
        data_collator: Callable[[Any], dict[str, Any]] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_loss_func: Callable[..., Any] | None = None,
        compute_metrics: Callable[[EvalPrediction], dict[str, Any]] | None = None,
        callbacks: Sequence[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        peft_config: PeftConfig | LoraConfig | None = None,
        formatting_func: Callable[[dict[str, Any]], str] | None = None,
    ):
        args = HarmonicTrainingArguments("trainer_output") if args is None else args
        if not isinstance(args, HarmonicTrainingArguments):
            raise ValueError(
                f"args: expected HarmonicTrainingArguments, got {type(args).__name__}. They take "
                "the same arguments"
            )
        check_launch(args)
        _check_loss(args, compute_loss_func)
        preparation = Preparation(
            model,
            args,
            peft_config=peft_config,
            tokenizer=processing_class,
            collator=data_collator,
            formatting_func=formatting_func,
            is_stream=isinstance(train_dataset, datasets.IterableDataset | StreamedRows),
            has_own_loss=compute_loss_func is not None,
        )
        train_dataset = preparation.train_rows(train_dataset)
        _check_batch(train_dataset, args)
        eval_dataset = preparation.eval_rows(eval_dataset)
        built, self.old_head = preparation.build(train_dataset)
        if compute_metrics is None:
            _check_best_metric(built, args)
        _warn_of_bfloat16(built, args.device)
        # transformers refuses a quantized model without a PEFT adapter; here its new head trains.
        vars(built)["is_quantized"] = False
        self._low_precision = low_precision_weights(built)
        is_given = optimizers[0] is not None or optimizer_cls_and_kwargs is not None
        check_optimizer(built, *optimizers, is_given=is_given)
        config, h_exp = preparation.config, preparation.config.h_exp
        if args.h_exp is None and h_exp is not None and h_exp.start != h_exp.end:
            logger.warning(
                "h_exp goes from %g to %g, as in the recipe. Held, h_exp=%s, losses were lower in "
                "our comparisons (docs/results.md).",
                h_exp.start,
                h_exp.end,
                h_exp.start,
            )
        self._head_callback = HeadCallback(None if config.learns_h_exp else h_exp)
        super().__init__(
            preparation,
            model=built,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            data_collator=preparation.collator,
            processing_class=preparation.known_tokenizer,
            compute_loss_func=compute_loss_func,
            compute_metrics=compute_metrics,
            callbacks=[self._head_callback, *(callbacks or [])],
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )
        self._set_patience()
        label_bars_(self.callback_handler.callbacks)
        place_events_(self.callback_handler.callbacks, str(args.output_dir))
        is_free = built.has_free_labels(torch.empty(0).long())
        self.data_collator = CountingCollator(
            collator=self.data_collator,
            num_classes=None if is_free else len(built.dist_head.weight),
            causal=built.is_causal,
        )
        if config.hub.every_save:
            self.add_callback(PushCallback(destination_of(config.hub)))
        self.data_seconds = 0.0
        self._memory = MemoryFallback(args, built)
        self._losses: list[Tensor] = []  # of the micro-batches of this step

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> tuple[nn.Module, DataLoader]:
        """Wrap the model in DistributedDataParallel, also after an evaluation.

        In transformers 5.23 `evaluation_loop` lets accelerate prepare the model without
        DistributedDataParallel, and accelerate prepares no model twice: every process would train
        alone.
        """
        self.old_head = None  # it has been measured, and takes as much memory as the new one
        self._num_bad_steps = 0  # left out in this session
        is_alone = self.args.world_size == 1
        if not is_alone and not _is_distributed(self.model_wrapped):
            self.model_wrapped = self.model
            vars(self.model).pop("_is_accelerate_prepared", None)
        model, loader = super()._prepare_for_training(*args, **kwargs)
        name = type(model).__name__
        assert is_alone or _is_distributed(model), f"expected DistributedDataParallel, got {name}"
        self._warn_of_repeated(loader)
        return model, loader

    def hyperparameter_search(
        self,
        hp_space: Callable[[Any], dict[str, Any]] | None = None,
        compute_objective: Callable[[dict[str, float]], float] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Search as transformers does, but load the model again for every trial.

        By default `compute_objective` is the loss at the best exponent, or the user's own loss;
        transformers would take the sum of all metrics.

        Raises:
            ValueError: The trainer was given a model, which trials would change; `hp_space` is
                missing; a trial asks for other rows; or `compute_objective` is missing for several
                data sets.
        """
        if hp_space is None:
            raise ValueError(
                "hp_space: expected a function that makes the arguments of a trial, got none. That "
                "of transformers would change the seed, and with it the rows"
            )
        if not isinstance(self._preparation.model, str):
            raise ValueError("model: expected a name for a hyper-parameter search, got a model")
        if compute_objective is None and isinstance(self.eval_dataset, dict):
            raise ValueError("compute_objective: expected one for several data sets, got none")
        self.model_init = self._load_again
        objective = compute_objective or self._objective
        return super().hyperparameter_search(hp_space, objective, *args, **kwargs)

    def _objective(self, metrics: dict[str, float]) -> float:
        """Return what a search minimizes; trials may end at different exponents."""
        loss = metrics["eval_loss"]
        return loss if self._has_own_loss else metrics.get("eval_post_hoc_loss", loss)

    def _hp_search_setup(self, trial: Any) -> None:
        """Set the arguments of a trial without the casts that would change their values."""
        if trial is not None and self.hp_search_backend is not None:
            is_optuna = self.hp_search_backend == HPSearchBackend.OPTUNA
            for name, value in (self.hp_space(trial) if is_optuna else trial).items():
                if is_optuna and not hasattr(self.args, name):
                    raise ValueError(unknown_key(f"hp_space.{name}", name, [*vars(self.args)]))
                old = getattr(self.args, name, None)
                if hasattr(self.args, name) and not _survives_cast(value, type(old)):
                    setattr(self.args, name, None)  # transformers casts to the old value's type
        super()._hp_search_setup(trial)

    def _load_again(self, trial: Any) -> HarmonicHeadModel:
        """Load the model as the arguments of a trial say."""
        self._hp_search_setup(trial)  # transformers calls it only later
        self.run_config = config = self._preparation.configure_trial()
        # transformers reads these once, or not again after the last trial.
        self._train_batch_size = self.args.train_batch_size
        self.neftune_noise_alpha = self.args.neftune_noise_alpha
        self._head_callback.h_exp = None if config.learns_h_exp else config.h_exp
        model = self._preparation.build(self.train_dataset)[0]
        self._low_precision, self._frozen = low_precision_weights(model), None
        self._memory = MemoryFallback(self.args, model)
        self._set_patience()
        return model

    def _set_patience(self) -> None:
        """Stop early as the arguments say, which a trial of a search may have changed."""
        self.remove_callback(EarlyStopping)
        if (patience := self.args.early_stopping_patience) is not None:
            self.add_callback(EarlyStopping(patience))

    def anneal(self, h_exp: HExpConfig) -> None:
        """Replace the schedule of the exponent, from the next step on."""
        self._head_callback.h_exp = h_exp

    def _get_dataloader(self, *args: Any, is_training: bool = False, **kwargs: Any) -> DataLoader:
        """Return batches from workers that outlive a SIGTERM to all processes of a job.

        Evaluations read every row, since `dataloader_drop_last` is meant for the training. They
        read padding-free rows one by one, because each has metrics and predictions of its own.
        """
        collator = self._preparation.collator  # set when the first rows of text are read
        if collator is not None and isinstance(self.data_collator, CountingCollator):
            self.data_collator = replace(self.data_collator, collator=collator)
            if collator is collate_padding_free and not is_training:
                kwargs["batch_size"] = 1
        drop_last = self.args.dataloader_drop_last and is_training
        with changed(self.args, dataloader_drop_last=drop_last):
            loader = super()._get_dataloader(*args, is_training=is_training, **kwargs)
        return self._termination.keep_workers_(loader)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Return batches of a data set, given itself or by name; text is tokenized and masked."""
        if isinstance(eval_dataset, str):
            eval_dataset = cast(dict, self.eval_dataset)[eval_dataset]
        return super().get_eval_dataloader(self._preparation.eval_rows(eval_dataset))

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """Return batches to predict; text is tokenized and masked. Texts may have no labels."""
        return super().get_test_dataloader(self._preparation.test_rows(test_dataset))

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list, Tensor | int | None]:
        """Read the batches of an optimizer step; note its seconds, its tokens and stream places."""
        start = time.perf_counter()
        batches = list(islice(epoch_iterator, num_batches))
        if self._leaves_out_repeated and self.accelerator.gradient_state.end_of_dataloader:
            num_rows = last_batch_rows(self.callback_handler.train_dataloader, self.args)
            if num_rows:
                size, process = self.args.per_device_train_batch_size, self.args.process_index
                self.data_collator.take_out_repeated_(
                    batches[-1], num_rows=num_rows, size=size, process=process
                )
        batches, num_items = super().get_batch_samples(iter(batches), num_batches, device)
        self.data_seconds += time.perf_counter() - start
        self._memory.batches, self._losses = [], []
        # Batches of a user's own loader have no count.
        num_tokens = sum(batch.pop("num_tokens", 0) for batch in batches)
        if self.args.world_size > 1:
            counted = torch.tensor([[num_tokens, self._termination.received]], device=device)
            num_tokens, num_signals = self.accelerator.gather(counted).sum(0).tolist()
            self._termination.agreed = num_signals > 0
        self.state.num_input_tokens_seen += num_tokens
        if self.stream_place is not None:
            self.stream_place.take(batches)
        return batches, num_items

    @property
    def _leaves_out_repeated(self) -> bool:
        """Whether repeated rows can be left out; a user's loss may need a label of every row."""
        is_ours = isinstance(self.train_dataset, MaskedRows) and not isinstance(
            self.model, HarmonicForSequenceClassification
        )
        is_span = isinstance(self.model, HarmonicForQuestionAnswering)
        return not is_span and (is_ours or not self._has_own_loss)

    def _warn_of_repeated(self, loader: DataLoader) -> None:
        """Warn if the last step of an epoch scores some rows twice."""
        args = self.args
        num_rows = last_batch_rows(loader, args)
        if num_rows and args.should_log and not self._leaves_out_repeated:
            logger.warning(
                "The last batches of an epoch score %d rows again, so that all %d processes have "
                "as many. dataloader_drop_last=True leaves these batches out.",
                rows_at_once(args) - num_rows,
                args.world_size,
            )
        rows = loader.dataset
        if isinstance(rows, IterableDatasetShard) and not rows.drop_last and args.should_log:
            logger.warning(
                "An IterableDataset of your own: where its rows do not fill the last batch of all "
                "%d processes, its first rows are scored again. dataloader_drop_last=True leaves "
                "that batch out.",
                args.world_size,
            )

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        """Do nothing: `get_batch_samples` counts tokens, without waiting for the device."""

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """Turn the ratios into whole steps, unless the schedule is one of transformers' own."""
        schedule = self.run_config.schedule
        if schedule is None:
            return super().create_scheduler(num_training_steps, optimizer)
        fixed = self.args.get_warmup_steps(num_training_steps)
        warmup, decay = schedule.phase_steps(num_training_steps, warmup_steps=fixed)
        phases = {"num_decay_steps": decay, "decay_type": schedule.decay}
        with changed(self.args, warmup_steps=warmup, lr_scheduler_kwargs=phases):
            return super().create_scheduler(num_training_steps, optimizer)

    @staticmethod
    def get_optimizer_cls_and_kwargs(
        args: TrainingArguments, model: PreTrainedModel | None = None
    ) -> tuple[Any, Any]:
        """Return AdamW on float32 masters for a model that trains weights of 16 bits."""
        optimizer_class, options = Trainer.get_optimizer_cls_and_kwargs(args, model)
        if model is not None and low_precision_weights(model):
            return MasterWeightsAdamW, options
        return optimizer_class, options

    def _finalize_training(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """Average the losses since the last log over all processes; transformers does not."""
        # A callback may have stopped one process early: the others would wait for it here.
        if self.args.world_size > 1 and self.state.global_step >= self.state.max_steps:
            losses = self._tr_loss.double() + self._total_loss_scalar
            self._total_loss_scalar = self.accelerator.reduce(losses, "mean").item()
            self._tr_loss.zero_()
        return super()._finalize_training(*args, **kwargs)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Leave prototypes out of weight decay: their norm is the head's business.

        The weight of a linear head, also of one inside another, decays as any layer's.
        """
        names = super().get_decay_parameter_names(model)
        head = self.model.dist_head
        table = {name for name, weight in model.named_parameters() if weight is head.weight}
        decays = any(isinstance(part, LinearHead) for part in head.modules())
        dense = ".dense_weight"  # of a transform
        return [
            n
            for n in names
            if (decays if n in table else n.endswith(dense) or not n.startswith("dist_head."))
        ]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the exponent beside a loss: that of its step, or the learned one as it is now."""
        # transformers would count the epochs of a stream from the step it was resumed at.
        if self.stream_place is not None and self.state.max_steps:
            self.state.epoch = self.state.global_step / self.state.max_steps
        if "loss" in logs:
            learned = self.run_config.learns_h_exp
            h_exp = self.model.h_exp if learned else self._head_callback.last_h_exp
            logs = logs if h_exp is None else {**logs, "h_exp": h_exp}
        super().log(logs, start_time)

    @property
    def _has_own_loss(self) -> bool:
        """Whether the loss is a user's: `compute_loss_func` or a subclass's `compute_loss`."""
        is_ours = type(self).compute_loss is HarmonicTrainer.compute_loss
        return self.compute_loss_func is not None or not is_ours

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Let the old body read the batch first, if the loss distills from the old model."""
        counts = COUNTS if self.compute_loss_func is not None else ("num_tokens",)
        inputs = {key: value for key, value in inputs.items() if key not in counts}
        if isinstance(self.model.loss_fn, Distillation):
            with self.accelerator.autocast():
                self.model.loss_fn.read(
                    {k: v for k, v in inputs.items() if k == "labels" or k not in OF_LABELS}
                )
        return super().compute_loss(model, inputs, *args, **kwargs)

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """Run one micro-batch; after an out-of-memory error repeat it in a cheaper way.

        Raises:
            StoppedError: One row does not fit into memory.
        """
        train = super().training_step
        loss = self._memory.run(
            lambda batch: train(model, batch, num_items_in_batch),
            inputs,
            step=self.state.global_step + 1,
            is_sum=num_items_in_batch is not None and not self._has_own_loss,
        )
        self._losses.append(loss)
        if self.accelerator.sync_gradients and self.args.world_size > 1:
            average_gradients(self._low_precision)
        return loss.nan_to_num(0, 0, 0)  # transformers sums it, though the step may be skipped

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Stop at a loss or gradients that are not finite, or skip the step, before the update."""
        norm = super()._get_grad_norm(model, grad_norm)
        loss = torch.stack([torch.zeros_like(norm), *self._losses]).sum()
        if self.args.skip_bad_steps:  # every process has to decide alike
            loss = self.accelerator.reduce(loss)
        values = torch.stack([loss, norm]).tolist()
        if all(map(math.isfinite, values)):
            return norm
        bad_step = {"step": self.state.global_step, "loss": values[0], "gradient_norm": values[1]}
        rows, batches = self.train_dataset, self._memory.batches
        save_bad_step(self.args, rows, self.stream_place, batches, **bad_step)
        if self._num_bad_steps == self.args.skip_bad_steps:
            raise not_finite(**bad_step)
        logger.warning(
            "Step %d was left out: its loss or gradients are not finite.", bad_step["step"] + 1
        )
        self._num_bad_steps += 1
        model.zero_grad()  # optimizers do not update weights without a gradient
        # The next logged loss, and that of the training, are means over steps without this one.
        self._tr_loss -= torch.stack(self._losses).nan_to_num(0, 0, 0).sum()
        self._globalstep_last_logged += 1
        self._initial_global_step += 1
        return torch.zeros_like(norm)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Leave the rows that accelerate has added to the last batch out of its loss."""
        state, size = self.accelerator.gradient_state, self.args.per_device_eval_batch_size
        is_uneven = self.args.world_size > 1 and state.end_of_dataloader and state.remainder > 0
        if not is_uneven or not self._leaves_out_repeated:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        self.data_collator.take_out_repeated_(
            inputs, num_rows=state.remainder, size=size, process=self.args.process_index
        )
        outputs = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if outputs[0] is None:
            return outputs
        # The processes' losses are parts of one sum; transformers would weigh them by rows.
        return self.accelerator.reduce(outputs[0], "mean"), *outputs[1:]

    @torch.random.fork_rng(devices=[])  # or dropout would depend on how often a run is evaluated
    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Weigh every labelled token alike; transformers averages the means of batches.

        transformers' own loop then gathers predictions for `predict` and `compute_metrics`, the
        loss of labels that are no classes of the head, and the user's own loss. A metric of the
        user's replaces ours of the same name, except the loss.
        """
        if prediction_loss_only is None:
            prediction_loss_only = self.args.prediction_loss_only
        reads_again = not prediction_loss_only or self._has_own_loss
        self.model.eval()
        self.callback_handler.eval_dataloader = dataloader
        seed = torch.default_generator.manual_seed  # for collators that mask at random
        seed(self.args.seed)
        inputs = self._head_inputs(dataloader, counts=not reads_again)
        scores = score(self.model, inputs, self._gather_scores)
        metrics, num_rows = {}, 0 if scores is None else scores.num_rows
        # Rows to predict may have no labels.
        if scores is not None and (len(scores.labels) > 0 or description != "Prediction"):
            documents = documents_of(dataloader.dataset, num_rows)
            metrics = summarize(scores, self.model.dist_head, documents)
        ours = {f"{metric_key_prefix}_{key}": value for key, value in metrics.items()}
        if num_rows > 0 and not reads_again:
            return EvalLoopOutput(None, None, ours, num_rows)  # ty: ignore[invalid-argument-type]
        seed(self.args.seed)
        output = super().evaluation_loop(
            dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
        )
        theirs = dict(output.metrics or {})
        if num_rows > 0 and not self._has_own_loss:  # theirs is a mean of means, or of nothing
            theirs.pop(f"{metric_key_prefix}_loss", None)
        return output._replace(metrics=ours | theirs, num_samples=output.num_samples or num_rows)

    def _head_inputs(
        self, dataloader: DataLoader, *, counts: bool
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield hidden states and labels of every batch whose labels are classes of the head.

        With `counts` callbacks see every batch; data that is read twice counts the second time.
        """
        for batch in dataloader:
            batch = self._prepare_inputs(batch)
            if "labels" not in batch or self.model.has_free_labels(batch["labels"]):
                continue
            with torch.no_grad(), self.compute_loss_context_manager(), self.accelerator.autocast():
                inputs = head_inputs(self.model, batch)  # [B, S, D], [B, S]
            yield inputs
            if counts:
                self.control = self.callback_handler.on_prediction_step(
                    self.args, self.state, self.control
                )

    def _gather_scores(self, scores: Tensor) -> Tensor:
        """Return the scores `[B, S, C]` of all processes, whose rows may differ in length."""
        padded = self.accelerator.pad_across_processes(
            scores, dim=1, pad_index=cast("int", math.nan)
        )
        return self.accelerator.gather_for_metrics(padded)

    def push_to_hub(  # ty: ignore[incompatible-method-override]
        self,
        commit_message: str | None = None,
        blocking: bool = True,
        token: None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> str:
        """Save the model into the output folder and publish it in one commit, with its card.

        Args:
            commit_message: Of the commit; default: form and step.
            blocking: Has to be True: a push is waited for.
            token: Has to be None; `hf auth login` keeps it.
            revision: The branch; default: `hub_revision`, else main.
            private: Create the repo as a private one; default: `hub_private_repo`.
            kwargs: Ignored. Scripts pass what transformers' card says; ours is made from the run.

        Returns:
            The address of the commit; in other processes than the first an empty string.

        Raises:
            ValueError: Bad input; nothing was sent.
            PushError: The Hub did not take it; the saved model is complete.
        """
        hub = self._preparation.configure().hub  # of the arguments as they are now
        if hub.repo_id is None:
            raise ValueError("hub_model_id: expected owner/name, got nothing")
        if not blocking or token is not None:
            raise ValueError(
                "push_to_hub: expected neither blocking=False nor a token, got one of them. A push "
                "is waited for, and huggingface_hub.login() keeps the token"
            )
        if kwargs:
            logger.warning("push_to_hub: the card is made of the run, without %s.", [*kwargs])
        finish_pushes(self.callback_handler.callbacks)
        with self.at_work():
            self.save_model(_internal_call=True)
            if not self.is_world_process_zero():
                return ""
            folder = Path(str(self.args.output_dir))
            self.state.save_to_json(str(folder / "trainer_state.json"))
            to = replace(destination_of(hub), message=commit_message)
            changes = {"revision": revision, "private": private}
            return push(folder, replace(to, **{k: v for k, v in changes.items() if v is not None}))

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Check that the Hub can be pushed to; the first push creates the repo."""
        if self.is_world_process_zero():
            check_destination(destination_of(self.run_config.hub))

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Do nothing: `PushCallback` pushes checkpoints in the form that the Hub gets from us."""


def _check_batch(rows: Any, args: HarmonicTrainingArguments) -> None:
    """Refuse fewer rows than a batch with `dataloader_drop_last`, which would leave none."""
    size = rows_at_once(args)
    if args.dataloader_drop_last and isinstance(rows, Sized) and len(rows) < size:
        raise ValueError(
            f"training.dataloader_drop_last: expected false, got true with {len(rows)} rows "
            f"and {size} in a batch. Use a smaller training.per_device_train_batch_size"
        )


def _check_best_metric(model: HarmonicHeadModel, args: HarmonicTrainingArguments) -> None:
    """Refuse to choose checkpoints by a metric of classes if the labels are not classes."""
    name = args.metric_for_best_model or "loss"
    if metric_of(name) is None:
        raise ValueError(
            f"metric_for_best_model: expected one of {list(METRICS)} without compute_metrics, got "
            f"{name!r}"
        )
    metric = name.removeprefix("eval_")
    is_span = isinstance(model, HarmonicForQuestionAnswering)
    has_classes = not is_span and not model.has_free_labels(torch.zeros(1, dtype=torch.int64))
    if metric in METRICS and metric != "loss" and not has_classes:
        raise ValueError(
            "metric_for_best_model: expected 'loss' or one of your compute_metrics, got "
            f"{metric!r}, which needs one class for each label"
        )


def _warn_of_bfloat16(model: nn.Module, device: torch.device) -> None:
    """Warn if the GPU is too old for bfloat16 weights."""
    is_used = any(weight.dtype == torch.bfloat16 for weight in model.parameters())
    if is_used and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        logger.warning(
            "This GPU has no bfloat16 arithmetic: its products are emulated or refused, and "
            "attention keeps matrices of T x T. Try float32 in dtype and unfreeze, in a YAML file "
            "in model.dtype and model.unfreeze.dtype."
        )


def _check_loss(args: HarmonicTrainingArguments, compute_loss_func: Any) -> None:
    """Refuse a loss or weights of rows beside `compute_loss_func`, which would ignore them."""
    for name in ("weight_column", "loss"):
        if getattr(args, name) is not None and compute_loss_func is not None:
            raise ValueError(
                f"{name}: expected nothing with compute_loss_func, which does not see it, got "
                f"{getattr(args, name)!r}. Leave one of them out"
            )


def _is_distributed(model: Any) -> bool:
    """Whether gradients of a model, or of what torch.compile has wrapped, are averaged."""
    return any(isinstance(module, DistributedDataParallel) for module in model.modules())


def _survives_cast(value: Any, kind: type) -> bool:
    """Whether a cast keeps a value; a text that is cast to a number is meant as one."""
    try:
        return kind(value) == value or (isinstance(value, str) and kind in (int, float))
    except (TypeError, ValueError):
        return False
