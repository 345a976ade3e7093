"""Files: round trips, SciPy's own, real matrices, and files that lie."""

import io as memory
import os
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from coo_helpers import each_dtype, random_dense, shuffled
from helpers import assert_coo
from scipy import sparse

from snack_cupy import COOTensor, io

FOLDER = os.environ.get("SNACK_CUPY_DATA")


@each_dtype
@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_io_round_trip(kind, dtype, rng, tmp_path):
    if kind == "safetensors":
        pytest.importorskip("safetensors")
    for shape in ((4, 6), (3, 4, 5), (0, 3), (7,)):
        dense = random_dense(rng, shape, dtype)
        tensor = shuffled(rng, dense)
        getattr(io, f"save_{kind}")(tmp_path / "a", tensor)
        got = getattr(io, f"load_{kind}")(tmp_path / "a")
        assert_coo(got, dense, nnz=tensor.nnz)


@pytest.mark.parametrize("format", ["coo", "csr", "csc"])
def test_io_reads_scipys_npz_and_scipy_reads_ours(format, rng, tmp_path):
    dense = random_dense(rng, (4, 6), np.dtype(float))
    path = tmp_path / "a.npz"
    sparse.save_npz(path, sparse.coo_array(dense).asformat(format))
    assert_coo(io.load_npz(path), dense)
    io.save_npz(path, COOTensor.from_dense(dense))
    np.testing.assert_array_equal(sparse.load_npz(path).toarray(), dense)


def test_io_text_round_trips(rng, tmp_path):
    dense = random_dense(rng, (4, 6), np.dtype(float))
    tensor = COOTensor.from_dense(dense)
    io.save_mtx(tmp_path / "a.mtx", tensor)
    assert_coo(io.load_mtx(tmp_path / "a.mtx").coalesce(), dense)
    io.save_smtx(tmp_path / "a.smtx", tensor)
    assert_coo(io.load_smtx(tmp_path / "a.smtx", dtype=float), (dense != 0).astype(float))


BANNER = b"%%MatrixMarket matrix coordinate real general\n"
MTX = [
    b"",
    b"hello",
    BANNER,
    BANNER + b"3 3\n",
    BANNER + b"3 3 99999999999\n1 1 1\n",
    BANNER + b"3 3 2\n1 1 1\n",
    BANNER + b"3 3 1\n4 1 1\n",
    BANNER + b"3 3 1\n0 1 1\n",
    BANNER + b"-3 3 1\n1 1 1\n",
    BANNER + b"3 3 1\n1 x 1\n",
    b"%%MatrixMarket matrix array real general\n1000000 1000000\n1\n",
]
SMTX = [
    b"",
    b"3, 3\n",
    b"99999999999, 3, 1\n0 1\n0\n",
    b"2, 3, 99999999999\n0 1 2\n0 1\n",
    b"2, 3, 2\n0 1\n0 1\n",
    b"2, 3, 2\n0 1 2\n0 3\n",
    b"2, 3, 2\n0 1 2\n0 -1\n",
    b"2, 3, 2\n0 3 2\n0 1\n",
    b"2, 3, 2\n0 1 2\n0 x\n",
    b"2, 3, 2\n0 1 99999999999999999999\n0 1\n",
]


def good_arrays():
    index = np.array([0, 1])
    return {
        "format": np.array(b"coo"), "shape": np.array([2, 2]), "row": index, "col": index,
        "data": np.ones(2),
    }  # fmt: skip


def npz_with(**changes):
    file = memory.BytesIO()
    np.savez(file, **{k: v for k, v in (good_arrays() | changes).items() if v is not None})
    return file.getvalue()


def npz_that_claims_much():
    header = memory.BytesIO()
    claim = {"descr": "<f8", "fortran_order": False, "shape": (2**40,)}
    np.lib.format.write_array_header_1_0(header, claim)
    file = memory.BytesIO(npz_with(data=None))
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("data.npy", header.getvalue())
    return file.getvalue()


