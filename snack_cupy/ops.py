"""Sparse linear algebra on arrays: ``check -> plan -> launch`` on the GPU, SciPy on the CPU.

Each operation takes a `Topology` and the values as one array of length nnz in canonical order.
Dense operands come in one of two layouts: NumPy code multiplies ``A @ D`` with D of shape (k, n);
a layer multiplies ``x @ A.T`` with x of shape (batch, k), here ``batch_major=True``.
"""

from __future__ import annotations

import math
from typing import Any

from snack_cupy import _check, _jit, _product, dispatch, reference
from snack_cupy._check import fail
from snack_cupy._xp import Array, dtype_name, get_array_module, is_array, on_device
from snack_cupy.topology import Topology, check_topology, index_dtype

# Workspaces of captured launches: whenever their graph is replayed it writes there again.
_captured: list[Array] = []


def spmm(
    topology: Topology,
    values: Array,
    dense: Array,
    *,
    batch_major: bool = False,
    bias: Array | None = None,
    out: Array | None = None,
    kernel: str | None = None,
) -> Array:
    """Sparse (m, k) times dense: ``A @ dense``, or ``dense @ A.T`` with ``batch_major=True``.

    Parameters
    ----------
    topology : Topology
        Structure of A, shape (m, k).
    values : float32, float64, float16 or bfloat16 array, shape (nnz,)
        Values of A in canonical order.
    dense : array, dtype and device of `values`
        Shape (k, n) or (k,); with ``batch_major`` shape (..., k). Any strides.
    batch_major : bool
        Whether the features are the last axis of `dense` and of the result.
    bias : array, shape (m,), optional
        Added to every column (row with ``batch_major``) of the result.
    out : C-contiguous array of the result's shape and dtype, optional
        Written, never read. It must not overlap an input.
    kernel : "csr" or "snack_coo", optional
        The default is chosen by `snack_cupy.dispatch.choose_spmm`. "snack_coo" is SNACK's COO
        kernel, a reference point: float32 and float64 with ``batch_major`` only, sums by atomics,
        so it is not deterministic. On the CPU every name gives the same result.

    Returns
    -------
    array, shape (m, n) or (m,); with ``batch_major`` shape (..., m)

    Raises
    ------
    TypeError
        An argument is no array, or has a dtype that is not supported or not that of `values`.
    ValueError
        Shapes or devices disagree, `out` is not C-contiguous or overlaps, or the kernel is unknown.

    Notes
    -----
    2 * nnz * n flop. Half types are summed in float32. Deterministic (except "snack_coo").

    Source: Gale et al., "Sparse GPU Kernels for Deep Learning", SC 2020 (row-major CSR SpMM and
    SDDMM); SNACK, arXiv 2610.04093 (the "snack_coo" kernel).

    Examples
    --------
    >>> import numpy as np
    >>> from snack_cupy import Topology, spmm
    >>> topology = Topology.from_mask(np.array([[0, 1, 0], [1, 0, 1]]))
    >>> values = np.array([2.0, 3.0, 4.0])
    >>> spmm(topology, values, np.arange(6.0).reshape(3, 2))
    array([[ 4.,  6.],
           [16., 23.]])
    >>> spmm(topology, values, np.ones((4, 3)), batch_major=True).shape
    (4, 2)
    """
    check_topology("spmm", topology)
    operands = {"values": (values, (topology.nnz,)), "dense": (dense, None)}
    if bias is not None:
        operands["bias"] = (bias, (topology.m,))
    _check.check_linear_operands("spmm", topology, operands)
    _check_kernel("spmm", kernel, dtype_name(values), batch_major)
    shape = _result_shape("spmm", "dense", dense, topology.k, topology.m, batch_major)
    out = _output("spmm", out, shape, values, (values, dense, bias))
    if topology.device == "cpu":
        flat, target = _as_matrix(dense, batch_major), _as_matrix(out, batch_major)
        reference.spmm(
            topology.row_offsets,
            topology.columns,
            values,
            flat,
            topology.k,
            batch_major=batch_major,
            bias=bias,
            out=target,
        )
        return out
    with on_device(values):
        indices = topology.packed_rows if kernel == "snack_coo" else topology.row_offsets
        structure = (indices, topology.columns, None)
        inputs = (_contiguous(values), _contiguous(dense), _contiguous(bias))
        _run("spmm", topology, structure, inputs, out, dense, batch_major, kernel)
    return out


