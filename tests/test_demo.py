"""The demo: data files, choice of the device, what is measured and shown, exit codes."""

import gzip
import io
import lzma
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from snack_cupy import __main__ as command
from snack_cupy import _facts, _probe
from snack_cupy._facts import Device, Facts
from snack_cupy.torch import demo, demo_data, demo_device
from snack_cupy.torch.demo_data import DemoError, load_digits, load_mnist, read_idx
from snack_cupy.torch.demo_device import Gpu, choose_device, find_gpu

WRITERS = {"": Path.open, ".gz": gzip.open, ".xz": lzma.open}
H200 = Device("NVIDIA H200", (9, 0), 150_000_000_000, 132)
TINY = {"epochs": 1, "hidden": (16, 8), "batch": 10, "device": "cpu"}


def idx(array):
    """The bytes of an idx file that holds an array of unsigned bytes."""
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def write(path, data):
    with WRITERS.get(path.suffix, Path.open)(path, "wb") as file:
        file.write(data)


def write_set(folder, *, train=35, test=20, joint="-", suffix=""):
    """A set of 6 x 6 images in MNIST's files: the label is the brightest row."""
    rng = np.random.default_rng(1)
    for part, count in (("train", train), ("t10k", test)):
        labels = rng.integers(0, 6, count).astype(np.uint8)
        images = rng.integers(0, 100, (count, 6, 6)).astype(np.uint8)
        images[np.arange(count), labels] += 150
        write(folder / f"{part}-images{joint}idx3-ubyte{suffix}", idx(images))
        write(folder / f"{part}-labels{joint}idx1-ubyte{suffix}", idx(labels))
    return folder


def run_tiny(folder, **options):
    screen = io.StringIO()
    console = Console(file=screen, width=250)
    results = demo.run(demo.Options(data=write_set(folder), **{**TINY, **options}), console)
    return results, screen.getvalue()


# Data


@pytest.mark.parametrize("suffix", WRITERS)
@pytest.mark.parametrize("shape", [(3, 4, 5), (7,), (0, 2, 2)])
def test_read_idx_returns_what_was_written(tmp_path, suffix, shape):
    array = np.arange(np.prod(shape)).astype(np.uint8).reshape(shape)
    path = tmp_path / f"some-idx-ubyte{suffix}"
    write(path, idx(array))
    got = read_idx(path, len(shape))
    assert got.dtype == np.uint8
    np.testing.assert_array_equal(got, array)


