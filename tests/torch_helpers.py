"""What the CPU and the GPU tests of the PyTorch layer share; imports torch."""

import itertools

import numpy as np
import torch
from helpers import make_topology, normal
from torch import nn

from snack_cupy.torch import SnackLinear, bridge

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}

# Every kind of state an optimiser keeps per connection, by name; all at sizes that move weights.
OPTIMIZERS = {
    "sgd": lambda p, **kw: torch.optim.SGD(p, lr=0.1, **kw),
    "sgd_momentum": lambda p, **kw: torch.optim.SGD(p, lr=0.1, momentum=0.9, **kw),
    "adam": lambda p, **kw: torch.optim.Adam(p, lr=0.01, **kw),
    "adam_amsgrad": lambda p, **kw: torch.optim.Adam(p, lr=0.01, amsgrad=True, **kw),
    "adamw": lambda p, **kw: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, **kw),
    "rmsprop": lambda p, **kw: torch.optim.RMSprop(p, momentum=0.9, centered=True, **kw),
    "adagrad": lambda p, **kw: torch.optim.Adagrad(p, lr=0.1, **kw),
}


# Tensors and arrays


def to_torch(array, device="cpu"):
    """A tensor copy of a NumPy array, bfloat16 included."""
    # NumPy gives empty arrays strides of 0; `contiguous` does not touch those, `clone` does.
    return bridge.to_tensor(np.array(array)).clone(memory_format=torch.contiguous_format).to(device)


def to_numpy(tensor):
    """A NumPy copy of a tensor, bfloat16 included."""
    return bridge.to_array(tensor.detach().cpu()).copy()


def operands(problem, dtype, rng, device="cpu"):
    """values, x (batch, k), bias (m,) and gradient (batch, m) of a problem: normal numbers."""
    shapes = ((problem.nnz,), (problem.n, problem.k), (problem.m,), (problem.n, problem.m))
    return [to_torch(normal(rng, shape, dtype), device) for shape in shapes]


