"""The Trainer: transformers' own, with the harmonic recipe."""

import hashlib
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Generator, Iterator, Sequence, Sized
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, cast

import datasets
import torch
from accelerate import PartialState
from peft import LoraConfig
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
    get_wsd_schedule,
)
from transformers.trainer_utils import (
    PREFIX_CHECKPOINT_DIR,
    EvalLoopOutput,
    EvalPrediction,
    HPSearchBackend,
    TrainOutput,
    align_special_tokens,
    has_length,
)

from harmonic_sft.data.batches import EpochSampler, MaskedRows, collate_padding_free
from harmonic_sft.data.row_maker import rows_digest
from harmonic_sft.data.streams import StreamedRows
from harmonic_sft.eval import documents_of, score, summarize
from harmonic_sft.hub import check_destination, push
from harmonic_sft.losses import Distillation
from harmonic_sft.models import (
    HarmonicConfig,
    HarmonicForQuestionAnswering,
    HarmonicHeadModel,
    LinearHead,
)
from harmonic_sft.models.backbones import load_checked
from harmonic_sft.models.configuration_harmonic import quantization_method
from harmonic_sft.models.partial_checkpoint import RESUME_FILE
from harmonic_sft.training.adapters import has_lora, load_part_, save_adapter
from harmonic_sft.training.arguments import HarmonicTrainingArguments, check_launch
from harmonic_sft.training.batches import (
    COUNTS,
    OF_LABELS,
    CountingCollator,
    head_inputs,
    last_batch_rows,
    save_bad_step,
    take_out_repeated_,
)
from harmonic_sft.training.callbacks import (
    TERMINATED,
    HeadCallback,
    StoppedError,
    TerminationCallback,
    label_bars_,
    not_finite,
)
from harmonic_sft.training.checkpoints import (
    all_checkpoints,
    check_continues,
    check_frozen,
    check_whole,
    find_checkpoint,
    frozen_sha256,
    load_neighbors_,
    load_running_loss,
    read_state,
    rotate,
    rows_at_once,
    rows_per_step,
    same_accumulation,
    save_neighbors,
    save_running_loss,
    save_trained,
    was_saved,
    write_manifest,
)
from harmonic_sft.training.master_weights import (
    MasterWeightsAdamW,
    average_gradients,
    check_optimizer,
    low_precision_weights,
)
from harmonic_sft.training.memory_fallback import MemoryFallback
from harmonic_sft.training.output_folder import (
    RUN_FILE,
    check_output_folder,
    check_same,
    check_settings,
    check_shared,
    claim_output_folder,
    holds_a_run,
    is_empty,
    locked,
)
from harmonic_sft.training.peers import naming_silent_peers
from harmonic_sft.training.preparation import Preparation
from harmonic_sft.training.publishing import PushCallback, destination_of, finish_pushes
from harmonic_sft.training.run_config import HExpConfig, PeftConfig
from harmonic_sft.training.stream_place import StreamPlace

logger = logging.getLogger(__name__)


