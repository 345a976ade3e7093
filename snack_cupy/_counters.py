"""Random words from counters, and permutations from keys: the arithmetic under `random`.

Everything is a pure function of a 64-bit key and a counter, in unsigned 64-bit arithmetic that
wraps, the same on NumPy, on CuPy and in CUDA.

Sources: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014
(SplitMix64); Black, Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002 (Feistel network
over mixed radices, cycle walking); Mitchell et al., "Bandwidth-Optimal Random Shuffling for GPUs",
ACM TOPC 2022 (such permutations in place of a shuffle).
"""

from __future__ import annotations

import math

import numpy as np

from snack_cupy._xp import Array, get_array_module

GOLDEN = 0x9E3779B97F4A7C15
WORD = 2**64

# NumPy works through long arrays in pieces: temporaries stay small and in cache. CuPy does not.
_NUMPY_BLOCK = 1 << 16


def mix64(words: Array) -> Array:
    """SplitMix64's finaliser, a bijection of 64-bit words that changes about half of their bits.

    Parameters
    ----------
    words : uint64 array, any shape

    Returns
    -------
    uint64 array, same shape
    """
    words = words ^ (words >> np.uint64(30))
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words


def hash_counters(key: int, counters: Array) -> Array:
    """Random words: ``mix64(key + (counter + 1) * golden)``, output ``counter`` of SplitMix64.

    Parameters
    ----------
    key : int
        In [0, 2^64).
    counters : uint64 array, any shape

    Returns
    -------
    uint64 array, same shape
    """
    words = counters * np.uint64(GOLDEN)
    words += np.uint64((key + GOLDEN) % WORD)
    return mix64(words)


def permute(key: int, ranks: Array, domain: int, tweak: Array | None = None) -> Array:
    """Image of each rank under a keyed permutation of ``range(domain)``.

    With ``a = ceil(sqrt(domain))`` and ``b = ceil(domain / a)`` a rank is ``left * b + right``.
    Round ``i`` adds to one half, modulo its radix, a hash of the other half and round key
    ``hash_counters(key, i)``. Images in ``[domain, a * b)`` go through the network again until they
    fall below the domain.

    Parameters
    ----------
    key : int
        In [0, 2^64).
    ranks : uint64 array, shape (n,)
        Below ``domain``.
    domain : int
        In [1, 2^62], or 0 where there are no ranks.
    tweak : uint64 array, shape (n,), optional
        Random words: each one selects another permutation for its rank.

    Returns
    -------
    uint64 array, shape (n,)
    """
    xp = get_array_module(ranks)
    n = ranks.shape[0]
    if xp is np and n > _NUMPY_BLOCK:
        images = np.empty_like(ranks)
        for start in range(0, n, _NUMPY_BLOCK):
            part = slice(start, start + _NUMPY_BLOCK)
            selected = None if tweak is None else tweak[part]
            images[part] = permute(key, ranks[part], domain, selected)
        return images
    if n == 0:
        return ranks
    a = math.isqrt(domain - 1) + 1
    b = -(-domain // a)
    images = _feistel(key, ranks, a, b, rounds_of(domain), tweak)
    while a * b > domain:
        outside = xp.flatnonzero(images >= np.uint64(domain))
        if outside.shape[0] == 0:
            break
        selected = None if tweak is None else tweak[outside]
        images[outside] = _feistel(key, images[outside], a, b, rounds_of(domain), selected)
    return images


def rounds_of(domain: int) -> int:
    """Rounds of the network for a domain: more for small ones."""
    return 24 if domain < 2**16 else 12


def _feistel(key: int, ranks: Array, a: int, b: int, rounds: int, tweak: Array | None) -> Array:
    """A permutation of ``range(a * b)``; even rounds change the left half, odd ones the right."""
    xp = get_array_module(ranks)
    halves = [ranks // np.uint64(b), ranks % np.uint64(b)]
    radices = [np.uint64(a), np.uint64(b)]
    for i, round_key in enumerate(hash_counters(key, np.arange(rounds, dtype=np.uint64))):
        changed, read = i % 2, 1 - i % 2
        source = halves[read] if tweak is None else halves[read] ^ tweak
        # The high word, scaled to [0, radix): radix <= 2^31, so the product fits 63 bits.
        step = mix64(source + round_key) >> np.uint64(32)
        step *= radices[changed]
        step >>= np.uint64(32)
        step += halves[changed]
        # Modulo the radix: where the sum is below it, the difference wraps to a huge number.
        halves[changed] = xp.minimum(step, step - radices[changed])
    return halves[0] * np.uint64(b) + halves[1]
