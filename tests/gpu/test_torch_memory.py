"""All memory comes from PyTorch's allocator, stays flat, and no dense matrix is ever among it."""

import gc
import sys

import pytest

from snack_cupy import dispatch, ops


def training(torch, snack, torch_helpers, sizes=(120, 80, 40)):
    """A function that does one training step; every third one restructures."""
    model = torch_helpers.make_mlp(sizes, sparsity=0.8, device="cuda")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    method = snack.SET(0.3, update_every=3).attach(model, optimizer)
    x = torch.randn(16, sizes[0], device="cuda")
    target = torch.randn(16, sizes[-1], device="cuda")

    def step():
        torch_helpers.train_step(model, optimizer, x, target)
        return method

    return step


def peak(torch, function):
    """Bytes that the function needs at its peak, beyond what is held before."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = function()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


def test_cupy_pool_takes_nothing(torch, snack, torch_helpers, cp):
    pool = cp.get_default_memory_pool()
    gc.collect()
    pool.free_all_blocks()
    before = pool.used_bytes(), pool.total_bytes()
    step = training(torch, snack, torch_helpers)
    for _ in range(10):
        method = step()
    layer = method._layers["0"]
    layer(torch.randn(3, 120, device="cuda", requires_grad=True)).sum().backward()
    layer.prune(0.1)
    layer.grow(0.1)
    snack.SnackLinear.from_dense(layer.to_dense(), sparsity=0.5)
    layer.load_state_dict(layer.state_dict())
    layer(torch.randn(3, 120, device="cuda", requires_grad=True)).sum().backward()
    torch.cuda.synchronize()
    assert method.updates == 3
    assert (pool.used_bytes(), pool.total_bytes()) == before


def test_training_with_updates_is_flat(torch, snack, torch_helpers):
    step = training(torch, snack, torch_helpers)
    for _ in range(100):
        step()
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    objects = sys.getallocatedblocks()
    for _ in range(1000):
        method = step()
    torch.cuda.synchronize()
    gc.collect()
    assert method.updates == 366
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before
    assert sys.getallocatedblocks() - objects < 1000


def test_failing_calls_leave_nothing(torch, torch_helpers):
    layer = torch_helpers.seeded_layer(sparsity=0.5, device="cuda")
    x = torch_helpers.X.cuda()
    empty = torch_helpers.seeded_layer(12, 0, device="cuda")

    def call():
        empty(x)
        layer(x[:0])
        for wrong in (x[:, 1:], x.cpu(), x.double()):
            with pytest.raises((ValueError, TypeError)):
                layer(wrong)
        with pytest.raises(ValueError, match="amount"):
            layer.prune(1000)

    for _ in range(20):
        call()
    gc.collect()
    before, objects = torch.cuda.memory_allocated(), sys.getallocatedblocks()
    for _ in range(200):
        call()
    gc.collect()
    assert torch.cuda.memory_allocated() == before
    assert sys.getallocatedblocks() - objects < 500


@pytest.fixture
def large(torch, snack):
    """0.1 % of 32768 x 32768: the dense matrix would take 4 GiB, a mask of bytes 1 GiB."""
    generator = torch.Generator().manual_seed(1)
    return snack.SnackLinear(32768, 32768, sparsity=0.999, device="cuda", generator=generator)


def test_peak_of_forward_and_backward(torch, large):
    batch, (m, k), nnz = 16, large.topology.shape, large.nnz
    x = torch.randn(batch, k, device="cuda", requires_grad=True)

    def run():
        large.zero_grad()
        large(x).sum().backward()
        x.grad = None

    run()
    large.zero_grad()
    # Output, its gradient and that of x, each with a copy; the values' gradient, with a copy; the
    # partial sums of one product.
    plans = (
        dispatch.plan(ops.problem_of(op, large.topology, batch, "float32", True), 0)
        for op in ("spmm", "spmm_transposed", "sddmm")
    )
    sums = max(plan.workspace for plan in plans)
    assert sums <= 64 << 20
    assert peak(torch, run) <= 4 * (2 * nnz + 4 * batch * (m + k)) + sums + (2 << 20)


@pytest.mark.parametrize("update", ["restructure", "prune", "grow", "transpose"])
def test_peak_of_updates(torch, torch_helpers, large, update):
    x = torch.randn(1, 32768, device="cuda", requires_grad=True)
    if update == "transpose":
        needed = peak(torch, lambda: large(x))
    else:
        large(x).sum().backward()
        needed = peak(torch, lambda: torch_helpers.UPDATES[update](large, key=1))
    # Some 64-bit positions, ranks and masks at a time: far from a byte for each place.
    assert needed <= 160 * large.nnz < 32768 * 32768 / 4


def test_layer_reports_what_it_holds(torch, large):
    held = [t for t in (*large.parameters(), *large.buffers()) if t is not None]
    assert sum(t.nbytes for t in held) <= 6 * large.nnz + 8 * (32768 + 1)
