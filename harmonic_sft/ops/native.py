"""`native_tiles.c`, compiled for the processor at hand, as functions of tensors.

A product in `torch.mm` knows nothing of what comes next, so that every step between two of them is
a pass over memory. In C they are part of the product, and no tile is allocated.
"""

import ctypes
import functools
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("native_tiles.c")
FLAGS = ("-O3", "-fno-fast-math", "-march=native", "-shared", "-fPIC")
SECONDS = 60  # of a compiler that does not come back

_TYPES = {"p": ctypes.c_void_p, "n": ctypes.c_long, "i": ctypes.c_int, "f": ctypes.c_float}
_FUNCTIONS = {  # a letter for each argument
    "token_multiple": "",
    "panel_width": "",
    "pack_tokens": "pnnnfipp",
    "score_tile": "pnnpnppppnnipp",
    "weigh_tile": "pnnpfiiip",
    "accumulate_tile": "pnnnnppppipipppp",
}


@functools.cache
def library() -> ctypes.CDLL:
    """Compile `native_tiles.c`, in less than a second, and load it; once per process.

    The file is made anew by each process and removed when it is loaded: none is ever taken from a
    folder that another processor, or somebody else, has written to.

    Raises:
        OSError: There is no C compiler (`CC`, cc or gcc), or it cannot compile for this machine.
    """
    compiler = shlex.split(os.environ.get("CC", ""))
    compiler = compiler or [name for name in ("cc", "gcc") if shutil.which(name)][:1]
    if not compiler or shutil.which(compiler[0]) is None:
        raise OSError(
            f"gemm: expected a C compiler for native, got {' '.join(compiler) or 'none'}. "
            "Install one, name it in CC, or take auto"
        )
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "native_tiles.so")
        command = [*compiler, *FLAGS, str(SOURCE), "-o", str(target)]
        try:
            subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=SECONDS,
                check=True,
            )
        except subprocess.SubprocessError as error:
            output = getattr(error, "stderr", None) or ""
            raise OSError(f"gemm: {error}\n{output.strip()[-2000:]}") from error
        loaded = ctypes.CDLL(str(target))
    for name, arguments in _FUNCTIONS.items():
        function = getattr(loaded, name)
        function.argtypes = [_TYPES[kind] for kind in arguments]
        function.restype = None if arguments else ctypes.c_long
    return loaded


class Packed(NamedTuple):
    """The tokens of a chunk as the products want them.

    Attributes:
        across: `[P * D]`, for the scores.
        along: `[T * D]` and the zeros of its last vectors, for the gradient of the prototypes;
            half of it if `narrow`, pairs of tokens.
        count: T.
        padded: P, the number of tokens up to the next whole vector.
        narrow: Whether the products of the gradients are of bfloat16.
    """

    across: Tensor
    along: Tensor
    count: int
    padded: int
    narrow: bool


def pack_tokens(tokens: Tensor, scale: float, *, narrow: bool = False) -> Packed:
    """Pack tokens `[T, D]`, those for the scores times `scale`; see `Packed.narrow`."""
    tokens = tokens.contiguous()
    count, size = tokens.shape
    multiple = library().token_multiple()
    padded = _up(count, multiple)
    across = tokens.new_empty(padded * size)
    depth = _up(count, 2) // 2 if narrow else count
    along = tokens.new_empty(depth * _up(size, multiple))
    library().pack_tokens(_at(tokens), count, padded, size, scale, narrow, _at(across), _at(along))
    return Packed(across, along, count, padded, narrow)


def score_tile(
    packed: Packed,
    prototypes: Tensor,
    terms: tuple[Tensor | None, Tensor | None, Tensor | None],
    excluded: tuple[Tensor, int],
    scores: Tensor,
    best: Tensor,
) -> None:
    """Write the scores of one tile, and the best of each token.

    Args:
        packed: The tokens, for distances times -2.
        prototypes: `[W, D]`.
        terms: Gain `[W]`, a factor of the products; column `[W]`, added; row `[P]`, added. No
            column: a linear head, for which the largest score is the best.
        excluded: Classes and tokens `[S, 2]`, in order of classes, whose scores are to be
            infinite, and the class that the tile begins with.
        scores: `[W, P]`, written.
        best: `[P]`, written.
    """
    (width, size), (pairs, first) = prototypes.shape, excluded
    gain, column, row = terms
    library().score_tile(
        _at(prototypes), width, size, _at(packed.across), packed.padded,
        _at(gain), _at(column), _at(row), _at(pairs), len(pairs), first, column is None,
        _at(scores), _at(best),
    )  # fmt: skip


def weigh_tile(
    scores: Tensor, best: Tensor, h_exp: float | None, sums: Tensor, *, keep: bool
) -> None:
    """Sum the weights of one tile.

    Args:
        scores: `[W, P]`; with `keep` the weights replace them, for distances over d2 / best.
        best: `[P]`.
        h_exp: Weights are (best / d2) ** -h_exp; None: exp(score - best).
        sums: `[P]`, written.
        keep: Whether the weights are needed.
    """
    exponent = -(h_exp or 0.0)
    whole = int(exponent) if exponent == int(exponent) and exponent < 1024 else 0
    width, padded = scores.shape
    library().weigh_tile(
        _at(scores), width, padded, _at(best), exponent, whole, h_exp is None, keep, _at(sums)
    )


def scratch_size(packed: Packed, width: int) -> int:
    """Return how many floats `accumulate_tile` works in, for tiles of at most `width` classes."""
    return width * (packed.padded + library().panel_width())


class Totals(NamedTuple):
    """What the gradients of a tile are added to; None where nobody needs it.

    Attributes:
        prototypes: `[W, D]`.
        tokens: `[P, D]`.
        columns: `[W]`, sums of the weights of each class.
        rows: `[P]`, sums of the weights of each token.
    """

    prototypes: Tensor | None
    tokens: Tensor | None
    columns: Tensor | None
    rows: Tensor | None


def accumulate_tile(
    packed: Packed,
    weights: Tensor,
    factors: tuple[Tensor, Tensor | None],
    prototypes: Tensor,
    totals: Totals,
    scratch: Tensor,
    *,
    add: bool,
) -> None:
    """Add the products of one tile's weights `[W, P]`, which are scaled in place.

    With `packed.narrow` they are also rounded to bfloat16, before anything is added up.

    Args:
        packed: The tokens.
        weights: `[W, P]`.
        factors: Of the tokens `[P]`, and of the classes `[W]` or None.
        prototypes: `[W, D]`.
        totals: Accumulated in place.
        scratch: `scratch_size` floats of this thread.
        add: Whether `totals.prototypes` holds something already; it is written otherwise.
    """
    width, padded = weights.shape
    library().accumulate_tile(
        _at(weights), width, packed.count, padded, prototypes.shape[1],
        _at(factors[0]), _at(factors[1]), _at(prototypes), _at(packed.along), packed.narrow,
        _at(totals.prototypes), add, _at(totals.tokens), _at(totals.columns), _at(totals.rows),
        _at(scratch),
    )  # fmt: skip


def _at(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    assert tensor.dtype in (torch.float32, torch.int64), f"C would misread {tensor.dtype}"
    assert tensor.device.type == "cpu", f"C would misread memory of {tensor.device}"
    assert tensor.is_contiguous(), "C reads memory as it lies"
    return tensor.data_ptr()


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
