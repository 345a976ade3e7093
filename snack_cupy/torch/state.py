"""What a layer holds: its topology as views of its buffers, and the loading of a checkpoint.

A checkpoint is checked as a whole, so that a bad one changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from snack_cupy._check import fail
from snack_cupy.topology import Topology, TransposedView
from snack_cupy.torch import bridge, restructuring

if TYPE_CHECKING:
    from snack_cupy.torch.linear import SnackLinear

OP = "load_state_dict"


def view_buffers(layer: SnackLinear) -> Topology:
    """A `Topology` whose arrays are the layer's buffers."""
    topology = Topology._from_parts(
        bridge.to_array(layer.row_offsets),
        bridge.index_to_array(layer.packed_columns),
        (layer.out_features, layer.in_features),
    )
    offsets, rows, permutation = layer.col_offsets, layer.packed_rows, layer.permutation
    if offsets is not None and rows is not None and permutation is not None:
        topology._transposed = TransposedView(
            bridge.to_array(offsets), bridge.index_to_array(rows), bridge.to_array(permutation)
        )
    return topology


def is_view_of_buffers(layer: SnackLinear, topology: Topology) -> bool:
    """Whether ``topology`` still is what `view_buffers` would give."""
    return (
        bridge.address(topology.row_offsets) == layer.row_offsets.data_ptr()
        and bridge.address(topology.columns) == layer.packed_columns.data_ptr()
        and topology.nnz == layer.nnz
        and (topology._transposed is None) == (layer.permutation is None)
    )


def keys(prefix: str) -> list[str]:
    """Keys of what belongs together: values and indices mean nothing without each other."""
    return [prefix + name for name in ("values", "row_offsets", "columns")]


def adopt(
    layer: SnackLinear, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
) -> dict[str, Any]:
    """Take over a checkpoint's topology, and make room for the values that are loaded next.

    Returns the state dict with row offsets as they are stored. Where it holds nothing of the
    layer's connections, nothing is done.

    Raises
    ------
    TypeError, ValueError, IndexError, RuntimeError
        Something is missing, of a wrong type or shape, or no canonical topology of the layer's
        shape. Nothing is changed then.
    """
    names = keys(prefix)
    present = [name for name in names if name in state_dict]
    if not present:
        return state_dict
    if present != names:
        fail(OP, "state_dict", f"hold all of {names}", f"only {present}")
    values, row_offsets, columns = (state_dict[name] for name in names)
    bias = None if layer.bias is None else state_dict.get(prefix + "bias")
    topology = _check(layer, values, row_offsets, columns, bias)
    assign = local_metadata.get("assign_to_params_buffers", False)
    _make_room(layer, topology, columns.device if assign else None)
    return {**state_dict, names[1]: row_offsets.to(torch.int32)}


def _check(
    layer: SnackLinear,
    values: torch.Tensor,
    row_offsets: torch.Tensor,
    columns: torch.Tensor,
    bias: torch.Tensor | None,
) -> Topology:
    """The topology of a checkpoint all of whose tensors fit the layer."""
    held = {"values": values, "row_offsets": row_offsets, "columns": columns}
    if bias is not None:
        held["bias"] = bias
    for name, tensor in held.items():
        if not isinstance(tensor, torch.Tensor):
            fail(OP, name, "be a tensor", type(tensor).__name__, TypeError)
    if values.shape != columns.shape:
        fail(OP, "values", f"have shape {tuple(columns.shape)}", tuple(values.shape))
    if bias is not None and bias.shape != (layer.out_features,):
        fail(OP, "bias", f"have shape ({layer.out_features},)", tuple(bias.shape))
    shape = (layer.out_features, layer.in_features)
    return Topology(row_offsets.cpu().numpy(), columns.cpu().numpy(), shape)


def _make_room(layer: SnackLinear, topology: Topology, device: torch.device | None) -> None:
    """Store the columns, on another device if given, with room for as many values.

    Where nnz is unchanged, in place, like the loading of other tensors.
    """
    packed = bridge.index_to_tensor(topology.columns)
    if topology.nnz != layer.nnz:
        restructuring.resize_parameter(layer.values, layer.values.new_empty(topology.nnz))
    if device is None and packed.shape == layer.packed_columns.shape:
        layer.packed_columns.copy_(packed)
    else:
        layer.packed_columns = packed.to(device or layer.packed_columns.device)
        layer.col_offsets = layer.packed_rows = layer.permutation = None
        layer._topology = None
