"""Counter-based random numbers and random topologies, the same on NumPy and CuPy.

Every number is a pure function of a 64-bit key and a counter, in unsigned 64-bit arithmetic that
wraps: nothing depends on the device, on the order of evaluation or on numbers drawn before.

Two building blocks. `hash_counters` is SplitMix64 (Steele, Lea, Flood, "Fast splittable
pseudorandom number generators", OOPSLA 2014) read as a function of its counter. `permuted_ranks`
is a keyed permutation of ``range(domain)``, so that distinct ranks come without a sort, a table or
a rejection loop over duplicates (Mitchell et al., "Bandwidth-Optimal Random Shuffling for GPUs",
2021).
"""

from __future__ import annotations

import hashlib
import math
from numbers import Integral
from types import ModuleType

import numpy as np
from numpy.typing import DTypeLike

from snack_cupy import _check
from snack_cupy._check import fail
from snack_cupy._xp import Array, get_array_module
from snack_cupy.topology import Topology

GOLDEN = 0x9E3779B97F4A7C15
WORD = 2**64
MAX_DOMAIN = 2**62
DISTRIBUTIONS = ("uniform", "balanced")

# Bits of the significand: a uniform number is that many random bits over their range.
_SIGNIFICAND_BITS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}

# NumPy works through long arrays in pieces: temporaries stay small and in cache. CuPy does not.
_NUMPY_BLOCK = 1 << 16


def key(seed: int, name: str = "", step: int = 0) -> int:
    """Key of one stream: a 64-bit hash of (seed, name, step), the same on every machine.

    Parameters
    ----------
    seed : int
        Any integer.
    name : str
        What the stream is for, e.g. a layer's name.
    step : int
        Any integer, e.g. the training step.

    Returns
    -------
    int
        In [0, 2^64).

    Raises
    ------
    TypeError
        ``seed`` or ``step`` is not an integer, or ``name`` not a string.

    Examples
    --------
    >>> from snack_cupy.random import key
    >>> hex(key(0)), hex(key(0, "fc1", 100))
    ('0x98208390acceb8a', '0xf9f7bb59bc52e92e')
    """
    for argument, value in (("seed", seed), ("step", step)):
        if not isinstance(value, Integral) or isinstance(value, bool):
            fail("key", argument, "be an integer", repr(value), TypeError)
    if not isinstance(name, str):
        fail("key", "name", "be a string", repr(name), TypeError)
    # The name comes last, so no two triples share a text.
    text = f"{int(seed)} {int(step)} {name}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def subkey(key: int, index: int) -> int:
    """Key of part ``index`` of a stream, for work that needs several independent ones.

    Examples
    --------
    >>> from snack_cupy.random import subkey
    >>> subkey(1, 0) == subkey(1, 1)
    False
    """
    counter = np.asarray([check_key("subkey", index)], np.uint64)
    return int(hash_counters(check_key("subkey", key), counter)[0])


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


def uniform(key: int, n: int, dtype: DTypeLike = np.float32, xp: ModuleType = np) -> Array:
    """Uniform numbers in [0, 1): every multiple of ``2^-p`` there is equally likely.

    Parameters
    ----------
    key : int
        In [0, 2^64); see `key`.
    n : int
    dtype : float64 (p = 53), float32 (24), float16 (11) or bfloat16 (8)
    xp : module
        ``numpy`` or ``cupy``, on its current device.

    Returns
    -------
    array, shape (n,), of ``dtype``

    Raises
    ------
    TypeError
        ``dtype`` is another one, or ``key`` or ``n`` no integer.
    ValueError
        ``key`` or ``n`` is out of range.

    Examples
    --------
    >>> from snack_cupy.random import uniform
    >>> uniform(7, 3)
    array([0.3898297 , 0.01678824, 0.90076065], dtype=float32)
    """
    key = check_key("uniform", key)
    n = _check.check_count("uniform", "n", n, high=MAX_DOMAIN)
    dtype = np.dtype(dtype)
    if dtype.name not in _SIGNIFICAND_BITS:
        fail("uniform", "dtype", f"be one of {tuple(_SIGNIFICAND_BITS)}", dtype.name, TypeError)
    bits = _SIGNIFICAND_BITS[dtype.name]
    words = hash_counters(key, xp.arange(n, dtype=np.uint64)) >> np.uint64(64 - bits)
    wide = np.float64 if bits == 53 else np.float32
    return (words.astype(wide) * wide(2.0**-bits)).astype(dtype, copy=False)


