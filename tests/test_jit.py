"""Sources as they go to the compiler, and the errors of machines that cannot compile or run."""

import ctypes
import shutil
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest

from snack_cupy import CompileError, CudaUnavailableError, _jit, kernels


@pytest.fixture
def folder(tmp_path):
    """A copy of cuda/ that a test may edit."""
    copy = tmp_path / "cuda"
    shutil.copytree(_jit.cuda_directory(), copy)
    return copy


@pytest.fixture
def read(folder):
    """`read_source` of the copy, read anew at each call."""
    return lambda file: _jit.read_source.__wrapped__(file, folder)


# Sources


def test_cuda_directory_holds_every_source_of_the_table():
    files = {kernel.file for kernel in kernels.KERNELS}
    assert files == {path.name for path in _jit.cuda_directory().glob("*.cu")}
    assert (_jit.cuda_directory() / "common.cuh").is_file()
    assert not (_jit.cuda_directory() / "__init__.py").exists()


def test_source_starts_with_the_digest_and_its_own_file_name():
    text = _jit.read_source("spmm.cu")
    first, second, rest = text.split("\n", 2)
    assert first == f"// headers {_jit.header_digest(_jit.cuda_directory())}"
    assert second == '#line 1 "cuda/spmm.cu"'
    assert rest == (_jit.cuda_directory() / "spmm.cu").read_text()


def test_source_of_a_copy_is_equal(read):
    assert read("spmm.cu") == _jit.read_source("spmm.cu")


def test_editing_a_header_changes_every_source(folder, read):
    before = {path.name: read(path.name) for path in folder.glob("*.cu")}
    header = folder / "common.cuh"
    header.write_text(header.read_text() + "\n// changed\n")
    for name, text in before.items():
        assert read(name) != text
        assert read(name).split("\n")[1:] == text.split("\n")[1:]


@pytest.mark.parametrize("change", ["add", "rename", "remove"])
def test_digest_follows_the_set_of_headers(folder, change):
    (folder / "one.cuh").write_text("// one\n")
    before = _jit.header_digest(folder)
    if change == "add":
        (folder / "two.cuh").write_text("")
    elif change == "rename":
        (folder / "one.cuh").rename(folder / "two.cuh")
    else:
        (folder / "one.cuh").unlink()
    assert _jit.header_digest(folder) != before


def test_editing_a_source_changes_that_source_alone(folder, read):
    spmm, sddmm = read("spmm.cu"), read("sddmm.cu")
    (folder / "spmm.cu").write_text("// another\n")
    assert read("spmm.cu") != spmm
    assert read("sddmm.cu") == sddmm


def test_cuda_directory_is_inside_an_installed_package_or_beside_it(tmp_path, monkeypatch):
    package = tmp_path / "snack_cupy"
    package.mkdir()
    monkeypatch.setattr(_jit, "__file__", str(package / "_jit.py"))
    find = _jit.cuda_directory.__wrapped__
    with pytest.raises(FileNotFoundError, match=r"snack_cupy: no CUDA sources in .* or beside it"):
        find()
    for place in (tmp_path / "cuda", package / "cuda"):
        place.mkdir()
        (place / "common.cuh").touch()
        assert find() == place
    (place / "common.cuh").unlink()
    assert find() == tmp_path / "cuda"  # an empty folder of that name is passed over


# Machines that lack something


@pytest.fixture
def fake_cupy(monkeypatch):
    """A stand-in for CuPy on a machine with one device."""

    class CUDARuntimeError(RuntimeError):
        pass

    class CompileException(Exception):
        pass

    class Device:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            current.append(self.index)

        def __exit__(self, *error):
            current.pop()

    current, cupy = [], ModuleType("cupy")
    runtime = SimpleNamespace(getDeviceCount=lambda: 1, CUDARuntimeError=CUDARuntimeError)
    compiler = SimpleNamespace(CompileException=CompileException)
    driver = SimpleNamespace(launchKernel=None, launchCooperativeKernel=None)
    cupy.cuda = SimpleNamespace(runtime=runtime, compiler=compiler, driver=driver, Device=Device)
    cupy.current = current
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    _jit.compile_instance.cache_clear()
    yield cupy
    _jit.compile_instance.cache_clear()


