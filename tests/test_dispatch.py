"""Which kernel is chosen and how it is launched, without a GPU: compilation is faked."""

import itertools
from operator import itemgetter
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import DTYPES, PROBLEMS, make_topology, problem

from snack_cupy import _cost, _jit, dispatch, kernels, ops
from snack_cupy.dispatch import H200, Device, Problem, choose_sddmm, choose_spmm

SIZES = (1, 3, 31, 32, 33, 784, 3072, 65536, 65537, 2**20)
NS = (1, 2, 3, 4, 5, 8, 9, 16, 31, 32, 64, 100, 128, 4096)
SMALL = Device(multiprocessors=4, shared_bytes=48 * 1024)

# Names of the arguments of each kernel after its sizes, as in cuda/.
ARGUMENTS = {
    "spmm_csr_batch_major": "row_offsets columns permutation values x bias y",
    "spmm_csr_feature_major": "row_offsets columns permutation values dense bias out",
    "spmm_csr_resident": "row_offsets columns values x bias y",
    "spmm_csr_vector": "row_offsets columns permutation values x bias y",
    "spmm_csr_sliced": "row_offsets columns permutation values x bias y partial",
    "reduce_slices": "bias y partial",
    "sddmm_csr_sliced": "row_offsets columns left right out sums",
    "add_chunks": "out sums",
    "sddmm_csr_batch_major": "row_offsets columns left right out",
    "sddmm_csr_feature_major": "row_offsets columns left right out",
    "fill_rows": "bias y",
    "spmm_coo_atomic": "rows columns values x y",
}


def index_name(size):
    return "uint16" if size <= 65536 else "int32"