GOOD = idx(np.ones((2, 3, 3), np.uint8))
MALFORMED = {
    "empty": (b"", "start with the bytes 00000803", "an empty file"),
    "not_idx": (b"P5 28 28 255", "start with the bytes 00000803", "50352032"),
    "floats": (b"\0\0\x0d\x03" + GOOD[4:], "start with the bytes 00000803", "00000d03"),
    "other_dimensions": (idx(np.ones(4, np.uint8)), "3 dimensions", "00000801"),
    "short_header": (GOOD[:9], "have a header of 16 bytes", "got 9"),
    "short": (GOOD[:-1], "hold 18 elements for its shape (2, 3, 3)", "got 17"),
    "long": (GOOD + b"\0", "hold 18 elements for its shape (2, 3, 3)", "got 19"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_read_idx_refuses_malformed_files(tmp_path, name):
    data, rule, got = MALFORMED[name]
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(data)
    with pytest.raises(DemoError) as caught:
        read_idx(path, 3)
    message = str(caught.value)
    assert message.startswith(f"demo: {path} must ") and rule in message and got in message


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
@pytest.mark.parametrize("damage", [lambda data: data[:-6], lambda data: b"plain" + data])
def test_read_idx_refuses_damaged_compression(tmp_path, suffix, damage):
    path = tmp_path / f"train-images-idx3-ubyte{suffix}"
    write(path, GOOD)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DemoError, match="must be readable, got"):
        read_idx(path, 3)


@pytest.mark.parametrize("suffix", WRITERS)
@pytest.mark.parametrize("joint", "-.")
def test_load_mnist_reads_four_files(tmp_path, joint, suffix):
    data = load_mnist(write_set(tmp_path, joint=joint, suffix=suffix))
    assert (data.features, data.classes) == (36, 6)
    assert data.train_images.shape == (35, 36) and data.test_labels.shape == (20,)
    assert data.train_images.dtype == np.float32 and data.train_labels.dtype == np.int64
    assert 0 <= data.train_images.min() and 0.9 < data.train_images.max() <= 1
    rows = data.test_images.reshape(-1, 6, 6).sum(2)
    np.testing.assert_array_equal(rows.argmax(1), data.test_labels)


def test_load_mnist_explains_what_does_not_fit(tmp_path):
    with pytest.raises(DemoError, match="--data must name a folder, got"):
        load_mnist(tmp_path / "nowhere")
    with pytest.raises(DemoError, match=r"hold train-images-idx3-ubyte \(plain, \.gz or \.xz\)"):
        load_mnist(tmp_path)
    write_set(tmp_path)
    labels = tmp_path / "t10k-labels-idx1-ubyte"
    whole = labels.read_bytes()
    labels.write_bytes(idx(np.zeros(19, np.uint8)))
    with pytest.raises(DemoError, match="hold one label for each of the 20 images, got 19"):
        load_mnist(tmp_path)
    labels.write_bytes(whole)
    images = tmp_path / "t10k-images-idx3-ubyte"
    images.write_bytes(idx(np.zeros((20, 5, 5), np.uint8)))
    with pytest.raises(
        DemoError, match="have images of 36 pixels, as the training set has, got 25"
    ):
        load_mnist(tmp_path)
    labels.write_bytes(idx(np.zeros(0, np.uint8)))
    images.write_bytes(idx(np.zeros((0, 6, 6), np.uint8)))
    with pytest.raises(DemoError, match="hold at least one pixel"):
        load_mnist(tmp_path)


def test_load_mnist_reads_the_real_files():
    if "SNACK_CUPY_DATA" not in os.environ:
        pytest.skip("SNACK_CUPY_DATA is not set")
    data = load_mnist(Path(os.environ["SNACK_CUPY_DATA"]) / "mnist")
    assert data.train_images.shape == (60_000, 784) and data.test_images.shape == (10_000, 784)
    assert data.train_images.mean() == pytest.approx(0.1307, abs=5e-5)
    assert data.classes == 10


def test_load_digits_splits_them_always_alike():
    data, again = load_digits(), load_digits()
    assert data.train_images.shape == (1197, 64) and data.test_images.shape == (600, 64)
    assert data.classes == 10 and data.train_images.min() == 0 and data.train_images.max() == 1
    np.testing.assert_array_equal(data.test_images, again.test_images)
    np.testing.assert_array_equal(np.unique(data.test_labels), np.arange(10))


# Where it runs

GPU_MACHINE = {
    "driver_present": True,
    "driver_cuda": 13000,
    "devices": (H200,),
    "torch_version": "2.13.0",
    "torch_cuda": "13.0",
    "torch_usable": True,
}
# name: facts, trouble, words of the problem, words of the remedy
MACHINES = {
    "no_gpu": (None, None, "no GPU is visible", None),
    "no_cupy": (GPU_MACHINE, "ignored", "CuPy is missing", 'pip install "snack-cupy[cuda13]"'),
    "no_cupy_cuda12": (
        {**GPU_MACHINE, "driver_cuda": 12040, "torch_cuda": "12.4"},
        None,
        "CuPy is missing",
        'pip install "snack-cupy[cuda12]"',
    ),
    "cpu_torch": (
        {
            **GPU_MACHINE,
            "torch_cuda": None,
            "cupy_wheels": ("cupy-cuda13x",),
            "cupy_version": "14.2.0",
            "nvrtc": (13, 0),
        },
        None,
        "CPU build",
        "torch",
    ),
    "hidden": (
        {
            "driver_present": True,
            "driver_error": "CUDA_ERROR_NO_DEVICE",
            "visible_devices": "",
        },
        None,
        "CUDA_VISIBLE_DEVICES is ''",
        "unset CUDA_VISIBLE_DEVICES",
    ),
    "unknown_trouble": (
        {
            **GPU_MACHINE,
            "cupy_wheels": ("cupy-cuda13x",),
            "cupy_version": "14.2.0",
            "nvrtc": (13, 0),
        },
        "out of memory",
        "out of memory",
        None,
    ),
    "a_trap_beside_the_trouble": (
        {
            **GPU_MACHINE,
            "cupy_wheels": ("cupy-cuda13x",),
            "cupy_version": "14.2.0",
            "nvrtc": (13, 0),
            "cache_writable": False,
        },
        "out of memory",
        "out of memory",
        None,
    ),
}


def pretend(monkeypatch, facts):
    """A machine of these facts; None: one that shows no trace of a GPU and must not be asked."""

    def collect():
        assert facts is not None, "the doctor must not be asked"
        return facts

    driver = {"present": facts is not None and facts.driver_present}
    monkeypatch.setattr(_probe, "ask_driver", lambda: driver)
    monkeypatch.setattr(_facts, "_nvidia_hardware", lambda: False)
    monkeypatch.setattr(_facts, "collect_facts", collect)


@pytest.mark.parametrize("name", MACHINES)
def test_demo_names_problem_and_remedy(monkeypatch, name):
    facts, trouble, problem, remedy = MACHINES[name]
    pretend(monkeypatch, None if facts is None else Facts(**facts))
    got_problem, got_remedy = command._advise(trouble)
    assert problem in got_problem
    assert got_remedy is None if remedy is None else remedy in got_remedy
    device, reason = choose_device("auto", Gpu(None, got_problem, got_remedy))
    assert device == "cpu" and reason.startswith(f"on the CPU: {got_problem}")
    assert (remedy is not None) == ("\nTo use the GPU: " in reason)


def test_choose_device_follows_the_request():
    works = Gpu("NVIDIA H200")
    broken = Gpu(None, "CuPy is missing", 'pip install "snack-cupy[cuda13]"')
    assert choose_device("auto", works) == ("cuda", "on the GPU (NVIDIA H200)")
    assert choose_device("cuda", works)[0] == "cuda"
    assert choose_device("cpu", works) == ("cpu", "on the CPU, as asked")
    with pytest.raises(DemoError, match="--device cuda cannot be used: CuPy is missing") as caught:
        choose_device("cuda", broken)
    assert 'pip install "snack-cupy[cuda13]"' in str(caught.value)


def test_find_gpu_asks_for_advice_where_no_layer_runs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")

    def machine(visible, trouble):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: visible)
        monkeypatch.setattr(demo_device, "_try_gpu", lambda: trouble)
        return find_gpu(lambda trouble: (f"because {trouble}", "help"))

    assert machine(True, None) == Gpu("NVIDIA H200")
    assert machine(True, "CuPy is missing") == Gpu(None, "because CuPy is missing", "help")
    assert machine(False, "never tried") == Gpu(None, "because None", "help")
    assert find_gpu() == Gpu(None, "no GPU is visible", None)


