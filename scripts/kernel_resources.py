"""Registers, spills and shared memory of our Triton kernels, by compiling them; needs no GPU.

    python scripts/kernel_resources.py [--targets 89 90] [--blocks 2x1024x4,4x1024x4] [--json FILE]

A block is rows x classes x warps of one program of the statistics; the first is the one in use.
Spills are bytes that a thread stores to and loads from memory because its registers do not suffice.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).parents[1]))

from harmonic_sft.ops import (
    LossOptions,
    distance_cross_entropy,
    linear_cross_entropy,
    triton_tiles,
)
from harmonic_sft.results import environment, show_table, write_results

BLOCKS = "2x1024x4,4x1024x4,4x512x4,8x256x4,16x128x4,4x1024x8,1x2048x4"
NUM_ROWS, NUM_CLASSES = 64, 50257  # an odd number, GPT-2's, whose rows start anywhere
CARDS = {89: "RTX 4090", 90: "H100, H200"}
FIGURES = {
    "registers": r"Used (\d+) registers",
    "spill stores": r"(\d+) bytes spill stores",
    "spill loads": r"(\d+) bytes spill loads",
}


class Compiler:
    """Stands for the driver of a GPU; kernels that are called are compiled and never run."""

    def __init__(self, capability: int):
        self.target = GPUTarget("cuda", capability, 32)
        self.found: dict[str, dict[str, int]] = {}

    def get_current_device(self) -> int:
        """Return a number of its own: triton looks up what it compiled by that of the device."""
        return int(self.target.arch)

    def get_current_stream(self, device: int) -> int:
        """Return the stream of a device."""
        return device

    def get_current_target(self) -> GPUTarget:
        """Return what is compiled for."""
        return self.target

    def compile(self, function: Any, *args: Any, run: Any, **options: Any) -> None:
        """Compile a kernel instead of launching it, and keep the most it takes."""
        kernel = run(function, *args, **options | {"warmup": True})
        assert kernel.metadata.target.arch == self.target.arch, "compiled for another capability"
        figures = {**assemble(kernel.asm["ptx"]), "shared bytes": kernel.metadata.shared}
        before = self.found.setdefault(function.fn.__name__, figures)
        before.update({name: max(before[name], value) for name, value in figures.items()})


def assemble(code: str) -> dict[str, int]:
    """Return what the assembler says of a kernel in PTX."""
    target = re.search(r"^\.target (\w+)", code, re.M)
    assert target is not None, "PTX names its target"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(code)
        command = [knobs.nvidia.ptxas.path, "-v", f"--gpu-name={target[1]}", str(path)]
        run = subprocess.run(
            [*command, "-o", os.devnull], capture_output=True, text=True, check=True
        )
    matches = {name: re.search(pattern, run.stderr) for name, pattern in FIGURES.items()}
    return {name: int(match[1]) for name, match in matches.items() if match is not None}


def call_losses() -> None:
    """Call the losses in every form that the kernels are compiled for."""
    labels = torch.zeros(NUM_ROWS, dtype=torch.long)
    prototypes = torch.ones(NUM_CLASSES, 16, requires_grad=True)
    bias = torch.zeros(NUM_CLASSES, requires_grad=True)
    several = labels.unsqueeze(1) + torch.arange(11)  # a label, and its nearest neighbors
    weights = torch.full(several.shape, 1 / 11)
    forms = (
        (labels, LossOptions()),
        (labels, LossOptions(class_bias=bias, label_smoothing=0.1)),
        (several, LossOptions(target_weights=weights)),
    )
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        states = torch.ones(NUM_ROWS, 16, dtype=dtype, requires_grad=True)
        for targets, options in forms:
            given: dict[str, Any] = {"options": options, "impl": "triton"}
            linear_cross_entropy(states, prototypes, targets, **given)
            for unit_sphere in (False, True):
                distance_cross_entropy(
                    states, prototypes, targets, h_exp=-12.0, unit_sphere=unit_sphere, **given
                )


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Compile the kernels, print the table and return its rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--targets", type=int, nargs="+", default=list(CARDS), help="capabilities")
    parser.add_argument("--blocks", default=BLOCKS, help=f"default: {BLOCKS}")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args(arguments)
    tiles: Any = triton_tiles
    tiles._closest = lambda near: None  # nothing has written these columns
    os.environ["TRITON_INTERPRET"] = "1"  # what `impl` asks for where there is no GPU
    launch, rows = JITFunction.run, []
    for capability in options.targets:
        for block in options.blocks.split(","):
            tiles.STATISTICS = tuple(map(int, block.split("x")))
            compiler: Any = Compiler(capability)
            driver.set_active(compiler)
            JITFunction.run = lambda function, *args, to=compiler, **named: to.compile(
                function, *args, run=launch, **named
            )
            call_losses()
            for kernel, figures in sorted(compiler.found.items()):
                rows.append({"sm": capability, "block": block, "kernel": kernel, **figures})
    show_table("As compiled", list(rows[0]), [tuple(row.values()) for row in rows])
    if options.json is not None:
        payload = {"triton": triton.__version__, "rows": rows, "environment": environment()}
        write_results(options.json.parent, options.json.stem, payload)
    return rows


if __name__ == "__main__":
    main()
