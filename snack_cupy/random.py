"""Counter-based random numbers and random topologies, the same on NumPy and CuPy.

Every number is a pure function of a 64-bit key and a counter: nothing depends on the device, on the
order of evaluation or on numbers drawn before.
"""

from __future__ import annotations

import hashlib
import math
from numbers import Integral, Real
from types import ModuleType

import numpy as np
from numpy.typing import DTypeLike

from snack_cupy import _check
from snack_cupy._check import fail
from snack_cupy._coords import coords_dtype
from snack_cupy._counters import WORD, hash_counters, permute
from snack_cupy._structure import check_topology_shape
from snack_cupy._xp import Array
from snack_cupy.coo import COOTensor
from snack_cupy.topology import Topology

MAX_DOMAIN = 2**62
DISTRIBUTIONS = ("uniform", "balanced")

# Bits of the significand: a uniform number is that many random bits over their range.
_SIGNIFICAND_BITS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}


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


def uniform(key: int, n: int, dtype: DTypeLike = np.float32, xp: ModuleType = np) -> Array:
    """Uniform numbers in [0, 1): every multiple of ``2^-p`` there is equally likely.

    Parameters
    ----------
    key : int
        In [0, 2^64); see `key`.
    n : int
    dtype : float64 (p = 53), float32 (24), float16 (11) or, on NumPy, bfloat16 (8)
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
    allowed = tuple(name for name in _SIGNIFICAND_BITS if xp is np or name != "bfloat16")
    if dtype.name not in allowed:
        fail("uniform", "dtype", f"be one of {allowed}", dtype.name, TypeError)
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
    The permutation is an alternating Feistel network over mixed radices: with
    ``a = ceil(sqrt(domain))``, ``b = ceil(domain / a)`` a rank is ``left * b + right``, and the
    rounds add to one half, modulo its radix, a hash of the other. Fewer than ``a`` of the ``a * b``
    images lie outside the domain; those are permuted again until they fall inside (cycle walking),
    which keeps the map a permutation. A rank needs ``a * b / domain`` passes on average: at most
    4/3, and about ``1 + 1 / sqrt(domain)`` for large domains.

    Rounds: 24 below a domain of 2^16, else 12. With ideal round functions the distribution of two
    images approaches the uniform one by a factor of about the smaller radix every two rounds. The
    worst small domain (6) is within 2.5e-4 of uniform in total variation after 24 rounds, and the
    distribution of its whole permutation within 3.8e-4; from 2^16 on, 12 rounds are within 2^-40.

    Memory O(n). On CuPy each pass after the first, and the end, takes one synchronisation (to
    learn how many ranks remain), so usually two; none where ``a * b == domain``.

    Sources: Black, Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002; Mitchell et al.,
    "Bandwidth-Optimal Random Shuffling for GPUs", ACM TOPC 2022.

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
    return permute(key, xp.arange(n, dtype=np.uint64), domain).view(np.int64)


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
    m, k = check_topology_shape(op, shape)
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


def random(
    shape: tuple[int, ...],
    density: float = 0.1,
    dtype: DTypeLike = np.float32,
    seed: int = 0,
    xp: ModuleType = np,
) -> COOTensor:
    """Random sparse tensor: uniform numbers in (0, 1] at uniformly random positions.

    Parameters
    ----------
    shape : tuple of ints
        At least one; m * k * ... is at most 2^62.
    density : float in [0, 1]
        nnz is ``round(density * m * k * ...)``, halves to even.
    dtype : float32, float64, float16 or, on NumPy, bfloat16
    seed : int
    xp : module
        ``numpy`` or ``cupy``, on its current device; both give the same tensor.

    Returns
    -------
    COOTensor
        Sorted, without duplicates and without stored zeros.

    Raises
    ------
    TypeError, ValueError
        An argument has the wrong type or is out of range, or nnz is 2^31 or more.

    Examples
    --------
    >>> from snack_cupy.random import random
    >>> random((4, 5, 6), density=0.25)
    <COOTensor: shape=(4, 5, 6), dtype=float32, nnz=30, device='cpu'>
    """
    op = "random"
    sizes = _check.check_matrix_shape(op, shape, ndim=None)
    if not sizes:
        fail(op, "shape", "have at least 1 entry", sizes)
    size = math.prod(sizes)
    if size > MAX_DOMAIN:
        fail(op, "shape", f"have a product of at most {MAX_DOMAIN}", sizes)
    fraction = _check.check_fraction(op, "density", density, include_one=True)
    nnz = min(round(fraction * size), size)
    _check.check_nnz(op, nnz)
    stream = key(seed)
    data = 1 - uniform(subkey(stream, 0), nnz, dtype, xp)
    rest = permuted_ranks(subkey(stream, 1), nnz, size, xp)
    rest.sort()
    coords = xp.empty((len(sizes), nnz), coords_dtype(sizes))
    for axis in reversed(range(len(sizes))):
        coords[axis] = rest % max(sizes[axis], 1)
        rest = rest // max(sizes[axis], 1)
    return COOTensor._from_parts(coords, data, sizes, is_sorted=True, has_duplicates=False)


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
    if not isinstance(epsilon, Real) or isinstance(epsilon, bool):
        fail(op, "epsilon", "be a number", repr(epsilon), TypeError)
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
    column = permute(subkey(key, 2), place, k, tweak)
    return (row * np.uint64(k) + column).view(np.int64)