def permuted_ranks(key: int, n: int, domain: int, xp: ModuleType = np) -> Array:
    """First ``n`` images of a keyed pseudo-random permutation of ``range(domain)``.

    So: ``n`` distinct numbers below ``domain``, in random order, any set of them about equally
    likely.

    Parameters
    ----------
    key : int
        In [0, 2^64); see `key`.
    n : int
        At most ``domain``.
    domain : int
        At most 2^62.
    xp : module
        ``numpy`` or ``cupy``, on its current device.

    Returns
    -------
    int64 array, shape (n,)

    Raises
    ------
    TypeError
        ``key``, ``n`` or ``domain`` is not an integer.
    ValueError
        One of them is out of range.

    Notes
    -----
    The permutation is an alternating Feistel network over mixed radices (Black, Rogaway, "Ciphers
    with arbitrary finite domains", 2002): with ``a = ceil(sqrt(domain))``, ``b = ceil(domain / a)``
    a rank is ``left * b + right``, and the rounds add to one half, modulo its radix, a hash of the
    other. Fewer than ``a`` of the ``a * b`` images lie outside the domain; those are permuted again
    until they fall inside (cycle walking), which keeps the map a permutation. A rank needs
    ``a * b / domain`` passes on average: at most 4/3, and ``1 + 1 / sqrt(domain)`` for large ones.

    Rounds: 24 below a domain of 2^16, else 12. With ideal round functions the distribution of two
    images approaches the uniform one by a factor of about the smaller radix every two rounds. The
    worst small domain (6) is within 2.5e-4 of uniform in total variation after 24 rounds, and the
    distribution of its whole permutation within 3.8e-4; from 2^16 on, 12 rounds are within 2^-40.

    Memory O(n). On CuPy each pass after the first, and the end, takes one synchronisation (to
    learn how many ranks remain), so usually two; none where ``a * b == domain``.

    Examples
    --------
    >>> from snack_cupy.random import permuted_ranks
    >>> permuted_ranks(3, 10, 10)
    array([1, 6, 8, 4, 2, 9, 3, 7, 5, 0])
    """
    op = "permuted_ranks"
    key = check_key(op, key)
    domain = _check.check_count(op, "domain", domain, high=MAX_DOMAIN)
    n = _check.check_count(op, "n", n, high=domain)
    return _permute(key, xp.arange(n, dtype=np.uint64), domain, None, xp).view(np.int64)


def random_topology(
    shape: tuple[int, int],
    *,
    sparsity: float | None = None,
    density: float | None = None,
    nnz: int | None = None,
    fan_in: int | None = None,
    distribution: str = "uniform",
    seed: int = 0,
    name: str = "",
    xp: ModuleType = np,
) -> Topology:
    """Random structure with an exact number of entries.

    Parameters
    ----------
    shape : (m, k)
    sparsity : float in [0, 1)
        nnz is ``round((1 - sparsity) * m * k)``, halves to even.
    density : float in [0, 1]
        nnz is ``round(density * m * k)``, halves to even.
    nnz : int
        In [0, m * k].
    fan_in : int
        In [0, k]: so many entries in every row, nnz is ``m * fan_in``. Exactly one of these four
        is given.
    distribution : "uniform" or "balanced"
        "uniform": every set of nnz positions is equally likely (the Erdos-Renyi model G(n, M)).
        "balanced": the rows' numbers of entries differ by at most one. Not used with ``fan_in``.
    seed, name : int, str
        Of the `key`; e.g. one seed for a model and the name of each layer.
    xp : module
        ``numpy`` or ``cupy``, on its current device; both give the same topology.

    Returns
    -------
    Topology

    Raises
    ------
    TypeError, ValueError
        An argument has the wrong type or is out of range, none or several of the four sizes are
        given, or nnz is 2^31 or more.

    Notes
    -----
    O(nnz) memory: no array of m * k elements exists. One sort of nnz positions.

    Source of the initial Erdos-Renyi topology: Mocanu et al., "Scalable training of artificial
    neural networks with adaptive sparse connectivity inspired by network science", Nature
    Communications 2018.

    Examples
    --------
    >>> from snack_cupy.random import random_topology
    >>> random_topology((300, 784), sparsity=0.9, seed=1)
    Topology(shape=(300, 784), nnz=23520, density=0.1, device='cpu')
    >>> random_topology((4, 9), fan_in=2).fan_in
    array([2, 2, 2, 2], dtype=int32)
    """
    op = "random_topology"
    m, k = _check.check_matrix_shape(op, shape)
    if distribution not in DISTRIBUTIONS:
        fail(op, "distribution", f"be one of {DISTRIBUTIONS}", repr(distribution))
    nnz = _resolve_nnz(op, m, k, sparsity, density, nnz, fan_in)
    stream = key(seed, name)
    if fan_in is not None or distribution == "balanced":
        positions = _balanced_positions(stream, nnz, m, k, xp)
    else:
        positions = permuted_ranks(stream, nnz, m * k, xp)
    positions.sort()
    return Topology._from_positions(positions, (m, k))


