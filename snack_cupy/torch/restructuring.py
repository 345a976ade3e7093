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
from snack_cupy.dst._device import InPlace, move_addresses
from snack_cupy.dst.restructure import restructure_in_place
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
        return dst.prune(layer.topology, _widened(layer.values), n, criterion=criterion, key=key)

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
    gradient: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> dst.Remap:
    """`SnackLinear.restructure`."""
    _check_update(layer, optimizer)
    values, following = layer.values, []

    def reserve() -> None:
        following.append(_reserve(layer, optimizer))

    with torch.no_grad(), bridge.array_scope(values.device):
        growth: str | dst.GradientGrowth = "random"
        if gradient is not None:
            growth = dst.GradientGrowth(*map(_widened, gradient))
        remap = restructure_in_place(
            layer.topology,
            _widened(values),
            drop_fraction,
            criterion=criterion,
            growth=growth,
            regrown=regrown,
            key=key,
            reserve=reserve,
        )
        following[0].follow(remap)
        torch.autograd.graph.increment_version([values, layer.row_offsets])
    return remap


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
    """New connections, of another number; nothing moves if deciding fails."""
    _check_update(layer, optimizer)
    values = layer.values
    with torch.no_grad(), bridge.array_scope(values.device):
        row_offsets, columns, remap = change()
        following = _reserve(layer, optimizer)
        if remap.nnz_new == remap.nnz_old:
            layer.topology.update(row_offsets, columns)
            following.follow(remap)
        else:
            _resize(layer, row_offsets, columns, remap)
            if optimizer is not None:
                remap_optimizer_state(optimizer, values, remap)
        torch.autograd.graph.increment_version([values, layer.row_offsets])
    return remap


def _check_update(layer: SnackLinear, optimizer: torch.optim.Optimizer | None) -> None:
    values = layer.values
    if values.is_cuda and torch.cuda.is_current_stream_capturing():
        rule = "not be captured in a CUDA graph (update between its replays)"
        fail("restructure", "an update", rule, "a capture", RuntimeError)
    if optimizer is not None:
        check_optimizer_state(optimizer, values, layer.nnz)


def _reserve(layer: SnackLinear, optimizer: torch.optim.Optimizer | None) -> _Following:
    """What follows an update that keeps nnz: values, gradient, optimiser state."""
    values, nnz = layer.values, layer.nnz
    state = {} if optimizer is None else optimizer.state.get(values, {})
    kept = [tensor for tensor in state.values() if _is_per_connection(tensor, nnz)]
    tensors = [values, *([] if values.grad is None else [values.grad]), *kept]
    return _Following(tensors, layer.topology.columns, nnz)


class _Following:
    """The tensors with an entry per connection, to be rewritten as a remap says.

    On a GPU those of one width together, without copies of them.
    """

    def __init__(self, tensors: list[torch.Tensor], like: Array, nnz: int) -> None:
        self._in_place: InPlace | None = None
        device = tensors[0].device
        if device.type == "cuda":
            self._in_place = InPlace(like, nnz)
        self._by_width: dict[int, list[torch.Tensor]] = {}
        for tensor in tensors:
            width = tensor.element_size()
            together = (
                self._in_place is not None
                and self._in_place.takes(width)
                and tensor.device == device
                and tensor.is_contiguous()
            )
            self._by_width.setdefault(width if together else 0, []).append(tensor)

    def follow(self, remap: dst.Remap) -> None:
        """Rewrite each tensor."""
        for width, tensors in self._by_width.items():
            if width and self._in_place is not None:
                addresses = [tensor.data_ptr() for tensor in tensors]
                self._in_place.move(remap.new_to_old, addresses, width)
                torch.autograd.graph.increment_version(tensors)
                continue
            for tensor in tensors:
                tensor.copy_(_gather(tensor, remap))


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


def _widened(tensor: torch.Tensor) -> Array:
    """An array of the tensor's memory; bfloat16 widened, which keeps the order."""
    tensor = tensor.detach()
    return bridge.to_array(tensor.float() if tensor.dtype is torch.bfloat16 else tensor)


def _count(op: str, amount: int | float, nnz: int, high: int) -> int:
    """A count as given, or a fraction of ``nnz`` rounded to the nearest count."""
    if isinstance(amount, float):
        if not math.isfinite(amount) or not 0 <= amount <= 1:
            fail(op, "amount", "be a count or a fraction in [0, 1]", amount)
        amount = round(amount * nnz)
    return check_count(op, "amount", amount, high=high)
