"""The package as a whole: imports, what a wheel and an sdist hold, pinned versions, commands."""

import ast
import graphlib
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import snack_cupy

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "snack_cupy"

# From the lowest layer up: a module imports its own layer and those below it.
LAYERS = (
    ("_xp",),
    ("_check",),
    ("_jit", "reference"),
    ("kernels",),
    ("_product", "_cost", "_tensor", "_plan", "_launches", "_device_work", "dispatch"),
    ("_structure", "topology"),
    ("ops", "_explain"),
    ("_coords", "_entries", "_elementwise", "_indexing", "_reductions", "_joining"),
    ("_array_surface", "coo"),
    ("construct", "io"),
    ("_counters", "random", "io", "dst", "codegen"),
    ("torch",),
    ("_probe", "_facts", "doctor", "__main__"),
)
RANK = {module: rank for rank, layer in enumerate(LAYERS) for module in layer}

COMMANDS = (
    'pip install -c constraints.txt -e ".[demo]" && python -m snack_cupy demo',
    'pip install -c constraints.txt -e ".[test]" && pytest',
)


def run_python(code, *options, cwd=None):
    """Output of a fresh interpreter that runs ``code``; fails with its errors."""
    command = [sys.executable, *options, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


# Imports


CORE_WORKS = """
import sys
import numpy as np

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"cupy", "cupyx", "cupy_backends", "torch", "ml_dtypes"}:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
import snack_cupy
row, col = np.array([0, 1, 1]), np.array([2, 0, 1])
topology = snack_cupy.Topology.from_coords(row, col, (2, 3))
values = np.array([1.0, 2.0, 3.0])
assert snack_cupy.spmm(topology, values, np.eye(3)).tolist() == [[0, 0, 1], [2, 3, 0]]

import importlib
import pkgutil
for info in pkgutil.walk_packages(snack_cupy.__path__, "snack_cupy."):
    if not info.name.startswith("snack_cupy.torch") and not info.name.endswith("__main__"):
        importlib.import_module(info.name)
"""

IMPORT_IS_LIGHT = """
import pathlib
import sys
import snack_cupy
print(sorted({"cupy", "cupy_backends", "torch"} & set(sys.modules)))
maps = pathlib.Path("/proc/self/maps")
print("libcuda.so" in maps.read_text() if maps.exists() else False)
"""


def test_core_works_without_cupy_torch_and_ml_dtypes():
    run_python(CORE_WORKS)


def test_import_loads_neither_cupy_nor_torch_nor_the_cuda_driver():
    assert run_python(IMPORT_IS_LIGHT).split("\n")[:2] == ["[]", "False"]


def module_name(path):
    """Dotted name of a source file of the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports(path):
    """Triples (module, line, on_import) for each module that a file imports.

    ``on_import`` tells those that run when the file is imported from those inside a function.
    Imports for type checkers alone do not count.
    """
    found = []

    def visit(node, on_import):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            return
        if isinstance(node, ast.Import):
            found.extend((alias.name, node.lineno, on_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports must be absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.append((inner if inner in SOURCES else node.module, node.lineno, on_import))
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, on_import and not inside)

    visit(ast.parse(path.read_text(encoding="utf-8")), True)
    return found


def layer_of(module):
    """Name of a module's top part within the package, as LAYERS lists it."""
    return module.split(".")[1]


@pytest.mark.parametrize("module", [name for name in SOURCES if name != "snack_cupy"])
def test_imports_point_one_way(module):
    assert layer_of(module) in RANK, f"give {layer_of(module)} its place in LAYERS"
    rank = RANK[layer_of(module)]
    for target, line, _ in imports(SOURCES[module]):
        if target == "snack_cupy":
            assert rank == len(LAYERS) - 1, f"{module}:{line} imports the package's root"
        elif target.startswith("snack_cupy."):
            assert RANK[layer_of(target)] <= rank, f"{module}:{line} imports {target}, above it"


def test_modules_import_each_other_in_no_circle():
    graph = {
        module: {
            target for target, _, on_import in imports(path) if on_import and target in SOURCES
        }
        for module, path in SOURCES.items()
    }
    graph["snack_cupy"] = set()  # every module imports the package's root first
    list(graphlib.TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("module", SOURCES)
def test_torch_is_imported_by_the_torch_layer_alone_and_cupy_late(module):
    in_torch = module.startswith("snack_cupy.torch")
    for target, line, on_import in imports(SOURCES[module]):
        top = target.partition(".")[0]
        assert in_torch or top != "torch", f"{module}:{line} imports torch"
        assert in_torch or not target.startswith("snack_cupy.torch") or not on_import, (
            f"{module}:{line} imports {target} at once"
        )
        assert not on_import or top not in {"cupy", "cupyx"}, (
            f"{module}:{line} imports {top} at once"
        )


# Wheel, sdist, editable install


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Paths of the sdist and of the wheel built from it."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def repository_files():
    """Files that belong to the repository, relative to its root; in an unpacked sdist, all.

    A virtual environment may lie in the checkout under any name.
    """
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        listed = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        listed = "\0".join(
            path.relative_to(ROOT).as_posix()
            for path in ROOT.rglob("*")
            if "__pycache__" not in path.parts
        )
    environments = {path.parent.name for path in ROOT.glob("*/pyvenv.cfg")}
    return [
        name
        for name in listed.split("\0")
        if (ROOT / name).is_file() and name.split("/")[0] not in environments
    ]


def cuda_files():
    return sorted(path.name for path in (ROOT / "cuda").iterdir() if path.is_file())


def test_sdist_holds_the_repository(built):
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert set(repository_files()) <= names
    assert {f"cuda/{name}" for name in cuda_files()} <= names


def test_wheel_holds_the_package_and_the_cuda_sources_only(built):
    names = set(zipfile.ZipFile(built[1]).namelist())
    assert {f"snack_cupy/cuda/{name}" for name in cuda_files()} <= names
    assert {path.relative_to(ROOT).as_posix() for path in SOURCES.values()} <= names
    assert "snack_cupy/py.typed" in names
    assert {name.split("/")[0] for name in names} == {
        "snack_cupy",
        f"snack_cupy-{snack_cupy.__version__}.dist-info",
    }
    assert not any("__pycache__" in name or name.endswith("cuda/__init__.py") for name in names)


def test_wheel_metadata(built):
    archive = zipfile.ZipFile(built[1])
    (path,) = [name for name in archive.namelist() if name.endswith("dist-info/METADATA")]
    metadata = Parser().parsestr(archive.read(path).decode())
    assert metadata["Name"] == "snack-cupy"
    assert metadata["Version"] == snack_cupy.__version__
    assert metadata["License-Expression"] == "MIT"
    assert metadata["Requires-Python"] == ">=3.11"
    required = {Requirement(text) for text in metadata.get_all("Requires-Dist")}
    assert {r.name for r in required if r.marker is None} == {"numpy", "scipy"}
    extras = {"bench", "cuda12", "cuda13", "demo", "docs", "test", "torch"}
    assert set(metadata.get_all("Provides-Extra")) == extras


def test_installed_wheel_finds_its_cuda_sources(built, tmp_path):
    install = ["install", "-q", "--no-deps", "--no-index", "--no-compile", "--target"]
    command = [sys.executable, "-m", "pip", *install, str(tmp_path / "site"), str(built[1])]
    subprocess.run(command, check=True, timeout=100)
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path / "site")!r})
from snack_cupy import _jit
print(_jit.cuda_directory())
for path in _jit.cuda_directory().glob("*.cu"):
    assert path.read_text() in _jit.read_source(path.name)