def spmm_transposed(
    topology: Topology,
    values: Array,
    dense: Array,
    *,
    batch_major: bool = False,
    out: Array | None = None,
) -> Array:
    """Transpose of a sparse (m, k) matrix times dense: ``A.T @ dense``, or ``dense @ A``.

    This is the gradient of `spmm` with respect to its dense operand.

    Parameters
    ----------
    topology : Topology
        Structure of A, shape (m, k). Its column-major view is built at first use and kept.
    values : float32, float64, float16 or bfloat16 array, shape (nnz,)
        Values of A in canonical order; read in place, through the view's permutation.
    dense : array, dtype and device of `values`
        Shape (m, n) or (m,); with ``batch_major`` shape (..., m). Any strides.
    batch_major, out
        As for `spmm`.

    Returns
    -------
    array, shape (k, n) or (k,); with ``batch_major`` shape (..., k)

    Raises
    ------
    TypeError, ValueError
        As for `spmm`.

    Notes
    -----
    2 * nnz * n flop. Half types are summed in float32. Deterministic.

    Source: Gale et al., "Sparse GPU Kernels for Deep Learning", SC 2020.

    Examples
    --------
    >>> import numpy as np
    >>> from snack_cupy import Topology, spmm_transposed
    >>> topology = Topology.from_mask(np.array([[0, 1, 0], [1, 0, 1]]))
    >>> spmm_transposed(topology, np.array([2.0, 3.0, 4.0]), np.array([1.0, 10.0]))
    array([30.,  2., 40.])
    """
    check_topology("spmm_transposed", topology)
    operands = {"values": (values, (topology.nnz,)), "dense": (dense, None)}
    _check.check_linear_operands("spmm_transposed", topology, operands)
    shape = _result_shape("spmm_transposed", "dense", dense, topology.m, topology.k, batch_major)
    out = _output("spmm_transposed", out, shape, values, (values, dense))
    if topology.device == "cpu":
        reference.spmm_transposed(
            topology.row_offsets,
            topology.columns,
            values,
            _as_matrix(dense, batch_major),
            topology.k,
            batch_major=batch_major,
            out=_as_matrix(out, batch_major),
        )
        return out
    with on_device(values):
        structure = topology.transposed
        inputs = (_contiguous(values), _contiguous(dense), None)
        _run("spmm_transposed", topology, structure, inputs, out, dense, batch_major, None)
    return out


def sddmm(
    topology: Topology,
    left: Array,
    right: Array,
    *,
    batch_major: bool = False,
    out: Array | None = None,
) -> Array:
    """Sampled dense-dense product: the entries of ``left @ right.T`` that `topology` has.

    With ``left`` the gradient of the result of `spmm` and ``right`` its dense operand this is the
    gradient with respect to the values.

    Parameters
    ----------
    topology : Topology
        Which entries (row, col) of the (m, k) product to compute.
    left : float32, float64, float16 or bfloat16 array
        Shape (m, n) or (m,); with ``batch_major`` shape (..., m). Any strides.
    right : array, dtype and device of `left`
        Shape (k, n) or (k,); with ``batch_major`` shape (..., k), leading axes those of `left`.
    batch_major : bool
        Whether the features are the last axis: the entries of ``left.T @ right`` then.
    out : C-contiguous array, shape (nnz,), optional
        Written, never read. It must not overlap an input.

    Returns
    -------
    array, shape (nnz,), canonical order

    Raises
    ------
    TypeError, ValueError
        As for `spmm`.

    Notes
    -----
    2 * nnz * n flop; no (m, k) array exists at any time. Half types are summed in float32.
    Deterministic.

    Source: Gale et al., "Sparse GPU Kernels for Deep Learning", SC 2020.

    Examples
    --------
    >>> import numpy as np
    >>> from snack_cupy import Topology, sddmm
    >>> topology = Topology.from_mask(np.array([[0, 1, 0], [1, 0, 1]]))
    >>> sddmm(topology, np.array([1.0, 10.0]), np.array([2.0, 3.0, 4.0]))
    array([ 3., 20., 40.])
    """
    check_topology("sddmm", topology)
    _check.check_linear_operands("sddmm", topology, {"left": (left, None), "right": (right, None)})
    left_rest = _rest_shape("sddmm", "left", left, topology.m, batch_major)
    right_rest = _rest_shape("sddmm", "right", right, topology.k, batch_major)
    if left_rest != right_rest:
        axes = "leading" if batch_major else "trailing"
        fail("sddmm", "right", f"have the {axes} axes of left {left_rest}", right_rest)
    out = _output("sddmm", out, (topology.nnz,), left, (left, right))
    if topology.device == "cpu":
        reference.sddmm(
            topology.row_offsets,
            topology.columns,
            _as_matrix(left, batch_major),
            _as_matrix(right, batch_major),
            batch_major=batch_major,
            out=out,
        )
        return out
    with on_device(left):
        structure = (topology.row_offsets, topology.columns)
        inputs = (_contiguous(left), _contiguous(right))
        _run("sddmm", topology, structure, inputs, out, left, batch_major, None)
    return out


