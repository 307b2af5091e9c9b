"""Models saved in full and in part, and what they compute where this package is not installed."""

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

READER = """
import sys, torch, transformers
from pathlib import Path
for path in map(Path, sys.argv[2:]):
    options = {"trust_remote_code": True, "cache_dir": sys.argv[1]}  # where bases are
    expected = torch.load(f"{path}.pt", weights_only=True)
    auto, inputs = getattr(transformers, expected["auto"]), expected["inputs"]
    model = auto.from_pretrained(path, **options)
    assert torch.equal(model(**inputs).logits, expected["logits"]), path
    assert model.h_exp == expected["h_exp"], path
    assert model.dist_head.weight.dtype == torch.float32, path
    dtypes = {n: str(p.dtype) for n, p in model.named_parameters()}
    assert dtypes == expected["dtypes"], path
    backbone = transformers.AutoModel.from_pretrained(path, **options)
    assert torch.equal(backbone(**inputs).last_hidden_state, expected["states"]), path
    model.save_pretrained(f"{path}-again")
    again = auto.from_pretrained(f"{path}-again", trust_remote_code=True)
    assert torch.equal(again(**inputs).logits, expected["logits"]), path
"""


class SavedModels:
    """Saves models, and checks what they compute where this package is not installed."""

    def __init__(self, folder, elsewhere):
        self.folder, self.elsewhere, self.paths = folder, elsewhere, []

    @torch.no_grad()
    def add(self, name, model, auto="AutoModelForMaskedLM", **inputs):
        """Save a model, unless its folder is there, and what it computes."""
        path = self.folder / name
        if not path.exists():
            model.save_pretrained(path)
        logits = model(**inputs).logits
        assert logits.isfinite().all()
        expected = {
            "auto": auto,
            "inputs": inputs,
            "logits": logits,
            "states": model.model(**inputs).last_hidden_state,
            "dtypes": {name: str(p.dtype) for name, p in model.named_parameters()},
            "h_exp": model.dist_head.h_exp,
        }
        torch.save(expected, f"{path}.pt")
        self.paths.append(path)
        return path

    def run(self):
        self.elsewhere(READER, os.environ["HF_HUB_CACHE"], *self.paths)


def change_json(path: Path, **fields) -> dict:
    """Set fields of a JSON file, and return what was in it before."""
    before = json.loads(path.read_text())
    path.write_text(json.dumps({**before, **fields}))
    return before


def change_weights(path: Path, change) -> None:
    """Let `change` set what a file of safetensors holds, in place."""
    weights = load_file(path)
    change(weights)
    save_file(weights, path, {"format": "pt"})


def spoil_embeddings(path: Path) -> str:
    """Put a NaN into embeddings that a file holds, and return their name."""
    with safe_open(path, "pt") as file:
        name = next(name for name in file.keys() if "embeddings" in name)  # noqa: SIM118
    change_weights(path, lambda weights: weights[name].view(-1)[3].fill_(torch.nan))
    return name


def write_partial(full: Path, folder: Path) -> None:
    """Keep of a saved model what its configuration says was trained."""
    shutil.copytree(full, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    fields = json.loads((full / "config.json").read_text())
    tensors = load_file(full / "model.safetensors")
    trained = {name: tensors[name] for name in fields["trained_parameters"]}
    head = {name: tensor for name, tensor in trained.items() if name.startswith("dist_head")}
    blocks = {name: tensor for name, tensor in trained.items() if name not in head}
    save_file(head, folder / "dist_head.safetensors", {"format": "pt"})
    if blocks:
        save_file(blocks, folder / "trained_blocks.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**fields, "partial": True}))
