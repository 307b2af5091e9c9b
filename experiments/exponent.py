"""What `h_exp` does on the unit sphere: a token's probability over its cosine, a picture."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from experiments.figures import COLORS
from harmonic_sft.models import DistLayer
from harmonic_sft.plots import new_figure, save_figure

EXPONENTS, VOCAB_SIZE = (-4.0, -12.0, -24.0), 30_522


def main(name: str, arguments: Sequence[str]) -> None:
    """Draw the probability of a token by its cosine, all other prototypes at a right angle."""
    parser = argparse.ArgumentParser(prog=f"python -m experiments {name}", description=main.__doc__)
    parser.add_argument("picture", type=Path, help="the PNG file, such as docs/exponent.png")
    draw(parser.parse_args(arguments).picture)


def draw(out_png: Path) -> Path:
    """Draw one line for each of `EXPONENTS`."""
    cosines = torch.linspace(-0.2, 1, 241)
    figure = new_figure(width=8.0, height=3.4)
    axes = figure.subplots()
    for h_exp, color in zip(EXPONENTS, COLORS[1:], strict=False):
        axes.plot(cosines, probabilities(cosines, h_exp), color=color, label=f"h_exp {h_exp:g}")
    axes.set_xlabel("cosine of hidden state and prototype")
    axes.set_ylabel(f"probability, {VOCAB_SIZE:,} tokens")
    axes.legend(loc="upper left")
    return save_figure(figure, out_png, grid="both")


@torch.no_grad()
def probabilities(cosines: torch.Tensor, h_exp: float) -> torch.Tensor:
    """Return by the head itself what a token has at each of the cosines `[N]`."""
    head = DistLayer(3, VOCAB_SIZE, h_exp=h_exp)
    head.weight.copy_(torch.tensor([0.0, 0.0, 1.0]).expand(VOCAB_SIZE, 3))
    head.weight[0] = torch.tensor([1.0, 0.0, 0.0])
    states = torch.stack([cosines, (1 - cosines**2).sqrt(), torch.zeros_like(cosines)], 1)
    return head(states).softmax(-1)[:, 0]