def double_operands(topology):
    """values, x, bias, gradient in float64, batch 3, the first three asking for a gradient."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((topology.nnz,), (3, topology.k), (topology.m,), (3, topology.m))
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    return [*require_grad(*tensors[:3]), tensors[3]]


def integers(shape, seed=0, dtype=torch.float32, device="cpu"):
    """Integers in [-8, 8]: sums of their products are exact, in whatever order they are taken."""
    generator = torch.Generator().manual_seed(seed)
    shape = (shape,) if isinstance(shape, int) else shape
    return torch.randint(-8, 9, shape, generator=generator).to(device=device, dtype=dtype)


def _as_sliced(tensor):
    memory = tensor.new_zeros((*tensor.shape[:-1], 2 * tensor.shape[-1]))
    memory[..., ::2] = tensor
    return memory[..., ::2]


def _as_offset(tensor):
    memory = tensor.new_zeros(tensor.numel() + 1)
    memory[1:] = tensor.flatten()
    return memory[1:].view(tensor.shape)


# Each gives an equal tensor that lies in memory another way.
LAYOUTS = {
    "transposed": lambda tensor: tensor.T.contiguous().T,
    "sliced": _as_sliced,
    "offset": _as_offset,
}


# Dense twins


def dense_spmm(topology, values, x, bias=None):
    """`spmm` by a dense matrix, differentiable in values."""
    matrix = values.new_zeros(topology.shape)
    matrix[torch.from_numpy(topology.row).long(), torch.from_numpy(topology.col).long()] = values
    return nn.functional.linear(x, matrix, bias)


def dense_sddmm(topology, left, right):
    """`sddmm` by a dense product."""
    return (left.flatten(0, -2).T @ right.flatten(0, -2))[
        torch.from_numpy(topology.row).long(), torch.from_numpy(topology.col).long()
    ]


def require_grad(*tensors):
    """Copies that ask for a gradient."""
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


# Layers


def make_layer(problem, dtype="float32", device="cpu", bias=True, seed=0):
    """A layer with the topology of a problem and normal values."""
    layer = SnackLinear(
        problem.k,
        problem.m,
        bias=bias,
        topology=make_topology(problem),
        device=device,
        dtype=DTYPES[dtype],
    )
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        layer.values.copy_(to_torch(normal(rng, (problem.nnz,), dtype)))
        if bias:
            layer.bias.copy_(to_torch(normal(rng, (problem.m,), dtype)))
    return layer


def seeded_layer(in_features=12, out_features=7, seed=1, **kwargs):
    """A layer whose topology and values come from a generator of their own."""
    generator = torch.Generator().manual_seed(seed)
    return SnackLinear(in_features, out_features, generator=generator, **kwargs)


def positions(layer):
    """``row * in_features + column`` of each connection, on the host."""
    topology = layer.topology
    return to_numpy(bridge.to_tensor(topology.positions))


def by_position(layer, tensor):
    """What a tensor holds for each connection, under its position in the dense matrix."""
    return dict(zip(positions(layer).tolist(), tensor.detach().cpu().tolist(), strict=True))


def dense_matrix(layer, tensor=None):
    """The values (or another tensor of that length) as a dense (out, in) matrix."""
    tensor = layer.values if tensor is None else tensor
    matrix = torch.zeros(layer.out_features * layer.in_features, dtype=tensor.dtype)
    matrix[torch.from_numpy(positions(layer))] = tensor.detach().cpu()
    return matrix.view(layer.out_features, layer.in_features)


def snapshot(layer, optimizer=None):
    """A copy of all that an update may change: state, gradient, optimiser state, held view."""
    held = dict(layer.state_dict())
    for name in ("packed_columns", "col_offsets", "packed_rows", "permutation"):
        held[name] = getattr(layer, name)
    held["grad"] = layer.values.grad
    if optimizer is not None:
        held.update(optimizer.state.get(layer.values, {}))
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in held.items()}


def assert_same(got, want):
    """Two snapshots (or state dicts) hold the same keys, dtypes, shapes and bits."""
    assert got.keys() == want.keys()
    for name, expected in want.items():
        if not isinstance(expected, torch.Tensor):
            assert got[name] == expected, name
            continue
        assert got[name].dtype == expected.dtype, name
        assert torch.equal(got[name], expected), name


def make_mlp(sizes=(20, 16, 8), seed=0, layer=SnackLinear, **kwargs):
    """Linear layers with ReLU between them."""
    generator = torch.Generator().manual_seed(seed)
    modules = []
    for k, m in itertools.pairwise(sizes):
        modules += [layer(k, m, generator=generator, **kwargs), nn.ReLU()]
    return nn.Sequential(*modules[:-1])


def train_step(model, optimizer, x, target):
    """One step on the mean squared error; returns the loss."""
    optimizer.zero_grad()
    loss = (model(x) - target).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


# Updates

# The data of `trained`, and every way to change a layer's connections.
X, TARGET = integers((6, 12), 1) / 8, integers((6, 7), 2) / 8
UPDATES = {
    "restructure": lambda layer, **kw: layer.restructure(0.4, **kw),
    "restructure_random": lambda layer, **kw: layer.restructure(0.4, criterion="random", **kw),
    "restructure_all": lambda layer, **kw: layer.restructure(1.0, **kw),
    "restructure_nothing": lambda layer, **kw: layer.restructure(0.0, **kw),
    "prune": lambda layer, **kw: layer.prune(0.3, **kw),
    "prune_random": lambda layer, **kw: layer.prune(9, criterion="random", **kw),
    "prune_all": lambda layer, **kw: layer.prune(1.0, **kw),
    "grow": lambda layer, **kw: layer.grow(0.2, **kw),
    "grow_all": lambda layer, **kw: layer.grow(42, **kw),
}


def trained(optimizer_name="adam", steps=3, dtype="float32", device="cpu", **options):
    """A layer after some steps, and its optimiser, with the last gradient still there."""
    layer = seeded_layer(sparsity=0.5, dtype=DTYPES[dtype]).to(device)
    optimizer = OPTIMIZERS[optimizer_name](layer.parameters(), **options)
    (x,) = require_grad(X.to(device, DTYPES[dtype]))
    for _ in range(steps):
        train_step(layer, optimizer, x, TARGET.to(device, DTYPES[dtype]))
    return layer, optimizer


def per_connection(layer, optimizer=None):
    """The tensors with an entry for each connection, by name."""
    state = optimizer.state[layer.values] if optimizer is not None else {}
    held = {"values": layer.values, "grad": layer.values.grad, **state}
    return {k: v for k, v in held.items() if isinstance(v, torch.Tensor) and v.dim() == 1}


# Trajectories


class MaskedLinear(nn.Module):
    """Dense+Mask: the dense layer that a sparse one stands for, its weight masked at each step."""

    def __init__(self, layer):
        super().__init__()
        self.weight = nn.Parameter(dense_matrix(layer).to(layer.values.device))
        self.bias = nn.Parameter(layer.bias.detach().clone())
        ones = torch.ones_like(layer.values)
        self.register_buffer("mask", dense_matrix(layer, ones).to(layer.values.device))

    def forward(self, x):
        return nn.functional.linear(x, self.weight * self.mask, self.bias)


def masked_twin(model):
    """The same model, each sparse layer replaced by its Dense+Mask."""
    twins = (MaskedLinear(m) if isinstance(m, SnackLinear) else m for m in model)
    return nn.Sequential(*twins)


def trajectories(dtype, device="cpu", steps=100):
    """Losses (steps,) of a sparse and a Dense+Mask model under Adam, and both models."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(steps, 32, 40, generator=generator, dtype=torch.float64)
    target = torch.randn(steps, 32, 5, generator=generator, dtype=torch.float64)
    x, target = x.to(device, dtype), target.to(device, dtype)
    # The same float64 numbers for every dtype, so that runs can be compared across dtypes.
    model = make_mlp((40, 64, 32, 5), seed=3, sparsity=0.8, dtype=torch.float64)
    model = model.to(device, dtype)
    twin = masked_twin(model)
    losses = []
    for each in (model, twin):
        optimizer = torch.optim.Adam(each.parameters(), lr=1e-3)
        pairs = zip(x, target, strict=True)
        losses.append(torch.stack([train_step(each, optimizer, *pair) for pair in pairs]))
    return (*(loss.double().cpu() for loss in losses), model, twin)


def assert_trajectories_agree(device):
    """In float32 the sparse model's losses are as close to float64's as the dense model's.

    Both runs round at every step, differently, and training carries the differences on; neither is
    better than the other. So the dense run's own distance from the float64 run, at its largest so
    far, is what rounding does here, and 4 times that is the tolerance at each step.
    """
    _, exact, *_ = trajectories(torch.float64, device)
    sparse, dense, *_ = trajectories(torch.float32, device)
    scale = (dense - exact).abs().cummax(0).values
    # A first step may happen to be hit exactly; one rounding of the loss is always allowed.
    tolerance = 4 * torch.maximum(scale, exact * 2.0**-23)
    worst = ((sparse - exact).abs() / tolerance).max()
    assert worst <= 1, f"the sparse losses are {4 * worst:.1f} times as far off as the dense ones"
