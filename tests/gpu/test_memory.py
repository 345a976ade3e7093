"""Memory of device and host stays flat over thousands of calls, failing and empty ones included."""

import gc
import sys
from pathlib import Path

import numpy as np
import pytest
from gpu_arrays import put

from snack_cupy import Topology, dst, random, sddmm, spmm, spmm_transposed

M, K, BATCH = 60, 80, 5


def host_bytes():
    """Resident bytes of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def assert_flat(cp, call, calls, blocks=500, host=4 << 20):
    """``call`` leaves nothing on the device, and next to nothing on the host."""
    pool = cp.get_default_memory_pool()
    for _ in range(50):
        call()
    cp.cuda.runtime.deviceSynchronize()
    gc.collect()
    before = pool.used_bytes(), pool.total_bytes()
    objects, resident = sys.getallocatedblocks(), host_bytes()
    for _ in range(calls):
        call()
    cp.cuda.runtime.deviceSynchronize()
    gc.collect()
    assert (pool.used_bytes(), pool.total_bytes()) == before
    assert sys.getallocatedblocks() - objects < blocks
    assert host_bytes() - resident < host


@pytest.fixture
def topology(cp):
    topology = random.random_topology((M, K), density=0.2, seed=1, xp=cp)
    _ = topology.transposed, topology.packed_rows
    return topology


@pytest.fixture
def operands(topology):
    rng = np.random.default_rng(1)
    shapes = (topology.nnz, (BATCH, K), (BATCH, M))
    return [put(rng.standard_normal(shape).astype(np.float32)) for shape in shapes]


def test_calls_leave_nothing(cp, topology, operands):
    values, x, gradient = operands

    def call():
        spmm(topology, values, x, batch_major=True)
        spmm_transposed(topology, values, gradient, batch_major=True)
        sddmm(topology, gradient, x, batch_major=True)

    assert_flat(cp, call, 10_000)


def test_calls_on_strided_operands_leave_nothing(cp, topology, operands):
    values, x, gradient = operands

    def call():
        spmm(topology, values, x.T, bias=gradient[0])
        spmm_transposed(topology, values, gradient.T)
        sddmm(topology, gradient.T, x.T)

    assert_flat(cp, call, 1_000)


def test_calls_with_out_allocate_nothing(cp, topology, operands):
    values, x, gradient = operands
    out = cp.empty((BATCH, M), np.float32)
    asked = []

    class Hook(cp.cuda.MemoryHook):
        name = "count"

        def malloc_preprocess(self, **arguments):
            asked.append(arguments["size"])

    def call():
        for kernel in (None, "snack_coo"):
            spmm(topology, values, x, batch_major=True, bias=gradient[0], out=out, kernel=kernel)

    call()
    with Hook():
        call()
        assert not asked
        spmm(topology, values, x, batch_major=True)
        assert asked
    assert_flat(cp, call, 10_000)


def test_empty_calls_leave_nothing(cp, operands):
    _, x, gradient = operands
    topology = Topology(cp.zeros(M + 1, np.int32), cp.zeros(0, np.int32), (M, K))
    values = cp.zeros(0, np.float32)

    def call():
        spmm(topology, values, x, batch_major=True, bias=gradient[0])
        spmm_transposed(topology, values, gradient, batch_major=True)
        sddmm(topology, gradient, x, batch_major=True)
        spmm(topology, values, x[:0], batch_major=True)

    assert_flat(cp, call, 2_500)


def test_failing_calls_leave_nothing(cp, topology, operands):
    values, x, gradient = operands
    wrong = (
        lambda: spmm(topology, values, gradient, batch_major=True),
        lambda: spmm(topology, values[1:], x, batch_major=True),
        lambda: spmm(topology, values, x.get(), batch_major=True),
        lambda: spmm(topology, values.astype(np.float64), x, batch_major=True),
        lambda: spmm(topology, values, x, batch_major=True, out=x),
        lambda: sddmm(topology, gradient, x[1:], batch_major=True),
        lambda: topology.update(topology.row_offsets[1:], topology.columns),
        lambda: Topology.from_coords(topology.row, topology.col, (M - 1, K)),
    )

    def call():
        for function in wrong:
            with pytest.raises((TypeError, ValueError, IndexError)):
                function()

    assert_flat(cp, call, 1_000)


def test_updates_leave_nothing(cp, topology, operands):
    values = operands[0]
    other = random.random_topology((M, K), nnz=topology.nnz, seed=2, xp=cp)
    both = [(one.row_offsets.copy(), one.columns.copy()) for one in (topology, other)]

    def call():
        for row_offsets, columns in both:
            topology.update(row_offsets, columns)
            spmm_transposed(topology, values, operands[2], batch_major=True)

    assert_flat(cp, call, 500)


def test_updates_that_change_nnz_leave_nothing(cp, topology, operands):
    other = random.random_topology((M, K), nnz=topology.nnz + 7, seed=2, xp=cp)
    both = [(one.row_offsets.copy(), one.columns.copy()) for one in (other, topology)]
    values = [put(np.ones(columns.size, np.float32)) for _, columns in both]

    def call():
        for (row_offsets, columns), own in zip(both, values, strict=True):
            topology.update(row_offsets, columns)
            spmm_transposed(topology, own, operands[2], batch_major=True)

    assert_flat(cp, call, 500)


def test_restructures_leave_nothing(cp, topology, operands):
    values = operands[0]
    steps = iter(range(10_000))

    def call():
        key = random.key(0, "memory", next(steps))
        row_offsets, columns, remap = dst.restructure(topology, values, 0.3, key=key)
        topology.update(row_offsets, columns)
        remap.apply(values, out=values)

    # Arrays of nnz elements only; how many passes a permutation takes differs from step to step.
    pool = cp.get_default_memory_pool()
    for _ in range(100):
        call()
    used, total = pool.used_bytes(), pool.total_bytes()
    for _ in range(300):
        call()
    cp.cuda.runtime.deviceSynchronize()
    assert pool.used_bytes() == used
    assert pool.total_bytes() - total <= 64 << 10


def test_restructure_takes_memory_of_order_nnz(cp):
    size, nnz = 16384, 100_000
    topology = random.random_topology((size, size), nnz=nnz, seed=1, xp=cp)
    values = put(np.random.default_rng(1).standard_normal(nnz).astype(np.float32))
    dst.restructure(topology, values, 0.3, key=1)
    pool = cp.get_default_memory_pool()
    pool.free_all_blocks()
    held = pool.total_bytes()
    dst.restructure(topology, values, 0.3, key=1)
    limit = 200 * nnz
    assert limit < size * size / 8  # a map of all positions would not fit, even of bits
    assert pool.total_bytes() - held < limit
