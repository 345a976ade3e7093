"""`SnackLinear`: a drop-in linear layer that stores only its non-zero connections."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from snack_cupy import _check
from snack_cupy._check import fail
from snack_cupy._explain import Explanations, explain
from snack_cupy.dst import Remap
from snack_cupy.random import random_topology
from snack_cupy.topology import Topology, check_topology
from snack_cupy.torch import (
    bridge,
    conversion,
    eager,
    functional,
    initialisation,
    ops,
    restructuring,
    scratch,
    state,
)
from snack_cupy.torch.weight import SparseWeight


class SnackLinear(nn.Module):
    """``y = x @ W.T + bias`` with a truly sparse W, in the place of ``torch.nn.Linear``.

    Only the non-zero connections are stored, computed, differentiated and optimised: the weight is
    one 1-D parameter ``values`` of length nnz and the indices of the topology.

    Parameters
    ----------
    in_features, out_features : int
    bias : bool
    sparsity : float in [0, 1)
        Fraction of connections that do not exist. The layer holds exactly
        ``round((1 - sparsity) * out_features * in_features)`` connections (halves to even), at
        uniformly random places. Ignored where `topology` is given.
    topology : Topology, optional
        The connections, shape (out_features, in_features), copied to the layer's device.
    device, dtype : as for ``torch.nn.Linear``
        float32, float64, float16 or bfloat16.
    generator : torch.Generator, optional
        Source of the topology and of the initial values; the default generator otherwise. The
        topology is the same on the CPU and on a GPU.

    Attributes
    ----------
    values : Parameter, shape (nnz,)
        In canonical (row-major) order; its identity never changes.
    bias : Parameter, shape (out_features,), or None
    row_offsets : int32 buffer, shape (out_features + 1,)
    packed_columns : uint8 buffer of 2 * nnz (in_features <= 65536) or int32 buffer of nnz

    Raises
    ------
    ValueError
        A size is negative, the sparsity is outside [0, 1), or the topology has another shape.
    TypeError
        An argument or the dtype is of a wrong type.

    Notes
    -----
    Initial values are uniform within ``1 / sqrt(fan_in)`` where fan_in is the actual number of
    connections of the output row; so is the bias.

    A checkpoint holds ``values``, ``row_offsets``, ``columns`` (int32) and ``bias``; loading adopts
    the topology of the checkpoint, whatever its nnz.

    Source: SNACK, arXiv 2610.04093 (a truly sparse layer in COO form).

    Examples
    --------
    >>> import torch
    >>> from snack_cupy.torch import SnackLinear
    >>> layer = SnackLinear(64, 32, sparsity=0.9)
    >>> layer
    SnackLinear(in_features=64, out_features=32, bias=True, nnz=205, sparsity=0.8999)
    >>> layer(torch.ones(8, 64)).shape
    torch.Size([8, 32])
    """

    values: nn.Parameter
    bias: nn.Parameter | None
    row_offsets: torch.Tensor
    packed_columns: torch.Tensor
    col_offsets: torch.Tensor | None
    packed_rows: torch.Tensor | None
    permutation: torch.Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        sparsity: float = 0.9,
        topology: Topology | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        op = "SnackLinear"
        k = _check.check_count(op, "in_features", in_features, high=2**31 - 1)
        m = _check.check_count(op, "out_features", out_features, high=2**31 - 1)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if dtype not in functional.FLOAT_DTYPES:
            fail(op, "dtype", f"be one of {functional.FLOAT_DTYPES}", dtype, TypeError)
        self.in_features, self.out_features = k, m
        if topology is None:
            _check.check_fraction(op, "sparsity", sparsity)
            seed = initialisation.draw_seed(generator)
            topology = random_topology((m, k), sparsity=sparsity, seed=seed)
        else:
            check_topology(op, topology)
            if topology.shape != (m, k):
                fail(op, "topology", f"have shape {(m, k)}", topology.shape)
        device = torch.get_default_device() if device is None else torch.device(device)
        with bridge.array_scope(device):
            host = topology.to_device("cpu")
        row_offsets = bridge.to_tensor(host.row_offsets.copy()).to(device)
        packed = bridge.index_to_tensor(host.columns.copy()).to(device)
        self.register_buffer("row_offsets", row_offsets)
        self.register_buffer("packed_columns", packed, persistent=False)
        for name in ("col_offsets", "packed_rows", "permutation"):
            self.register_buffer(name, None, persistent=False)
        self._topology: Topology | None = None
        self.values = nn.Parameter(torch.empty(host.nnz, device=device, dtype=dtype))
        if bias:
            self.bias = nn.Parameter(torch.empty(m, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters(generator)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the values and the bias anew: uniform within ``1 / sqrt(fan_in of the row)``.

        Parameters
        ----------
        generator : torch.Generator, optional
            On the CPU it gives the same numbers whatever the layer's device.
        """
        initialisation.reset(self, generator)

    # The product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x @ W.T + bias``.

        Parameters
        ----------
        x : tensor, shape (..., in_features), dtype and device of `values`
            Any strides; under ``torch.autocast`` any dtype it casts.

        Returns
        -------
        tensor, shape (..., out_features)

        Raises
        ------
        TypeError
            ``x`` is no tensor or of another dtype.
        ValueError
            ``x`` has another number of features or lives on another device.
        """
        y = eager.linear(self, x)
        if y is not None:
            return y
        functional.check_tensor("SnackLinear", "x", x)
        if x.requires_grad and self.permutation is None and torch.is_grad_enabled():
            self._build_transposed()
        structure = bridge.Structure(
            self.row_offsets,
            self.packed_columns,
            self.col_offsets,
            self.packed_rows,
            self.permutation,
        )
        shape = (self.out_features, self.in_features)
        return functional.linear("SnackLinear", x, self.values, self.bias, structure, shape)

    def _build_transposed(self) -> None:
        """The column-major view that the input gradient needs, kept from then on."""
        view = ops.transpose(self.row_offsets, self.packed_columns, self.in_features)
        self.col_offsets, self.packed_rows, self.permutation = view
        self._topology = None

    # What it is made of

    @property
    def nnz(self) -> int:
        """Number of connections."""
        return self.values.shape[0]

    @property
    def sparsity(self) -> float:
        """Actual fraction of connections that do not exist."""
        size = self.in_features * self.out_features
        return 1.0 - self.nnz / size if size else 1.0

    @property
    def weight(self) -> SparseWeight:
        """Shape, dtype and device of W, without a dense matrix (`SparseWeight`)."""
        return SparseWeight(self.values, (self.out_features, self.in_features))

    @property
    def topology(self) -> Topology:
        """The layer's `Topology`: views of its buffers, so never modify its arrays directly."""
        if self._topology is None or not state.is_view_of_buffers(self, self._topology):
            self._topology = state.view_buffers(self)
        return self._topology

    def explain(self, batch: int) -> Explanations:
        """Which kernels a batch of that size gets, why, and what to expect: `snack_cupy.explain`.

        Raises
        ------
        ValueError
            The batch is less than 1.
        """
        dtype = str(self.values.dtype).removeprefix("torch.")
        return explain(self.topology, batch, dtype, tf32=scratch.tf32_allowed())

    def extra_repr(self) -> str:
        """Sizes for ``repr``."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, nnz={self.nnz}, sparsity={self.sparsity:.4g}"
        )

    # From and to dense

    @classmethod
    def from_dense(
        cls,
        linear: nn.Linear,
        sparsity: float | None = None,
        mask: torch.Tensor | None = None,
    ) -> SnackLinear:
        """A sparse copy of an ``nn.Linear``: its largest weights, or those under a mask.

        Parameters
        ----------
        linear : nn.Linear
            Left unchanged; its device, dtype, bias and training mode are taken over.
        sparsity : float in [0, 1)
            Keep ``round((1 - sparsity) * out * in)`` weights of largest magnitude; equal
            magnitudes keep the lower index.
        mask : tensor, shape (out_features, in_features)
            Keep the weights where the mask is non-zero. Exactly one of the two is given.

        Raises
        ------
        TypeError
            ``linear`` is no nn.Linear, the mask no tensor, or both or neither of `sparsity` and
            `mask` are given.
        ValueError
            The sparsity is outside [0, 1) or the mask has another shape.

        Notes
        -----
        On the weight's device this takes a sort and a mask of as many elements as the weight.
        """
        return conversion.from_dense(cls, linear, sparsity, mask)

    def to_dense(self) -> nn.Linear:
        """An ``nn.Linear`` that computes the same function; its weight is (out, in) elements.

        Returns
        -------
        nn.Linear
            With copies of the values and the bias, of the layer's device, dtype, training mode and
            ``requires_grad``.
        """
        return conversion.to_dense(self)

    # Restructuring: see snack_cupy.torch.restructuring

    def prune(
        self,
        amount: int | float,
        *,
        criterion: str = "magnitude",
        optimizer: torch.optim.Optimizer | None = None,
        key: int = 0,
    ) -> Remap:
        r"""Remove connections; nnz falls.

        Parameters
        ----------
        amount : int or float
            Number of connections, or fraction in [0, 1] of the present ones (rounded to the
            nearest count).
        criterion : "magnitude" or "random"
            Which go: the smallest \|value\| (ties: the lower index goes first) or random ones.
        optimizer : torch.optim.Optimizer, optional
            Its state for ``values`` follows (see `remap_optimizer_state`).
        key : int
            Key of the random numbers (`snack_cupy.random.key`).

        Returns
        -------
        Remap
            From the new positions to the old ones.

        Raises
        ------
        ValueError, TypeError
            The amount or the criterion is invalid, or optimiser state cannot follow.
        RuntimeError
            A CUDA graph is being captured. Nothing is changed in any of these cases.

        Notes
        -----
        Source: magnitude pruning as in Han et al., "Learning both weights and connections for
        efficient neural networks", NeurIPS 2015.
        """
        return restructuring.prune(self, amount, criterion, optimizer, key)

    def grow(
        self,
        amount: int | float,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        key: int = 0,
    ) -> Remap:
        """Add connections of value 0 at random inactive places; nnz rises.

        Parameters
        ----------
        amount : int or float
            Number of connections, or fraction of the present ones (rounded).
        optimizer, key
            As for `prune`.

        Returns
        -------
        Remap

        Raises
        ------
        ValueError, TypeError
            As for `prune`; also where fewer places than `amount` are inactive.
        RuntimeError
            A CUDA graph is being captured.

        Notes
        -----
        Source: random growth as in Mocanu et al., "Scalable training of artificial neural networks
        with adaptive sparse connectivity inspired by network science", Nature Communications 2018.
        """
        return restructuring.grow(self, amount, optimizer, key)

    def restructure(
        self,
        drop_fraction: float,
        *,
        criterion: str = "magnitude",
        regrown: str = "survive",
        gradient: tuple[torch.Tensor, torch.Tensor] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        key: int = 0,
    ) -> Remap:
        """Drop a fraction of the connections and grow as many elsewhere; nnz stays.

        Everything is rewritten in place, so captured CUDA graphs and optimiser references stay
        valid. Grown connections start at 0 with zero gradient and zero optimiser state.

        Parameters
        ----------
        drop_fraction : float in [0, 1]
        regrown : "survive" or "reset"
            Whether a connection dropped and grown again in this update keeps its value and state.
        gradient : pair of tensors, shapes (batch, out_features) and (batch, in_features), optional
            Gradient of the layer's result and its input, of one dtype: grow where the magnitude of
            their product is largest (`snack_cupy.dst.grow_by_gradient`) rather than at random.
        criterion, optimizer, key
            As for `prune`.

        Returns
        -------
        Remap

        Raises
        ------
        ValueError, TypeError
            As for `prune`.
        RuntimeError
            A CUDA graph is being captured.

        Notes
        -----
        Source: Mocanu et al., "Scalable training of artificial neural networks with adaptive
        sparse connectivity inspired by network science", Nature Communications 2018 (SET); Evci
        et al., "Rigging the lottery: making all tickets winners", ICML 2020 (growth by gradient).
        """
        return restructuring.restructure(
            self, drop_fraction, criterion, regrown, optimizer, key, gradient
        )

    # State

    def __getstate__(self) -> dict[str, Any]:
        """The module without its cached topology, which is made of views."""
        return {**self.__dict__, "_topology": None}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "columns"] = bridge.unpack_indices(self.packed_columns)

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        try:
            state_dict = state.adopt(self, state_dict, prefix, local_metadata)
        except (ValueError, TypeError, IndexError, RuntimeError) as error:
            missing_keys += [key for key in state.keys(prefix) if key not in state_dict]
            error_msgs.append(f"{prefix.rstrip('.') or 'SnackLinear'}: {error}")
            return
        super()._load_from_state_dict(
            state_dict,
            prefix,
            local_metadata,
            strict,
            missing_keys,
            unexpected_keys,
            error_msgs,
        )
        columns = prefix + "columns"
        if columns in unexpected_keys:
            unexpected_keys.remove(columns)
        if columns not in state_dict:
            missing_keys.append(columns)
        elif self.permutation is not None:  # of as many connections: rewritten in place
            with bridge.array_scope(self.values.device):
                self.topology.refresh()