"""
    folder = run_python(code, "-P", cwd=tmp_path).strip()
    assert Path(folder) == (tmp_path / "site" / "snack_cupy" / "cuda").resolve()


def test_checkout_finds_its_cuda_sources():
    code = "from snack_cupy import _jit; print(_jit.cuda_directory())"
    assert Path(run_python(code, cwd=ROOT).strip()) == ROOT / "cuda"


def test_cuda_folder_is_no_python_package():
    assert not (ROOT / "cuda" / "__init__.py").exists()


# Versions and commands


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def pins():
    """Version of each normalised name in constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def test_constraints_pin_every_requirement_within_its_range():
    table, pinned = project(), pins()
    groups = [table["project"]["dependencies"], table["build-system"]["requires"]]
    groups += table["project"]["optional-dependencies"].values()
    for text in (text for group in groups for text in group):
        requirement = Requirement(text)
        if requirement.name != "snack-cupy":
            version = pinned[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(version), f"{text} excludes {version}"


def test_readme_names_the_oldest_versions():
    table, readme = project()["project"], (ROOT / "README.md").read_text(encoding="utf-8")
    groups = [table["dependencies"], *table["optional-dependencies"].values()]
    texts = [text for group in groups for text in group]
    for name, label in {
        "numpy": "NumPy",
        "scipy": "SciPy",
        "torch": "PyTorch",
        "cupy-cuda12x": "CuPy",
    }.items():
        (oldest,) = {
            specifier.version
            for text in texts
            if Requirement(text).name == name
            for specifier in Requirement(text).specifier
        }
        assert re.search(rf"{label} {re.escape(oldest)}\b", readme), f"{label} {oldest}"


def test_pre_commit_runs_the_pinned_tools():
    text = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    tools = dict(re.findall(r'"(ruff|clang-format)==([^"]+)"', text))
    assert tools == {name: pins()[name] for name in ("ruff", "clang-format")}
    assert len(set(re.findall(r'"ruff==([^"]+)"', text))) == 1


def test_readme_has_the_two_commands_that_do_all_set_up():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    for command in COMMANDS:
        assert lines.count(command) == 1, f"README.md must have one line {command!r}"


def test_no_file_names_a_folder_of_one_machine():
    folder = re.compile(r"(?<![\w.~])/(?:work|farm|root|home)/")
    for name in repository_files():
        try:
            text = (ROOT / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found = folder.search(text)
        assert not found, f"{name} names {found[0]}"
