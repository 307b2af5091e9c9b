"""A Trainer whose runs can be resumed: whole checkpoints, the same rows, one folder for a run."""

import hashlib
import json
import logging
import math
import shutil
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from accelerate import PartialState
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from transformers import (
    EarlyStoppingCallback,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    __version__,
)
from transformers.trainer_utils import (
    PREFIX_CHECKPOINT_DIR,
    HPSearchBackend,
    TrainOutput,
    has_length,
)

from harmonic_sft.data.batches import EpochSampler, MaskedRows
from harmonic_sft.data.row_maker import rows_digest
from harmonic_sft.data.streams import StreamedRows
from harmonic_sft.eval.scoring import DivergedError
from harmonic_sft.hub.run_folder import RUN_FILE, read_tensors
from harmonic_sft.models import HarmonicConfig, HarmonicHeadModel
from harmonic_sft.models.backbones import load_checked
from harmonic_sft.models.configuration_harmonic import quantization_method
from harmonic_sft.models.partial_checkpoint import RESUME_FILE
from harmonic_sft.training.adapters import has_lora, load_part_, save_adapter
from harmonic_sft.training.arguments import HarmonicTrainingArguments, changed
from harmonic_sft.training.batches import StreamPlace
from harmonic_sft.training.callbacks import TERMINATED, StoppedError, TerminationCallback
from harmonic_sft.training.checkpoints import (
    all_checkpoints,
    check_continues,
    check_frozen,
    check_undamaged,
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
from harmonic_sft.training.output_folder import (
    check_output_folder,
    check_same_arguments,
    check_same_settings,
    check_shared,
    claim_output_folder,
    holds_a_run,
    is_empty,
    locked,
)
from harmonic_sft.training.peers import naming_silent_peers
from harmonic_sft.training.preparation import Preparation
from harmonic_sft.training.publishing import finish_pushes

logger = logging.getLogger(__name__)


class ResumableTrainer(Trainer):
    """transformers' Trainer whose runs can be killed at any moment and continue with the same bits.

    A checkpoint counts only if it is whole by its manifest of checksums. Beside what transformers
    saves it holds the losses since the last log, the places in streams and tables of neighbors. A
    run has to continue with the settings, rows, frozen weights and rows per step that it began
    with. Its output folder is its own. `training_args.bin`, a pickle, is never written.
    """

    model: HarmonicHeadModel
    args: HarmonicTrainingArguments
    data_collator: Any

    def __init__(
        self,
        preparation: Preparation,
        *,
        args: HarmonicTrainingArguments,
        train_dataset: Any,
        callbacks: Sequence[TrainerCallback],
        **kwargs: Any,
    ):
        self._preparation = preparation
        self.run_config = preparation.config
        self.stream_place: StreamPlace | None = None
        if isinstance(train_dataset, StreamedRows):
            self.stream_place = StreamPlace(train_dataset, args)
        self._termination = TerminationCallback(is_alone=args.world_size == 1)
        callbacks = [self._termination, *callbacks]
        with changed(args, enable_jit_checkpoint=False):  # our callback handles SIGTERM
            super().__init__(args=args, train_dataset=train_dataset, callbacks=callbacks, **kwargs)
        # `train` compares these two, since rows and model were made of them.
        self._original_args = args.to_dict()
        self._original_rows = train_dataset if preparation.makes_rows else None
        folder = Path(str(args.output_dir))
        self._empty_at_start = folder if is_empty(folder) else None
        self.claimed: Path | None = None  # the output folder, once it belongs to this run
        self._claim: bytes | None = None  # the configuration that says so
        self._is_at_work = self._is_own = False  # inside `at_work`; a run continues in its folder
        self._last_trained: Path | None = None  # output folder of the last `train`
        self._resumed_best: str | None = None  # the best checkpoint when the run was resumed
        self._num_kept: int | None = None  # args.save_total_limit, which is None while training
        self._frozen: str | None = None  # checksum of the frozen weights

    @contextmanager
    def at_work(self, *, resume: bool = False, claims: bool = True) -> Generator[None]:
        """Make the output folder this run's alone, name silent processes, and wait for pushes.

        A trial of a search claims no folder. A nested block does nothing.
        """
        folder = Path(str(self.args.output_dir))
        if self._is_at_work:
            yield
            return
        if claims and folder.expanduser() != self.run_config.output_dir:
            self.run_config = self._preparation.configure_trial()  # changed after `__init__`
        run = replace(self.run_config, resume=resume)
        # If the folder was empty at the start, this trainer wrote what it holds, such as metrics.
        is_main, claims = PartialState().is_main_process, claims and self.claimed != folder
        if is_main and claims and self._empty_at_start != folder:
            check_output_folder(run)
        # The main process alone writes, so its lock is enough.
        with locked(folder) if is_main else nullcontext(), naming_silent_peers(self.args):
            if claims:
                if is_main:
                    claim_output_folder(run)
                self.claimed, self._claim = folder, check_shared(folder)
            elif is_main and self._claim and (folder / RUN_FILE).read_bytes() != self._claim:
                raise holds_a_run(folder)  # of another trainer, which may have trained since
            self._is_at_work = True
            try:
                yield
            finally:
                self._is_at_work = False
                finish_pushes(self.callback_handler.callbacks)

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train, or continue a run; see `transformers.Trainer.train`.

        Args:
            resume_from_checkpoint: A folder, or True for the newest whole checkpoint.
            trial: Set by a hyper-parameter search.
            ignore_keys_for_eval: Outputs of the model that evaluations do not gather.

        Raises:
            ValueError: The output folder holds another run, no whole checkpoint, or a checkpoint
                with another number of rows per step; or another process trains in it.
            StoppedError: Loss or gradients are not finite, one row does not fit into memory, or
                another process does not answer.
            SystemExit: A SIGTERM came; the current step was completed and saved.
        """
        folder = Path(str(self.args.output_dir))
        checkpoint = find_checkpoint(resume_from_checkpoint, folder)
        if checkpoint is not None:
            check_same_settings(checkpoint, self.run_config)
        if self._preparation.makes_rows and self.train_dataset is not self._original_rows:
            raise ValueError(
                "train_dataset: expected the one that the trainer was made with, got another, of "
                "which no rows were made. Make another trainer"
            )
        is_search = trial is not None and self.hp_search_backend == HPSearchBackend.OPTUNA
        if trial is None:
            if self.model_init is not None:  # a search has changed the arguments
                self.run_config = self._preparation.configure_trial()
            else:
                check_same_arguments(self._original_args, self.args.to_dict())
            is_again = checkpoint is None and self._last_trained == folder
            if is_again and any(map(was_saved, all_checkpoints(folder))):
                raise holds_a_run(folder)
        try:
            with self.at_work(resume=checkpoint is not None, claims=trial is None):
                self._last_trained = folder if trial is None else self._last_trained
                output = self._train(checkpoint, trial, ignore_keys_for_eval)
                if is_search and self.objective is None:  # before the folder is unlocked
                    self.objective = self.compute_objective(self.evaluate())
                return output
        except (StoppedError, DivergedError) as error:
            if not is_search:
                raise
            if self.args.process_index > 0:  # the first process tells the search
                self.objective = math.nan
                return TrainOutput(self.state.global_step, math.nan, {})
            import optuna

            raise optuna.TrialPruned(str(error)) from error  # so that other trials follow

    def _train(self, checkpoint: Path | None, *options: Any) -> TrainOutput:
        args, accumulation, first_step = self.args, self.args.gradient_accumulation_steps, 0
        self._is_own = False
        if self.stream_place is not None:
            self.stream_place.load(checkpoint)
        if checkpoint is not None:
            self.check_continues(checkpoint)
            state = read_state(checkpoint, needs_best=args.load_best_model_at_end)
            if isinstance(self.train_dataset, IterableDataset) and self.stream_place is None:
                logger.warning(
                    "An IterableDataset of your own is read from its start, and the batches of all "
                    "steps taken are left out: the same rows only if none came twice."
                )
            self._resumed_best, first_step = state.best_model_checkpoint, state.global_step
            self._is_own = checkpoint.resolve().parent == Path(str(args.output_dir)).resolve()
            accumulation = same_accumulation(checkpoint, args)
            load_neighbors_(checkpoint, self.model.loss_fn)
        # `_save_checkpoint` deletes old checkpoints: transformers would go by modification times,
        # delete before the manifest is there and, at the end, delete all but the best checkpoint.
        self._num_kept = args.save_total_limit
        with (
            self._termination.listening(is_asked=args.enable_jit_checkpoint),
            changed(
                args,
                # A resumed run has done it, and early stopping would count it twice.
                eval_on_start=args.eval_on_start and checkpoint is None,
                ignore_data_skip=self.stream_place is not None,  # `load` has set the place
                save_total_limit=None,
                gradient_accumulation_steps=accumulation,
            ),
        ):
            output = super().train(str(checkpoint) if checkpoint else None, *options)
        if self._termination.agreed:
            raise SystemExit(TERMINATED)
        if checkpoint is not None and output.global_step == first_step:
            logger.warning("Finished: nothing is left to train after %s.", checkpoint)
        return output

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Train an epoch unless the run has ended, where transformers would take one more step."""
        # A run from another folder may have had other reasons to stop early.
        if self.state.global_step < self.state.max_steps and not (
            self._is_own and self.is_stopped_early
        ):
            super()._run_epoch(*args, **kwargs)
        else:
            self.control.should_training_stop = True

    def check_continues(self, checkpoint: Path) -> None:
        """Refuse a checkpoint with other classes or rows, or of another commit of the base."""
        rows = {"rows_sha256": self.rows_sha256, "eval_sha256": self.eval_sha256}
        check_continues(checkpoint, self.model.config, **rows)

    @cached_property
    def rows_sha256(self) -> str | None:
        """The checksum of the training rows; for a stream that of the tokenizer's vocabulary.

        For rows that are not ours it is their number, None if that is unknown.
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
        """The checksums of the evaluation sets that are tables of ours; None if there are none."""
        data = self.eval_dataset
        sets = data.values() if isinstance(data, dict) else [data]
        digests = [rows_digest(rows.rows) for rows in sets if isinstance(rows, MaskedRows)]
        return " ".join(sorted(digests)) or None

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler | None:
        """Shuffle by (seed, epoch) alone, whatever the number of processes; a stream has none."""
        if isinstance(self.train_dataset, MaskedRows):
            return EpochSampler(self.train_dataset, seed=self.args.seed)
        return super()._get_train_sampler(train_dataset)

    def get_train_dataloader(self) -> DataLoader:
        """Read this process's share of a stream; accelerate would read all in every process."""
        if self.stream_place is None:
            return super().get_train_dataloader()
        loader = self.stream_place.loader(self.data_collator, self._train_batch_size)
        return self._termination.keep_workers_(loader)

    def _save_rng_state(self, output_dir: str) -> None:
        """Save also the losses since the last log and the places in streams.

        These are saved here because transformers calls this in every process.
        """
        super()._save_rng_state(output_dir)
        loss = self._tr_loss.item()
        last = self._globalstep_last_logged
        save_running_loss(Path(output_dir), self.args.process_index, loss, last)
        if self.stream_place is not None:
            self.stream_place.save(Path(output_dir))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Load also the losses since the last log."""
        super()._load_rng_state(checkpoint)
        if checkpoint is not None:
            loss, last = load_running_loss(Path(checkpoint), self.args)
            self._tr_loss += loss
            self._total_loss_scalar -= loss  # the training's mean loss is of this session alone
            if last is not None:
                self._globalstep_last_logged = last

    def _load_callback_state(self) -> None:
        """Restore counters of callbacks and, if the run was moved, the best checkpoint's path."""
        super()._load_callback_state()
        for callback in self.callback_handler.callbacks:
            state = cast(dict, self.state.stateful_callbacks).get(type(callback).__name__)
            if isinstance(state, dict):  # it is a list for several callbacks of one class
                vars(callback).update(state.get("attributes", {}))
        if self._resumed_best is not None and self.state.best_model_checkpoint is None:
            logger.warning("The run was moved. Its best checkpoint is %s.", self._resumed_best)
        self.state.best_model_checkpoint = self._resumed_best
        self.state.compute_steps(self.args, self.state.max_steps)  # logging_steps may have changed

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a checkpoint, its manifest last; then delete those of the lowest steps."""
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        folder = Path(self._get_output_dir(trial), name)
        if self.args.should_save:  # an older one may have other files
            shutil.rmtree(folder, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            save_neighbors(folder, self.model.loss_fn)
            is_part = has_lora(self.model) or self.args.save == "trainable"
            is_quantized = quantization_method(self.model.config) is not None
            # Whole quantized weights change as they are used: they have no checksum.
            if self._frozen is None and (is_part or not is_quantized):
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
            rotate(folder.parent, keep=self._num_kept, protected=[folder, best])

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Note a new best model, and save it if the best one is loaded at the end.

        transformers saves no checkpoint of it if saves are rarer than evaluations. With
        `save_strategy="best"` it saves nothing else, and the last steps before a SIGTERM are lost.
        """
        is_best = super()._determine_best_metric(metrics, trial)
        self.control.should_save |= is_best and self.args.load_best_model_at_end
        return is_best or self.control.should_save

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        """Load the weights; refuse other frozen ones, since a teacher may share the model's."""
        folder = Path(resume_from_checkpoint)
        check_frozen(self.model, folder)
        before = HarmonicConfig.from_pretrained(folder).transformers_version
        if before != __version__:
            logger.warning("%s is of transformers %s, this is %s.", folder, before, __version__)
        self._load_weights(folder)

    def _load_best_model(self) -> None:
        """Load the best checkpoint, if it is whole."""
        assert self.state.best_model_checkpoint is not None, "callers check this"
        folder = Path(self.state.best_model_checkpoint)
        check_undamaged(folder, is_best=True)
        self._load_weights(folder)

    def _load_weights(self, folder: Path) -> None:
        """Load weights and exponent of a checkpoint, which may hold trained weights only."""
        config = HarmonicConfig.from_pretrained(folder)
        if not load_part_(self.model, folder):
            saved = dict(read_tensors(folder, ("",)))
            keys = self.model.load_state_dict(saved, strict=False)
            missing = set(keys.missing_keys).difference(self.model.all_tied_weights_keys)
            if missing:  # such as experts, which have other names in files
                whole = load_checked(type(self.model), str(folder), config, dtype="auto")
                self.model.load_state_dict(whole.state_dict())
            elif keys.unexpected_keys:
                logger.warning("%s has more: %s.", folder, ", ".join(keys.unexpected_keys))
        if config.h_exp is not None and not self.run_config.learns_h_exp:
            self.model.h_exp = config.h_exp

    @property
    def is_stopped_early(self) -> bool:
        """Whether early stopping has ended the training."""
        return any(
            callback.early_stopping_patience_counter >= callback.early_stopping_patience
            for callback in self.callback_handler.callbacks
            if isinstance(callback, EarlyStoppingCallback)
        )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the whole model; in a checkpoint, with `save: trainable`, only what trains."""
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
        Path(folder, RESUME_FILE).unlink(missing_ok=True)  # of an earlier save in another form
        if has_lora(self.model):
            save_adapter(self.model, Path(folder))
        self.model.save_pretrained(folder, state_dict=state_dict)
        tokenizer = self.processing_class
        if isinstance(tokenizer, PreTrainedTokenizerBase) and tokenizer._auto_class is None:
            tokenizer.init_kwargs.pop("auto_map", None)  # the base's code, which was not run
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
