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
from typing import Any, NamedTuple

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
    "weigh_tile": "pnnpfiiipppp",
    "weigh_tiles": "ppnnnpnnppppppnfiiipppppp",
    "accumulate_tiles": "nnpnnnnnppppipipppppp",
}
_COUNTS = ("token_multiple", "panel_width", "weigh_tiles")  # the others return nothing


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
        function.restype = ctypes.c_long if name in _COUNTS else None
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


class Logits(NamedTuple):
    """How scores become logits: `h_exp * log(score / unit) + bias`, or without a unit themselves.

    Attributes:
        unit: `[P]`, of squared distances; None for a linear head, whose `h_exp` is 1.
        bias: `[V]` or None; that of a linear head is in its scores.
        h_exp: Below 0.
    """

    unit: Tensor | None
    bias: Tensor | None
    h_exp: float

    def part(self, classes: slice) -> "Logits":
        """Return those of `classes`."""
        return self if self.bias is None else self._replace(bias=self.bias[classes])


class Found(NamedTuple):
    """What tiles leave behind.

    Attributes:
        scores: `[V, P]`, or `[width, P]` unless they are kept.
        best: `[tiles, P]`, the best score of each token; with moments its largest logit.
        sums: `[tiles, P]`, of the weights; with moments of p = exp(logit - largest).
        moments: `[tiles, 4, P]` or None: sums of p * log p, p * log(score / unit), logit, and
            log(score / unit), excluded scores left out.
        columns: `[tiles, P]` int32 or None, where in its tile the largest logit stands.
    """

    scores: Tensor
    best: Tensor
    sums: Tensor
    moments: Tensor | None = None
    columns: Tensor | None = None

    def tile(self, scores: Tensor, k: int) -> "Found":
        """Return what belongs to tile `k`, of which the scores are `scores`."""
        moments = None if self.moments is None else self.moments[k]
        columns = None if self.columns is None else self.columns[k]
        return Found(scores, self.best[k], self.sums[k], moments, columns)


class _Logits(ctypes.Structure):
    """`struct logits` of the C."""

    _fields_ = (("unit", ctypes.c_void_p), ("bias", ctypes.c_void_p), ("h_exp", ctypes.c_float))


Rule = float | Logits | None


def weigh_tile(found: Found, rule: Rule, *, keep: bool) -> None:
    """Sum the weights of one tile.

    Args:
        found: Of this tile: scores `[W, P]` and best `[P]`. The others are written.
        rule: h_exp, for weights (best / d2) ** -h_exp; None, for exp(score - best); `Logits`, for
            exp(logit - largest) and moments, or for nothing yet where there are no moments.
        keep: Whether the weights replace the scores, for distances over d2 / best. With `Logits`
            the scores stay as they are.
    """
    width, padded = found.scores.shape
    library().weigh_tile(
        *(_at(found.scores), width, padded, _at(found.best), *_power(rule), keep),
        *(_at(found.sums), _pointer(rule), _at(found.moments), _at(found.columns)),
    )


class Terms(NamedTuple):
    """What tiles' scores are made of, and which are left out.

    Attributes:
        prototypes: `[V, D]`.
        gain: `[V]` or None, a factor of the products.
        column: `[V]`, added; None for a linear head without a bias.
        row: `[P]` or None, added.
        limits: `[T]` or None; somebody must look at a tile with a score below.
        excluded: Classes and tokens `[S, 2]`, in order of classes, whose scores are to be infinite.
        bounds: `[tiles + 1]`, which of them belong to a tile.
        first: The class that the prototypes begin with, as `excluded` counts.
    """

    prototypes: Tensor
    gain: Tensor | None
    column: Tensor | None
    row: Tensor | None
    limits: Tensor | None
    excluded: Tensor
    bounds: Tensor
    first: int