def test_try_gpu_tells_what_went_wrong(monkeypatch):
    def missing():
        raise demo_device._jit.CudaUnavailableError("CuPy is missing\nmore")

    monkeypatch.setattr(demo_device._jit, "require_cupy", missing)
    assert demo_device._try_gpu() == "CuPy is missing"


# Networks and measures


def test_build_networks_masked_starts_as_the_sparse_function():
    sparse, dense, masked = demo.build_networks((36, 32, 6), 0.9, seed=3).values()
    x = torch.rand(5, 36, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(sparse(x), masked(x))
    assert sparse(x).shape == dense(x).shape == (5, 6)
    for layer, twin in zip(sparse[::2], masked[::2], strict=True):
        assert layer.nnz == int(twin.mask.sum()) == round(0.1 * twin.mask.numel())


def test_build_networks_depends_on_the_seed_alone():
    torch.manual_seed(5)
    first = demo.build_networks((36, 32, 6), 0.9, seed=3)
    state = torch.get_rng_state()
    again, other = (demo.build_networks((36, 32, 6), 0.9, seed=seed) for seed in (3, 4))
    assert torch.equal(state, torch.get_rng_state())
    for name, network in first.items():
        for a, b, c in zip(
            network.parameters(), again[name].parameters(), other[name].parameters(), strict=True
        ):
            assert torch.equal(a, b) and not torch.equal(a, c)


def trained(data, recipe, name="SnackLinear + SET", seed=0):
    """One network after the recipe, and what was measured of it."""
    sizes = (data.features, *recipe.hidden, data.classes)
    network = demo.build_networks(sizes, 0.9, seed)[name]
    train_set = demo._split(data.train_images, data.train_labels, "cpu")
    test_set = demo._split(data.test_images, data.test_labels, "cpu")
    training = demo.Training(name, network, recipe, train_set, seed)
    for _ in range(recipe.epochs):
        training.epoch(lambda: None)
    return network, training.result(test_set)


def test_training_repeats_exactly(tmp_path):
    data = load_mnist(write_set(tmp_path))
    recipe = demo.Recipe((16, 8), epochs=3, batch=10)
    (first, result), (again, _) = trained(data, recipe), trained(data, recipe)
    assert result.updates == 8  # after each of the first 8 of 12 steps
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


@pytest.mark.slow
def test_default_sparse_accuracy_is_within_a_point_of_dense():
    data = load_digits()
    _, sparse = trained(data, demo.DIGITS)
    _, dense = trained(data, demo.DIGITS, "nn.Linear")
    assert dense.accuracy > 0.97 and sparse.accuracy >= dense.accuracy - 0.01


def test_run_measures_the_tensors(tmp_path):
    (sparse, dense, masked), screen = run_tiny(tmp_path)
    size, biases = 36 * 16 + 16 * 8 + 8 * 6, 16 + 8 + 6
    nnz = round(57.6) + round(12.8) + round(4.8)
    assert (sparse.weights, dense.weights, masked.weights) == (nnz, size, size)
    # values, 16-bit columns, row offsets; and but for the first layer the column-major view.
    inner = nnz - round(57.6)
    indices = 2 * nnz + 4 * (17 + 9 + 7) + (2 + 4) * inner + 4 * (17 + 9)
    assert sparse.weight_bytes == 4 * nnz + indices
    assert (dense.weight_bytes, masked.weight_bytes) == (4 * size, 5 * size)
    # parameter, gradient and two moments; Adam's step is one float for each of 6 parameters.
    assert dense.state_bytes == 16 * (size + biases) + 24
    assert masked.state_bytes == dense.state_bytes + size
    assert sparse.state_bytes == 16 * (nnz + biases) + 24 + indices
    assert (sparse.updates, dense.updates, masked.updates) == (2, None, None)
    assert all(r.step_ms > 0 and r.train_seconds > 0 for r in (sparse, dense, masked))
    for words in (
        "Running on the CPU, as asked.",
        "35 to train on and 20 to test on",
        "36 - 16 - 8 - 6, every layer 90 % sparse",
        "SnackLinear + SET",
        "nn.Linear",
        "dense + mask",
        f"{sparse.weight_bytes:,}",
        f"{masked.state_bytes:,}",
        f"{100 * sparse.accuracy:.2f} %",
    ):
        assert words in screen, words


def test_run_options_change_what_they_name(tmp_path):
    (sparse, *_), screen = run_tiny(tmp_path, sparsity=0.995, hidden=(50,), seed=9)
    assert sparse.weights == round(0.005 * 36 * 50) + round(0.005 * 50 * 6)
    assert "36 - 50 - 6, every layer 99.5 % sparse" in screen and "seed 9" in screen
    with pytest.raises(DemoError, match="--batch must be at most the 35 training images, got 36"):
        run_tiny(tmp_path, batch=36)


def result(name, accuracy, step_ms, state_bytes):
    return demo.Result(name, accuracy, 10, 40, state_bytes, step_ms, 1.0, None)


@pytest.mark.parametrize(
    ("accuracy", "step_ms", "device", "words"),
    [
        (0.975, 3.0, "cpu", ("0.50 points below", "Slower here", "1.5 times", "On this CPU")),
        (0.985, 1.0, "cuda", ("0.50 points above", "On this GPU a sparse step takes 0.50 times")),
        (0.98, 2.0, "cpu", ("Accuracy: equal to nn.Linear's", "1.00 times")),
    ],
)
def test_notes_say_what_was_measured(accuracy, step_ms, device, words):
    results = [
        result("sparse", accuracy, step_ms, 150),
        result("dense", 0.98, 2.0, 1000),
        result("masked", 0.97, 2.5, 1060),
    ]
    text = "\n".join(demo.notes(results, device, 600))
    for word in (*words, "takes 15 %", "takes 106 %", "one of the 600 test images is 0.17 points"):
        assert word in text, word


# The command


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "command"),
        (["train"], "invalid choice: 'train'"),
        (["doctor", "--fast"], "unrecognized arguments"),
        (["demo", "--sparsity", "1"], "must be in [0, 1), got 1"),
        (["demo", "--sparsity", "nan"], "must be in [0, 1), got nan"),
        (["demo", "--epochs", "0"], "must be at least 1, got 0"),
        (["demo", "--hidden", "64,0"], "must be at least 1, got 0"),
        (["demo", "--hidden", "wide"], "--hidden"),
        (["demo", "--seed", "-1"], "must be in [0, 2^63)"),
        (["demo", "--device", "tpu"], "invalid choice: 'tpu'"),
    ],
)
def test_command_answers_wrong_usage_with_2(capsys, arguments, words):
    with pytest.raises(SystemExit) as caught:
        command.main(arguments)
    errors = capsys.readouterr().err
    assert caught.value.code == 2 and "usage: python -m snack_cupy" in errors and words in errors


