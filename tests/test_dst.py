"""Prune, grow and restructure against brute force on small dense masks."""

import math

import numpy as np
import pytest
from dst_helpers import assert_survivors_are_where_they_were, by_magnitude, changed, dense, problems
from helpers import to_numpy
from hypothesis import given
from hypothesis import strategies as st

from snack_cupy import dst, random
from snack_cupy.topology import Topology


@pytest.fixture(scope="module")
def xp():
    """The array module under test; the GPU tests run this file with CuPy."""
    return np


@given(problem=problems(), data=st.data())
def test_prune_keeps_a_mask(xp, problem, data):
    mask, values = problem
    topology = Topology.from_mask(xp.asarray(mask))
    picks = data.draw(st.lists(st.booleans(), min_size=topology.nnz, max_size=topology.nnz))
    keep = np.array(picks, bool)
    change = dst.prune(topology, keep_mask=xp.asarray(keep))
    result = changed(topology, change)
    assert np.array_equal(
        dense(result, xp.ones(result.nnz, bool), False), dense(topology, keep, False)
    )
    assert to_numpy(change[2].new_to_old).tolist() == np.flatnonzero(keep).tolist()
    assert to_numpy(change[2].apply(xp.asarray(values))).tobytes() == values[keep].tobytes()


@given(problem=problems())
def test_prune_drops_the_smallest(xp, problem):
    mask, values = problem
    topology = Topology.from_mask(xp.asarray(mask))
    order = by_magnitude(values)
    for n in range(topology.nnz + 1):
        change = dst.prune(topology, xp.asarray(values), n)
        changed(topology, change)
        assert to_numpy(change[2].new_to_old).tolist() == sorted(order[n:])


@given(problem=problems(), key=st.integers(0, 2**64 - 1))
def test_grow_adds_the_growth(xp, problem, key):
    mask = problem[0]
    topology = Topology.from_mask(xp.asarray(mask))
    n = int((~mask).sum() + 1) // 2
    change = dst.grow(topology, n, key=key)
    result = changed(topology, change)
    want = mask.copy()
    want.ravel()[to_numpy(dst.random_growth(topology, n, key))] = True
    assert np.array_equal(dense(result, xp.ones(result.nnz, bool), False), want)
    assert change[2].grown == n
    assert_survivors_are_where_they_were(topology, result, change[2])


@given(problem=problems(), data=st.data())
def test_restructure_is_drop_then_grow(xp, problem, data):
    mask, values = problem
    topology = Topology.from_mask(xp.asarray(mask))
    before = topology.copy()
    n = data.draw(st.integers(0, topology.nnz))
    key = data.draw(st.integers(0, 2**64 - 1))
    weights = xp.asarray(values)
    survive = dst.restructure(topology, weights, n=n, key=key)
    reset = dst.restructure(topology, weights, n=n, key=key, regrown="reset")
    result = changed(topology, survive)
    assert changed(topology, reset).equals(result)
    assert topology.equals(before)
    assert topology.version == 0
    assert to_numpy(weights).tobytes() == values.tobytes()

    # By hand, on the dense mask.
    dropped = by_magnitude(values)[:n]
    after = mask.copy()
    after[to_numpy(topology.row)[dropped], to_numpy(topology.col)[dropped]] = False
    remaining = Topology.from_mask(xp.asarray(after))
    after.ravel()[to_numpy(dst.random_growth(remaining, n, random.subkey(key, 1)))] = True
    assert np.array_equal(dense(result, xp.ones(result.nnz, bool), False), after)
    old_index = dense(topology, xp.arange(topology.nnz), -1)
    assert np.array_equal(to_numpy(survive[2].new_to_old), old_index[after])
    old_index[np.isin(old_index, dropped)] = -1
    assert np.array_equal(to_numpy(reset[2].new_to_old), old_index[after])
    assert reset[2].grown == n