def erdos_renyi_density(shape: tuple[int, int], epsilon: float) -> float:
    """Density of SET's Erdos-Renyi layers: ``epsilon * (m + k) / (m * k)``, at most 1.

    Parameters
    ----------
    shape : (m, k)
    epsilon : float
        Finite and not negative; connections per neuron, 20 in the paper.

    Raises
    ------
    TypeError, ValueError
        ``shape`` or ``epsilon`` is not as above.

    Notes
    -----
    Source: Mocanu et al., Nature Communications 2018, equation 1.

    Examples
    --------
    >>> from snack_cupy.random import erdos_renyi_density
    >>> erdos_renyi_density((1000, 1000), epsilon=20)
    0.04
    """
    op = "erdos_renyi_density"
    m, k = _check.check_matrix_shape(op, shape)
    if not math.isfinite(epsilon) or epsilon < 0:
        fail(op, "epsilon", "be finite and not negative", epsilon)
    return min(1.0, epsilon * (m + k) / (m * k)) if m * k else 0.0


def check_key(op: str, key: object) -> int:
    """``key`` must be an integer in [0, 2^64); returned as a plain int."""
    return _check.check_count(op, "key", key, high=WORD - 1)


def _resolve_nnz(
    op: str,
    m: int,
    k: int,
    sparsity: float | None,
    density: float | None,
    nnz: int | None,
    fan_in: int | None,
) -> int:
    sizes = {"sparsity": sparsity, "density": density, "nnz": nnz, "fan_in": fan_in}
    given = [name for name, value in sizes.items() if value is not None]
    if len(given) != 1:
        fail(op, "exactly one of sparsity, density, nnz and fan_in", "be given", given or "none")
    if sparsity is not None:
        nnz = round((1 - _check.check_fraction(op, "sparsity", sparsity)) * m * k)
    elif density is not None:
        nnz = round(_check.check_fraction(op, "density", density, include_one=True) * m * k)
    elif fan_in is not None:
        nnz = m * _check.check_count(op, "fan_in", fan_in, high=k)
    else:
        nnz = _check.check_count(op, "nnz", nnz, high=m * k)
    nnz = min(nnz, m * k)  # rounding of the product can exceed a size above 2^53
    _check.check_nnz(op, nnz)
    return nnz


def _balanced_positions(key: int, nnz: int, m: int, k: int, xp: ModuleType) -> Array:
    """Unsorted positions; every row has ``nnz // m`` entries and random ``nnz % m`` one more.

    Entry ``j`` of a row is image ``j`` of that row's own permutation of the columns.
    """
    if nnz == 0:
        return xp.zeros(0, np.int64)
    base, extra = divmod(nnz, m)
    entry = xp.arange(base * m, dtype=np.uint64)
    width = np.uint64(max(base, 1))
    longer = permuted_ranks(subkey(key, 0), extra, m, xp).view(np.uint64)
    row = xp.concatenate([entry // width, longer])
    place = xp.concatenate([entry % width, xp.full(extra, base, np.uint64)])
    tweak = hash_counters(subkey(key, 1), row)
    column = _permute(subkey(key, 2), place, k, tweak, xp)
    return (row * np.uint64(k) + column).view(np.int64)


def _permute(key: int, ranks: Array, domain: int, tweak: Array | None, xp: ModuleType) -> Array:
    """Image of each rank (uint64); ``tweak`` (uint64, same length) selects its permutation."""
    n = ranks.shape[0]
    if xp is np and n > _NUMPY_BLOCK:
        images = np.empty_like(ranks)
        for start in range(0, n, _NUMPY_BLOCK):
            part = slice(start, start + _NUMPY_BLOCK)
            images[part] = _permute(
                key, ranks[part], domain, None if tweak is None else tweak[part], xp
            )
        return images
    if n == 0:
        return ranks
    a = math.isqrt(domain - 1) + 1
    b = -(-domain // a)
    images = _feistel(key, ranks, a, b, _rounds(domain), tweak)
    while a * b > domain:
        outside = xp.flatnonzero(images >= np.uint64(domain))
        if outside.shape[0] == 0:
            break
        selected = None if tweak is None else tweak[outside]
        images[outside] = _feistel(key, images[outside], a, b, _rounds(domain), selected)
    return images


def _rounds(domain: int) -> int:
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
