"""Matrix products of one tile on one CPU core: the backends, ours in C, and how one is chosen."""

import math
import time
from collections.abc import Callable

import torch
from torch import Tensor

from harmonic_sft.ops import native

Gemm = Callable[[Tensor, Tensor, Tensor | None], Tensor]
AccumulatedGemm = Callable[[Tensor, Tensor, Tensor], Tensor]
StoredGemm = Callable[[Tensor, Tensor, Tensor, bool], None]

_FASTEST: dict[tuple[torch.dtype, int], str] = {}
# What products and passes may take of the time of PyTorch's products, which take passes besides. An
# even race must not be decided anew by each process, since results would differ in the last bits.
HANDICAP = 1.5
_FAST: dict[tuple[int, bool], bool] = {}
_LINEAR = "mkldnn::_linear_pointwise"


def product(backend: str) -> Gemm:
    """Return a function of a `[M, K]`, b `[N, K]` and bias `[N]` or None: a @ b.T + bias."""
    return {"mm": _mm, "mkldnn": _mkldnn}[backend]


def accumulated_product(backend: str) -> AccumulatedGemm:
    """Return a function of total `[M, N]`, a `[M, K]` and b `[N, K]`: total + a @ b.T.

    The total may be overwritten or not: go on with what is returned.
    """
    return {"mm": _mm_add, "mkldnn": _mkldnn_add}[backend]


def stored_product(backend: str) -> StoredGemm:
    """Return a function of target `[M, N]`, a `[M, K]`, b `[N, K]` and add, a flag.

    It adds a @ b.T to the target, or puts it there.
    """
    return {"mm": _mm_into, "mkldnn": _mkldnn_into}[backend]


def choose_backend(wanted: str, dtype: torch.dtype, hidden_size: int) -> str:
    """Return "mm" or "mkldnn": what is wanted, or under "auto" what a trial finds faster.

    The trial (tens of milliseconds) is made once per dtype and power of two of `hidden_size`, on
    one core. oneDNN must win by a tenth, so that equal backends do not change between runs.

    Raises:
        ValueError: "mkldnn" is wanted and cannot serve this dtype on this machine.
    """
    built = torch.backends.mkldnn.is_available()  # the operator's name is known only then
    built = built and torch._C._dispatch_has_kernel_for_dispatch_key(_LINEAR, "CPU")
    usable = built and dtype in (torch.float32, torch.bfloat16)
    if wanted == "mkldnn" and not usable:
        raise ValueError(f"gemm: expected mm, since oneDNN does not serve {dtype} here, got mkldnn")
    if wanted != "auto" or not usable:
        return wanted if wanted != "auto" else "mm"
    key = (dtype, max(hidden_size - 1, 0).bit_length())
    if key not in _FASTEST:
        seconds = {
            name: trial_seconds(product(name), dtype, hidden_size) for name in ("mm", "mkldnn")
        }
        _FASTEST[key] = "mkldnn" if seconds["mkldnn"] < 0.9 * seconds["mm"] else "mm"
    return _FASTEST[key]