def make(op="spmm", m=512, k=768, n=64, dtype="float32", batch_major=True, **options):
    nnz = options.pop("nnz", max(1, m * k // 10))
    return Problem(op, m, k, nnz, n, dtype, index_name(k), index_name(m), batch_major, **options)


def all_problems():
    """Many sizes, both layouts, all dtypes, aligned or not."""
    flags = itertools.product(DTYPES, (False, True), (False, True))
    for (dtype, batch_major, aligned), n in itertools.product(flags, NS):
        for m, k in zip(SIZES, reversed(SIZES), strict=True):
            layout = {"batch_major": batch_major, "aligned": aligned}
            yield {"m": m, "k": k, "n": n, "dtype": dtype, **layout}


@pytest.fixture
def fake_gpu(monkeypatch):
    """Compiled functions that record how they are launched, on a device like an H200."""
    launches = []

    def compile_instance(file, expression, device, max_shared_bytes=0):
        def function(grid, block, arguments, shared_bytes, stream):
            launches.append(
                SimpleNamespace(
                    file=file,
                    expression=expression,
                    device=device,
                    max_shared_bytes=max_shared_bytes,
                    grid=grid,
                    block=block,
                    arguments=arguments,
                    shared_bytes=shared_bytes,
                    stream=stream,
                )
            )

        return function

    monkeypatch.setattr(_jit, "compile_instance", compile_instance)
    monkeypatch.setattr(dispatch, "device_facts", lambda device: H200)
    dispatch._plan.cache_clear()
    yield launches
    dispatch._plan.cache_clear()


# Choices


@pytest.mark.parametrize("device", [H200, SMALL], ids=["h200", "small"])
@pytest.mark.parametrize("op", ["spmm", "spmm_transposed", "sddmm"])
def test_every_choice_is_in_the_table_and_says_why(op, device):
    for options in all_problems():
        problem = make(op, **options)
        choice = choose_sddmm(problem) if op == "sddmm" else choose_spmm(problem, device)
        assert choice.kernel in kernels.KERNELS
        assert choice.kernel.expression(**choice.values).startswith("snack::")
        assert choice.kernel.name not in ("fill_rows", "spmm_coo_atomic")
        assert len(choice.reason) > 10
        assert choice.values["T"] == problem.dtype


def test_choose_is_a_pure_function():
    for options in all_problems():
        first, again = choose_spmm(make(**options)), choose_spmm(make(**options))
        assert first == again
        assert first.values is not again.values


@pytest.mark.parametrize("op", ["spmm", "spmm_transposed", "sddmm"])
def test_index_dtype_is_that_of_the_indices_the_kernel_reads(op):
    for m, k in itertools.product((1000, 100_000), repeat=2):
        problem = make(op, m=m, k=k, kernel="csr")
        choice = choose_sddmm(problem) if op == "sddmm" else choose_spmm(problem)
        size = m if op == "spmm_transposed" else k
        assert choice.values["I"] == index_name(size)


def test_only_the_transposed_product_reads_values_through_a_permutation():
    for batch_major in (False, True):
        for op, permuted in (("spmm", False), ("spmm_transposed", True)):
            choice = choose_spmm(make(op, batch_major=batch_major, kernel="csr"))
            assert choice.values["kPermuted"] is permuted


@pytest.mark.parametrize(("n", "batch"), [(1, 1), (2, 4), (4, 4), (5, 8), (8, 8), (9, 8), (999, 8)])
def test_csr_batch_major_holds_as_many_rows_as_the_batch_fills(n, batch):
    choice = choose_spmm(make(n=n, kernel="csr"))
    assert choice.kernel is kernels.SPMM_BATCH_MAJOR
    assert choice.values["kBatch"] == batch
    assert f"{batch} batch rows" in choice.reason


@pytest.mark.parametrize(
    ("n", "aligned", "vec"),
    [(4, True, 4), (64, True, 4), (64, False, 1), (66, True, 1), (3, True, 1)],
)
def test_feature_major_uses_packs_where_rows_keep_their_alignment(n, aligned, vec):
    for dtype in DTYPES:
        problem = make(n=n, aligned=aligned, batch_major=False, dtype=dtype)
        choice = choose_spmm(problem)
        assert choice.kernel is kernels.SPMM_FEATURE_MAJOR
        assert choice.values["kVec"] == vec


def test_one_column_is_a_batch_of_one():
    for op in ("spmm", "spmm_transposed"):
        as_column = choose_spmm(make(op, n=1, batch_major=False))
        assert as_column == choose_spmm(make(op, n=1, batch_major=True))
    assert choose_sddmm(make("sddmm", n=1, batch_major=False)) == choose_sddmm(
        make("sddmm", n=1, batch_major=True)
    )


def test_sddmm_kernel_follows_the_layout():
    assert choose_sddmm(make("sddmm")).kernel is kernels.SDDMM_SLICED
    assert choose_sddmm(make("sddmm", dtype="float64")).kernel is kernels.SDDMM_BATCH_MAJOR
    feature_major = choose_sddmm(make("sddmm", batch_major=False))
    assert feature_major.kernel is kernels.SDDMM_FEATURE_MAJOR


STAGED = (kernels.SPMM_VECTOR, kernels.SPMM_RESIDENT, kernels.SPMM_SLICED, kernels.SDDMM_SLICED)


def choose(problem, device=H200):
    pick = choose_sddmm if problem.op == "sddmm" else choose_spmm
    return pick(problem, device)


@pytest.mark.parametrize("op", ["spmm", "spmm_transposed", "sddmm"])
def test_kernels_with_x_in_shared_memory_are_kept_to_where_they_work(op):
    chosen = set()
    for options in all_problems():
        each = make(op, **options)
        kernel = choose(each).kernel
        if kernel not in STAGED:
            continue
        chosen.add(kernel)
        assert each.batch_major or each.n == 1
        assert each.aligned
        assert (each.row_index if op == "spmm_transposed" else each.index) == "uint16"
        assert each.dtype != "float64"
    assert len(chosen) == {"spmm": 3, "spmm_transposed": 2, "sddmm": 1}[op]
    assert choose(make(op, kernel="csr")).kernel not in STAGED


@pytest.mark.parametrize(
    ("n", "kernel"),
    [(1, "vector"), (2, "resident"), (16, "resident"), (64, "sliced"), (512, "sliced")],
)
def test_kernel_by_batch_at_4096(n, kernel):
    choice = choose_spmm(make(m=4096, k=4096, n=n))
    assert choice.kernel.name == f"spmm_csr_{kernel}"


def test_small_layers_keep_all_of_x_in_a_block():
    for n in (8, 16, 32):
        assert choose_spmm(make(m=768, k=768, n=n)).kernel is kernels.SPMM_RESIDENT


@pytest.mark.parametrize("device", [H200, SMALL], ids=["h200", "small"])
def test_resident_batch_rows_fit_shared_memory_and_the_batch(device):
    seen = 0
    for options in all_problems():
        problem = make(**options)
        choice = choose_spmm(problem, device)
        if choice.kernel is kernels.SPMM_RESIDENT:
            seen += 1
            batch = choice.values["kBatch"]
            assert 4 * batch * (problem.k + 1) <= device.shared_bytes
            assert batch == 2 or batch // 2 < problem.n
            assert f"holds {batch} batch rows" in choice.reason
    assert seen


@pytest.mark.parametrize("device", [H200, SMALL], ids=["h200", "small"])
def test_a_vector_in_shared_memory_fits_it(device):
    limit = device.shared_bytes // 4
    assert choose_spmm(make(k=limit, n=1), device).kernel is kernels.SPMM_VECTOR
    assert choose_spmm(make(k=limit + 1, n=1), device).kernel is not kernels.SPMM_VECTOR


@pytest.mark.parametrize("device", [H200, SMALL], ids=["h200", "small"])
@pytest.mark.parametrize("op", ["spmm", "spmm_transposed", "sddmm"])
def test_slicing_covers_the_work_and_fits(op, device):
    seen = 0
    for options in all_problems():
        problem = make(op, **options)
        choice = choose(problem, device)
        if choice.slicing is None:
            continue
        seen += 1
        cut = choice.slicing
        m, k = (problem.k, problem.m) if op == "spmm_transposed" else (problem.m, problem.k)
        assert cut.width % 4 == 0
        assert (cut.slices - 1) * cut.width < k <= cut.slices * cut.width
        assert (cut.row_blocks - 1) * cut.rows < m <= cut.row_blocks * cut.rows
        assert 4 * (cut.width + 1) * cut.batch < cut.shared_bytes <= device.shared_bytes
        assert cut.batch == choice.values["kBatch"]
        assert 1 <= cut.chunk <= problem.n
        if op != "sddmm":
            assert cut.row_each is choice.values["kRowEach"]
            padded = -(-cut.chunk // cut.batch) * cut.batch
            least = 4 * cut.slices * m * cut.batch
            if cut.slices > 1:
                assert 4 * cut.slices * m * padded <= max(_cost.WORKSPACE, least)
        assert f"{cut.slices} in all" in choice.reason
    assert seen


def test_expected_times_rise_with_the_work():
    for estimate in (_cost.spmm_slicing, _cost.sddmm_slicing):
        by_batch = [estimate(4096, 4096, 10**6, n, *H200).microseconds for n in (16, 64, 256, 1024)]
        by_nnz = [
            estimate(4096, 4096, nnz, 64, *H200).microseconds for nnz in (10**5, 10**6, 10**7)
        ]
        assert by_batch == sorted(by_batch)
        assert by_nnz == sorted(by_nnz)
    assert _cost.spmm_slicing(64, 65536, 1000, 64, 132, 20 * 1024) is None


@pytest.mark.parametrize("n", [1, 64])
def test_snack_coo_is_chosen_only_when_asked_for(n):
    for m, k in itertools.product((1000, 100_000), repeat=2):
        choice = choose_spmm(make(m=m, k=k, n=n, kernel="snack_coo"))
        assert choice.kernel is kernels.SNACK_COO
        assert choice.values == {"T": "float32", "R": index_name(m), "I": index_name(k)}
        assert "asked for" in choice.reason


def test_non_deterministic_kernels_are_named():
    assert set(dispatch.NON_DETERMINISTIC) <= set(dispatch.SPMM_KERNELS)
    assert dispatch.NON_DETERMINISTIC == ("snack_coo",)


# Plans


def run(problem, launches, device=0):
    """Launch the plan of a problem with pointers that tell their names; returns the launches."""
    names = {
        "spmm": ["row_offsets", "columns", 0, "values", "dense", "bias", "out"],
        "spmm_transposed": ["col_offsets", "rows", "permutation", "values", "dense", 0, "out"],
        "sddmm": ["row_offsets", "columns", "left", "right", "out"],
    }[problem.op]
    if problem.kernel == "snack_coo":
        names[0] = "rows"
    launches.clear()
    plan = dispatch.plan(problem, device)
    pointers = [Address(name) if name else 0 for name in names]
    if plan.workspace:
        pointers.append(Address("workspace"))
    _jit.launch(plan, tuple(pointers), "stream")
    return launches


class Address(str):
    """The name of an array in place of its address."""

    def __add__(self, distance):
        return Address(f"{self}+{distance}")


@pytest.mark.parametrize("batch_major", [False, True], ids=["feature", "batch"])
@pytest.mark.parametrize(
    ("op", "pointers"),
    [
        ("spmm", ("row_offsets", "columns", 0, "values", "dense", "bias", "out")),
        ("spmm_transposed", ("col_offsets", "rows", "permutation", "values", "dense", 0, "out")),
        ("sddmm", ("row_offsets", "columns", "left", "right", "out")),
    ],
)
def test_plan_passes_sizes_first_and_then_all_pointers(op, pointers, batch_major, fake_gpu):
    problem = make(op, m=100, k=70, n=12, batch_major=batch_major, kernel="csr")
    (launch,) = run(problem, fake_gpu, device=3)
    rows, columns = (70, 100) if op == "spmm_transposed" else (100, 70)
    assert launch.arguments == (rows, columns, 12, *pointers)
    assert launch.stream == "stream"
    assert launch.device == 3
    assert (launch.shared_bytes, launch.max_shared_bytes) == (0, 0)


def test_plan_argument_lists_are_as_long_as_the_kernels(fake_gpu):
    # The declarations in cuda/ are the truth; this counts their parameters.
    for op, batch_major, kernel in itertools.product(
        ("spmm", "spmm_transposed", "sddmm"), (False, True), (None, "csr", "snack_coo")
    ):
        if kernel == "snack_coo" and (op != "spmm" or not batch_major):
            continue
        problem = make(op, batch_major=batch_major, kernel=kernel)
        for launch in run(problem, fake_gpu):
            name = launch.expression.removeprefix("snack::").split("<")[0]
            assert len(launch.arguments) == len(parameters(launch.file, name))


def parameters(file, name):
    """Parameter names of one kernel, read from its source."""
    text = (_jit.cuda_directory() / file).read_text()
    start = text.index(f" {name}(")
    inside = text[text.index("(", start) + 1 : text.index(")", start)]
    return [part.split()[-1].strip("*&") for part in inside.split(",")]


@pytest.mark.parametrize("name", ARGUMENTS)
def test_kernel_arrays_come_last_and_in_the_order_of_the_plans(name):
    (kernel,) = (k for k in kernels.KERNELS if k.name == name)
    expected = ARGUMENTS[name].split()
    assert parameters(kernel.file, name)[-len(expected) :] == expected


def test_every_kernel_of_a_plan_has_its_argument_order_tested():
    # Those of topology updates are not planned; tests/test_emulation_updates.py runs them all.
    updates = {"select.cu", "grow.cu", "merge.cu", "gradient.cu", "transpose.cu"}
    assert set(ARGUMENTS) == {k.name for k in kernels.KERNELS if k.file not in updates}


@pytest.mark.parametrize("op", ["spmm", "spmm_transposed", "sddmm"])
def test_csr_grids_have_a_warp_for_each_piece_of_work(op, fake_gpu):
    for options in all_problems():
        problem = make(op, **options, kernel="csr")
        (launch,) = run(problem, fake_gpu)
        choice = dispatch.plan(problem, 0).choices[0]
        rows = problem.k if op == "spmm_transposed" else problem.m
        width = choice.values.get("kBatch") or 32 * choice.values.get("kVec", 1)
        needed = rows if op == "sddmm" else rows * -(-problem.n // width)
        (blocks,), (threads,) = launch.grid, launch.block
        assert threads == 256
        assert needed <= blocks * (threads // 32) < needed + threads // 32


def test_resident_plan_is_one_wave_with_its_shared_memory(fake_gpu):
    seen = 0
    for options in all_problems():
        problem = make(**options)
        if choose(problem).kernel is not kernels.SPMM_RESIDENT:
            continue
        seen += 1
        (launch,) = run(problem, fake_gpu)
        batch = dispatch.plan(problem, 0).choices[0].values["kBatch"]
        m, k, n, nnz, blocks, *pointers = launch.arguments
        assert (m, k, n, nnz) == (problem.m, problem.k, problem.n, problem.nnz)
        assert pointers == ["row_offsets", "columns", "values", "dense", "bias", "out"]
        tiles = -(-n // batch)
        assert launch.grid == (tiles * blocks,)
        assert blocks >= 1
        assert tiles * blocks <= max(H200.multiprocessors, tiles)
        assert launch.block[0] in (256, 512, 1024)
        assert launch.shared_bytes == 4 * batch * (k + 1) <= launch.max_shared_bytes
        assert launch.max_shared_bytes == H200.shared_bytes
    assert seen


@pytest.mark.parametrize("op", ["spmm", "spmm_transposed"])
def test_vector_plan_has_a_warp_for_each_row_of_one_wave(op, fake_gpu):
    for m, k in itertools.product((1, 100, 3072, 40_000), repeat=2):
        problem = make(op, m=m, k=k, n=1)
        (launch,) = run(problem, fake_gpu)
        rows, columns, *pointers = launch.arguments
        assert (rows, columns) == ((k, m) if op == "spmm_transposed" else (m, k))
        assert pointers[4] == "dense"
        warps = launch.grid[0] * launch.block[0] // 32
        assert warps <= 32 * H200.multiprocessors
        assert warps >= min(rows, 32 * H200.multiprocessors) - 32
        assert launch.shared_bytes == 4 * columns


@pytest.mark.parametrize("op", ["spmm", "spmm_transposed"])
def test_sliced_plan_covers_the_batch_and_adds_its_slices(op, fake_gpu):
    for n in (5, 64, 100, 700, 5000):
        problem = make(op, m=4096, k=4000, n=n, dtype="float16")
        cut = choose(problem).slicing
        if cut is None:
            continue
        plan = dispatch.plan(problem, 0)
        launches = run(problem, fake_gpu)
        products = [each for each in launches if "spmm_csr_sliced" in each.expression]
        sums = [each for each in launches if "reduce_slices" in each.expression]
        assert len(launches) == len(products) + len(sums)
        assert len(sums) == (len(products) if cut.slices > 1 else 0)
        m, k = (4000, 4096) if op == "spmm_transposed" else (4096, 4000)
        done = 0
        for i, each in enumerate(products):
            rows, columns, batch, *_, x, _, y, partial = each.arguments
            assert (rows, columns) == (m, k)
            assert x == (f"dense+{done * k * 2}" if done else "dense")
            assert y == (f"out+{done * m * 2}" if done else "out")
            tiles = -(-batch // cut.batch)
            assert each.grid == (cut.row_blocks * cut.slices * tiles,)
            assert partial == ("workspace" if sums else 0)
            if sums:
                bias = 0 if op == "spmm_transposed" else "bias"
                padded = tiles * cut.batch
                expected = (m, batch, cut.slices, padded, bias, y, "workspace")
                assert sums[i].arguments == expected
                assert plan.workspace >= 4 * cut.slices * m * padded
            done += batch
        assert done == n


def test_sddmm_plan_covers_the_batch_and_adds_its_chunks(fake_gpu):
    seen = set()
    for dtype, n, size in itertools.product(("float32", "float16"), (3, 64, 65, 512), (700, 4096)):
        problem = make("sddmm", m=size, k=size, n=n, dtype=dtype)
        cut = choose(problem).slicing
        plan = dispatch.plan(problem, 0)
        product, *sums = run(problem, fake_gpu)
        chunks = -(-n // cut.chunk)
        seen.add(chunks > 1)
        assert cut.chunk == n or cut.chunk % cut.batch == 0
        assert product.grid == (cut.row_blocks * cut.slices * chunks,)
        apart = chunks > 1 or (dtype == "float16" and n > cut.batch)
        assert product.arguments[-2:] == ("out", "workspace" if apart else "out")
        assert plan.workspace == (4 * problem.nnz * chunks if apart else 0)
        assert len(sums) == (chunks > 1)
        for each in sums:
            assert each.arguments == (problem.nnz, chunks, "out", "workspace")
            assert each.grid[0] * each.block[0] >= problem.nnz
    assert seen == {False, True}


@pytest.mark.parametrize("nnz", [1, 255, 256, 257, 5000])
def test_snack_coo_fills_first_and_then_scatters(nnz, fake_gpu):
    problem = make(m=100, k=70, n=12, nnz=nnz, kernel="snack_coo", dtype="float64")
    fill, scatter = run(problem, fake_gpu)
    assert fill.expression == "snack::fill_rows<double>"
    assert fill.arguments == (100, 12, "bias", "out")
    assert fill.grid[0] * fill.block[0] >= 1200
    assert scatter.expression == "snack::spmm_coo_atomic<double, unsigned short, unsigned short>"
    blocks = -(-nnz // 256)
    pointers = ("rows", "columns", "values", "dense", "out")
    assert scatter.arguments == (100, 70, nnz, blocks, *pointers)
    assert scatter.grid == (12 * blocks,)
    assert scatter.block == (256,)
    assert [choice.kernel.name for choice in dispatch.plan(problem, 0).choices] == [
        "fill_rows",
        "spmm_coo_atomic",
    ]


def test_plan_is_made_once_for_each_problem_and_device(fake_gpu):
    plan = dispatch.plan(make(), 0)
    assert dispatch.plan(make(), 0) is plan
    assert dispatch.plan(make(), 1) is not plan
    assert dispatch.plan(make(n=65), 0) is not plan


@pytest.mark.parametrize("kernel", ["csr", "snack_coo"])
def test_a_grid_beyond_2_to_the_31_is_refused(kernel, fake_gpu):
    problem = make(m=2**20, n=2**31 - 1, nnz=2**20, kernel=kernel)
    with pytest.raises(ValueError, match="problem must need fewer than 2\\^31 thread blocks, got"):
        dispatch.plan(problem, 0)
    assert fake_gpu == []


def test_launch_lets_a_step_pick_its_pointers(fake_gpu):
    function = _jit.compile_instance("file", "expression", 0)
    steps = (
        dispatch.Step(function, (1,), (32,), (5, 6)),
        dispatch.Step(function, (2,), (64,), (7,), itemgetter(2, 0), 128),
    )
    _jit.launch(dispatch.Plan(steps), (10, 20, 30), "stream")
    first, second = fake_gpu
    assert (first.grid, first.block, first.arguments) == ((1,), (32,), (5, 6, 10, 20, 30))
    assert (second.grid, second.block, second.arguments) == ((2,), (64,), (7, 30, 10))
    assert (first.shared_bytes, second.shared_bytes) == (0, 128)


# Operations on the way to a plan


@pytest.mark.parametrize("p", PROBLEMS, ids=lambda p: p.name)
def test_problem_of_every_topology_has_a_plan(p, fake_gpu):
    topology = make_topology(p)
    if p.nnz == 0 or p.n == 0:
        return  # such an operation never asks for a plan
    for op, dtype, batch_major in itertools.product(
        ("spmm", "spmm_transposed", "sddmm"), DTYPES, (False, True)
    ):
        made = ops.problem_of(op, topology, p.n, dtype, batch_major)
        for launch in run(made, fake_gpu):
            assert launch.grid[0] >= 1
            sizes = [size for size in launch.arguments if isinstance(size, int | np.integer)]
            assert all(type(size) is int for size in sizes)


def test_explicit_csr_and_default_solve_the_same_problem(fake_gpu):
    topology = make_topology(problem("odd_sizes"))
    made = ops.problem_of("spmm", topology, 33, "float32", True)
    asked = ops.problem_of("spmm", topology, 33, "float32", True, kernel="csr")
    assert made._replace(kernel="csr") == asked
    assert run(asked, fake_gpu)[0].expression.startswith("snack::spmm_csr_batch_major<float")
