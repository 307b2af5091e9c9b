"""A linear head that ranks tokens as a distance head does, for engines that know no other."""

import copy
import json
import os
import shutil
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from harmonic_sft.hub.staging import TOKENIZER, clean_tokenizer_config
from harmonic_sft.models import (
    DistLayer,
    HarmonicConfig,
    HarmonicForMaskedLM,
    Head,
    LinearHead,
    load_checked,
)

HEAD_FILE = "linear_head.safetensors"
NUM_TEXTS, NUM_TOKENS = 4, 16  # of random tokens, to measure what rounding does
COPIED = "The head of this model was linear already: weights and logits are unchanged."
REPLACED = """The model was trained with a distance head {where}.
In its place stands a linear head, for software that knows no other:
{rows}.

**Only the order of the tokens is kept**: a softmax over these logits does not give the
probabilities of the trained model.

The order is the same up to rounding to float32. Measured on {num_states} hidden states of this
model (of random tokens), against distances in float64: the first token was another one in
{num_first} of {num_states} rankings, and {num_swapped} of {num_pairs} pairs of neighbors
in the rankings had changed places. In 16 bits more of them will."""
README = """# A harmonic model with a linear head

{text}

`{head_file}` holds the head alone, in float32: {tensors}.
The other files are a complete model with this head. To load both, in this folder:

```python
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM

head = load_file("{head_file}")
model = AutoModelForMaskedLM.from_pretrained("./", trust_remote_code=True)
```

The logits of hidden states `[N, D]` are `hidden_states @ head["weight"].T{bias}`.
"""


def export_linear(folder: Path, target: Path) -> Path:
    """Write a model with a linear head that ranks all tokens as the model in `folder` does.

    Off the sphere -|x - w|^2 / 2 is x w - |w|^2 / 2 up to a constant per row; on it the order is
    that of the cosine. Rounding to float32 swaps tokens at almost the same distance, for
    all-MiniLM-L6-v2 (V = 30522, D = 384) 0.1 % of the neighbors in a ranking and the first token
    in none of 512. The README.md written says what was measured on the model exported.

    Args:
        folder: A saved harmonic model with a dist or a linear head.
        target: The new folder; must not exist, or be empty. It then holds a whole model,
            `linear_head.safetensors` (`weight` `[V, D]`, `bias` `[V]` if there is one) and a
            README.md.

    Returns:
        `target`.

    Raises:
        ValueError: `folder` holds no harmonic model, its head has no linear equal, or `target`
            is not empty.
    """
    place = target.resolve()
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise ValueError(f"target: expected an empty folder or none, got {str(target)!r}")
    _check_model(folder)
    model = load_checked(HarmonicForMaskedLM, str(folder), HarmonicConfig.from_pretrained(folder))
    head = linear_head(model.dist_head)
    draft = place.with_name(f".{place.name}.{os.getpid()}")
    draft.mkdir(parents=True)
    try:
        _with_head(model, head).save_pretrained(draft)
        save_file(head.state_dict(), draft / HEAD_FILE, metadata={"format": "pt"})
        (draft / "README.md").write_text(_readme(model, head))
        for pattern in TOKENIZER:
            for path in folder.glob(pattern):
                shutil.copyfile(path, draft / path.name)
        clean_tokenizer_config(draft / "tokenizer_config.json")
        draft.replace(place)  # whole or not at all
    except BaseException:
        shutil.rmtree(draft)
        raise
    return target


@torch.no_grad()
def linear_head(head: Head) -> LinearHead:
    """Return the linear head that ranks classes as `head` does, computed in float64.

    Args:
        head: A `DistLayer`, or a `LinearHead`, which is copied.

    Raises:
        ValueError: Another head.
    """
    if type(head) is LinearHead:
        return copy.deepcopy(head).float()  # a tied one may be in 16 bits
    if type(head) is not DistLayer:
        raise ValueError(
            f"head: expected dist or linear, got {head.settings()['name']}. Its ranking is not "
            "that of a dot product with one vector per token"
        )
    prototypes = head.weight.double()
    num_classes, hidden_size = prototypes.shape
    linear = LinearHead(hidden_size, num_classes, bias=not head.unit_sphere)
    if linear.bias is None:
        # The same floor as in the head's own forward pass: a row of zeros stays one.
        prototypes = F.normalize(prototypes, dim=-1, eps=1e-12)
    else:
        linear.bias.copy_(-prototypes.square().sum(-1) / 2)
    linear.weight.copy_(prototypes)
    return linear


def _check_model(folder: Path) -> None:
    path = folder / "config.json"
    if not path.is_file() or not any(folder.glob("*.safetensors")):
        raise ValueError(
            f"folder: expected a saved model (config.json and safetensors), got {str(folder)!r}"
        )
    fields = json.loads(path.read_text())
    if fields.get("model_type") != "harmonic":
        raise ValueError(
            f"folder: expected a harmonic model, got one of type {fields.get('model_type')!r}"
        )


def _with_head(model: HarmonicForMaskedLM, head: LinearHead) -> HarmonicForMaskedLM:
    """Return a model with the same body, not copied, and another head."""
    config = copy.deepcopy(model.config)
    config.head = head.settings()
    config.tie_word_embeddings = False  # the rows are scaled, and a body may be in 16 bits
    if config.trained_parameters is not None:
        own = [f"dist_head.{name}" for name, _ in head.named_parameters()]
        config.trained_parameters = sorted({*config.trained_parameters, *own})
    with torch.device("meta"):
        exported = HarmonicForMaskedLM(config)
    exported.model = model.model
    exported.dist_head = head
    return exported


@torch.no_grad()
def _count_swaps(model: HarmonicForMaskedLM, head: LinearHead) -> dict[str, int]:
    """Compare the order of the float32 logits with that of float64 distances."""
    generator = torch.Generator().manual_seed(0)
    num_classes = len(head.weight)
    input_ids = torch.randint(num_classes, (NUM_TEXTS, NUM_TOKENS), generator=generator)
    outputs = model.model(input_ids=input_ids, attention_mask=torch.ones_like(input_ids))
    hidden_states = outputs.last_hidden_state.flatten(0, 1)  # [N, D]
    exact = model.dist_head(hidden_states.double())  # a head computes as exactly as its input
    order = exact.argsort(-1, descending=True)
    logits = head(hidden_states).gather(-1, order)  # [N, V]
    swapped = logits[:, :-1] < logits[:, 1:]
    return {
        "num_states": len(logits),
        "num_first": int((logits[:, 0] < logits.amax(-1)).sum()),
        "num_swapped": int(swapped.sum()),
        "num_pairs": swapped.numel(),
    }


def _readme(model: HarmonicForMaskedLM, head: LinearHead) -> str:
    text, old = COPIED, model.dist_head
    if isinstance(old, DistLayer):
        rows = "its rows are the prototypes w, its bias is -|w|^2 / 2"
        if old.unit_sphere:
            rows = "its rows are the prototypes, scaled to norm 1, without a bias"
        where = "on the unit sphere" if old.unit_sphere else "off the unit sphere"
        text = REPLACED.format(where=where, rows=rows, **_count_swaps(model, head))
    num_classes, hidden_size = head.weight.shape
    tensors = f"`weight` [{num_classes}, {hidden_size}]"
    if head.bias is not None:
        tensors += f" and `bias` [{num_classes}]"
    bias = ' + head["bias"]' if head.bias is not None else ""
    return README.format(text=text, head_file=HEAD_FILE, tensors=tensors, bias=bias)