def _mm(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(a, b.T) if bias is None else torch.addmm(bias, a, b.T)


def _mkldnn(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    # What torch.compile emits for a linear layer on the CPU; F.linear itself goes to MKL.
    return torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")


def _mm_add(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return total.add_(torch.mm(a, b.T)) if a.dtype != total.dtype else total.addmm_(a, b.T)


def _mkldnn_add(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    if a.dtype != total.dtype:
        return total.add_(_mkldnn(a, b, None))
    return torch.ops.mkldnn._linear_pointwise.binary(a, total, b, None, "add")


def _mm_into(target: Tensor, a: Tensor, b: Tensor, add: bool) -> None:
    if a.dtype != target.dtype:
        _put(target, _mm(a, b, None), add)
    elif add:
        target.addmm_(a, b.T)
    else:
        torch.mm(a, b.T, out=target)


def _mkldnn_into(target: Tensor, a: Tensor, b: Tensor, add: bool) -> None:
    _put(target, _mkldnn(a, b, None), add)


def _put(target: Tensor, found: Tensor, add: bool) -> None:
    target.add_(found) if add else target.copy_(found)


def multiplies_bfloat16() -> bool:
    """Return whether oneDNN has bfloat16 products on this processor; PyTorch's own are a crawl."""
    built = torch.backends.mkldnn.is_available()
    return built and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def trial_seconds(gemm: Gemm, dtype: torch.dtype, hidden_size: int) -> float:
    """Return the seconds of the three products of one tile, the best of four."""
    hidden_states = torch.zeros(192, hidden_size, dtype=dtype, device="cpu")
    prototypes = hidden_states.new_zeros(512, hidden_size)
    weights = hidden_states.new_zeros(192, 512)
    best = math.inf
    for _ in range(4):
        start = time.perf_counter()
        gemm(hidden_states, prototypes, None)
        gemm(weights, prototypes.T, None)
        gemm(weights.T, hidden_states.T, None)
        best = min(best, time.perf_counter() - start)
    return best


def native_is_fast(hidden_size: int, *, narrow: bool) -> bool:
    """Return whether the C tiles are taken: not where they are clearly slower. Tried once."""
    size = min(max(hidden_size, 512), 1024)  # elsewhere a trial is mostly calls, or takes a second
    key = (size - 1).bit_length(), narrow
    if key not in _FAST:
        try:
            native.library()
        except OSError:
            _FAST[key] = False
        else:
            # Turn by turn: what slows one down for a while slows the other down.
            turns = [(_trial(size, narrow=narrow), _peer(size, narrow=narrow)) for _ in range(3)]
            own, theirs = map(min, zip(*turns, strict=True))
            _FAST[key] = own < HANDICAP * theirs
    return _FAST[key]


def _peer(hidden_size: int, *, narrow: bool) -> float:
    """Return the seconds of PyTorch's three products: two of them in bfloat16, if `narrow`."""
    gemm = product(choose_backend("auto", torch.float32, hidden_size))
    seconds = trial_seconds(gemm, torch.float32, hidden_size)
    if not narrow:
        return seconds
    return (seconds + 2 * trial_seconds(gemm, torch.bfloat16, hidden_size)) / 3


def _trial(hidden_size: int, *, narrow: bool) -> float:
    """Return the seconds of products and passes of the tile of `trial_seconds`, best of four."""
    # Of a dtype and device of their own, whatever the defaults are.
    prototypes = torch.zeros(512, hidden_size, dtype=torch.float32, device="cpu")
    tokens, totals = prototypes[:192], torch.zeros_like(prototypes)
    column = prototypes.new_ones(512)
    bounds = torch.zeros(2, dtype=torch.int64, device="cpu")
    best = math.inf
    for _ in range(4):
        start = time.perf_counter()
        packed = native.pack_tokens(tokens, -2.0, narrow=narrow)
        scores = tokens.new_empty(512, packed.padded)
        nearest, sums, factors = tokens.new_ones(3, 1, packed.padded)
        excluded = bounds.new_zeros(0, 2)
        terms = native.Terms(prototypes, None, column, None, None, excluded, bounds, 0)
        results = native.Found(scores, nearest, sums)
        native.weigh_tiles(packed, terms, -14.0, bounds.new_zeros(1), results, width=512, keep=True)
        found = tokens.new_zeros(packed.padded, hidden_size)
        all_totals = native.Totals(totals, found, None, None)
        scratch = tokens.new_empty(native.scratch_size(packed, 512))
        native.accumulate_tiles(
            *(packed, scores, native.Factors(factors, None), prototypes, all_totals, scratch),
            tiles=(512, 0, 1),
            add=True,
        )
        best = min(best, time.perf_counter() - start)
    return best
