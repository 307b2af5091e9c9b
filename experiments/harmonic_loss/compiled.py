"""MLPs trained by compiled code, two to three times as fast as by PyTorch."""

import ctypes
import logging
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from experiments.harmonic_loss.data import Examples
from experiments.stacked import StackedMLP

if TYPE_CHECKING:
    from experiments.harmonic_loss.bench import Cell

logger = logging.getLogger(__name__)
SOURCE = Path(__file__).with_name("mlp.cpp")
HEADS = ("linear", "dist", "l2", "l2_squared", "dot_harmonic")  # numbered as in the source
WIDTH, MULTIPLE, BATCH_SIZE = 112, 16, 32  # as in the source


@cache
def library() -> ctypes.CDLL | None:
    """Compile the source for this processor; None without a compiler that can."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mlp.so"
        command = ["g++", "-O3", "-march=native", "-ffast-math", "-shared", "-fPIC", str(SOURCE)]
        if shutil.which(command[0]) is None:
            logger.info("No g++: PyTorch trains the MLPs, at a half to a third of the speed")
            return None
        done = subprocess.run([*command, "-o", str(path)], check=False, capture_output=True)
        if done.returncode != 0:
            logger.warning("g++ failed, so PyTorch trains the MLPs: %s", done.stderr.decode())
            return None
        return ctypes.CDLL(str(path))


class CompiledTrainer:
    """AdamW on the MLPs of all seeds, for the mean negative log-likelihood and the penalty.

    Args:
        code: See `library`.
        cell: What to train.
        body: Its MLPs, which follow the training.
        bias: `[S, 1, V]` of the linear head, which does too.
        examples: Of every seed.
    """

    def __init__(
        self,
        code: ctypes.CDLL,
        cell: "Cell",
        body: StackedMLP,
        bias: Tensor | None,
        examples: Examples,
    ):
        self.code, self.cell, self.num_steps = code, cell, 0
        self.inputs, self.labels = examples.inputs.contiguous(), examples.labels.contiguous()
        num_seeds, self.vocab_size, hidden_size = body.embedding.shape
        self.padded_size = -(-self.vocab_size // MULTIPLE) * MULTIPLE
        self.shapes: dict[Tensor, tuple[int, int]] = {
            body.embedding: (self.padded_size, hidden_size),
            body.weight_in: (body.weight_in.shape[1], WIDTH),
            body.bias_in: (1, WIDTH),
            body.weight_out: (WIDTH, hidden_size),
            body.bias_out: (1, hidden_size),
        }
        bias = torch.zeros(num_seeds, 1, self.vocab_size) if bias is None else bias
        self.shapes[bias] = (1, self.padded_size)
        flat = []
        for parameter, shape in self.shapes.items():
            padded = torch.zeros(num_seeds, *shape)
            padded[:, : parameter.shape[1], : parameter.shape[2]] = parameter.detach()
            flat.append(padded.flatten(1))
        self.parameters = torch.cat(flat, dim=1)  # [S, all of them]
        self.means, self.squares = torch.zeros(2, *self.parameters.shape)

    @torch.no_grad()
    def train(self, orders: Tensor) -> None:
        """Train for the epochs of `orders` `[S, epochs, N']`, rows of the examples."""
        cell, orders = self.cell, orders.contiguous()
        arrays = (self.parameters, self.means, self.squares, self.inputs, self.labels, orders)
        _, num_epochs, num_training = orders.shape
        self.code.train(
            *[ctypes.c_void_p(array.data_ptr()) for array in arrays],
            *self.labels.shape,
            num_epochs,
            num_training,
            self.num_steps,
            self.inputs.shape[2],
            self.vocab_size,
            self.padded_size,
            HEADS.index(cell.head),
            ctypes.c_float(cell.h_exp),
            ctypes.c_float(cell.penalty),
            ctypes.c_float(cell.learning_rate),
            ctypes.c_float(cell.weight_decay),
        )
        self.num_steps += num_epochs * -(-num_training // BATCH_SIZE)
        parts = self.parameters.split([a * b for a, b in self.shapes.values()], dim=1)
        for (parameter, shape), part in zip(self.shapes.items(), parts, strict=True):
            _, rows, columns = parameter.shape
            parameter.copy_(part.unflatten(1, shape)[:, :rows, :columns])
