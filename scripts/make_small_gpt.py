"""The shape of a small GPT-2 and a tokenizer of its own, for `configs/causal/small_gpt.yaml`.

    python scripts/make_small_gpt.py TEXT runs/small_gpt_shape [--vocab-size 8192]

TEXT is a file with one document a line. The folder gets a `config.json` and a byte-level BPE
tokenizer trained on it; weights are drawn when training starts from scratch.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from tokenizers import ByteLevelBPETokenizer
from transformers import GPT2Config, PreTrainedTokenizerFast

END = "<|endoftext|>"


def main(arguments: Sequence[str] | None = None) -> Path:
    """Write the folder and return its path.

    Raises:
        ValueError: The text is missing, or the folder is not empty.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path, nargs="+", help="files with one document a line")
    parser.add_argument("folder", type=Path, help="a new folder")
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    options = parser.parse_args(arguments)
    for path in options.text:
        if not path.is_file():
            raise ValueError(f"text: expected a file, got {str(path)!r}")
    if options.folder.exists() and any(options.folder.iterdir()):
        raise ValueError(f"folder: expected an empty one or none, got {str(options.folder)!r}")
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train(
        [str(path) for path in options.text],
        vocab_size=options.vocab_size,
        special_tokens=[END],
        show_progress=False,
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._tokenizer, eos_token=END, bos_token=END
    )
    end = fast.eos_token_id
    config = GPT2Config(
        vocab_size=len(fast),
        n_embd=options.hidden_size,
        n_layer=options.layers,
        n_head=options.hidden_size // 64,
        n_positions=256,
        bos_token_id=end,
        eos_token_id=end,
    )
    fast.save_pretrained(options.folder)
    config.save_pretrained(options.folder)
    return options.folder


if __name__ == "__main__":
    main()