def weigh_tiles(
    packed: Packed,
    terms: Terms,
    rule: Rule,
    following: Tensor,
    found: Found,
    *,
    width: int,
    keep: bool,
) -> int:
    """Score and weigh tiles, until one has a score below its token's limit.

    Args:
        packed: The tokens, for distances times -2.
        terms: See there.
        rule: As for `weigh_tile`.
        following: `[1]` int64, the tile to go on with; shared by threads that share the tiles.
        found: Of all tiles; written.
        width: Classes of a tile; the last may have fewer.
        keep: Whether the weights, or with `Logits` the scores, are needed.

    Returns:
        That tile, which `weigh_tile` must follow, or -1 when all are taken.
    """
    (vocab_size, size), tiles = terms.prototypes.shape, len(terms.bounds) - 1
    rows = tiles * packed.padded
    kept = vocab_size if keep else min(width, vocab_size)
    assert found.scores.numel() >= kept * packed.padded, "[V, P] or [width, P]"
    assert found.best.numel() == found.sums.numel() == rows, "[tiles, P]"
    assert found.moments is None or found.moments.numel() == 4 * rows, "[tiles, 4, P]"
    assert found.columns is None or found.columns.numel() == rows, "[tiles, P]"
    assert found.columns is None or found.columns.dtype == torch.int32, "C writes int32"
    assert _fits(rule, packed, vocab_size), "[P] and [V]"
    assert tiles == -(-vocab_size // width), "a bound for each tile"
    return library().weigh_tiles(
        _at(following), _at(terms.prototypes), vocab_size, width, size,
        _at(packed.across), packed.count, packed.padded, _at(terms.gain), _at(terms.column),
        _at(terms.row), _at(terms.limits), _at(terms.excluded), _at(terms.bounds), terms.first,
        *_power(rule), keep, *map(_at, found[:3]), _pointer(rule), *map(_at, found[3:]),
    )  # fmt: skip


def scratch_size(packed: Packed, width: int) -> int:
    """Return how many floats `accumulate_tiles` works in, for tiles of at most `width` classes."""
    return width * (packed.padded + library().panel_width())


class Totals(NamedTuple):
    """What the gradients of tiles are added to; None where nobody needs it.

    Attributes:
        prototypes: `[V, D]`.
        tokens: `[P, D]`.
        columns: `[V]`, sums of the weights of each class.
        rows: `[P]`, sums of the weights of each token.
        bias: `[V]`, sums of each class before `Factors.classes`: of scores those of dL/dlogit.
    """

    prototypes: Tensor | None
    tokens: Tensor | None
    columns: Tensor | None
    rows: Tensor | None
    bias: Tensor | None = None


class Factors(NamedTuple):
    """What turns kept weights, or scores, into coefficients of the products.

    Attributes:
        tokens: `[tiles, P]`, factors of the weights. With `logits`, which scores need, instead
            log-normalizer, mass and smoothing `[3, P]`: dL/dlogit = mass * p - smoothing.
        classes: `[V]` or None, factors of the classes besides.
        logits: Of scores; None for weights.
    """

    tokens: Tensor
    classes: Tensor | None
    logits: Logits | None = None


def accumulate_tiles(
    packed: Packed,
    weights: Tensor,
    factors: Factors,
    prototypes: Tensor,
    totals: Totals,
    scratch: Tensor,
    *,
    tiles: tuple[int, int, int],
    add: bool,
) -> None:
    """Add the products of weights `[V, P]` or scores, which are turned into coefficients.

    With `packed.narrow` they are also rounded to bfloat16, before anything is added up.

    Args:
        packed: The tokens.
        weights: `[V, P]`, overwritten.
        factors: See there.
        prototypes: `[V, D]`.
        totals: Accumulated in place.
        scratch: `scratch_size` floats of this thread.
        tiles: Classes of a tile, the first tile and the step to the next.
        add: Whether `totals.prototypes` holds something already; it is written otherwise.
    """
    (vocab_size, size), (width, first, step) = prototypes.shape, tiles
    assert weights.numel() >= vocab_size * packed.padded, "[V, P]"
    rows = -(-vocab_size // width) if factors.logits is None else 3
    assert factors.tokens.numel() == rows * packed.padded, "[tiles, P], or [3, P]"
    assert _fits(factors.logits, packed, vocab_size), "[P] and [V]"
    assert totals.bias is None or len(totals.bias) == vocab_size, "[V]"
    assert scratch.numel() >= scratch_size(packed, min(width, vocab_size)), "scratch_size"
    library().accumulate_tiles(
        first, step, _at(weights), vocab_size, width, packed.count, packed.padded, size,
        _at(factors.tokens), _at(factors.classes), _at(prototypes), _at(packed.along),
        packed.narrow,
        _at(totals.prototypes), add, _at(totals.tokens), _at(totals.columns), _at(totals.rows),
        _at(scratch), _pointer(factors.logits), _at(totals.bias),
    )  # fmt: skip


def _power(rule: Rule) -> tuple[float, int, bool]:
    """Return the exponent of best / d2, again if it is a whole number, else 0, and if linear."""
    if isinstance(rule, Logits):
        return 0.0, 0, rule.unit is None
    exponent = -(rule or 0.0)
    whole = int(exponent) if exponent == int(exponent) and exponent < 1024 else 0
    return exponent, whole, rule is None


def _fits(rule: Rule, packed: Packed, vocab_size: int) -> bool:
    if not isinstance(rule, Logits):
        return True
    sizes = ((rule.unit, packed.padded), (rule.bias, vocab_size))
    return all(values is None or len(values) == size for values, size in sizes)


def _pointer(rule: Rule) -> Any:
    if not isinstance(rule, Logits):
        return None
    return ctypes.byref(_Logits(_at(rule.unit), _at(rule.bias), rule.h_exp))


def _at(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    assert tensor.dtype in (torch.float32, torch.int64, torch.int32), f"C takes no {tensor.dtype}"
    assert tensor.device.type == "cpu", f"C would misread memory of {tensor.device}"
    assert tensor.is_contiguous(), "C reads memory as it lies"
    return tensor.data_ptr()


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
