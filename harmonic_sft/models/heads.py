"""All output heads by name: what turns a hidden state into one logit per class."""

from typing import Any

from .cosine_heads import CosineHead, VonMisesFisherHead
from .dist_layer import DistLayer
from .head import Head
from .linear_heads import L2Head, LinearHead, PowerHead
from .multi_head import MultiHead
from .rotation import RotationHead

HEADS: dict[str, type[Head]] = {
    "linear": LinearHead,
    "dist": DistLayer,
    "cosine": CosineHead,
    "vmf": VonMisesFisherHead,
    "l2": L2Head,
    "power": PowerHead,
    "rotation": RotationHead,
    "multi_head": MultiHead,
}


def build_head(settings: dict[str, Any], *, hidden_size: int, vocab_size: int) -> Head:
    """Build a head from `{"name": ..., fields...}`, the inverse of `Head.settings`.

    Raises:
        ValueError: The name is not in `HEADS`, or a field is not one of that head's.
    """
    fields = dict(settings)
    name = fields.pop("name", None)
    if name not in HEADS:
        raise ValueError(f"head name: expected one of {sorted(HEADS)}, got {name!r}")
    try:
        return HEADS[name](hidden_size, vocab_size, **fields)
    except TypeError as error:
        raise ValueError(f"head {name}: expected its own fields, got {fields}. {error}") from error