class HarmonicTrainer(Trainer):
    """transformers' Trainer for models with a geometry-aware head.

    The loss is computed inside the model's `forward`. Around it this class adds: a new head on a
    model that has none of ours, rows of text that it tokenizes, masks and packs, the
    warmup-stable-decay schedule by ratio, the annealed exponent, prototypes re-normalized after
    every optimizer step, float32 master weights for 16-bit parameters, token-weighted evaluation
    with the best post-hoc exponent, a stop at the first non-finite loss or gradient, and a fallback
    after running out of memory. `training_args.bin` is never written: it is a pickle.

    Args:
        model: A name on the Hub, a folder, one of our models, or a model of transformers, whose
            head is replaced and whose body is not copied.
        args: Default: the NeoBERT recipe, in the folder `trainer_output`.
        data_collator: Makes batches of the rows, which then go to it as they are. Default: text is
            tokenized and padded, or packed.
        train_dataset: Of the datasets library, with a column of text, messages, prompt and
            completion, a label, or `input_ids`; or rows with `input_ids` and `labels`.
        eval_dataset: As well, or a dictionary of them. Nothing is kept out of `train_dataset`.
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

    model: HarmonicHeadModel
    args: HarmonicTrainingArguments
    _best: str | None = None  # checkpoint of a resumed run
    _misses = False  # weights of a checkpoint that was just loaded
    _trained_in: Path | None = None  # by `train`

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
        self._preparation = Preparation(
            model,
            args,
            peft_config=peft_config,
            tokenizer=processing_class,
            collator=data_collator,
            formatting_func=formatting_func,
            is_stream=isinstance(train_dataset, datasets.IterableDataset | StreamedRows),
        )
        train_dataset = self._preparation.train_rows(train_dataset)
        self.stream_place: StreamPlace | None = None
        if isinstance(train_dataset, StreamedRows):
            self.stream_place = StreamPlace(train_dataset, args)
        _check_batch(train_dataset, args)
        eval_dataset = self._preparation.eval_rows(eval_dataset)
        built, self.old_head = self._preparation.build(train_dataset)
        # transformers would refuse a quantized model, of which the head alone trains here.
        vars(built)["is_quantized"] = False
        self._low_precision = low_precision_weights(built)
        is_given = optimizers[0] is not None or optimizer_cls_and_kwargs is not None
        check_optimizer(built, optimizers[0], is_given=is_given)
        self.run_config = config = self._preparation.config  # what a YAML file would say
        self._head_callback = HeadCallback(None if config.learns_h_exp else config.h_exp)
        self._termination = TerminationCallback(is_alone=args.world_size == 1)
        takes_sigterm, args.enable_jit_checkpoint = args.enable_jit_checkpoint, False  # ours does
        super().__init__(
            model=built,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            data_collator=self._preparation.collator,
            processing_class=self._preparation.known_tokenizer,
            compute_loss_func=compute_loss_func,
            compute_metrics=compute_metrics,
            callbacks=[self._head_callback, self._termination, *(callbacks or [])],
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )
        args.enable_jit_checkpoint = takes_sigterm
        label_bars_(self.callback_handler.callbacks)
        is_free = built.has_free_labels(torch.empty(0).long())
        self.data_collator = CountingCollator(
            collator=self.data_collator,
            num_classes=None if is_free else len(built.dist_head.weight),
            causal=built.is_causal,
        )
        if config.hub.every_save:
            self.add_callback(PushCallback(destination_of(config.hub)))
        folder = Path(str(args.output_dir))
        self.claimed: Path | None = None  # the output folder that is this run's
        self._found_empty = folder if is_empty(folder) else None
        self.data_seconds = 0.0
        self._memory = MemoryFallback(args, built)
        self._losses: list[Tensor] = []  # of the micro-batches of this step
        self._keep: int | None = None  # how many checkpoints, while a training is on
        self._frozen: str | None = None  # checksum of the frozen weights
        self._made_with = args.to_dict()

    def claim_output_folder(self, *, resume: bool = False) -> None:
        """Write down what is trained, which makes the output folder this run's.

        Raises:
            ValueError: It holds something else, or another run; or nodes do not share it.
        """
        folder = Path(str(self.args.output_dir))
        if self.claimed == folder:
            return
        if folder.expanduser() != self.run_config.output_dir:  # the arguments name another one now
            self.run_config = self._preparation.configure_trial()
        state = PartialState()
        if state.is_main_process:
            config = replace(self.run_config, resume=resume)
            # Metrics of an evaluation, say, that this trainer has written are in nobody's way.
            if self._found_empty != folder or (folder / RUN_FILE).exists():
                check_output_folder(config)
            claim_output_folder(config)
        state.wait_for_everyone()
        if state.num_processes > 1:
            check_shared(folder)
        self.claimed = folder

    @contextmanager
    def at_work(self) -> Generator[None]:
        """Keep others out of the output folder and name silent processes.

        Raises:
            ValueError: Another process trains in the folder.
            StoppedError: Another process of this run does not answer.
        """
        is_main = PartialState().is_main_process  # which writes, and locks the folder for all
        lock = locked(Path(str(self.args.output_dir))) if is_main else nullcontext()
        with lock, naming_silent_peers(self.args):
            yield

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train, or continue a run; see `transformers.Trainer.train`.

        Args:
            resume_from_checkpoint: A folder, or True for the newest whole checkpoint.
            trial: Of a hyper-parameter search.
            ignore_keys_for_eval: Outputs of the model that evaluations do not gather.

        Raises:
            ValueError: The output folder holds another run, no whole checkpoint, or one of steps
                with another number of rows; or another process trains in it.
            StoppedError: Loss or gradients are not finite, one row does not fit into memory, or
                another process does not answer.
            SystemExit: A SIGTERM came; the step at work was saved.
        """
        folder = Path(str(self.args.output_dir))
        checkpoint = find_checkpoint(resume_from_checkpoint, folder)
        if checkpoint is not None:
            check_settings(checkpoint, self.run_config)
        if trial is None:
            if self.model_init is not None:  # a search has changed the arguments
                self.run_config = self._preparation.configure_trial()
            else:
                check_same(self._made_with, self.args.to_dict())
            if (
                checkpoint is None
                and self._trained_in == folder
                and any(map(was_saved, all_checkpoints(folder)))
            ):
                raise holds_a_run(folder)
            self.claim_output_folder(resume=checkpoint is not None)
            self._trained_in = folder
        try:
            with self.at_work():
                return self.train_from(checkpoint, trial, ignore_keys_for_eval)
        except StoppedError as error:
            if trial is None or self.hp_search_backend != HPSearchBackend.OPTUNA:
                raise
            import optuna

            raise optuna.TrialPruned(str(error)) from error  # the others are to go on

    def train_from(
        self,
        checkpoint: Path | None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train as `train` does, from a whole checkpoint or the start, in a folder that is claimed.

        The caller is `at_work`.
        """
        self.old_head = None  # as large as the new one
        accumulation = self.args.gradient_accumulation_steps
        if self.stream_place is not None:
            self.stream_place.load(checkpoint)
        if checkpoint is not None:
            self.check_continues(checkpoint)
            state = read_state(checkpoint, needs_best=self.args.load_best_model_at_end)
            if self._is_done(checkpoint, state):  # transformers would train one more step
                logger.warning("Finished: nothing is left to train after %s.", checkpoint)
                self.load_finished(checkpoint, state)
                return TrainOutput(state.global_step, 0.0, {"train_runtime": 0.0})
            if isinstance(self.train_dataset, IterableDataset) and self.stream_place is None:
                logger.warning(
                    "An IterableDataset of your own is read from its start, and the batches of all "
                    "steps taken are left out: the same rows only if none came twice."
                )
            self._best = state.best_model_checkpoint
            self.args.gradient_accumulation_steps = same_accumulation(checkpoint, self.args)
            load_neighbors_(checkpoint, self.model.loss_fn)
        evaluates = self.args.eval_on_start  # once, and early stopping would count it again
        self.args.eval_on_start = evaluates and checkpoint is None
        # A stream knows itself where it stood.
        self.args.ignore_data_skip = self.stream_place is not None
        # transformers would delete by the clock, before there is a manifest, and of two checkpoints
        # at the end the last one.
        self._keep, self.args.save_total_limit = self.args.save_total_limit, None
        self._num_bad_steps = 0
        try:
            with self._termination.listening(is_asked=self.args.enable_jit_checkpoint):
                resumed = str(checkpoint) if checkpoint else None
                output = super().train(resumed, trial, ignore_keys_for_eval)
        finally:
            self.args.eval_on_start, self.args.ignore_data_skip = evaluates, False
            self.args.save_total_limit = self._keep
            self.args.gradient_accumulation_steps = accumulation
        if self._termination.agreed:
            raise SystemExit(TERMINATED)
        return output

    def check_continues(self, checkpoint: Path) -> None:
        """Refuse a checkpoint of other classes, rows, or of another commit of the base."""
        rows = {"rows_sha256": self.rows_sha256, "eval_sha256": self.eval_sha256}
        check_continues(checkpoint, self.model.config, **rows)

    @cached_property
    def rows_sha256(self) -> str | None:
        """The checksum of the training rows, of a stream that of the tokenizer's vocabulary.

        Of rows of the user their number, if they have one.
        """
        rows = self.train_dataset
        if isinstance(rows, MaskedRows):
            return rows_digest(rows.rows)
        if isinstance(rows, StreamedRows):
            tokenizer = cast(PreTrainedTokenizerBase, self.processing_class)
            vocab = json.dumps(sorted(tokenizer.get_vocab().items()))
            return hashlib.sha256(vocab.encode()).hexdigest()
        return f"{len(rows)} rows" if has_length(rows) else None

    @cached_property
    def eval_sha256(self) -> str | None:
        """The checksum of the evaluation sets that are tables of ours; None if there is none."""
        given = self.eval_dataset
        sets = given.values() if isinstance(given, dict) else [given]
        found = [rows_digest(rows.rows) for rows in sets if isinstance(rows, MaskedRows)]
        return " ".join(sorted(found)) or None

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> tuple[nn.Module, DataLoader]:
        """Wrap the model for all processes, also after an evaluation.

        `evaluation_loop` of transformers 5.23 lets accelerate prepare it without
        DistributedDataParallel, and accelerate prepares no model twice: every process would train
        alone.
        """
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
        """Search as transformers does, every trial with a model that is loaded again.

        Without `compute_objective` it is the loss at the best exponent, or the user's own:
        transformers would add all metrics up.

        Raises:
            ValueError: The trainer was given a model, which a trial would change, a trial asks for
                other rows, or several data sets have no `compute_objective`.
        """
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
        """Set the arguments of a trial; what the type of the old value would change, as it is."""
        if trial is not None and self.hp_search_backend is not None:
            is_optuna = self.hp_search_backend == HPSearchBackend.OPTUNA
            for name, value in (self.hp_space(trial) if is_optuna else trial).items():
                if hasattr(self.args, name) and not _can_be(type(getattr(self.args, name)), value):
                    setattr(self.args, name, None)  # transformers casts to no type then
        super()._hp_search_setup(trial)

    def _load_again(self, trial: Any) -> HarmonicHeadModel:
        """Load the model as the arguments of a trial say."""
        self._hp_search_setup(trial)  # transformers calls it after this
        self.run_config = config = self._preparation.configure_trial()
        self._head_callback.h_exp = None if config.learns_h_exp else config.h_exp
        model = self._preparation.build(self.train_dataset)[0]
        self._low_precision, self._frozen = low_precision_weights(model), None
        self._memory = MemoryFallback(self.args, model)
        return model

    def anneal(self, h_exp: HExpConfig) -> None:
        """Anneal the exponent in another way than the arguments said, from the next step on."""
        self._head_callback.h_exp = h_exp

    def _get_dataloader(self, *args: Any, is_training: bool = False, **kwargs: Any) -> DataLoader:
        """Return batches from workers that outlive a SIGTERM to all processes of a job.

        What is not trained on is read to its last row: `dataloader_drop_last` is of the training.
        Rows that would be laid out as one, padding-free, are then read one by one: each has metrics
        and predictions of its own.
        """
        collator = self._preparation.collator  # known with the first rows of text
        if collator is not None and isinstance(self.data_collator, CountingCollator):
            self.data_collator = replace(self.data_collator, collator=collator)
            if collator is collate_padding_free and not is_training:
                kwargs["batch_size"] = 1
        drop_last = self.args.dataloader_drop_last
        self.args.dataloader_drop_last = drop_last and is_training
        try:
            loader = super()._get_dataloader(*args, is_training=is_training, **kwargs)
        finally:
            self.args.dataloader_drop_last = drop_last
        return self._termination.keep_workers_(loader)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Return batches to evaluate on; text is tokenized and masked."""
        return super().get_eval_dataloader(self._preparation.eval_rows(eval_dataset))

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """Return batches to predict; text is tokenized and masked. Texts may have no labels."""
        return super().get_test_dataloader(self._preparation.test_rows(test_dataset))

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler | None:
        """Shuffle by (seed, epoch) alone, whatever the number of processes; a stream has none."""
        if isinstance(self.train_dataset, MaskedRows):
            return EpochSampler(self.train_dataset, seed=self.args.seed)
        return super()._get_train_sampler(train_dataset)

    def get_train_dataloader(self) -> DataLoader:
        """Read a stream's own share of it; accelerate would read all of it in every process."""
        if self.stream_place is None:
            return super().get_train_dataloader()
        loader = self.stream_place.loader(self.data_collator, self._train_batch_size)
        return self._termination.keep_workers_(loader)

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list, Tensor | int | None]:
        """Start an optimizer step; note the time its data took, its tokens and streams' places."""
        start = time.perf_counter()
        batches = list(islice(epoch_iterator, num_batches))
        if self._knows_repeated and self.accelerator.gradient_state.end_of_dataloader:
            collator = cast(CountingCollator, self.data_collator)
            if rows := last_batch_rows(self.callback_handler.train_dataloader, self.args):
                take_out_repeated_(batches[-1], self.args, collator, num_rows=rows)
        batches, num_items = super().get_batch_samples(iter(batches), num_batches, device)
        self.data_seconds += time.perf_counter() - start
        self._memory.batches, self._losses = [], []
        num_tokens = sum(batch.pop("num_tokens", 0) for batch in batches)  # 0: a loader of others
        if self.args.world_size > 1:
            counted = torch.tensor([[num_tokens, self._termination.received]], device=device)
            num_tokens, num_signals = self.accelerator.gather(counted).sum(0).tolist()
            self._termination.agreed = num_signals > 0
        self.state.num_input_tokens_seen += num_tokens
        if self.stream_place is not None:
            self.stream_place.take(batches)
        return batches, num_items

    @property
    def _knows_repeated(self) -> bool:
        """Whether rows can be left out; a loss of the user may need a label in every batch."""
        is_ours = isinstance(self.train_dataset, MaskedRows) or not self._has_own_loss
        return is_ours and not isinstance(self.model, HarmonicForQuestionAnswering)

    def _warn_of_repeated(self, loader: DataLoader) -> None:
        """Say that the last step of an epoch scores some rows twice, where it does."""
        args = self.args
        num_rows = last_batch_rows(loader, args)
        if num_rows and args.should_log and not self._knows_repeated:
            logger.warning(
                "The last batches of an epoch score %d rows again, so that all %d processes have "
                "as many. dataloader_drop_last=True leaves these batches out.",
                args.per_device_train_batch_size * args.world_size - num_rows,
                args.world_size,
            )

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        """Leave it to `get_batch_samples`: transformers waits for the device here."""

    def _save_rng_state(self, output_dir: str) -> None:
        """Save with it the losses since the last log and where the streams stand.

        Every process knows its own.
        """
        super()._save_rng_state(output_dir)
        loss = self._tr_loss.item()
        last = self._globalstep_last_logged
        save_running_loss(Path(output_dir), self.args.process_index, loss, last)
        if self.stream_place is not None:
            self.stream_place.save(Path(output_dir))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Continue with the losses since the last log, too."""
        super()._load_rng_state(checkpoint)
        if checkpoint is not None:
            loss, last = load_running_loss(Path(checkpoint), self.args)
            self._tr_loss += loss
            self._total_loss_scalar -= loss  # which is of this session alone
            if last is not None:
                self._globalstep_last_logged = last

    def _load_callback_state(self) -> None:
        """Set what callbacks had counted, and the best checkpoint, wherever the run was once."""
        super()._load_callback_state()
        for callback in self.callback_handler.callbacks:
            state = cast(dict, self.state.stateful_callbacks).get(type(callback).__name__)
            if isinstance(state, dict):  # a list is of several of one kind
                vars(callback).update(state.get("attributes", {}))
        if self._best is not None and self.state.best_model_checkpoint is None:
            logger.warning("The run was moved. Its best checkpoint is %s.", self._best)
        self.state.best_model_checkpoint = self._best
        self.state.compute_steps(self.args, self.state.max_steps)  # `logging_steps` may be another

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a checkpoint, its manifest last; then delete those of the lowest steps."""
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        folder = Path(self._get_output_dir(trial), name)
        if self.args.should_save:  # what is there was saved otherwise, or cannot be written over
            shutil.rmtree(folder, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            save_neighbors(folder, self.model.loss_fn)
            is_part = has_lora(self.model) or self.args.save == "trainable"
            is_packed = quantization_method(self.model.config) is not None
            if self._frozen is None and (is_part or not is_packed):
                self._frozen = frozen_sha256(self.model)  # once: it takes seconds
            write_manifest(
                folder,
                rows_per_step=rows_per_step(self.args),
                rows_at_once=rows_at_once(self.args),
                frozen_sha256=self._frozen,
                rows_sha256=self.rows_sha256,
                eval_sha256=self.eval_sha256,
            )
            best = Path(self.state.best_model_checkpoint or folder)
            rotate(folder.parent, keep=self._keep, protected=[folder, best])

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Note a new best; with `save_strategy="best"` also save what a callback asked for.

        transformers would save the best alone, and lose the steps before a SIGTERM.
        """
        return super()._determine_best_metric(metrics, trial) or self.control.should_save

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """Turn the ratios into whole steps, unless the schedule is one of transformers' own."""
        schedule = self.run_config.schedule
        if schedule is None or self.lr_scheduler is not None:
            return super().create_scheduler(num_training_steps, optimizer)
        optimizer = self.optimizer if optimizer is None else optimizer
        assert optimizer is not None, "transformers makes it first"
        given = self.args.get_warmup_steps(num_training_steps)
        warmup, decay = schedule.phase_steps(num_training_steps, warmup_steps=given)
        self.lr_scheduler = get_wsd_schedule(
            optimizer,
            num_warmup_steps=warmup,
            num_decay_steps=decay,
            num_training_steps=num_training_steps,
            decay_type=schedule.decay,
        )
        self._created_lr_scheduler = True
        return self.lr_scheduler

    @staticmethod
    def get_optimizer_cls_and_kwargs(
        args: TrainingArguments, model: PreTrainedModel | None = None
    ) -> tuple[Any, Any]:
        """Return AdamW on float32 masters for a model that trains weights of 16 bits."""
        found = Trainer.get_optimizer_cls_and_kwargs(args, model)
        if model is not None and low_precision_weights(model):
            return MasterWeightsAdamW, found[1]
        return found

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Leave prototypes out of weight decay: their norm is the head's business."""
        names = super().get_decay_parameter_names(model)
        head = self.model.dist_head
        if isinstance(head, LinearHead):
            return names
        tied = {name for name, weight in model.named_parameters() if weight is head.weight}
        return [name for name in names if not name.startswith("dist_head.") and name not in tied]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the exponent of the step just taken to its loss, or what it is learned to be now."""
        if self.stream_place is not None and self.state.max_steps:  # else counted from a resume
            self.state.epoch = self.state.global_step / self.state.max_steps
        if "loss" in logs:
            h_exp = self._head_callback.h_exp_of(self.state.global_step - 1, self.state)
            h_exp = self.model.h_exp if self.run_config.learns_h_exp else h_exp
            logs = logs if h_exp is None else {**logs, "h_exp": h_exp}
        super().log(logs, start_time)

    @property
    def _has_own_loss(self) -> bool:
        """Whether `compute_loss_func`, or `compute_loss` of a subclass, is trained on."""
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
        """Run one micro-batch; after an out-of-memory error in a cheaper way.

        Raises:
            StoppedError: One row does not fit into memory.
        """
        run = super().training_step
        loss = self._memory.run(
            lambda batch: run(model, batch, num_items_in_batch),
            inputs,
            step=self.state.global_step + 1,
            is_sum=num_items_in_batch is not None and not self._has_own_loss,
        )
        self._losses.append(loss)
        if self.accelerator.sync_gradients and self.args.world_size > 1:
            average_gradients(self._low_precision)
        return loss.nan_to_num(0, 0, 0)  # of a step that may be skipped

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Stop before loss or gradients that are not finite are used, or skip the step."""
        norm = super()._get_grad_norm(model, grad_norm)
        loss = torch.stack([torch.zeros_like(norm), *self._losses]).sum()
        if self.args.skip_bad_steps:  # every process has to decide alike
            loss = self.accelerator.reduce(loss)
        values = torch.stack([loss, norm]).tolist()
        if all(map(math.isfinite, values)):
            return norm
        found = {"step": self.state.global_step, "loss": values[0], "gradient_norm": values[1]}
        rows, batches = self.train_dataset, self._memory.batches
        save_bad_step(self.args, rows, self.stream_place, batches, **found)
        if self._num_bad_steps == self.args.skip_bad_steps:
            raise not_finite(**found)
        logger.warning(
            "Step %d was left out: its loss or gradients are not finite.", found["step"] + 1
        )
        self._num_bad_steps += 1
        model.zero_grad()  # optimizers leave alone what has no gradient
        # The loss that is logged next is a mean over the steps that were taken.
        self._tr_loss -= torch.stack(self._losses).nan_to_num(0, 0, 0).sum()
        self._globalstep_last_logged += 1
        return torch.zeros_like(norm)

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Weigh every labelled token alike; transformers averages the means of batches.

        Predictions, for `predict` and `compute_metrics`, are gathered by transformers' own loop; so
        is the loss of labels that are no classes of the head, and the user's own. Of one name the
        user's metric is returned.
        """
        if prediction_loss_only is None:
            prediction_loss_only = self.args.prediction_loss_only
        reads_again = not prediction_loss_only or self._has_own_loss
        self.model.eval()
        self.callback_handler.eval_dataloader = dataloader
        inputs = self._head_inputs(dataloader, counts=not reads_again)
        scores = score(self.model, inputs, self._gather_scores)
        metrics, num_rows = {}, 0 if scores is None else scores.num_rows
        # Rows to predict may have no labels.
        if scores is not None and (len(scores.labels) > 0 or description != "Prediction"):
            documents = documents_of(dataloader.dataset, num_rows)
            metrics = summarize(scores, self.model.dist_head, documents)
        found: Any = EvalLoopOutput(None, None, {}, None)  # ty: ignore[invalid-argument-type]
        if num_rows == 0 or reads_again:
            found = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
        others = dict(found.metrics or {})
        if num_rows > 0 and not self._has_own_loss:  # a mean of means, or of nothing
            others.pop(f"{metric_key_prefix}_loss", None)
        named = {f"{metric_key_prefix}_{key}": value for key, value in metrics.items()}
        return found._replace(metrics=named | others, num_samples=found.num_samples or num_rows)

    def _head_inputs(
        self, dataloader: DataLoader, *, counts: bool
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield hidden states and labels of every batch whose labels are classes of the head.

        Callbacks are told of it if it `counts`: of what is read twice, the second time.
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

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        """Load weights; of some checkpoints only those that train.

        A teacher is made of the base, whose frozen weights have to be those of the checkpoint.
        """
        if not load_part_(self.model, Path(resume_from_checkpoint)):
            check_frozen(self.model, Path(resume_from_checkpoint))
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            self._load_missing(Path(resume_from_checkpoint))

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Note what was not loaded; a tied weight is in the checkpoint under its other name."""
        tied = self.model.all_tied_weights_keys
        load_result.missing_keys[:] = [key for key in load_result.missing_keys if key not in tied]
        self._misses = bool(load_result.missing_keys)
        if not self._misses:
            super()._issue_warnings_after_load(load_result)

    def _load_missing(self, folder: Path) -> None:
        """Load a checkpoint in which transformers has saved experts under the names of its files.

        Only `from_pretrained` knows them. The trainers of transformers 5.23 would leave such
        weights as they are, with a warning.
        """
        if self._misses:
            model_class, config = type(self.model), HarmonicConfig.from_pretrained(folder)
            whole = load_checked(model_class, str(folder), config, dtype="auto")
            self.model.load_state_dict(whole.state_dict())
            self._misses = False

    def _load_best_model(self) -> None:
        """Load the best checkpoint's exponent with its weights: they belong together."""
        assert self.state.best_model_checkpoint is not None, "the callers look"
        folder = Path(self.state.best_model_checkpoint)
        check_whole(folder, is_best=True)
        if not load_part_(self.model, folder):
            super()._load_best_model()
            self._load_missing(folder)
        if self._head_callback.h_exp is not None:
            best = HarmonicConfig.from_pretrained(folder)
            assert best.h_exp is not None, "it is annealed"
            self.model.h_exp = best.h_exp

    def _is_done(self, checkpoint: Path, state: TrainerState) -> bool:
        """Whether a checkpoint is the last one of these arguments."""
        if self.args.max_steps > 0:
            return state.global_step >= self.args.max_steps
        # The epochs of a run in another folder may be others.
        is_own = checkpoint.resolve().parent == Path(str(self.args.output_dir)).resolve()
        return is_own and state.global_step >= state.max_steps

    def load_finished(self, checkpoint: Path, state: TrainerState) -> None:
        """Load a checkpoint after whose step nothing is left to train."""
        self._load_from_checkpoint(str(checkpoint))
        self.state = state
        if isinstance(self.processing_class, PreTrainedTokenizerBase):  # as training begins
            align_special_tokens(self.model, self.processing_class)
        if self._head_callback.h_exp is not None:
            self.model.h_exp = self._head_callback.h_exp.end
        if self.args.load_best_model_at_end and state.best_model_checkpoint is not None:
            self._load_best_model()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, whole; in a checkpoint only what trains, if `save` says so."""
        is_checkpoint = _internal_call and output_dir is not None
        if not is_checkpoint or self.args.save == "full":
            super().save_model(output_dir, _internal_call)
        elif self.args.should_save:
            save_trained(self.model, Path(output_dir))

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Save model and tokenizer as transformers does, without its training_args.bin.

        A model with LoRA is saved merged, with what trains beside it in `adapter/`.
        """
        if not self.args.should_save:
            return
        folder = str(output_dir or self.args.output_dir)
        Path(folder, RESUME_FILE).unlink(missing_ok=True)  # saved otherwise before
        if has_lora(self.model):
            save_adapter(self.model, Path(folder))
        self.model.save_pretrained(folder, state_dict=state_dict)
        tokenizer = self.processing_class
        if isinstance(tokenizer, PreTrainedTokenizerBase) and tokenizer._auto_class is None:
            tokenizer.init_kwargs.pop("auto_map", None)  # names code of the base, which was not run
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)

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
            kwargs: What scripts say for transformers' card; ours is made of the run.

        Returns:
            The address of the commit; of other processes than the first, nothing.

        Raises:
            ValueError: Bad input; nothing was sent.
            PushError: The Hub did not take it; the saved model is complete.
        """
        hub = self.run_config.hub
        if hub.repo_id is None:
            raise ValueError("hub_model_id: expected owner/name, got nothing")
        if not blocking or token is not None:
            raise ValueError(
                "push_to_hub: expected neither blocking=False nor a token, got one of them. A push "
                "is waited for, and `hf auth login` keeps the token"
            )
        if kwargs:
            logger.warning("push_to_hub: the card is made of the run, without %s.", [*kwargs])
        finish_pushes(self.callback_handler.callbacks)
        self.claim_output_folder()
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return ""
        folder = Path(str(self.args.output_dir))
        self.state.save_to_json(str(folder / "trainer_state.json"))
        to = replace(destination_of(hub), message=commit_message)
        given = {"revision": revision, "private": private}
        return push(folder, replace(to, **{k: v for k, v in given.items() if v is not None}))

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Look whether the Hub could be pushed to; the repo is made by the first push."""
        if self.is_world_process_zero():
            check_destination(destination_of(self.run_config.hub))

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Leave it to `PushCallback`, which pushes what ours publishes."""

    def _finish_current_push(self) -> None:
        """Wait at the end of the training for checkpoints on their way."""
        if self.args.push_to_hub:
            finish_pushes(self.callback_handler.callbacks)


def _check_batch(rows: Any, args: HarmonicTrainingArguments) -> None:
    """Refuse an epoch without a batch."""
    size = args.per_device_train_batch_size * args.world_size
    if args.dataloader_drop_last and isinstance(rows, Sized) and len(rows) < size:
        raise ValueError(
            f"training.dataloader_drop_last: expected false, got true with {len(rows)} rows "
            f"and {size} in a batch. Use a smaller training.per_device_train_batch_size"
        )


def _check_loss(args: HarmonicTrainingArguments, compute_loss_func: Any) -> None:
    """Refuse what a loss of the user replaces, or would not see."""
    for name in ("weight_column", "loss"):
        if getattr(args, name) is not None and compute_loss_func is not None:
            raise ValueError(
                f"{name}: expected nothing with compute_loss_func, which does not see it, got "
                f"{getattr(args, name)!r}. Leave one of them out"
            )


def _is_distributed(model: Any) -> bool:
    """Whether gradients of a model, or of what torch.compile has wrapped, are averaged."""
    return any(isinstance(module, DistributedDataParallel) for module in model.modules())


def _can_be(kind: type, value: Any) -> bool:
    """Whether a value is the same as a value of another type; a text may be a number."""
    try:
        return kind(value) == value or (isinstance(value, str) and kind in (int, float))
    except (TypeError, ValueError):
        return False