def warmup(
    topology: Topology,
    batch: int,
    dtype: str = "float32",
    *,
    batch_major: bool = True,
    training: bool = True,
) -> None:
    """Compile ahead what `spmm` (and its gradients) need for one size, and build the views.

    Call it before timing or before capturing a CUDA graph. On the CPU it does nothing.

    Parameters
    ----------
    topology : Topology
    batch : int
        Rows of the dense operand (columns where ``batch_major`` is false).
    dtype : str
        "float32", "float64", "float16" or "bfloat16".
    batch_major : bool
    training : bool
        Also `spmm_transposed`, `sddmm` and the column-major view.

    Raises
    ------
    ValueError
        The dtype is not supported, or the batch is negative.
    """
    check_topology("warmup", topology)
    _check.check_count("warmup", "batch", batch, high=2**31 - 1)
    if dtype not in _check.VALUE_DTYPES:
        fail("warmup", "dtype", f"be one of {_check.VALUE_DTYPES}", repr(dtype))
    if topology.device == "cpu":
        return
    if training:
        _ = topology.transposed
    device = topology.columns.device.id
    for op in ("spmm", "spmm_transposed", "sddmm") if training else ("spmm",):
        for aligned in (True, False):
            problem = problem_of(op, topology, batch, dtype, batch_major, aligned=aligned)
            dispatch.plan(problem, device)


def problem_of(
    op: str,
    topology: Topology,
    n: int,
    dtype: str,
    batch_major: bool,
    *,
    aligned: bool = True,
    kernel: str | None = None,
    scratch: int | None = None,
    tf32: bool = False,
) -> dispatch.Problem:
    """The `snack_cupy.dispatch.Problem` of one operation on ``n`` batch rows or dense columns."""
    return dispatch.Problem(
        op,
        topology.m,
        topology.k,
        topology.nnz,
        n,
        dtype,
        index_dtype(topology.k).name,
        index_dtype(topology.m).name,
        batch_major,
        aligned,
        kernel,
        _product.scratch_limit() if scratch is None else scratch,
        tf32,
    )


def _run(
    op: str,
    topology: Topology,
    structure: tuple[Array | None, ...],
    inputs: tuple[Array | None, ...],
    out: Array,
    dense: Array,
    batch_major: bool,
    kernel: str | None,
) -> None:
    """Plan and launch on CuPy's current stream of the topology's device, which is current."""
    if out.size == 0:
        return
    n = _batch_size(dense, batch_major)
    if topology.nnz == 0 or n == 0:
        # Nothing is summed: the result is the bias, or zero.
        bias = inputs[2] if op == "spmm" else None
        _fill(out, bias, batch_major)
        return
    cupy = get_array_module(out)
    pointers = tuple(0 if a is None else int(a.data.ptr) for a in (*structure, *inputs, out))
    aligned = all(pointer % 16 == 0 for pointer in pointers[1:])  # offsets are read one by one
    stream = cupy.cuda.get_current_stream()
    # CuPy can neither capture calls of the dense library nor multiply bfloat16 by it; a bias added
    # to float16 products would round them twice.
    dtype, biased = dtype_name(out), op == "spmm" and inputs[2] is not None
    refused = stream.is_capturing() or dtype == "bfloat16" or (dtype == "float16" and biased)
    scratch = 0 if refused else None
    problem = problem_of(
        op, topology, n, dtype, batch_major, aligned=aligned, kernel=kernel, scratch=scratch
    )
    plan = dispatch.plan(problem, topology.columns.device.id)
    if not plan.workspace:
        _jit.launch(plan, pointers, stream.ptr)
        return
    workspace = cupy.empty(plan.workspace, cupy.uint8)
    pointers += (workspace.data.ptr,)
    if plan.product:
        _multiply(plan, problem, pointers, stream, inputs, out, workspace)
        return
    if stream.is_capturing():
        _captured.append(workspace)
    _jit.launch(plan, pointers, stream.ptr)


