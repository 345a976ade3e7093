"""Sparse operations on tensors for a `snack_cupy.Topology`: the functional PyTorch API."""

from __future__ import annotations

import torch

from snack_cupy._check import fail
from snack_cupy.dispatch import NON_DETERMINISTIC, SPMM_KERNELS
from snack_cupy.topology import Topology, check_topology
from snack_cupy.torch import autograd
from snack_cupy.torch.bridge import Structure, structure_of

FLOAT_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def spmm(
    topology: Topology,
    values: torch.Tensor,
    x: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    kernel: str | None = None,
) -> torch.Tensor:
    """``x @ W.T + bias`` for a sparse W (out_features, in_features); differentiable.

    Parameters
    ----------
    topology : Topology
        Structure of W, on the device of `x`.
    values : tensor, shape (nnz,)
        Values of W in canonical order: float32, float64, float16 or bfloat16.
    x : tensor, shape (..., in_features), dtype and device of `values`
        Any strides.
    bias : tensor, shape (out_features,), optional
    kernel : "csr" or "snack_coo", optional
        As for `snack_cupy.spmm`. "snack_coo" is not deterministic.

    Returns
    -------
    tensor, shape (..., out_features)

    Raises
    ------
    TypeError
        Dtypes differ or are not supported.
    ValueError
        Shapes or devices disagree, or the kernel is unknown.
    RuntimeError
        "snack_coo" under ``torch.use_deterministic_algorithms(True)``; or, at backward, the
        topology was updated since the forward.

    Notes
    -----
    Under ``torch.autocast`` the operands are cast to the autocast dtype, as for
    ``torch.nn.functional.linear``. Gradients of any order are defined: that of `x` is a product
    with W's column-major view, that of `values` is `sddmm`.

    Source: Gale et al., "Sparse GPU Kernels for Deep Learning", SC 2020; of "snack_coo": SNACK,
    arXiv 2610.04093.

    Examples
    --------
    >>> import torch
    >>> from snack_cupy import Topology
    >>> from snack_cupy.torch import spmm
    >>> topology = Topology.from_mask(torch.tensor([[0, 1, 0], [1, 0, 1]]).numpy())
    >>> spmm(topology, torch.tensor([2.0, 3.0, 4.0]), torch.ones(1, 3))
    tensor([[2., 7.]])
    """
    _check_topology("spmm", topology, values)
    check_tensor("spmm", "x", x)
    if bias is not None:
        check_tensor("spmm", "bias", bias)
    need_transposed = torch.is_grad_enabled() and x.requires_grad
    structure = structure_of(topology, transposed=need_transposed)
    return linear("spmm", x, values, bias, structure, topology.shape, kernel)


