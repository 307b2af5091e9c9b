"""NeoBERT with random weights in the layout of the published checkpoint, and a tokenizer.

    python scripts/make_neobert.py runs/neobert_random [--tokenizer FOLDER] [--small]

For trials of `configs/neobert.yaml` at its true shape where the real weights cannot be had. Without
`--tokenizer` a WordPiece tokenizer is trained on the docstrings of the standard library.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import BertWordPieceTokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from harmonic_sft import NeoBERTConfig, NeoBERTForMaskedLM
from harmonic_sft.data.docstrings import standard_library_docstrings

SMALL: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
    "max_position_embeddings": 256,
}
PUBLISHED = {  # what the published config.json says beside the shape
    "architectures": ["NeoBERTLMHead"],
    "auto_map": {
        "AutoConfig": "model.NeoBERTConfig",
        "AutoModel": "model.NeoBERT",
        "AutoModelForMaskedLM": "model.NeoBERTLMHead",
    },
    "model_type": "neobert",
    "torch_dtype": "float32",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the folder.

    Raises:
        ValueError: It is not empty.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="a new folder")
    parser.add_argument("--tokenizer", help="a folder or name; default: trained here")
    parser.add_argument("--small", action="store_true", help="three narrow blocks, for tests")
    options = parser.parse_args(arguments)
    folder = options.folder
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"folder: expected an empty one or none, got {str(folder)!r}")
    config = NeoBERTConfig(**(SMALL if options.small else {}))
    torch.manual_seed(0)
    NeoBERTForMaskedLM(config).save_pretrained(folder)
    shape = {key: getattr(config, key) for key in SMALL}
    shape["max_length"] = shape.pop("max_position_embeddings")  # the published name
    shape["dim_head"] = config.hidden_size // config.num_attention_heads
    (folder / "config.json").write_text(json.dumps({**PUBLISHED, **shape}, indent=2))
    if options.tokenizer is not None:
        given: Any = AutoTokenizer.from_pretrained(options.tokenizer)
        given.save_pretrained(folder)
        return
    tokenizer = BertWordPieceTokenizer()
    texts = standard_library_docstrings()
    tokenizer.train_from_iterator(texts, vocab_size=config.vocab_size, show_progress=False)
    special = {name: f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._tokenizer,
        **{f"{name}_token": token for name, token in special.items()},
    ).save_pretrained(folder)


if __name__ == "__main__":
    main()
