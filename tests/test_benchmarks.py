"""Every benchmark runs on the CPU in small, and the report computes what it says."""

import csv
import importlib
import math
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
SMOKE = ["--device", "cpu", "--quick"]


@pytest.fixture(scope="module", autouse=True)
def benchmarks():
    """The repository's root on the path, where the package lies, and one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    sys.path.insert(0, str(ROOT))
    yield importlib.import_module("benchmarks")
    sys.path.remove(str(ROOT))
    torch.set_num_threads(threads)


def module(name):
    return importlib.import_module(f"benchmarks.{name}")


def run(*arguments):
    """Exit status of ``python -m benchmarks``."""
    return module("__main__").main([str(argument) for argument in arguments])


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# Every command


@pytest.mark.parametrize("op", ["fwd", "dx", "dw"])
def test_benchmark_kernels_checks_and_times_every_method(tmp_path, op):
    options = ["--op", op, "--dtype", "float32", "float16", "bfloat16", "tf32", "--cold"]
    assert run("kernels", *SMOKE, *options, "--out", tmp_path) == 0
    for dtype in ("float32", "float16", "bfloat16", "tf32"):
        rows = read(tmp_path / f"kernels_{op}_{dtype}.csv")
        assert not any(row["error"] for row in rows)
        assert all(float(row["us"]) > 0 and row["mode"] == "w" for row in rows)
        methods = {row["method"] for row in rows}
        assert {"snack_cupy", "dense"} <= methods
        assert ("dense_mask" in methods) == (op != "dx")
        assert {row["cache"] for row in rows} == {"hot", "cold"}
    (facts,) = read(tmp_path / "runs.csv")
    assert {row["run"] for row in rows} == {facts["run"]}
    assert facts["torch"] == torch.__version__


def test_benchmark_kernels_measures_the_cells_it_is_told_to(tmp_path):
    cells = ["--shape", "8x6", "5x9", "--sparsity", "0.5", "--batch", "3", "--no-rivals"]
    assert run("kernels", "--device", "cpu", *cells, "--op", "fwd", "--out", tmp_path) == 0
    rows = read(tmp_path / "kernels_fwd_float32.csv")
    got = [(row["m"], row["k"], row["batch"], row["method"], row["nnz"]) for row in rows]
    assert got == [("8", "6", "3", "snack_cupy", "24"), ("5", "9", "3", "snack_cupy", "22")]


def test_benchmark_kernels_begins_no_cell_after_its_time(tmp_path):
    assert run("kernels", *SMOKE, "--seconds", "-1", "--out", tmp_path) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["runs.csv"]


def test_benchmark_a_wrong_or_failing_method_is_a_row_with_the_error(tmp_path, monkeypatch):
    providers = module("_providers")

    def fails(problem):
        raise RuntimeError("no such thing\nmore")

    def is_wrong(problem):
        return providers.Provider(lambda: problem.x @ problem.matrix.weight.T * 1.0001)

    monkeypatch.setattr(providers, "ours", fails)
    monkeypatch.setattr(providers, "dense", is_wrong)
    options = ["--op", "fwd", "--batch", "4", "--rivals", "dense", "dense_mask"]
    assert run("kernels", *SMOKE, *options, "--out", tmp_path) == 1
    ours, dense, masked = read(tmp_path / "kernels_fwd_float32.csv")
    assert (ours["us"], ours["error"]) == ("", "RuntimeError: no such thing")
    assert dense["us"] == ""
    assert dense["error"].startswith("ArithmeticError: wrong")
    assert (masked["method"], masked["error"]) == ("dense_mask", "")


@pytest.mark.parametrize(
    ("command", "files"),
    [
        ("layer", ["energy.csv", "layer.csv", "memory.csv"]),
        ("host", ["host.csv"]),
        ("update", ["update.csv"]),
        ("scale", ["scale.csv"]),
    ],
)
def test_benchmark_command_writes_its_files(tmp_path, command, files):
    assert run(command, *SMOKE, "--out", tmp_path) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*files, "runs.csv"])
    notes = r"(not (measured|counted) on a CPU)?"
    for name in files:
        rows = read(tmp_path / name)
        assert any(row["method"].startswith("snack_cupy") for row in rows)
        assert any(row["method"].startswith("dense") for row in rows)
        assert all(re.fullmatch(notes, row["error"]) for row in rows)


def test_benchmark_real_reads_packed_topologies(tmp_path):
    (tmp_path / "data").mkdir()
    text = "3, 4, 5\n0 2 2 5\n0 3 0 1 2\n"
    (tmp_path / "data" / "one.smtx").write_text(text)
    with importlib.import_module("lzma").open(tmp_path / "data" / "two.smtx.xz", "wt") as file:
        file.write(text)
    options = ["--device", "cpu", "--batch", "2", "--out", tmp_path, "--data", tmp_path / "data"]
    assert run("real", *options) == 0
    rows = read(tmp_path / "real.csv")
    assert {row["name"] for row in rows} == {"one", "two"}
    assert {row["method"] for row in rows} == {"snack_cupy", "dense", "snack_cupy on random"}
    assert {(row["nnz"], row["longest_row"]) for row in rows if row["method"] == "dense"} == {
        ("5", "3")
    }
    assert not any(row["error"] for row in rows)


def test_benchmark_real_without_data_says_so(tmp_path, capsys):
    assert run("real", "--device", "cpu", "--out", tmp_path, "--data", tmp_path) == 0
    assert "no .smtx files" in capsys.readouterr().err


def test_benchmark_cpu_prints_the_cell_with_the_target(capsys, monkeypatch):
    cpu = module("cpu")
    monkeypatch.setattr(cpu, "TARGET", (32, 48, 0.9, 4))
    monkeypatch.setattr(cpu, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(cpu, "TURN_SECONDS", 0.002)
    assert run("cpu", "--quick") in (0, 1)
    assert "| 32 x 48 | 0.9 | 4 |" in capsys.readouterr().out


def test_benchmark_all_runs_parts_apart_and_survives_a_failure(tmp_path, capfd, monkeypatch):
    parts = ((1.0, "kernels --op fwd"), (1.0, "nonsense"), (1.0, "kernels --op dw"))
    monkeypatch.setattr(module("all"), "PARTS", parts)
    assert run("all", *SMOKE, "--seconds", "60", "--out", tmp_path) == 1
    assert (tmp_path / "kernels_fwd_float32.csv").exists()
    assert (tmp_path / "kernels_dw_float32.csv").exists()
    assert "failed: nonsense: status 2" in capfd.readouterr().out
    assert len(read(tmp_path / "runs.csv")) == 2


def test_benchmark_parts_of_all_and_commands_of_its_readme_parse():
    main, cells = module("__main__"), module("_cells")
    text = (ROOT / "benchmarks" / "README.md").read_text()
    lines = re.findall(r"^python -m benchmarks (.*)$", text, re.MULTILINE)
    assert {line.split()[0] for line in lines} == set(main.COMMANDS)
    assert cells.PRESETS.keys() == cells.QUICK.keys()
    for line in [*lines, *(command for _, command in module("all").PARTS)]:
        name, *options = shlex.split(line, comments=True)
        parser = importlib.import_module("argparse").ArgumentParser()
        module(name).add_arguments(parser)
        parser.parse_args(options)


# Timing on a GPU, with a made-up one


class Clock:
    """A device whose work takes exactly as long as it is told to."""

    def __init__(self, monkeypatch):
        self.now, self.recorded = 0.0, None
        clock = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = clock.now

            def synchronize(self):
                pass

            def elapsed_time(self, end):
                return 1e-3 * (end.at - self.at)

        class Graph:
            def capture_begin(self):
                clock.recorded = []

            def capture_end(self):
                self.work, clock.recorded = clock.recorded, None

            def replay(self):
                clock.now += sum(self.work)

        def sleep(cycles):
            clock.now += 1e-3 * cycles

        for name, fake in {
            "CUDAGraph": Graph,
            "Event": Event,
            "_sleep": sleep,
            "synchronize": lambda: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def work(self, microseconds):
        """Queue work."""
        if self.recorded is None:
            self.now += microseconds
        else:
            self.recorded.append(microseconds)


def test_benchmark_timing_is_that_of_one_call_in_a_replay(monkeypatch):
    timing, clock = module("_timing"), Clock(monkeypatch)
    device = torch.device("cuda", 0)
    for time in (3.0, 2000.0):  # many launches in a graph, and few
        got = timing.measure(lambda time=time: clock.work(time), device)
        assert got.mode == "g"
        assert got.low == pytest.approx(got.high) == pytest.approx(time)


def test_benchmark_timing_of_a_cold_cache_subtracts_the_flush(monkeypatch):
    timing, clock = module("_timing"), Clock(monkeypatch)

    class Buffer:
        def zero_(self):
            clock.work(40.0)

    monkeypatch.setattr(timing, "_flush_buffer", lambda device: Buffer())
    got = timing.measure(lambda: clock.work(7.0), torch.device("cuda", 0), cold=True)
    assert got.median == pytest.approx(7.0)


def test_benchmark_timing_of_what_cannot_be_captured(monkeypatch):
    timing, clock = module("_timing"), Clock(monkeypatch)

    def call():
        if clock.recorded is not None:
            raise NotImplementedError("not in a capture")
        clock.work(11.0)

    got = timing.measure(call, torch.device("cuda", 0))
    assert got.mode == "e"
    assert got.median == pytest.approx(11.0)
    assert clock.recorded is None


# What is right, and what is stored


def test_benchmark_judge_tells_rounding_from_tf32_and_from_a_lost_entry():
    matrix = module("_matrix")
    problem = matrix.Problem(
        "fwd",
        matrix.random_matrix(torch.device("cpu"), (64, 512), 0.5, torch.float32),
        torch.randn(16, 512, generator=torch.Generator().manual_seed(0)),
        torch.empty(16, 64),
    )
    expected = matrix.reference(problem)
    weight = problem.matrix.weight
    assert matrix.judge(problem.x @ weight.T, expected).right
    cut = [
        ((t.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32) for t in (problem.x, weight)
    ]
    rounded = cut[0] @ cut[1].T
    assert not matrix.judge(rounded, expected).right
    assert matrix.judge(rounded, expected, tf32=True).right
    for dtype in (torch.float16, torch.bfloat16):
        half = problem._replace(
            matrix=matrix.Matrix(problem.matrix.topology, dtype, torch.device("cpu")),
            x=problem.x.to(dtype),
        )
        expected = matrix.reference(half)
        exact = half.x.double() @ half.matrix.weight.double().T
        assert matrix.judge(exact.to(dtype), expected).right
        first = half.matrix.weight.double()
        first[:, half.matrix.col[0]] = 0.0
        assert not matrix.judge((half.x.double() @ first.T).to(dtype), expected).right
    assert not matrix.judge(torch.full_like(rounded, math.nan), expected).right


def test_benchmark_reference_in_chunks_is_the_reference(monkeypatch):
    matrix = module("_matrix")
    device = torch.device("cpu")
    operand = matrix.random_matrix(device, (23, 17), 0.6, torch.float32)
    x, dy = torch.randn(4, 17), torch.randn(4, 23)
    wide = operand.weight.double()
    wants = {
        "fwd": x.double() @ wide.T,
        "dx": dy.double() @ wide,
        "dw": (dy.double().T @ x.double())[operand.row, operand.col],
    }
    for size in (1, 8 * 17 * 5, 2**30):
        monkeypatch.setattr(matrix, "CHUNK_BYTES", size)
        for op, want in wants.items():
            got = matrix.reference(matrix.Problem(op, operand, x, dy))
            torch.testing.assert_close(got.want, want)
            assert (got.magnitude >= got.want.abs() - 1e-12).all()


def test_benchmark_results_keep_the_last_row_of_a_cell_and_merge(tmp_path):
    results = module("_results")
    cell = {"m": 2, "k": 3, "sparsity": "0.9", "batch": 1, "what": "forward"}
    for run_name, time in (("2026-01-01", 5.0), ("2026-01-02", 4.0)):
        with results.Results(tmp_path / "a", {"run": run_name}) as store:
            store.add("host", **cell, method="snack_cupy", us=time)
            on_disk = read(tmp_path / "a" / "host.csv")
            assert on_disk[-1]["us"] == f"{time:g}"
    with results.Results(tmp_path / "b", {"run": "2026-01-01T12"}) as store:
        store.add("host", **cell, method="snack_cupy", us=9.0)
        store.add("host", **cell, method="dense", us=7.0)
        with pytest.raises(KeyError, match="colour"):
            store.add("host", **cell, method="dense", colour=1)
    assert [row["us"] for row in read(tmp_path / "a" / "host.csv")] == ["4"]
    assert dict(results.merge(tmp_path / "b", tmp_path / "a")) == {"host.csv": 2, "runs.csv": 3}
    merged = read(tmp_path / "a" / "host.csv")
    assert {row["method"]: row["us"] for row in merged} == {"snack_cupy": "4", "dense": "7"}


def test_benchmark_rivals_are_those_of_the_committed_file():
    rivals = module("_rivals")
    dense = rivals.time_of("fwd", 4096, 4096, 0.9, 64, "dense_f32")
    assert dense == rivals.time_of("fwd", 4096, 4096, 0.99, 64, "dense_f32")
    assert rivals.best("fwd", 4096, 4096, 0.9, 64) <= dense
    assert rivals.best("dx", 3072, 768, 0.9, 8) == rivals.best("fwd", 768, 3072, 0.9, 8)
    assert rivals.best("dx", 11008, 4096, 0.9, 8) is None
    measured = module("_measured")
    for op in ("fwd", "dw"):
        assert all(rivals.best(op, *cell) for cell in measured.GRID)


# Report and targets


def fill(folder, factor, device="NVIDIA H200"):
    """Results of a made-up run: forward float32 is ``factor`` times as fast as the best rival."""
    rivals, grid = module("_rivals"), module("_measured").GRID
    with module("_results").Results(folder, {"run": "2026-01-01", "device": device}) as store:
        for m, k, sparsity, batch in grid:
            cell = {"m": m, "k": k, "sparsity": f"{sparsity:g}", "batch": batch, "op": "fwd"}
            row = {**cell, "dtype": "float32", "method": "snack_cupy", "cache": "hot"}
            time = rivals.best("fwd", m, k, sparsity, batch) / factor
            store.add("kernels_fwd_float32", **row, us=time)


def verdicts(folder):
    return {target.what: target for target in module("targets").all_targets(folder)}


def test_benchmark_targets_without_data_are_missed(tmp_path, capsys):
    assert run("report", "--targets", "--results", tmp_path) == 1
    found = module("targets").all_targets(tmp_path)
    bound = [target for target in found if target.must is not None]
    assert len(bound) == 58
    assert all(target.verdict == "not measured" and target.missed for target in bound)
    assert capsys.readouterr().out.count("not measured |") >= 58


@pytest.mark.parametrize(("factor", "verdict"), [(1.5, "missed"), (1.8, "met"), (2.1, "aim met")])
def test_benchmark_targets_compute_means_of_best_rival_over_ours(tmp_path, factor, verdict):
    fill(tmp_path, factor)
    mean = verdicts(tmp_path)["forward float32, best rival / ours, mean of 200 cells"]
    assert mean.verdict == verdict
    assert mean.measured == pytest.approx(factor, rel=1e-3)


def test_benchmark_targets_are_incomplete_where_a_cell_is_missing(tmp_path):
    fill(tmp_path, 3.0)
    path = tmp_path / "kernels_fwd_float32.csv"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    mean = verdicts(tmp_path)["forward float32, best rival / ours, mean of 200 cells"]
    assert (mean.verdict, mean.missed) == ("incomplete", True)
    assert "199 of 200" in mean.note


def test_benchmark_targets_leave_the_committed_rivals_out_on_another_gpu(tmp_path):
    fill(tmp_path, 3.0, "NVIDIA A100")
    mean = verdicts(tmp_path)["forward float32, best rival / ours, mean of 200 cells"]
    assert mean.verdict == "not measured"


def test_benchmark_targets_where_less_is_better(tmp_path):
    with module("_results").Results(tmp_path, {"run": "1", "device": "NVIDIA H200"}) as store:
        cell = {"m": 4096, "k": 4096, "sparsity": "0.9", "batch": 64, "state": "inference"}
        store.add("memory", **cell, method="dense", bytes=1000, peak_bytes=1000)
        store.add("memory", **cell, method="snack_cupy", bytes=160, peak_bytes=200)
        cell = {"m": 4096, "k": 4096, "sparsity": "0.9", "batch": 64, "fraction": 0.3}
        store.add("update", **cell, method="snack_cupy SET", device_us=90.0, elapsed_us=400.0)
    found = verdicts(tmp_path)
    share = found["bytes of inference, share of dense"]
    assert (share.measured, share.verdict, share.note) == (0.16, "met", "peak 0.2")
    update = found["SET update 4096x4096 .9, ms of device time"]
    assert (update.measured, update.verdict) == (0.09, "aim met")
    assert "0.4 ms with the host's pauses" in update.note


def test_benchmark_report_prints_tables_and_draws_plots(tmp_path, capsys):
    fill(tmp_path, 2.0)
    assert run("scale", *SMOKE, "--out", tmp_path / "scale") == 0
    (tmp_path / "scale" / "scale.csv").rename(tmp_path / "scale.csv")
    assert run("report", "--results", tmp_path) == 0
    text = capsys.readouterr().out
    assert "| m x k, sparsity | batch 1 |" in text
    assert text.count("(2.00)") == 200
    assert "| forward float32 | 2.00 | 0 of 200 |" in text
    for name in ("speedup_by_sparsity", "speedup_by_batch", "time_against_limit"):
        path = tmp_path / "plots" / f"{name}.png"
        assert path.read_bytes().startswith(b"\x89PNG")


def test_benchmark_report_without_results_says_so(tmp_path, capsys):
    assert run("report", "--results", tmp_path) == 1
    assert "no results" in capsys.readouterr().out


def test_benchmark_committed_results_have_the_columns_of_today():
    results = module("_results")
    for path in (ROOT / "benchmarks" / "results").glob("*/*.csv"):
        with path.open(newline="") as file:
            header = next(csv.reader(file))
        assert header == list(dict.fromkeys(results.kind_of(path).fields)), path