def test_missing_cupy_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(CudaUnavailableError) as caught:
        _jit.require_cupy()
    message = str(caught.value)
    assert message.startswith("snack_cupy: CuPy is missing; install CuPy with its CUDA components")
    assert 'pip install "snack-cupy[cuda13]" (CUDA 13) or "snack-cupy[cuda12]" (CUDA 12)' in message
    assert "python -m snack_cupy doctor" in message


def test_cupy_that_cannot_be_imported_is_missing(monkeypatch):
    class Broken:
        def find_spec(self, name, path=None, target=None):
            if name == "cupy":
                raise ImportError("libcudart.so is missing")

    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(CudaUnavailableError, match="CuPy is missing") as caught:
        _jit.require_cupy()
    assert "libcudart.so is missing" in str(caught.value.__cause__)


def test_machine_without_a_driver(fake_cupy):
    def fails():
        raise fake_cupy.cuda.runtime.CUDARuntimeError("cudaErrorInsufficientDriver")

    fake_cupy.cuda.runtime.getDeviceCount = fails
    message = r"snack_cupy: no usable CUDA device \(cudaErrorInsufficientDriver\)"
    with pytest.raises(CudaUnavailableError, match=message):
        _jit.require_cupy()


def test_machine_without_a_device(fake_cupy):
    fake_cupy.cuda.runtime.getDeviceCount = lambda: 0
    with pytest.raises(CudaUnavailableError, match="snack_cupy: no CUDA device is visible"):
        _jit.require_cupy()


def test_require_cupy_returns_the_module(fake_cupy):
    assert _jit.require_cupy() is fake_cupy


def raw_module(fake_cupy, result):
    """Let RawModule record how it is made; its function is ``result``, raised if an exception."""
    made = []

    class RawModule:
        def __init__(self, **options):
            made.append((options, tuple(fake_cupy.current)))

        def get_function(self, expression):
            if isinstance(result, Exception):
                raise result
            return result

    fake_cupy.RawModule = RawModule
    return made


def raw_kernel():
    """What ``RawModule.get_function`` gives."""
    return SimpleNamespace(kernel=SimpleNamespace(ptr=0xF))


def test_compile_instance_makes_one_module_per_instance_and_device(fake_cupy):
    raw = raw_kernel()
    made = raw_module(fake_cupy, raw)
    compiled = [
        _jit.compile_instance("spmm.cu", "expression", device, shared)
        for device, shared in ((0, 0), (0, 0), (1, 0))
    ]
    assert all(isinstance(function, _jit.Function) for function in compiled)
    assert compiled[0] is compiled[1] is not compiled[2]
    assert not hasattr(raw, "max_dynamic_shared_size_bytes")
    assert [device for _, device in made] == [(0,), (1,)]
    options = made[0][0]
    assert options["code"] == _jit.read_source("spmm.cu")
    assert options["name_expressions"] == ("expression",)
    assert options["options"] == ("-std=c++17", f"-I{_jit.cuda_directory()}")
    assert fake_cupy.current == []


def test_compile_instance_raises_the_shared_memory_limit(fake_cupy):
    raw = raw_kernel()
    raw_module(fake_cupy, raw)
    _jit.compile_instance("spmm.cu", "expression", 0, 227 * 1024)
    assert raw.max_dynamic_shared_size_bytes == 227 * 1024


def test_compile_error_names_the_instance_and_shows_the_log(fake_cupy):
    log = 'cuda/spmm.cu(12): error: identifier "x" is undefined'
    raw_module(fake_cupy, fake_cupy.cuda.compiler.CompileException(log))
    with pytest.raises(CompileError) as caught:
        _jit.compile_instance("spmm.cu", "snack::f<float>", 0)
    assert str(caught.value) == f"snack_cupy: snack::f<float> does not compile\n{log}"