def sddmm(topology: Topology, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The entries of ``left.T @ right`` that the topology has; differentiable.

    Parameters
    ----------
    topology : Topology
        Which entries of the (m, k) product to compute.
    left : tensor, shape (..., m)
    right : tensor, shape (..., k), dtype and device of `left`
        The leading axes are summed over and must agree.

    Returns
    -------
    tensor, shape (nnz,), canonical order

    Raises
    ------
    TypeError
        Dtypes differ or are not supported.
    ValueError
        Shapes or devices disagree.
    RuntimeError
        At backward: the topology was updated since the forward.

    Notes
    -----
    2 * nnz operations for each row of `left`; no (m, k) product exists. Gradients of any order are
    defined.

    Source: Gale et al., "Sparse GPU Kernels for Deep Learning", SC 2020.

    Examples
    --------
    >>> import torch
    >>> from snack_cupy import Topology
    >>> from snack_cupy.torch import sddmm
    >>> topology = Topology.from_mask(torch.tensor([[0, 1, 0], [1, 0, 1]]).numpy())
    >>> sddmm(topology, torch.tensor([[1.0, 10.0]]), torch.tensor([[2.0, 3.0, 4.0]]))
    tensor([ 3., 20., 40.])
    """
    _check_topology("sddmm", topology, left)
    check_tensor("sddmm", "right", right)
    _check_features("sddmm", "left", left, topology.m)
    _check_like("sddmm", "right", right, left, "left")
    _check_features("sddmm", "right", right, topology.k)
    if left.shape[:-1] != right.shape[:-1]:
        rule = f"have the leading axes of left {tuple(left.shape[:-1])}"
        fail("sddmm", "right", rule, tuple(right.shape[:-1]))
    need_transposed = torch.is_grad_enabled() and right.requires_grad
    structure = structure_of(topology, transposed=need_transposed)
    rows = left.shape[:-1].numel()
    return autograd.sddmm(
        left.reshape(rows, topology.m), right.reshape(rows, topology.k), structure
    )


def linear(
    op: str,
    x: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor | None,
    structure: Structure,
    shape: tuple[int, int],
    kernel: str | None = None,
) -> torch.Tensor:
    """`spmm` on the tensors of a structure: the one path of the functional API and the layers."""
    m, k = shape
    if x.device != values.device:
        _check_device(op, "x", x, values, "values")
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):
        x, values, bias = _autocast(x, values, bias)
    if x.dtype is not values.dtype:
        _check_like(op, "x", x, values, "values")
    if values.dtype not in FLOAT_DTYPES:
        fail(op, "values", f"have a dtype of {FLOAT_DTYPES}", values.dtype, TypeError)
    if bias is not None and (bias.dtype is not values.dtype or bias.device != values.device):
        _check_like(op, "bias", bias, values, "values")
    if bias is not None and bias.shape != (m,):
        fail(op, "bias", f"have shape ({m},)", tuple(bias.shape))
    if kernel is not None:
        _check_kernel(op, kernel, values.dtype)
    _check_features(op, "x", x, k)
    flat = x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), k)
    y = autograd.spmm(flat, values, bias, structure, kernel)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], m)


def _autocast(
    x: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The operands in autocast's dtype; float64 is left alone, as PyTorch leaves it."""
    dtype = torch.get_autocast_dtype(x.device.type)

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        eligible = tensor.is_floating_point() and tensor.dtype is not torch.float64
        return tensor.to(dtype) if eligible else tensor

    return cast(x), cast(values), None if bias is None else cast(bias)


def _check_topology(op: str, topology: Topology, tensor: torch.Tensor) -> None:
    check_topology(op, topology)
    name = "values" if op == "spmm" else "left"
    check_tensor(op, name, tensor)
    device = torch.device(topology.device)
    if tensor.device != device:
        fail(op, name, f"be on the topology's device ({device})", tensor.device)
    if tensor.dtype not in FLOAT_DTYPES:
        fail(op, name, f"have a dtype of {FLOAT_DTYPES}", tensor.dtype, TypeError)
    if op == "spmm" and tensor.shape != (topology.nnz,):
        fail(op, name, f"have shape ({topology.nnz},)", tuple(tensor.shape))


def check_tensor(op: str, argument: str, value: object) -> None:
    """``value`` must be a tensor."""
    if not isinstance(value, torch.Tensor):
        fail(op, argument, "be a tensor", type(value).__name__, TypeError)


def _check_like(
    op: str, argument: str, tensor: torch.Tensor, like: torch.Tensor, other: str
) -> None:
    if tensor.dtype is not like.dtype:
        fail(op, argument, f"have the dtype of {other} ({like.dtype})", tensor.dtype, TypeError)
    _check_device(op, argument, tensor, like, other)


def _check_device(
    op: str, argument: str, tensor: torch.Tensor, like: torch.Tensor, other: str
) -> None:
    if tensor.device != like.device:
        fail(op, argument, f"be on the device of {other} ({like.device})", tensor.device)


def _check_features(op: str, argument: str, tensor: torch.Tensor, features: int) -> None:
    if tensor.dim() == 0 or tensor.shape[-1] != features:
        fail(op, argument, f"have shape (..., {features})", tuple(tensor.shape))


def _check_kernel(op: str, kernel: str, dtype: torch.dtype) -> None:
    if kernel not in SPMM_KERNELS:
        fail(op, "kernel", f"be None or one of {SPMM_KERNELS}", repr(kernel))
    if kernel == "snack_coo" and dtype not in (torch.float32, torch.float64):
        fail(op, "values", 'be float32 or float64 for kernel "snack_coo"', dtype, TypeError)
    if kernel in NON_DETERMINISTIC and torch.are_deterministic_algorithms_enabled():
        raise RuntimeError(
            f'{op}: kernel "{kernel}" sums with atomics and is not deterministic; '
            "torch.use_deterministic_algorithms(True) forbids it"
        )