def npz_bomb():
    file = memory.BytesIO()
    np.savez_compressed(file, **(good_arrays() | {"data": np.zeros(2**26)}))
    return file.getvalue()


NPZ = {
    "empty": b"",
    "text": b"hello",
    "truncated": npz_with()[:-30],
    "missing": npz_with(data=None),
    "pickle": npz_with(data=np.array([{}, {}], object)),
    "range": npz_with(row=np.array([0, 2])),
    "lengths": npz_with(row=np.array([0])),
    "format": npz_with(format=np.array(b"bsr")),
    "shape": npz_with(shape=np.array([-2, 2])),
    "offsets": npz_with(
        format=np.array(b"csr"), indptr=np.array([0, 2**40, 2]), indices=np.array([0, 1])
    ),
    "lines": npz_with(
        format=np.array(b"csr"), shape=np.array([2**50, 2]), indptr=np.array([0, 2]),
        indices=np.array([0, 1]),
    ),
    "claims": npz_that_claims_much(),
    "bomb": npz_bomb(),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "content"),
    [("mtx", c) for c in MTX] + [("smtx", c) for c in SMTX] + [("npz", c) for c in NPZ.values()],
    ids=[*(f"mtx{i}" for i in range(len(MTX))), *(f"smtx{i}" for i in range(len(SMTX))), *NPZ],
)
def test_io_broken_files_raise_and_take_no_memory(kind, content, tmp_path):
    path = tmp_path / "a"
    path.write_bytes(content)
    tracemalloc.start()
    with pytest.raises(io.FileFormatError, match=f"load_{kind}: the file must "):
        getattr(io, f"load_{kind}")(path)
    assert tracemalloc.get_traced_memory()[1] < 8e6
    tracemalloc.stop()
    with pytest.raises(FileNotFoundError):
        getattr(io, f"load_{kind}")(tmp_path / "absent")


@pytest.mark.parametrize("cut", [0, 4, 9, 60, -1])
def test_io_truncated_safetensors(cut, tmp_path):
    pytest.importorskip("safetensors")
    path = tmp_path / "a"
    io.save_safetensors(path, COOTensor.from_dense(np.eye(3)))
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(io.FileFormatError, match="load_safetensors: the file must "):
        io.load_safetensors(path)


@pytest.mark.skipif(not FOLDER, reason="SNACK_CUPY_DATA names no folder of real data")
def test_io_real_matrices(rng, tmp_path):
    root = Path(FOLDER or ".")
    tensors = [io.load_smtx(path) for path in sorted(root.glob("dlmc/**/*.smtx*"))]
    tensors += [io.load_mtx(path) for path in sorted(root.glob("suitesparse/*.mtx*"))]
    for path in sorted(root.glob("wavegru/*.npz")) + sorted(root.glob("planetoid/*.npz")):
        tensors += csr_parts(path)
    assert tensors
    for tensor in tensors:
        matrix = tensor.to_scipy("csr")
        other = rng.integers(-3, 4, (tensor.shape[1], 3)).astype(tensor.dtype)
        np.testing.assert_allclose(tensor @ other, matrix @ other, rtol=1e-4, atol=1e-3)
        io.save_npz(tmp_path / "a.npz", tensor)
        again = io.load_npz(tmp_path / "a.npz")
        assert np.array_equal(again.coords, tensor.coords)
        assert np.array_equal(again.data, tensor.data)


def csr_parts(path):
    """Every matrix of an archive that holds several in CSR, under names of its own."""
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    for name, offsets in arrays.items():
        if not name.endswith("indptr"):
            continue
        stem = name.removesuffix("indptr")
        columns = arrays[f"{stem}indices"]
        data = arrays.get(f"{stem}data", np.ones(columns.size, np.float32))
        m, k = arrays.get(f"{stem}shape", (offsets.size - 1, int(columns.max()) + 1))
        parts = (data.astype(np.float32), columns, offsets)
        yield COOTensor.from_scipy(sparse.csr_array(parts, shape=(int(m), int(k))))
