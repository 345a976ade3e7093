"""The table of CUDA kernels: file, name, and the template values each one allows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from snack_cupy import _jit
from snack_cupy._check import fail

CUDA_TYPES = {
    "float32": "float",
    "float64": "double",
    "float16": "__half",
    "bfloat16": "__nv_bfloat16",
    "uint8": "unsigned char",
    "uint16": "unsigned short",
    "uint32": "unsigned int",
    "uint64": "unsigned long long",
    "int32": "int",
}
FLOATS = ("float32", "float64", "float16", "bfloat16")
SUMMED_IN_FLOAT = ("float32", "float16", "bfloat16")
HALVES = ("float16", "bfloat16")
INDICES = ("uint16", "int32")
WORDS = ("uint8", "uint16", "uint32", "uint64")  # moved or compared as bits


@dataclass(frozen=True)
class Kernel:
    """One CUDA kernel template: ``snack::<name><...>`` of ``cuda/<file>``.

    ``parameters`` maps each template parameter, in order, to the values it may take.
    """

    file: str
    name: str
    parameters: tuple[tuple[str, tuple[Any, ...]], ...]

    def expression(self, **values: Any) -> str:
        """The name expression of one instance; a value outside the table is a ValueError."""
        arguments = []
        for parameter, allowed in self.parameters:
            if parameter not in values:
                fail(self.name, "template arguments", f"name {parameter}", sorted(values))
            value = values.pop(parameter)
            if value not in allowed:
                fail(self.name, parameter, f"be one of {allowed}", repr(value))
            arguments.append(_cuda_text(value))
        if values:
            fail(self.name, "template arguments", "be in the table", sorted(values))
        text = f"snack::{self.name}"
        return f"{text}<{', '.join(arguments)}>" if arguments else text

    def instances(self) -> Iterator[dict[str, Any]]:
        """Every allowed combination of template values."""
        names = [name for name, _ in self.parameters]
        for values in itertools.product(*(allowed for _, allowed in self.parameters)):
            yield dict(zip(names, values, strict=True))

    def get(self, device: int, *, max_shared_bytes: int = 0, **values: Any) -> Any:
        """The compiled function of one instance on CUDA device ``device``."""
        return _jit.compile_instance(self.file, self.expression(**values), device, max_shared_bytes)


def _cuda_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return CUDA_TYPES.get(value, str(value))


SPMM_BATCH_MAJOR = Kernel(
    "spmm.cu",
    "spmm_csr_batch_major",
    (("T", FLOATS), ("I", INDICES), ("kPermuted", (False, True)), ("kBatch", (1, 4, 8))),
)
SPMM_FEATURE_MAJOR = Kernel(
    "spmm.cu",
    "spmm_csr_feature_major",
    (("T", FLOATS), ("I", INDICES), ("kPermuted", (False, True)), ("kVec", (1, 4))),
)
SPMM_VECTOR = Kernel(
    "spmm_vector.cu",
    "spmm_csr_vector",
    (("T", SUMMED_IN_FLOAT), ("kPermuted", (False, True))),
)
SPMM_RESIDENT = Kernel(
    "spmm_resident.cu",
    "spmm_csr_resident",
    (("T", SUMMED_IN_FLOAT), ("kPermuted", (False, True)), ("kBatch", (4, 8))),
)
SPMM_SLICED = Kernel(
    "spmm_sliced.cu",
    "spmm_csr_sliced",
    (
        ("T", SUMMED_IN_FLOAT),
        ("kPermuted", (False, True)),
        ("kBatch", (16, 32, 64)),
        ("kRowEach", (False, True)),
    ),
)
REDUCE_SLICES = Kernel("spmm_sliced.cu", "reduce_slices", (("T", SUMMED_IN_FLOAT),))
SDDMM_VECTOR = Kernel("sddmm_vector.cu", "sddmm_csr_vector", (("T", SUMMED_IN_FLOAT),))
TENSOR = (
    ("T", HALVES),
    ("kPermuted", (False, True)),
    ("kBatchTiles", (1, 2)),
    ("kSteps", (4, 8)),
)
SPMM_TENSOR = Kernel("spmm_tensor.cu", "spmm_csr_tensor", TENSOR)
SPMM_TENSOR_PAIR = Kernel(
    "spmm_tensor.cu",
    "spmm_csr_tensor_pair",
    (("T", HALVES), ("kPermuted", (False, True)), ("kBatchTiles", (4,)), ("kSteps", (4,))),
)
SPMM_VECTOR_HALF = Kernel(
    "spmm_vector_half.cu",
    "spmm_csr_vector_half",
    (("T", HALVES), ("kLanes", (8, 16, 32)), ("kVectors", (2,))),
)
SDDMM_TENSOR = Kernel(
    "sddmm_tensor.cu", "sddmm_csr_tensor", (("T", HALVES), ("kBatchSteps", (1, 2, 4)))
)
ON_TENSOR_CORES = (SPMM_TENSOR, SPMM_TENSOR_PAIR, SDDMM_TENSOR)
SDDMM_SLICED = Kernel(
    "sddmm_sliced.cu",
    "sddmm_csr_sliced",
    (("T", SUMMED_IN_FLOAT), ("kBatch", (4, 8, 16, 32, 64))),
)
ADD_CHUNKS = Kernel("sddmm_sliced.cu", "add_chunks", (("T", SUMMED_IN_FLOAT),))
SDDMM_BATCH_MAJOR = Kernel("sddmm.cu", "sddmm_csr_batch_major", (("T", FLOATS), ("I", INDICES)))
SDDMM_FEATURE_MAJOR = Kernel("sddmm.cu", "sddmm_csr_feature_major", (("T", FLOATS), ("I", INDICES)))
SCATTER_ROWS = Kernel(
    "dense.cu",
    "scatter_rows",
    (("T", SUMMED_IN_FLOAT), ("I", INDICES), ("kPermuted", (False, True))),
)
GATHER_ENTRIES = Kernel("dense.cu", "gather_entries", (("T", SUMMED_IN_FLOAT), ("I", INDICES)))
FILL_ROWS = Kernel("snack_coo.cu", "fill_rows", (("T", ("float32", "float64")),))
SNACK_COO = Kernel(
    "snack_coo.cu",
    "spmm_coo_atomic",
    (("T", ("float32", "float64")), ("R", INDICES), ("I", INDICES)),
)

# Topology updates.
SELECT_DIGIT = Kernel("select.cu", "select_digit", (("T", (*FLOATS, "uint32")),))
SELECT_CUTOFF = Kernel("select.cu", "select_cutoff", (("T", FLOATS),))
SELECT_MASK = Kernel("select.cu", "select_mask", (("T", FLOATS),))
PERMUTED_RANKS = Kernel("grow.cu", "permuted_ranks", ())
MARK_ENTRIES = Kernel("merge.cu", "mark_entries", (("T", (*FLOATS, "uint8")), ("I", INDICES)))
EXPAND_RANKS = Kernel("merge.cu", "expand_ranks", ())
EMIT_STRUCTURE = Kernel("merge.cu", "emit_structure", (("I", INDICES),))
EMIT_POSITIONS = Kernel("merge.cu", "emit_positions", ())
MOVE_ENTRIES = Kernel("merge.cu", "move_entries", (("W", WORDS),))
GRADIENT_TILES = Kernel(
    "gradient.cu",
    "gradient_tiles",
    (("T", ("float32", "float64")), ("kPass", (0, 1, 2))),  # kSample, kList, kAgain
)
MARK_LISTED = Kernel("gradient.cu", "mark_listed", ())
EXPAND_MARKED = Kernel("gradient.cu", "expand_marked", ())
MOVE_IN_PLACE = Kernel(
    "merge.cu",
    "move_in_place",
    (("W", ("uint16", "uint32", "uint64")), ("kTogether", (1, 2, 3))),
)
TRANSPOSE_MASKS = Kernel("transpose.cu", "transpose_masks", (("I", INDICES),))
TRANSPOSE_COUNTS = Kernel("transpose.cu", "transpose_counts", ())
TRANSPOSE_ENTRIES = Kernel("transpose.cu", "transpose_entries", (("I", INDICES), ("R", INDICES)))

# What operations launch by a plan, and what updates of a structure launch.
PRODUCTS = (
    SPMM_BATCH_MAJOR,
    SPMM_FEATURE_MAJOR,
    SPMM_VECTOR,
    SPMM_RESIDENT,
    SPMM_SLICED,
    REDUCE_SLICES,
    SDDMM_VECTOR,
    SPMM_TENSOR,
    SPMM_TENSOR_PAIR,
    SPMM_VECTOR_HALF,
    SDDMM_TENSOR,
    SDDMM_SLICED,
    ADD_CHUNKS,
    SDDMM_BATCH_MAJOR,
    SDDMM_FEATURE_MAJOR,
    SCATTER_ROWS,
    GATHER_ENTRIES,
    FILL_ROWS,
    SNACK_COO,
)
UPDATES = (
    SELECT_DIGIT,
    SELECT_CUTOFF,
    SELECT_MASK,
    PERMUTED_RANKS,
    MARK_ENTRIES,
    EXPAND_RANKS,
    EMIT_STRUCTURE,
    EMIT_POSITIONS,
    GRADIENT_TILES,
    MARK_LISTED,
    EXPAND_MARKED,
    MOVE_ENTRIES,
    MOVE_IN_PLACE,
    TRANSPOSE_MASKS,
    TRANSPOSE_COUNTS,
    TRANSPOSE_ENTRIES,
)
KERNELS = (*PRODUCTS, *UPDATES)
