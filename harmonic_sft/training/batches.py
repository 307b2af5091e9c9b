"""Batches: what is counted on the CPU, the places of streams, fewer rows where memory is short."""

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard
from accelerate.utils.memory import release_memory, should_reduce_batch_size
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import TrainingArguments

from harmonic_sft.data.batches import EpochSampler, MaskedRows
from harmonic_sft.data.masking import IGNORE_INDEX
from harmonic_sft.data.row_maker import document_names
from harmonic_sft.data.streams import StreamedRows, StreamState, advance, collate_placed, merge
from harmonic_sft.models import HarmonicHeadModel, scored_positions
from harmonic_sft.training.arguments import HarmonicTrainingArguments
from harmonic_sft.training.callbacks import StoppedError
from harmonic_sft.training.checkpoints import rows_at_once, rows_per_step

logger = logging.getLogger(__name__)
STREAM_FILES = "stream_state_{}.json"  # process index
BAD_STEP = "bad_step_{}_{}.json"  # step, process index
COUNTS = ("label_positions", "num_tokens")  # what CountingCollator adds
COUNTED = ("input_ids", "attention_mask")  # what it counts tokens in
OF_LABELS = ("labels", "label_weights", *COUNTS)  # what a backbone does not take


@dataclass(frozen=True, kw_only=True)
class CountingCollator:
    """Makes batches and counts on the CPU, so that the trainer need not wait for the device.

    Attributes:
        collator: Makes a batch of rows.
        num_classes: V of the head; None if labels are not its classes.
        causal: The model predicts next tokens.
    """

    collator: Callable[[Any], dict[str, Any]]
    num_classes: int | None
    causal: bool

    def __call__(self, rows: Any) -> dict[str, Any]:
        """Make one batch.

        Returns:
            The batch of `collator` with `num_tokens`, without padding, which the trainer takes out,
            and if labels are classes with `label_positions`, `[N]`, an argument of the models.
        """
        try:
            batch = self.collator(rows)
        except Exception as error:  # such as a user's collator at columns it does not know
            if isinstance(rows, Sequence) and isinstance(rows[0], Mapping):
                error.add_note(
                    f"The collator was given rows as they are, with the columns {[*rows[0]]}. Take "
                    "out what it cannot use, dataset.remove_columns([...]). Labels of many lengths "
                    "are padded by transformers' DataCollatorForTokenClassification"
                )
            raise
        return self.count(batch)

    def count(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return a batch with its counts added."""
        mask = batch.get("attention_mask")
        if mask is not None and mask.dim() == 2:
            num_tokens = int(mask.sum())
        elif "input_ids" in batch:  # no mask, or one of pairs of tokens
            num_tokens = batch["input_ids"].numel()
        else:
            num_tokens = batch["inputs_embeds"][..., 0].numel()
        labels = batch.get("labels")
        if labels is None or self.num_classes is None or labels.is_floating_point():
            return {**batch, "num_tokens": num_tokens}
        positions = scored_positions(labels, num_classes=self.num_classes, causal=self.causal)
        return {**batch, "label_positions": positions, "num_tokens": num_tokens}

    def take_out_repeated_(
        self, batch: dict[str, Any], *, num_rows: int, size: int, process: int
    ) -> None:
        """Leave the rows that accelerate has added to the last batch out of the loss.

        `num_rows` is the number of its own rows, of all processes, and `size` the rows of each
        process. A batch laid out as one row, without labels or with shifted ones stays as it is.
        """
        num_left = max(0, num_rows - process * size)
        is_known = "labels" in batch and "shift_labels" not in batch
        if num_left >= size or not is_known or len(batch["labels"]) != size:
            return
        batch["labels"][num_left:] = IGNORE_INDEX
        own = {key: value[:num_left] for key, value in batch.items() if key in COUNTED}
        counted = self.count({**own, "labels": batch["labels"].cpu()})
        batch["num_tokens"] = counted["num_tokens"]
        if "label_positions" in counted:
            batch["label_positions"] = counted["label_positions"].to(batch["labels"].device)
        else:  # regression targets
            ones = torch.ones_like(batch["labels"], dtype=torch.float32)
            batch.setdefault("label_weights", ones)[num_left:] = 0


class StreamPlace:
    """Follows which rows of the streams were used, so that a resumed run takes the next ones."""

    def __init__(self, rows: StreamedRows, args: HarmonicTrainingArguments):
        self._rows, self._args = rows, args
        self.state = StreamState(rows=0, streams={})  # of the rows that this process has read
        self.examples: list[dict[str, int]] = []  # rows of this process in the current step

    def loader(self, collator: Callable[[Any], dict[str, Any]], batch_size: int) -> DataLoader:
        """Return this process's share as batches; accelerate would read all in every process."""
        args = self._args
        self._rows.share(
            process_index=args.process_index, num_processes=args.world_size, batch_size=batch_size
        )
        return DataLoader(
            self._rows,
            batch_size=batch_size,
            collate_fn=partial(collate_placed, collator),
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            prefetch_factor=args.dataloader_prefetch_factor,
            # transformers 5.10 has no such argument.
            multiprocessing_context=vars(args).get("dataloader_multiprocessing_context"),
            # Seeded now: a resumed run restores the random state before it reads, and must keep it.
            generator=torch.Generator().manual_seed(int(torch.randint(2**62, ()))),
        )

    def take(self, batches: Sequence[dict[str, Any]]) -> None:
        """Remove the places of the rows from the batches of a step, and note them."""
        places = [place for batch in batches for place in batch.pop("places")]
        self.examples = [{"stream": place.stream, "row": place.row} for place in places]
        self.state = advance(self.state, places, len(places) * self._args.world_size)

    def save(self, checkpoint: Path) -> None:
        """Write the state of this process."""
        path = checkpoint / STREAM_FILES.format(self._args.process_index)
        path.write_text(json.dumps(self.state))

    def load(self, checkpoint: Path | None) -> None:
        """Continue where the run of a checkpoint stood; without one, start at the first row."""
        paths = [] if checkpoint is None else sorted(checkpoint.glob(STREAM_FILES.format("*")))
        states: list[Any] = [json.loads(path.read_text()) for path in paths]
        for state in states:
            places = state["streams"].values()
            if "left_out" in state or any("duplicates" not in place for place in places):
                raise ValueError(
                    f"resume: expected a stream's place as this version writes it, got "
                    f"{str(checkpoint)!r} of an earlier one. Give it as the model of a new run"
                )
        self._rows.state = self.state = merge(states)


class MemoryFallback:
    """Runs micro-batches; out of memory it turns to gradient checkpointing, then to fewer rows.

    It then repeats the step from its first micro-batch with the same random numbers. Checkpointing
    leaves the result the same; fewer rows at a time sum in another order, with other dropout masks.
    """

    def __init__(self, args: HarmonicTrainingArguments, model: HarmonicHeadModel):
        self._args, self._model = args, model
        # Not `is_gradient_checkpointing`, which stays false where no block holds a graph.
        self.checkpoints_blocks = args.gradient_checkpointing
        if args.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        self.batches: list[dict[str, Any]] = []  # of this step, so far
        self._num_chunks = 1

    def run(
        self,
        backward: Callable[[dict[str, Any]], Tensor],
        batch: dict[str, Any],
        *,
        step: int,
        is_sum: bool,
    ) -> Tensor:
        """Return the loss of one micro-batch; `batches` has those before it in the same step.

        `backward` runs a micro-batch or some of its rows. With `is_sum` the losses of parts add up
        to that of the whole; without it they are means, and a micro-batch is never split.
        """
        if not self.batches:
            # For dropout in a repeated step, on the CPU and on every GPU.
            self._random_state = torch.get_rng_state(), torch.cuda.get_rng_state_all()
        self.batches.append(dict(batch))
        batches = [batch]
        while True:
            try:
                for micro_batch in batches:
                    chunks = split_batch(micro_batch, self._num_chunks)
                    losses = [backward(chunk) for chunk in chunks]
                return torch.stack(losses).sum()
            except RuntimeError as error:
                self._check_memory(error)
            # Outside of `except`: inside it the error keeps the tensors of its frames alive.
            change = self._fall_back(is_sum=is_sum)
            logger.warning("Out of memory at step %d: %s.", step, change)
            # The failed backward pass may have left some of its gradients: redo the whole step.
            self._model.zero_grad()
            torch.set_rng_state(self._random_state[0])
            torch.cuda.set_rng_state_all(self._random_state[1])
            batches = self.batches

    def _check_memory(self, error: RuntimeError) -> None:
        """Raise the error unless it is a lack of memory and the step can be repeated."""
        # Messages of the driver, cuBLAS, cuDNN and Triton, which accelerate does not know.
        is_known = any(words in str(error) for words in ("out of memory", "ALLOC_FAILED"))
        is_memory = is_known or should_reduce_batch_size(error)
        if not is_memory or not self._args.oom_fallback:
            raise error
        if self._args.world_size > 1:
            raise StoppedError(
                "out of memory: oom_fallback works on a single process only, since the others wait "
                "for this one. Lower per_device_train_batch_size, raise "
                "gradient_accumulation_steps, or set gradient_checkpointing: true"
            ) from error

    def _fall_back(self, *, is_sum: bool) -> str:
        """Turn gradient checkpointing on, or halve the chunks if it is on; return what was done."""
        release_memory()
        rows = num_rows(self.batches[-1])
        if not self.checkpoints_blocks:
            self.checkpoints_blocks = True
            with suppress(ValueError):  # some bodies have none
                self._model.gradient_checkpointing_enable()
                return "gradient checkpointing turned on"
        if not is_sum:
            raise StoppedError(
                "out of memory: a micro-batch does not fit with gradient checkpointing, and a mean "
                "over its rows is no sum of parts. Lower per_device_train_batch_size and raise "
                "gradient_accumulation_steps"
            )
        if self._num_chunks < rows:
            self._num_chunks *= 2
            size = math.ceil(rows / self._num_chunks)
            return f"micro-batches of {rows} rows run {size} at a time, same effective batch"
        raise StoppedError(
            "out of memory: one row at a time with gradient checkpointing does not fit. "
            "Lower data.context_length or use a smaller model"
        )


def split_batch(batch: dict[str, Any], num_chunks: int) -> list[dict[str, Any]]:
    """Split every tensor of a batch along its rows into at most `num_chunks` parts.

    `label_positions` are left out, since they index the whole batch; the model finds those of a
    part. Values that are not tensors go into every part.
    """
    if num_chunks == 1:
        return [batch]
    size = math.ceil(num_rows(batch) / num_chunks)
    batch = {key: value for key, value in batch.items() if key != "label_positions"}
    return [
        {k: v[start : start + size] if isinstance(v, Tensor) else v for k, v in batch.items()}
        for start in range(0, num_rows(batch), size)
    ]


def num_rows(batch: dict[str, Any]) -> int:
    """Return how many rows a batch has."""
    return len(batch["input_ids"] if "input_ids" in batch else batch["inputs_embeds"])


def head_inputs(model: HarmonicHeadModel, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the hidden states that the head gets, `[B, S, D]`, and their labels `[B, S]`."""
    inputs = {key: value for key, value in batch.items() if key not in OF_LABELS}
    hidden_states = model.model(**inputs).last_hidden_state  # [B, T, D]
    mask = model.attended(inputs.get("input_ids"), inputs.get("attention_mask"))
    states = model.select(hidden_states, mask)  # [B, S, D]
    return states, model.targets(batch["labels"]).reshape(states.shape[:2])


def batches_on(
    device: torch.device, rows: Any, collator: Any, batch_size: int
) -> Iterator[dict[str, Tensor]]:
    """Yield rows in their order, as batches on a device."""
    for batch in DataLoader(rows, batch_size=batch_size, collate_fn=collator):
        batch.pop("places", None)  # of a stream
        yield {key: value.to(device) for key, value in batch.items()}


def labelled_states(model: HarmonicHeadModel, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the hidden states `[N, D]` of the labelled positions of a batch, and their labels."""
    states, labels = head_inputs(model, batch)
    scored = labels != IGNORE_INDEX
    return states[scored], labels[scored]


def examples_of_step(
    rows: MaskedRows, args: TrainingArguments, *, step: int
) -> list[dict[str, int]]:
    """Return row, source and document of every row of a step, from 0 on, in all processes."""
    size, at_once = rows_per_step(args), rows_at_once(args)
    rounded = math.floor if args.dataloader_drop_last else math.ceil
    num_read = rounded(len(rows) / at_once) * at_once  # in an epoch
    start = step % math.ceil(num_read / size) * size
    items = islice(EpochSampler(rows, seed=args.seed), start, min(start + size, num_read))
    members = [m for item in items for m in ([item] if rows.packs is None else rows.packs[item])]
    sources, documents = document_names(rows.rows)
    return [
        {"row": int(m), "source": int(sources[m]), "document": int(documents[m])} for m in members
    ]


def save_bad_step(
    args: TrainingArguments,
    rows: Any,
    place: StreamPlace | None,
    batches: Sequence[dict[str, Any]],
    *,
    step: int,
    loss: float,
    gradient_norm: float,
) -> None:
    """Write which rows gave a loss or gradients that are not finite, into the output folder.

    Rows of a user's own data set have no names: the step's tokens are written in their place.
    """
    if isinstance(rows, MaskedRows):
        examples = examples_of_step(rows, args, step=step)
    elif place is not None:
        examples = place.examples
    else:
        tokens = [batch["input_ids"].tolist() for batch in batches if "input_ids" in batch]
        examples = [{"input_ids": ids} for rows in tokens for ids in rows]
    values = {"step": step + 1, "loss": str(loss), "gradient_norm": str(gradient_norm)}
    path = Path(str(args.output_dir), BAD_STEP.format(step + 1, args.process_index))
    path.write_text(json.dumps({**values, "examples": examples}, indent=1))


def last_batch_rows(loader: Any, args: TrainingArguments) -> int:
    """Return how many rows the last batch of all processes has before accelerate fills it up.

    accelerate repeats rows so that all processes have equally many. 0 if it repeats none.
    """
    sampler = loader.batch_sampler
    if args.dataloader_drop_last or not isinstance(sampler, BatchSamplerShard):
        return 0
    return len(sampler.batch_sampler.sampler) % rows_at_once(args)