@pytest.mark.parametrize("error", [ImportError, RuntimeError, OSError])
def test_missing_nvrtc_says_what_to_install(fake_cupy, error):
    raw_module(fake_cupy, error("cannot load libnvrtc.so.13"))
    with pytest.raises(CudaUnavailableError) as caught:
        _jit.compile_instance("spmm.cu", "snack::f<float>", 0)
    message = str(caught.value)
    assert message.startswith("snack_cupy: NVRTC is missing (cannot load libnvrtc.so.13); install")
    assert "snack-cupy[cuda13]" in message


def test_other_errors_pass_through_and_nothing_is_kept(fake_cupy):
    raw_module(fake_cupy, RuntimeError("out of memory"))
    with pytest.raises(RuntimeError, match=r"^out of memory$"):
        _jit.compile_instance("spmm.cu", "snack::f<float>", 0)
    raw_module(fake_cupy, raw_kernel())
    assert isinstance(_jit.compile_instance("spmm.cu", "snack::f<float>", 0), _jit.Function)


# Launches


class Driver:
    """Records launches as CUDA's driver sees them: it reads the arguments through pointers."""

    def __init__(self, count):
        self.count, self.launches, self.contexts = count, [], []

    def launchKernel(self, address, *geometry_and_pointers):
        *geometry, stream, pointers, extra = geometry_and_pointers
        addresses = (ctypes.c_void_p * self.count).from_address(pointers)
        arguments = [ctypes.c_int64.from_address(each).value for each in addresses]
        self.launches.append((address, geometry, stream, arguments, extra))

    def launchCooperativeKernel(self, address, *geometry_and_pointers):
        self.launchKernel(address, *geometry_and_pointers, "together")

    def make_context(self):
        self.contexts.append(threading.get_ident())


@pytest.fixture
def driver(fake_cupy, monkeypatch):
    monkeypatch.setattr(_jit, "_thread", threading.local())
    driver = Driver(3)
    fake_cupy.cuda.runtime.memGetInfo = driver.make_context
    return driver


STREAM = 7


def test_launch_passes_8_bytes_for_each_argument(driver):
    function = _jit.Function(SimpleNamespace(ptr=0xF), driver)
    arguments = (1, -2, 2**62)
    function((5,), (32, 4), arguments, 1024, STREAM)
    function((6, 2, 3), (64,), arguments[::-1], 0, STREAM)
    assert driver.launches == [
        (0xF, [5, 1, 1, 32, 4, 1, 1024], 7, [1, -2, 2**62], 0),
        (0xF, [6, 2, 3, 64, 1, 1, 0], 7, [2**62, -2, 1], 0),
    ]


def test_cooperative_launch_is_the_drivers(driver):
    function = _jit.Function(SimpleNamespace(ptr=0xF), driver)
    function((5,), (32,), (1, 2, 3), 0, STREAM, True)
    assert driver.launches == [(0xF, [5, 1, 1, 32, 1, 1, 0], 7, [1, 2, 3], "together")]


def test_each_thread_has_a_context_and_arguments_of_its_own(driver):
    function = _jit.Function(SimpleNamespace(ptr=0xF), driver)

    def run():
        for _ in range(2):
            function((1,), (1,), (1, 2, 3), 0, STREAM)
        held.append(_jit._thread.arguments)

    held, threads = [], [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    run()
    assert len({address for _, address in held}) == 3
    assert len(driver.contexts) == 3
    assert driver.contexts[-1] == threading.get_ident()


def test_too_many_arguments_are_refused(driver):
    function = _jit.Function(SimpleNamespace(ptr=0xF), driver)
    with pytest.raises(ValueError, match="assign sequence"):
        function((1,), (1,), tuple(range(_jit.MOST_ARGUMENTS + 1)), 0, STREAM)
    assert driver.launches == []
