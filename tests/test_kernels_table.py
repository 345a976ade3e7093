"""The table of kernels: expression text, allowed values, and that the sources hold them."""

import re

import pytest

from snack_cupy import _jit, kernels
from snack_cupy._check import VALUE_DTYPES
from snack_cupy.kernels import CUDA_TYPES, FLOATS, INDICES, KERNELS, WORDS, Kernel

EXAMPLE = Kernel(
    "file.cu",
    "example",
    (("T", FLOATS), ("I", INDICES), ("kFlag", (False, True)), ("kVec", (1, 4))),
)
each_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (("float32", "int32", True, 4), "float, int, true, 4"),
        (("float64", "uint16", False, 1), "double, unsigned short, false, 1"),
        (("float16", "int32", False, 4), "__half, int, false, 4"),
        (("bfloat16", "uint16", True, 1), "__nv_bfloat16, unsigned short, true, 1"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_expression_is_the_instance_in_cuda(values, text):
    named = dict(zip(("T", "I", "kFlag", "kVec"), values, strict=True))
    assert EXAMPLE.expression(**named) == f"snack::example<{text}>"
    shuffled = dict(reversed(named.items()))
    assert EXAMPLE.expression(**shuffled) == f"snack::example<{text}>"


def test_expressions_of_the_real_table():
    batch_major = kernels.SPMM_BATCH_MAJOR.expression(
        T="float32", I="uint16", kPermuted=False, kBatch=8
    )
    assert batch_major == "snack::spmm_csr_batch_major<float, unsigned short, false, 8>"
    assert kernels.FILL_ROWS.expression(T="float64") == "snack::fill_rows<double>"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"T": "int8"}, r"example: T must be one of \('float32', .*\), got 'int8'"),
        ({"T": "float"}, r"example: T must be one of \('float32', .*\), got 'float'"),
        ({"I": "int64"}, r"example: I must be one of \('uint16', 'int32'\), got 'int64'"),
        ({"kVec": 2}, r"example: kVec must be one of \(1, 4\), got 2"),
        ({"kVec": None}, r"example: kVec must be one of \(1, 4\), got None"),
        ({"kFlag": "true"}, r"example: kFlag must be one of \(False, True\), got 'true'"),
        ({"kOther": 1}, r"example: template arguments must be in the table, got \['kOther'\]"),
    ],
    ids=["dtype", "cuda_type", "index", "number", "none", "flag", "unknown"],
)
def test_expression_rejects_what_is_not_in_the_table(change, message):
    values = {"T": "float32", "I": "int32", "kFlag": True, "kVec": 1, **change}
    with pytest.raises(ValueError, match=message):
        EXAMPLE.expression(**values)


def test_expression_names_the_value_that_is_missing():
    message = r"example: template arguments must name I, got \['kFlag', 'kVec'\]"
    with pytest.raises(ValueError, match=message):
        EXAMPLE.expression(T="float32", kFlag=True, kVec=1)


def test_instances_are_all_combinations():
    instances = list(EXAMPLE.instances())
    assert len(instances) == 4 * 2 * 2 * 2
    assert len({EXAMPLE.expression(**values) for values in instances}) == len(instances)
    assert instances[0] == {"T": "float32", "I": "uint16", "kFlag": False, "kVec": 1}


def test_the_table_has_at_most_500_instances():
    expressions = [kernel.expression(**v) for kernel in KERNELS for v in kernel.instances()]
    assert len(set(expressions)) == len(expressions)
    assert len(expressions) <= 500


def test_every_kernel_of_the_module_is_in_the_table():
    defined = [value for value in vars(kernels).values() if isinstance(value, Kernel)]
    assert set(defined) == set(KERNELS)
    assert len(KERNELS) == len(set(KERNELS)) == len({kernel.name for kernel in KERNELS})


def test_types_cover_the_dtypes_of_the_operations():
    assert FLOATS == VALUE_DTYPES
    assert set(CUDA_TYPES) == {*FLOATS, *INDICES, *WORDS}


@each_kernel
def test_template_parameters_match_the_source(kernel):
    text = (_jit.cuda_directory() / kernel.file).read_text()
    pattern = rf"(?:template <([^>]*)>\s*)?__global__[^;{{]*?\s{kernel.name}\("
    (found,) = re.findall(pattern, text)
    declared = [part.split()[-1] for part in found.split(",") if part]
    assert declared == [name for name, _ in kernel.parameters]


def test_every_kernel_of_the_sources_is_in_the_table():
    names = set()
    for path in _jit.cuda_directory().glob("*.cu"):
        names |= set(re.findall(r"__global__[^;{(]*(?:\([^)]*\))?\s+(\w+)\(", path.read_text()))
    assert names == {kernel.name for kernel in KERNELS}


def test_get_compiles_one_instance_on_one_device(monkeypatch):
    calls = []
    monkeypatch.setattr(_jit, "compile_instance", lambda *a: calls.append(a) or "function")
    assert kernels.FILL_ROWS.get(2, T="float32") == "function"
    assert kernels.FILL_ROWS.get(0, max_shared_bytes=99, T="float64") == "function"
    assert calls == [
        ("snack_coo.cu", "snack::fill_rows<float>", 2, 0),
        ("snack_coo.cu", "snack::fill_rows<double>", 0, 99),
    ]
