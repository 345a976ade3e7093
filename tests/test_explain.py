"""`explain` tells what dispatch chooses, with the numbers that go with it."""

import pytest
from helpers import DTYPES, make_topology, problem

from snack_cupy import dispatch, explain, ops
from snack_cupy.random import random_topology


@pytest.fixture(scope="module")
def topology():
    return random_topology((512, 300), sparsity=0.9, seed=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch_major", [True, False])
def test_explain_tells_the_choice(topology, dtype, batch_major):
    for batch in (1, 8, 64, 5000):
        made = explain(topology, batch, dtype, batch_major=batch_major)
        assert [each.op for each in made] == ["spmm", "spmm_transposed", "sddmm"]
        assert made[:1] == explain(topology, batch, dtype, batch_major=batch_major, training=False)
        for each in made:
            asked = ops.problem_of(each.op, topology, batch, dtype, batch_major)
            choose = dispatch.choose_sddmm if each.op == "sddmm" else dispatch.choose_spmm
            choice = choose(asked)
            assert (each.kernel, each.reason) == (choice.kernel.name, choice.reason)
            assert each.expected == choice.microseconds
            assert each.flop == 2 * topology.nnz * batch
            assert each.limit >= 0.94
            assert each.expected is None or each.expected > each.limit
            for text in (each.kernel, each.reason, f"{each.nbytes:,}", f"{each.limit:.1f} us"):
                assert text in str(made)


def test_explain_counts_bytes_once():
    topology = make_topology(problem("every_entry"))  # 9 x 17
    forward, back, gradient = explain(topology, 4)
    dense = 4 * 4 * (9 + 17)
    assert forward.nbytes == 153 * 6 + 4 * 10 + dense
    assert back.nbytes == 153 * 10 + 4 * 18 + dense
    assert gradient.nbytes == forward.nbytes


def test_explain_refuses(topology):
    with pytest.raises(ValueError, match="explain: batch must be between 1 and"):
        explain(topology, 0)
    with pytest.raises(ValueError, match="explain: dtype must be one of"):
        explain(topology, 4, "int8")
    with pytest.raises(TypeError, match="explain: topology must be a"):
        explain("W", 4)