@pytest.mark.parametrize(("regrown", "want"), [("survive", [0, 1, 2]), ("reset", [-1, 1, 2])])
def test_restructure_what_is_dropped_and_regrown(xp, regrown, want):
    topology = Topology.from_mask(xp.asarray([[1, 0, 1], [0, 0, 1]]))
    values = xp.asarray([0.1, 2.0, 3.0])

    def same_again(remaining, n, key):
        assert to_numpy(remaining.positions).tolist() == [2, 5]
        return xp.asarray([0])

    change = dst.restructure(topology, values, n=1, growth=same_again, key=0, regrown=regrown)
    assert changed(topology, change).equals(topology)
    assert to_numpy(change[2].new_to_old).tolist() == want
    assert change[2].is_identity == (regrown == "survive")


def test_restructure_of_a_full_matrix_regrows_all_it_dropped(xp):
    topology = Topology.from_mask(xp.ones((5, 4)))
    values = random.uniform(0, 20, np.float32, xp)
    change = dst.restructure(topology, values, 0.5, key=1)
    assert changed(topology, change).equals(topology)
    assert change[2].is_identity
    assert dst.restructure(topology, values, 0.5, key=1, regrown="reset")[2].grown == 10


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (3, 0), (4, 5)])
def test_changes_of_an_empty_topology(xp, shape):
    topology = Topology.from_mask(xp.zeros(shape))
    values = xp.zeros(0, np.float32)
    for change in (
        dst.prune(topology, values, 0),
        dst.prune(topology, keep_mask=xp.zeros(0, bool)),
        dst.grow(topology, 0, key=0),
        dst.restructure(topology, values, 1.0, key=0),
        dst.restructure(topology, values, 1.0, key=0, regrown="reset"),
    ):
        assert changed(topology, change).equals(topology)


def test_grow_fills_the_matrix_and_prune_empties_it(xp):
    topology = Topology.from_mask(xp.zeros((4, 5)))
    full = changed(topology, dst.grow(topology, 20, key=3))
    assert full.density == 1
    assert changed(full, dst.prune(full, xp.zeros(20), 20)).equals(topology)


@pytest.mark.parametrize(
    ("fraction", "n"), [(0, 0), (0.0, 0), (0.3, 3), (0.25, 2), (0.35, 4), (1.0, 10), (1, 10)]
)
def test_restructure_rounds_the_fraction(xp, fraction, n):
    topology = random.random_topology((10, 10), nnz=10, xp=xp)
    values = random.uniform(0, 10, xp=xp)
    remap = dst.restructure(topology, values, fraction, key=0, regrown="reset")[2]
    assert remap.grown == n == round(fraction * 10)


def test_restructure_many_times_keeps_nnz_and_values(xp):
    topology = random.random_topology((40, 300), sparsity=0.9, xp=xp)
    values = random.uniform(1, topology.nnz, np.float32, xp) + 1
    state = xp.stack([values, 2 * values], axis=1)
    truth = dense(topology, values, 0.0)
    for step in range(20):
        key = random.key(0, "layer", step)
        row_offsets, columns, remap = dst.restructure(topology, values, 0.3, key=key)
        old = topology.copy()
        topology.update(row_offsets, columns)
        assert topology.nnz == 1200
        assert_survivors_are_where_they_were(old, topology, remap)
        values, state = remap.apply(values), remap.apply(state)
        truth *= dense(topology, xp.ones(topology.nnz), 0.0)
        assert np.array_equal(dense(topology, values, 0.0), truth)
        assert (state[:, 0] == values).all()
        assert (state[:, 1] == 2 * values).all()
        fresh = xp.where(values == 0, random.uniform(key, 1200, np.float32, xp), values)
        state = xp.where(values[:, None] == 0, xp.stack([fresh, 2 * fresh], axis=1), state)
        values, truth = fresh, dense(topology, fresh, 0.0)


def test_restructure_depends_on_the_key(xp):
    topology = random.random_topology((30, 30), nnz=200, xp=xp)
    values = random.uniform(1, 200, xp=xp)
    for criterion in ("magnitude", "random"):
        made = [
            changed(topology, dst.restructure(topology, values, 0.3, criterion=criterion, key=key))
            for key in (0, 0, 1)
        ]
        assert made[0].equals(made[1])
        assert not made[0].equals(made[2])