def test_command_help_names_everything(capsys):
    for arguments, words in (
        (["--help"], ("demo", "doctor")),
        (
            ["demo", "--help"],
            ("--data", "--device", "--sparsity", "--epochs", "--hidden", "--seed", "--batch"),
        ),
    ):
        with pytest.raises(SystemExit) as caught:
            command.main(arguments)
        screen = capsys.readouterr().out
        assert caught.value.code == 0 and all(word in screen for word in words)
    for recipe, name in ((demo.DIGITS, "digits"), (demo.MNIST, "--data")):
        for value in (recipe.epochs, recipe.batch):
            assert f"{value} ({name})" in screen
        assert f"{','.join(map(str, recipe.hidden))} for {name}" in " ".join(screen.split())


def test_command_explains_missing_packages(capsys, monkeypatch):
    absent = {"rich", "sklearn"}
    monkeypatch.setattr(command, "find_spec", lambda name: None if name in absent else name)
    assert command.main(["demo"]) == 1
    line = (
        'snack_cupy demo: rich and scikit-learn not installed; run: pip install "snack-cupy[demo]"'
    )
    assert capsys.readouterr().err.strip() == line


def test_command_explains_bad_data_and_device(capsys, monkeypatch, tmp_path):
    assert command.main(["demo", "--data", str(tmp_path), "--device", "cpu"]) == 1
    assert capsys.readouterr().err.startswith(f"snack_cupy demo: {tmp_path} must hold train-images")
    monkeypatch.setattr(demo, "find_gpu", lambda advise: Gpu())
    assert command.main(["demo", "--device", "cuda"]) == 1
    assert "--device cuda cannot be used: no GPU is visible" in capsys.readouterr().err


def test_command_runs_the_doctor(monkeypatch):
    from snack_cupy import doctor

    monkeypatch.setattr(doctor, "main", lambda: 7)
    assert command.main(["doctor"]) == 7


def test_command_in_a_process_of_its_own(tmp_path):
    options = "--epochs 1 --hidden 8 --batch 10 --device cpu".split()
    without_torch = (
        "import sys; sys.modules['torch'] = None; from snack_cupy.__main__ import main; "
        "sys.exit(main(['demo']))"
    )
    for arguments, code, words in (
        (["-m", "snack_cupy", "demo", "--data", str(write_set(tmp_path)), *options], 0, "measured"),
        (["-m", "snack_cupy", "nothing"], 2, "usage: python -m snack_cupy"),
        (["-c", without_torch], 1, 'PyTorch not installed; run: pip install "snack-cupy[demo]"'),
    ):
        done = subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            encoding="utf-8",
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"},
            timeout=100,
        )
        screen = (done.stdout + done.stderr).lower()
        assert done.returncode == code and words.lower() in screen, done.stderr


def test_demo_error_is_a_value_error():
    assert issubclass(demo_data.DemoError, ValueError)
