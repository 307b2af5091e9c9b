"""Random numbers that depend on nothing but the integers that name them."""

import hashlib
import struct

import numpy as np


def random_bits(purpose: str, key: tuple[int, ...], size: int) -> np.ndarray:
    """Draw uniform 64-bit integers from a generator keyed by `purpose` and `key`.

    The raw output of Philox is fixed for good; numpy's distributions may change between versions.

    Args:
        purpose: Separates the streams of two uses of one key; at most 16 ASCII characters.
        key: Any integers that fit 64 bits, negative ones included.
        size: How many integers to draw.

    Returns:
        `[size]`, uint64.

    Source:
        Salmon et al. 2011, Parallel Random Numbers: As Easy as 1, 2, 3 (Philox).
    """
    packed = struct.pack(f"<{len(key)}q", *key)
    digest = hashlib.blake2b(packed, digest_size=16, person=purpose.encode()).digest()
    return np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(size)


def permutation(purpose: str, key: tuple[int, ...], size: int) -> np.ndarray:
    """Shuffle `0 .. size - 1` by the generator of `random_bits`, `[size]` int64."""
    return np.argsort(random_bits(purpose, key, size), kind="stable")