def test_criteria_and_growths_may_be_functions(xp):
    topology = Topology.from_mask(xp.asarray([[1, 0, 1], [0, 0, 1]]))
    values = xp.asarray([3.0, 2.0, 1.0])

    def largest(values, n, key):
        return dst.smallest_magnitude(-1 / values, n)

    def first_inactive(remaining, n, key):
        inactive = xp.flatnonzero(~xp.isin(xp.arange(6), remaining.positions))
        return inactive[:n]

    assert to_numpy(dst.prune(topology, values, 1, criterion=largest)[2].new_to_old).tolist() == [
        1,
        2,
    ]
    result = changed(topology, dst.grow(topology, 2, growth=first_inactive, key=0))
    assert to_numpy(result.positions).tolist() == [0, 1, 2, 3, 5]
    change = dst.restructure(
        topology, values, n=2, criterion=largest, growth=first_inactive, key=0, regrown="reset"
    )
    assert to_numpy(changed(topology, change).positions).tolist() == [0, 1, 5]
    assert to_numpy(change[2].new_to_old).tolist() == [-1, -1, 2]


def test_growth_functions_are_checked(xp):
    topology = Topology.from_mask(xp.asarray([[1, 0, 1], [0, 0, 1]]))
    for positions, error, message in [
        ([1], ValueError, r"have shape \(2,\), got \(1,\)"),
        ([3, 1], ValueError, "strictly increase"),
        ([1, 1], ValueError, "strictly increase"),
        ([-1, 1], IndexError, r"hold positions in \[0, 6\), got -1"),
        ([1, 6], IndexError, r"hold positions in \[0, 6\), got 6"),
        ([1, 2], ValueError, "hold inactive positions only"),
        ([1.0, 3.0], TypeError, "have dtype int64, got float64"),
    ]:
        with pytest.raises(error, match=f"grow: the growth's result must {message}"):
            dst.grow(topology, 2, growth=lambda *_, p=positions: xp.asarray(p), key=0)
    with pytest.raises(TypeError, match="must be a NumPy or CuPy array, got list"):
        dst.grow(topology, 2, growth=lambda *_: [1, 3], key=0)
    with pytest.raises(ValueError, match=r"grow: growth must be one of \('random',\) or callable"):
        dst.grow(topology, 2, growth="rigl", key=0)
    with pytest.raises(TypeError, match=r"grow: growth must be one of .*, got 3"):
        dst.grow(topology, 2, growth=3, key=0)


def test_criterion_functions_are_checked(xp):
    topology = Topology.from_mask(xp.asarray([[1, 0, 1], [0, 0, 1]]))
    values = xp.zeros(3)
    for result, error, message in [
        ([True, True, False], ValueError, "be True at exactly n = 1 entries, got 2"),
        ([True, False], ValueError, r"have shape \(3,\), got \(2,\)"),
        ([1, 0, 0], TypeError, "have dtype bool, got int64"),
    ]:
        with pytest.raises(error, match=f"prune: the criterion's result must {message}"):
            dst.prune(topology, values, 1, criterion=lambda *_, r=result: xp.asarray(r))
    with pytest.raises(ValueError, match=r"prune: criterion must be one of .*, got 'movement'"):
        dst.prune(topology, values, 1, criterion="movement")
    with pytest.raises(TypeError, match=r"prune: criterion must be one of .*, got None"):
        dst.prune(topology, values, 1, criterion=None)