def _multiply(
    plan: dispatch.Plan,
    problem: dispatch.Problem,
    pointers: tuple[int, ...],
    stream: Any,
    inputs: tuple[Array | None, ...],
    out: Array,
    workspace: Array,
) -> None:
    """The dense library's product, between a sparse matrix and its dense form in the workspace."""
    transposed = problem.op == "spmm_transposed"
    shape = (problem.k, problem.m) if transposed else (problem.m, problem.k)
    scratch = workspace.view(out.dtype).reshape(shape)
    if problem.op == "sddmm":
        left, right = (_as_matrix(array, problem.batch_major) for array in inputs)
        _product.sample(scratch, left, right, problem.batch_major)
        _jit.launch(plan, pointers, stream.ptr)
        return
    _, dense, bias = inputs
    _jit.launch(plan, pointers, stream.ptr)
    dense, out = (_as_matrix(array, problem.batch_major) for array in (dense, out))
    _product.multiply(scratch, dense, bias, out, problem.batch_major)


def _fill(out: Array, bias: Array | None, batch_major: bool) -> None:
    if bias is None:
        out[...] = 0
    elif batch_major or out.ndim == 1:
        out[...] = bias
    else:
        out[...] = bias[:, None]


def _check_kernel(op: str, kernel: str | None, dtype: str, batch_major: bool) -> None:
    if kernel is not None and kernel not in dispatch.SPMM_KERNELS:
        fail(op, "kernel", f"be None or one of {dispatch.SPMM_KERNELS}", repr(kernel))
    if kernel == "snack_coo" and not batch_major:
        fail(op, "batch_major", 'be True for kernel "snack_coo"', batch_major)
    if kernel == "snack_coo" and dtype not in ("float32", "float64"):
        fail(op, "values", 'be float32 or float64 for kernel "snack_coo"', dtype, TypeError)


def _rest_shape(
    op: str, argument: str, dense: Array, features: int, batch_major: bool
) -> tuple[int, ...]:
    """Shape of ``dense`` without its feature axis, once that axis has ``features`` entries."""
    if dense.ndim == 0 or (not batch_major and dense.ndim > 2):
        rule = "have at least 1 dimension" if batch_major else "have 1 or 2 dimensions"
        fail(op, argument, rule, dense.ndim)
    axis = -1 if batch_major else 0
    if dense.shape[axis] != features:
        rule = f"have shape (..., {features})" if batch_major else f"have {features} rows"
        fail(op, argument, rule, tuple(dense.shape))
    return tuple(dense.shape[:-1] if batch_major else dense.shape[1:])


def _result_shape(
    op: str, argument: str, dense: Array, features: int, result: int, batch_major: bool
) -> tuple[int, ...]:
    rest = _rest_shape(op, argument, dense, features, batch_major)
    return (*rest, result) if batch_major else (result, *rest)


def _batch_size(dense: Array, batch_major: bool) -> int:
    rest = dense.shape[:-1] if batch_major else dense.shape[1:]
    return math.prod(rest)


def _as_matrix(dense: Array, batch_major: bool) -> Array:
    """``dense`` with its leading (or missing trailing) axes as one; a view where it can be."""
    if batch_major:
        return dense.reshape(_batch_size(dense, True), dense.shape[-1])
    return dense.reshape(dense.shape[0], _batch_size(dense, False))


def _contiguous(array: Array | None) -> Array | None:
    return None if array is None else get_array_module(array).ascontiguousarray(array)


def _output(
    op: str,
    out: Array | None,
    shape: tuple[int, ...],
    like: Array,
    inputs: tuple[Any, ...],
) -> Array:
    """``out`` once checked, or a new array."""
    xp = get_array_module(like)
    if out is None:
        with on_device(like):
            return xp.empty(shape, dtype=like.dtype)
    _check.check_array(op, "out", out)
    if get_array_module(out) is not xp:
        fail(op, "out", f"be a {xp.__name__} array", type(out).__module__, TypeError)
    _check.check_dtype(op, "out", out, (dtype_name(like),))
    _check.check_shape(op, "out", out, shape)
    if not out.flags.c_contiguous:
        fail(op, "out", "be C-contiguous", f"strides {out.strides}")
    for array in inputs:
        if is_array(array) and xp.may_share_memory(out, array):
            fail(op, "out", "not overlap an input", "shared memory")
    return out
