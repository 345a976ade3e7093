"""Every kernel instance compiles, through NVRTC and without a GPU, for each supported architecture.

The options are those CuPy itself would compile with, so a source that passes here compiles on a
machine with a GPU as well.
"""

import os
import re
import shutil
from collections import defaultdict

import pytest

from snack_cupy import _jit, kernels

ARCHITECTURES = (80, 90, 100, 120)
MAX_INSTANCES = 500  # of the whole table: what can be compiled here within the CI's time
GROUP = 100  # instances in one program: headers are parsed once for all of them

BROKEN = "line_one();\n__global__ void broken(int* out) {\n  out[0] = no_such_name;\n}\n"


def _nvrtc():
    """CuPy's binding of NVRTC, or the reason (a string) why there is none."""
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except Exception as error:  # ImportError, or RuntimeError from CuPy's loader
        return f"no NVRTC: {error}"
    return nvrtc


def _require_nvrtc():
    nvrtc = _nvrtc()
    if isinstance(nvrtc, str):
        pytest.skip(nvrtc)
    return nvrtc


def _options(architecture, folder):
    """CuPy's own options, the include folders it finds, and the options of `snack_cupy._jit`."""
    from cupy._core import core

    own = core.assemble_cupy_compiler_options((*_jit.OPTIONS, f"-I{folder}"))
    return (*own, "-ftz=true", "--device-as-default-execution-space", architecture)


def _compile(source, expressions, architecture, folder=None, result="getCUBIN"):
    """The machine code (or PTX) of one program; fails with NVRTC's log."""
    nvrtc = _require_nvrtc()
    program = nvrtc.createProgram(source, "program.cu", (), ())
    try:
        for expression in expressions:
            nvrtc.addNameExpression(program, expression)
        try:
            options = _options(architecture, folder or _jit.cuda_directory())
            nvrtc.compileProgram(program, options)
            lowered = {nvrtc.getLoweredName(program, name) for name in expressions}
        except nvrtc.NVRTCError as error:
            raise AssertionError(f"{error}\n{nvrtc.getProgramLog(program)}") from None
        assert len(lowered) == len(expressions)
        return getattr(nvrtc, result)(program)
    finally:
        nvrtc.destroyProgram(program)


def _groups():
    """(file, expressions) for groups of at most `GROUP` instances of one file."""
    by_file = defaultdict(list)
    for kernel in kernels.KERNELS:
        by_file[kernel.file].extend(kernel.expression(**values) for values in kernel.instances())
    for file, expressions in by_file.items():
        for start in range(0, len(expressions), GROUP):
            yield file, expressions[start : start + GROUP]


GROUPS = list(_groups())
GROUP_IDS = [f"{file.removesuffix('.cu')}-{i}" for i, (file, _) in enumerate(GROUPS)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("file", "expressions"), GROUPS, ids=GROUP_IDS)
def test_compile_instances(file, expressions, architecture):
    code = _compile(_jit.read_source(file), expressions, f"-arch=sm_{architecture}")
    assert code[:4] == b"\x7fELF"


@pytest.mark.parametrize("architecture", (90, 100))
@pytest.mark.parametrize(("file", "expressions"), GROUPS, ids=GROUP_IDS)
def test_compile_no_access_wider_than_16_bytes(file, expressions, architecture):
    # Dense operands are known to start on 16-byte boundaries at best; from sm_100 on the compiler
    # turns a 32-byte aligned type into 32-byte accesses, which fault on such an address.
    source = _jit.read_source(file)
    ptx = _compile(source, expressions, f"-arch=compute_{architecture}", result="getPTX")
    text = ptx.decode() if isinstance(ptx, bytes) else ptx
    access = re.compile(r"\b(?:ld|st)\.(?:global|shared)[\w.:]*?(?:\.v(\d))?\.[bufs](\d+)\s")
    wide = {
        match.group(0).strip()
        for match in access.finditer(text)
        if int(match.group(1) or 1) * int(match.group(2)) > 128
    }
    assert access.search(text)
    assert not wide


def test_compile_table_is_bounded_and_distinct():
    expressions = [expression for _, group in GROUPS for expression in group]
    assert len(set(expressions)) == len(expressions)
    assert len(expressions) <= MAX_INSTANCES


def test_compile_table_names_every_source():
    files = {path.name for path in _jit.cuda_directory().glob("*.cu")}
    assert files == {kernel.file for kernel in kernels.KERNELS}


def test_compile_table_names_every_kernel():
    declared = set()
    for path in _jit.cuda_directory().glob("*.cu"):
        text = re.sub(r"//[^\n]*", "", path.read_text(encoding="utf-8"))
        text = re.sub(r"__launch_bounds__\([^()]*\)|\bSNACK_CLUSTER_OF_TWO\b", "", text)
        names = re.findall(r"__global__\s+void\s+(\w+)\s*\(", text)
        declared |= {(path.name, name) for name in names}
    assert declared == {(kernel.file, kernel.name) for kernel in kernels.KERNELS}


def test_compile_error_shows_the_real_file_and_line(tmp_path):
    shutil.copy(_jit.cuda_directory() / "common.cuh", tmp_path)
    (tmp_path / "broken.cu").write_text(f'#include "common.cuh"\n{BROKEN}', encoding="utf-8")
    with pytest.raises(AssertionError, match="no_such_name") as error:
        _compile(_jit.read_source("broken.cu", tmp_path), (), "-arch=sm_90", tmp_path)
    assert "cuda/broken.cu(2)" in str(error.value)  # line_one();
    assert "cuda/broken.cu(4)" in str(error.value)  # no_such_name


def test_compile_error_in_a_header_shows_the_header(tmp_path):
    header = (_jit.cuda_directory() / "common.cuh").read_text(encoding="utf-8")
    lines = len(header.splitlines())
    (tmp_path / "common.cuh").write_text(f"{header}{BROKEN}", encoding="utf-8")
    (tmp_path / "includes.cu").write_text('#include "common.cuh"\n', encoding="utf-8")
    with pytest.raises(AssertionError, match=rf"common\.cuh\({lines + 3}\)"):
        _compile(_jit.read_source("includes.cu", tmp_path), (), "-arch=sm_90", tmp_path)


def test_compile_source_changes_with_a_header(tmp_path):
    for path in _jit.cuda_directory().glob("*.cu*"):
        shutil.copy(path, tmp_path)
    file = kernels.KERNELS[0].file
    before = _jit.read_source.__wrapped__(file, tmp_path)
    with (tmp_path / "common.cuh").open("a", encoding="utf-8") as header:
        header.write("// edited\n")
    after = _jit.read_source.__wrapped__(file, tmp_path)
    assert before.splitlines()[0] != after.splitlines()[0]
    assert before.splitlines()[1:] == after.splitlines()[1:]


def test_compile_nvrtc_is_there_in_ci():
    in_ci = os.environ.get("CI") == "true"
    assert not (in_ci and isinstance(_nvrtc(), str)), _nvrtc()
