"""Products by the dense form of a sparse matrix, and how much memory that may take.

Where tensor cores win whatever the sparsity (half types or TF32 and a large batch) W is laid out
densely in scratch memory at each call, and the dense library multiplies. `snack_cupy.dispatch` says
when; the scratch memory is allocated for the call alone.
"""

from __future__ import annotations

from snack_cupy import _check
from snack_cupy._xp import Array, get_array_module

_limit = 256 << 20


def scratch_limit() -> int:
    """Bytes that the dense form of one sparse matrix may take during a call."""
    return _limit


def set_scratch_limit(nbytes: int) -> None:
    """Set how many bytes the dense form of one sparse matrix may take during a call.

    At large batches in half precision, or where TF32 is allowed, `spmm`, its gradients and the
    layers multiply by a dense copy of the matrix, made in scratch memory at each call, where that
    is faster than a sparse kernel. The default is 256 MiB; 0 keeps everything sparse.

    Parameters
    ----------
    nbytes : int
        At least 0. A matrix of shape (m, k) takes ``m * k * itemsize`` bytes.

    Raises
    ------
    TypeError
        ``nbytes`` is no integer.
    ValueError
        It is negative.

    Examples
    --------
    >>> import snack_cupy
    >>> snack_cupy.set_scratch_limit(0)
    >>> snack_cupy.scratch_limit()
    0
    >>> snack_cupy.set_scratch_limit(256 << 20)
    """
    global _limit
    _limit = _check.check_count("set_scratch_limit", "nbytes", nbytes, high=2**63 - 1)


def multiply(
    scratch: Array, dense: Array, bias: Array | None, out: Array, batch_major: bool
) -> None:
    """``out = scratch @ dense + bias``, or ``dense @ scratch.T + bias`` with ``batch_major``.

    ``scratch`` is the dense W (m, k) for `spmm`, its transpose for `spmm_transposed`.
    """
    operands = (dense, scratch.T) if batch_major else (scratch, dense)
    get_array_module(out).matmul(*operands, out=out)
    if bias is not None:
        out += bias if batch_major else bias[:, None]


def sample(scratch: Array, left: Array, right: Array, batch_major: bool) -> None:
    """``scratch = left @ right.T``, or ``left.T @ right`` with ``batch_major``."""
    operands = (left.T, right) if batch_major else (left, right.T)
    get_array_module(scratch).matmul(*operands, out=scratch)
