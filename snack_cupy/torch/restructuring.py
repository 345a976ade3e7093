"""Restructuring of a layer's connections: `snack_cupy.dst` on its buffers, state following.

`snack_cupy.dst` decides on plain arrays which connections exist next and returns a `Remap`; here
everything that is kept per connection (values, gradient, optimiser state) follows it. Where nnz is
unchanged all of it is rewritten in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from snack_cupy import dst
from snack_cupy._check import check_count, fail
from snack_cupy._xp import Array
from snack_cupy.dst._device import move_addresses
from snack_cupy.torch import bridge

if TYPE_CHECKING:
    from snack_cupy.torch.linear import SnackLinear

Change = tuple[Array, Array, dst.Remap]


def prune(
    layer: SnackLinear,
    amount: int | float,
    criterion: str,
    optimizer: torch.optim.Optimizer | None,
    key: int,
) -> dst.Remap:
    """`SnackLinear.prune`."""
    n = _count("prune", amount, layer.nnz, layer.nnz)

    def change() -> Change:
        return dst.prune(layer.topology, _scores(layer), n, criterion=criterion, key=key)

    return _change(layer, change, optimizer)


def grow(
    layer: SnackLinear, amount: int | float, optimizer: torch.optim.Optimizer | None, key: int
) -> dst.Remap:
    """`SnackLinear.grow`."""
    inactive = layer.in_features * layer.out_features - layer.nnz
    n = _count("grow", amount, layer.nnz, inactive)
    return _change(layer, lambda: dst.grow(layer.topology, n, key=key), optimizer)


def restructure(
    layer: SnackLinear,
    drop_fraction: float,
    criterion: str,
    regrown: str,
    optimizer: torch.optim.Optimizer | None,
    key: int,
) -> dst.Remap:
    """`SnackLinear.restructure`."""

    def change() -> Change:
        return dst.restructure(
            layer.topology,
            _scores(layer),
            drop_fraction,
            criterion=criterion,
            regrown=regrown,
            key=key,
        )

    return _change(layer, change, optimizer)


def remap_optimizer_state(
    optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, remap: dst.Remap
) -> None:
    """Make the optimiser's state of one ``values`` parameter follow a `Remap`.

    Every state tensor with one entry per connection is gathered: survivors keep their entry, grown
    connections start at 0. Scalars (``step``) stay. Works for an optimiser without state yet.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
    parameter : Parameter
        The layer's ``values``, before or after the update.
    remap : Remap

    Raises
    ------
    TypeError
        An argument is of another kind.
    ValueError
        A state tensor has another length (quantised blocks, say) and cannot follow; nothing is
        changed then.
    """
    if not isinstance(remap, dst.Remap):
        rule = "be a snack_cupy.dst.Remap"
        fail("remap_optimizer_state", "remap", rule, type(remap).__name__, TypeError)
    check_optimizer_state(optimizer, parameter, remap.nnz_old)
    state = optimizer.state.get(parameter, {})
    for name, value in state.items():
        if _is_per_connection(value, remap.nnz_old):
            state[name] = _follow(value, remap)


def check_optimizer_state(
    optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, nnz: int
) -> None:
    """Raise where the state of ``parameter`` cannot follow an update of nnz entries."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        rule = "be a torch.optim.Optimizer"
        fail("restructure", "optimizer", rule, type(optimizer).__name__, TypeError)
    if isinstance(optimizer, torch.optim.LBFGS) and optimizer.state:
        fail(
            "restructure", "optimizer", "keep its state per parameter to follow an update", "LBFGS"
        )
    for name, value in optimizer.state.get(parameter, {}).items():
        scalar = not isinstance(value, (torch.Tensor, list, tuple, dict)) or (
            isinstance(value, torch.Tensor) and value.numel() == 1
        )
        if not scalar and not _is_per_connection(value, nnz):
            got = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            rule = f"hold one entry per connection ({nnz}) or a scalar to follow an update"
            fail("restructure", f"optimizer state {name!r}", rule, got)


