"""Heads whose logits are dot products: the ordinary softmax layer and its kin."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from .head import AffineForm, Head


class LinearHead(Head):
    """The ordinary softmax head, logits = hidden_states @ weight.T + bias: the baseline."""

    def __init__(self, hidden_size: int, vocab_size: int, *, bias: bool = True):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size, dtype=torch.float32))
        zeros = torch.zeros(vocab_size, dtype=torch.float32) if bias else None
        self.bias = nn.Parameter(zeros) if zeros is not None else None
        self.reset_parameters()

    def form(self, hidden_states: Tensor) -> AffineForm:
        """Return the logits' form for hidden states `[N, D]`."""
        return AffineForm(hidden_states, self.weight, self.bias)

    def reset_parameters(self) -> None:
        """Draw the weight from N(0, 0.02 ** 2), as transformers does; the bias is 0."""
        init.normal_(self.weight, std=0.02)
        if self.bias is not None:
            init.zeros_(self.bias)

    def settings(self) -> dict[str, Any]:
        """Return the name and the fields of this head."""
        return {"name": "linear", "bias": self.bias is not None}