def test_prune_refuses(xp):
    topology = Topology.from_mask(xp.asarray([[1, 0, 1], [0, 0, 1]]))
    values, mask = xp.zeros(3), xp.ones(3, bool)
    for arguments, keywords, error, message in [
        ((), {}, ValueError, "exactly one of n and keep_mask must be given, got neither"),
        ((values, 1), {"keep_mask": mask}, ValueError, "must be given, got both"),
        ((values, 4), {}, ValueError, "n must be between 0 and 3, got 4"),
        ((values, -1), {}, ValueError, "n must be between 0 and 3, got -1"),
        ((values, 0.5), {}, TypeError, "n must be an integer, got 0.5"),
        ((None, 1), {}, TypeError, "values must be a NumPy or CuPy array, got NoneType"),
        ((values[:2], 1), {}, ValueError, r"values must have shape \(3,\), got \(2,\)"),
        ((values.astype(int), 1), {}, TypeError, "values must have a dtype of"),
        ((values, 1), {"key": -1}, ValueError, "key must be between 0 and"),
        ((), {"keep_mask": mask[:2]}, ValueError, r"keep_mask must have shape \(3,\), got \(2,\)"),
        ((), {"keep_mask": mask[None]}, ValueError, r"keep_mask must have shape \(3,\), got"),
        ((), {"keep_mask": mask.astype(np.uint8)}, TypeError, "keep_mask must have dtype bool"),
        ((), {"keep_mask": [True] * 3}, TypeError, "keep_mask must be a NumPy or CuPy array"),
    ]:
        with pytest.raises(error, match=f"^prune: (.* )?{message}"):
            dst.prune(topology, *arguments, **keywords)


def test_dst_refuses_what_is_no_topology():
    mask = np.ones((2, 2))
    for call in (
        lambda: dst.prune(mask, np.ones(4), 1),
        lambda: dst.grow(mask, 1, key=0),
        lambda: dst.restructure(mask, np.ones(4), 0.5, key=0),
        lambda: dst.random_growth(mask, 1, 0),
    ):
        with pytest.raises(TypeError, match=r": topology must be a snack_cupy.Topology, got ndarr"):
            call()


def test_restructure_refuses(xp):
    topology = Topology.from_mask(xp.asarray([[1, 0, 1], [0, 0, 1]]))
    before, values = topology.copy(), xp.asarray([1.0, 2.0, 3.0])
    for arguments, keywords, error, message in [
        (
            (values,),
            {},
            ValueError,
            "exactly one of drop_fraction and n .*, got neither",
        ),
        ((values, 0.5), {"n": 1}, ValueError, "must be given, got both"),
        ((values, -0.1), {}, ValueError, r"drop_fraction must be in \[0, 1\], got -0.1"),
        ((values, 1.1), {}, ValueError, r"drop_fraction must be in \[0, 1\], got 1.1"),
        ((values, math.nan), {}, ValueError, r"drop_fraction must be in \[0, 1\], got nan"),
        ((values, math.inf), {}, ValueError, r"drop_fraction must be in \[0, 1\], got inf"),
        ((values, "0.3"), {}, TypeError, r"drop_fraction must be a number in \[0, 1\], got '0.3'"),
        ((values,), {"n": 4}, ValueError, "n must be between 0 and 3, got 4"),
        ((values,), {"n": -1}, ValueError, "n must be between 0 and 3, got -1"),
        ((values,), {"n": 1.0}, TypeError, "n must be an integer, got 1.0"),
        ((values[:2], 0.5), {}, ValueError, r"values must have shape \(3,\), got \(2,\)"),
        ((values.astype(int), 0.5), {}, TypeError, "values must have a dtype of"),
        ((values, 0.5), {"regrown": "keep"}, ValueError, "regrown must be one of .*, got 'keep'"),
        ((values, 0.5), {"key": 2**64}, ValueError, "key must be between 0 and"),
        ((values, 0.5), {"criterion": "x"}, ValueError, "criterion must be one of"),
        ((values, 0.5), {"growth": "x"}, ValueError, "growth must be one of"),
    ]:
        with pytest.raises(error, match=f"^restructure: (.* )?{message}"):
            dst.restructure(topology, *arguments, **{"key": 0, **keywords})
    assert topology.equals(before)
    assert to_numpy(values).tolist() == [1.0, 2.0, 3.0]