def _is_per_connection(value: Any, nnz: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 1 and value.shape[0] == nnz


def _change(
    layer: SnackLinear, change: Callable[[], Change], optimizer: torch.optim.Optimizer | None
) -> dst.Remap:
    """Decide on the next connections, then move everything; nothing moves if deciding fails."""
    values = layer.values
    if values.is_cuda and torch.cuda.is_current_stream_capturing():
        rule = "not be captured in a CUDA graph (update between its replays)"
        fail("restructure", "an update", rule, "a capture", RuntimeError)
    if optimizer is not None:
        check_optimizer_state(optimizer, values, layer.nnz)
    with torch.no_grad(), bridge.array_scope(values.device):
        topology = layer.topology
        row_offsets, columns, remap = change()
        if remap.nnz_new == remap.nnz_old:
            # In place: the topology's arrays are views of the layer's buffers.
            topology.update(row_offsets, columns)
            values.copy_(_gather(values, remap))
            if values.grad is not None:
                values.grad.copy_(_gather(values.grad, remap))
        else:
            _resize(layer, row_offsets, columns, remap)
        if optimizer is not None:
            remap_optimizer_state(optimizer, values, remap)
        torch.autograd.graph.increment_version([values, layer.row_offsets])
    return remap


def _resize(layer: SnackLinear, row_offsets: Array, columns: Array, remap: dst.Remap) -> None:
    """New arrays of another length; the parameter and the row offsets keep their identity."""
    values = layer.values
    gradient = values.grad
    resize_parameter(values, _gather(values, remap))
    if gradient is not None:
        values.grad = _gather(gradient, remap)
    layer.row_offsets.copy_(bridge.to_tensor(row_offsets))
    layer.packed_columns = bridge.index_to_tensor(columns).clone()
    layer.col_offsets = layer.packed_rows = layer.permutation = None
    layer._topology = None


def resize_parameter(parameter: torch.nn.Parameter, data: torch.Tensor) -> None:
    """Give ``parameter`` data of another length, and no gradient; its identity stays.

    A graph that is still alive (last step's loss, say) keeps the parameter's gradient accumulator
    alive, and that goes on expecting the old length. PyTorch lets go of it when the dtype changes.
    """
    parameter.grad = None
    other = torch.float32 if data.dtype is torch.float64 else torch.float64
    parameter.data = data.new_empty(0, dtype=other)
    parameter.data = data


def _follow(tensor: torch.Tensor, remap: dst.Remap) -> torch.Tensor:
    """``tensor`` after the update: the same object, rewritten, where nnz is unchanged."""
    with torch.no_grad(), bridge.array_scope(tensor.device):
        gathered = _gather(tensor, remap)
    return tensor.copy_(gathered) if remap.nnz_new == remap.nnz_old else gathered


def _gather(tensor: torch.Tensor, remap: dst.Remap) -> torch.Tensor:
    """Entry of the old position, or 0 for a grown connection, in any dtype."""
    if tensor.shape[0] == 0:
        return tensor.new_zeros(remap.nnz_new)
    index = bridge.to_tensor(remap.new_to_old)
    if index.device == tensor.device and tensor.is_cuda and tensor.element_size() <= 8:
        source = tensor.detach().contiguous()
        gathered = source.new_empty(remap.nnz_new)
        addresses = source.data_ptr(), gathered.data_ptr()
        move_addresses(remap.new_to_old, *addresses, tensor.element_size())
        return gathered
    index = index.to(tensor.device)
    taken = tensor.detach().index_select(0, index.clamp(min=0))
    return taken.masked_fill_(index < 0, 0)


def _scores(layer: SnackLinear) -> Array:
    """The values as an array; bfloat16 widened, which keeps their order."""
    values = layer.values.detach()
    return bridge.to_array(values.float() if values.dtype is torch.bfloat16 else values)


def _count(op: str, amount: int | float, nnz: int, high: int) -> int:
    """A count as given, or a fraction of ``nnz`` rounded to the nearest count."""
    if isinstance(amount, float):
        if not math.isfinite(amount) or not 0 <= amount <= 1:
            fail(op, "amount", "be a count or a fraction in [0, 1]", amount)
        amount = round(amount * nnz)
    return check_count(op, "amount", amount, high=high)
