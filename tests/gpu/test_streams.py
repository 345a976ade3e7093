"""Every launch goes to CuPy's current stream, taken anew at each call, and to no other."""

import threading

import numpy as np
import pytest
from gpu_arrays import put, spin
from helpers import to_numpy

from snack_cupy import random, sddmm, spmm, spmm_transposed

OPS = ("spmm", "spmm_transposed", "sddmm")
M, K, BATCH = 70, 50, 9


@pytest.fixture
def topology(cp):
    topology = random.random_topology((M, K), density=0.3, seed=1, xp=cp)
    _ = topology.transposed
    return topology


def arrays(topology, seed):
    """values, x (batch, k) and gradient (batch, m): small integers, so results are exact."""
    rng = np.random.default_rng(seed)
    shapes = (topology.nnz, (BATCH, K), (BATCH, M))
    return [put(rng.integers(-8, 9, shape).astype(np.float32)) for shape in shapes]


def call(op, topology, values, x, gradient, out=None):
    if op == "spmm":
        return spmm(topology, values, x, batch_major=True, out=out)
    if op == "spmm_transposed":
        return spmm_transposed(topology, values, gradient, batch_major=True, out=out)
    return sddmm(topology, gradient, x, batch_major=True, out=out)


def result_shape(op, topology):
    return {"spmm": (BATCH, M), "spmm_transposed": (BATCH, K), "sddmm": (topology.nnz,)}[op]


@pytest.mark.parametrize("op", OPS)
def test_launch_waits_for_its_own_stream(cp, topology, op):
    old, new = arrays(topology, 1), arrays(topology, 2)
    want = to_numpy(call(op, topology, *new))
    out = cp.empty(result_shape(op, topology), np.float32)
    spin(1)  # compiled before it is timed
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.runtime.deviceSynchronize()
    with stream:
        spin(100)
        for target, source in zip(old, new, strict=True):
            target[...] = source
        call(op, topology, *old, out=out)
        assert not stream.done
    stream.synchronize()
    np.testing.assert_array_equal(to_numpy(out), want)


@pytest.mark.parametrize("op", OPS)
def test_launch_does_not_wait_for_another_stream(cp, topology, op):
    operands = arrays(topology, 3)
    out = cp.empty(result_shape(op, topology), np.float32)
    want = to_numpy(call(op, topology, *operands))
    busy, stream = cp.cuda.Stream(non_blocking=True), cp.cuda.Stream(non_blocking=True)
    cp.cuda.runtime.deviceSynchronize()
    with busy:
        spin(500)
    with stream:
        call(op, topology, *operands, out=out)
    stream.synchronize()
    assert not busy.done
    with stream:
        np.testing.assert_array_equal(to_numpy(out), want)
    assert not busy.done
    busy.synchronize()


def test_stream_is_taken_at_each_call(cp, topology):
    old, new = arrays(topology, 4), arrays(topology, 5)
    want = to_numpy(call("spmm", topology, *new))
    call("spmm", topology, *old)  # the plan is made on the default stream
    for _ in range(3):
        stream = cp.cuda.Stream(non_blocking=True)
        values = old[0].copy()
        cp.cuda.runtime.deviceSynchronize()
        with stream:
            spin(20)
            values[...] = new[0]
            got = call("spmm", topology, values, *new[1:])
        stream.synchronize()
        np.testing.assert_array_equal(to_numpy(got), want)


def test_each_thread_has_its_own_stream(cp, topology):
    want, got, errors = {}, {}, []
    spin(1)
    for seed in range(4):
        want[seed] = to_numpy(call("spmm", topology, *arrays(topology, seed)))
    cp.cuda.runtime.deviceSynchronize()
    ready = threading.Barrier(4)

    def work(seed):
        try:
            with cp.cuda.Device(0), cp.cuda.Stream(non_blocking=True) as stream:
                source = arrays(topology, seed)
                operands = [array.copy() for array in source]
                operands[0][...] = 0
                stream.synchronize()
                ready.wait(timeout=60)
                for _ in range(5):
                    spin(5 + 5 * seed)
                    operands[0][...] = source[0]
                    out = call("spmm", topology, *operands)
                    operands[0][...] = 0
                stream.synchronize()
                got[seed] = to_numpy(out)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for seed in range(4):
        np.testing.assert_array_equal(got[seed], want[seed])


def test_per_thread_default_stream(cp, topology):
    old, new = arrays(topology, 6), arrays(topology, 7)
    want = to_numpy(call("spmm", topology, *new))
    cp.cuda.runtime.deviceSynchronize()
    with cp.cuda.Stream.ptds:
        spin(50)
        old[0][...] = new[0]
        got = call("spmm", topology, old[0], *new[1:])
        cp.cuda.Stream.ptds.synchronize()
        np.testing.assert_array_equal(to_numpy(got), want)


@pytest.mark.parametrize("op", OPS)
def test_captured_graph_replays_on_new_values(cp, topology, op):
    operands, new = arrays(topology, 8), arrays(topology, 9)
    out = cp.empty(result_shape(op, topology), np.float32)
    call(op, topology, *operands, out=out)  # compiled and loaded before the capture
    want = to_numpy(call(op, topology, *new))
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.runtime.deviceSynchronize()
    with stream:
        stream.begin_capture()
        call(op, topology, *operands, out=out)
        graph = stream.end_capture()
        for target, source in zip(operands, new, strict=True):
            target[...] = source
        out[...] = np.nan
        graph.launch(stream)
    stream.synchronize()
    np.testing.assert_array_equal(to_numpy(out), want)


@pytest.mark.parametrize("op", OPS)
def test_captured_graph_sees_an_update_in_place(cp, topology, op):
    operands = arrays(topology, 10)
    later = random.random_topology((M, K), nnz=topology.nnz, seed=2, xp=cp)
    want = to_numpy(call(op, later, *operands))
    out = cp.empty(result_shape(op, topology), np.float32)
    call(op, topology, *operands, out=out)
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.runtime.deviceSynchronize()
    with stream:
        stream.begin_capture()
        call(op, topology, *operands, out=out)
        graph = stream.end_capture()
        topology.update(later.row_offsets, later.columns)
        graph.launch(stream)
    stream.synchronize()
    np.testing.assert_array_equal(to_numpy(out), want)


def test_spmm_restores_the_current_device_and_stream(cp, topology):
    operands = arrays(topology, 11)
    with cp.cuda.Stream(non_blocking=True) as stream:
        call("spmm", topology, *operands)
        assert cp.cuda.get_current_stream() == stream
        assert cp.cuda.Device().id == 0
        stream.synchronize()


def test_every_visible_device_works_while_another_is_current(cp):
    count = cp.cuda.runtime.getDeviceCount()
    want = None
    for device in range(count):
        with cp.cuda.Device(device):
            topology = random.random_topology((M, K), density=0.3, seed=1, xp=cp)
            operands = arrays(topology, 12)
        with cp.cuda.Device((device + 1) % count):
            got = [call(op, topology, *operands) for op in OPS]
            assert cp.cuda.Device().id == (device + 1) % count
        assert [array.device.id for array in got] == [device] * 3
        want = want or [to_numpy(array) for array in got]
        for array, expected in zip(got, want, strict=True):
            np.testing.assert_array_equal(to_numpy(array), expected)
