"""Argument checks. Every message reads ``operation: argument must rule, got value``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any, NoReturn

from snack_cupy._xp import Array, device_of, dtype_name, is_array

VALUE_DTYPES = ("float32", "float64", "float16", "bfloat16")
MAX_NNZ = 2**31 - 1


def fail(
    op: str, argument: str, rule: str, got: object, error: type[Exception] = ValueError
) -> NoReturn:
    """Raise ``error`` with the message every check of the library uses."""
    raise error(f"{op}: {argument} must {rule}, got {got}")


def check_array(op: str, argument: str, value: object) -> None:
    """``value`` must be a NumPy or CuPy array."""
    if not is_array(value):
        fail(op, argument, "be a NumPy or CuPy array", type(value).__name__, TypeError)


def check_same_device(op: str, argument: str, value: Array, device: str) -> None:
    """``value`` must live on ``device`` (``"cpu"`` or ``"cuda:<index>"``)."""
    if device_of(value) != device:
        fail(op, argument, f"be on {device}", device_of(value))


def check_dtype(op: str, argument: str, value: Array, allowed: Iterable[str]) -> None:
    """The dtype of ``value`` must be one of the names ``allowed``."""
    allowed = tuple(allowed)
    if dtype_name(value) not in allowed:
        rule = f"have dtype {allowed[0]}" if len(allowed) == 1 else f"have a dtype of {allowed}"
        fail(op, argument, rule, dtype_name(value), TypeError)


def check_shape(op: str, argument: str, value: Array, shape: tuple[int, ...]) -> None:
    """``value.shape`` must equal ``shape``."""
    if tuple(value.shape) != shape:
        fail(op, argument, f"have shape {shape}", tuple(value.shape))


def check_matrix_shape(op: str, shape: Any, *, ndim: int | None = 2) -> tuple[int, ...]:
    """``shape`` must be a sequence of ``ndim`` integers, none negative; returned as plain ints."""
    try:
        result = tuple(shape)
    except TypeError:
        fail(op, "shape", "be a tuple of integers", repr(shape), TypeError)
    if ndim is not None and len(result) != ndim:
        fail(op, "shape", f"have {ndim} entries", result)
    for size in result:
        if not isinstance(size, Integral) or isinstance(size, bool):
            fail(op, "shape", "be a tuple of integers", result, TypeError)
        if size < 0:
            fail(op, "shape", "have no negative entry", result)
    return tuple(int(size) for size in result)


def check_nnz(op: str, nnz: int) -> None:
    """The number of non-zeros must fit 32-bit offsets."""
    if nnz > MAX_NNZ:
        fail(op, "nnz", f"be at most {MAX_NNZ} (offsets are 32-bit)", nnz)


def check_count(op: str, argument: str, value: object, *, low: int = 0, high: int) -> int:
    """``value`` must be an integer within [low, high]; returned as a plain int."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        fail(op, argument, "be an integer", repr(value), TypeError)
    count = int(value)
    if not low <= count <= high:
        fail(op, argument, f"be between {low} and {high}", count)
    return count


def check_fraction(op: str, argument: str, value: object, *, include_one: bool = False) -> float:
    """``value`` must be a finite real number within [0, 1) (or [0, 1]); returned as a float."""
    interval = "[0, 1]" if include_one else "[0, 1)"
    if isinstance(value, bool) or not isinstance(value, Real):
        fail(op, argument, f"be a number in {interval}", repr(value), TypeError)
    result = float(value)
    inside = 0.0 <= result <= 1.0 if include_one else 0.0 <= result < 1.0
    if not math.isfinite(result) or not inside:
        fail(op, argument, f"be in {interval}", value)
    return result


def check_linear_operands(
    op: str,
    topology: Any,
    operands: Mapping[str, tuple[Array, tuple[int, ...] | None]],
) -> str:
    """Check dense operands of one operation; returns the common dtype name.

    Every array must be NumPy or CuPy, on the topology's device, of one supported value dtype, and
    of the given shape (``None``: checked by the caller).
    """
    first: str | None = None
    name = ""
    for argument, (value, shape) in operands.items():
        check_array(op, argument, value)
        check_same_device(op, argument, value, topology.device)
        if first is None:
            check_dtype(op, argument, value, VALUE_DTYPES)
            first, name = argument, dtype_name(value)
        elif dtype_name(value) != name:
            fail(op, argument, f"have the dtype of {first} ({name})", dtype_name(value), TypeError)
        if shape is not None:
            check_shape(op, argument, value, shape)
    return name
