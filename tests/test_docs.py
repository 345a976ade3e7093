"""The Markdown files: every Python block runs, and what commands and links name is there.

The Python blocks of a file run in order and share their names. A block of console lines (``>>>``)
must show what Python answers. The README names the whole API, ``cuda/README.md`` every kernel.
"""

import contextlib
import doctest
import importlib
import inspect
import io
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from snack_cupy import __main__ as command
from snack_cupy import kernels

ROOT = Path(__file__).resolve().parent.parent
FILES = ("README.md", "CONTRIBUTING.md", "cuda/README.md", "docs/concepts.md")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\((?![a-z]+:)([^)\s]+)\)")
# Written by the command that names them, so they need not exist.
WRITTEN = ("--gpu-record",)
FIRST_SCREEN = 40


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(name, *languages):
    """Code blocks of a file in these languages, each with the line it starts on."""
    text = read(name)
    return [
        (text.count("\n", 0, match.start(2)) + 1, match[2])
        for match in BLOCK.finditer(text)
        if match[1] in languages
    ]


def run_block(name, line, code, names):
    """Execute one block in ``names``; compare answers where the block shows any."""
    if not code.startswith(">>>"):
        with contextlib.redirect_stdout(io.StringIO()):
            # Blank lines in front make a traceback show the line of the file.
            exec(compile("\n" * (line - 1) + code, name, "exec"), names)
        return
    test = doctest.DocTestParser().get_doctest(code, names, f"{name} line {line}", name, line - 1)
    report = io.StringIO()
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    runner.run(test, out=report.write, clear_globs=False)
    names.update(test.globs)
    assert runner.summarize(verbose=False).failed == 0, report.getvalue()


def shell_lines(name):
    """Command lines in the shell blocks of a file, without comments, split into words."""
    lines = [line for _, code in blocks(name, "sh") for line in code.splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


@pytest.mark.parametrize("name", FILES)
def test_docs_python_blocks_run(name):
    names = {"__name__": "__main__"}
    for line, code in blocks(name, "python", "pycon"):
        run_block(name, line, code, names)


def test_docs_run_block_notices_a_wrong_answer():
    with pytest.raises(AssertionError, match="Expected"):
        run_block("made up", 1, ">>> 1 + 1\n3\n", {})
    with pytest.raises(ZeroDivisionError):
        run_block("made up", 1, "1 / 0\n", {})


def test_readme_first_screen_holds_what_a_newcomer_needs():
    screen = "\n".join(read("README.md").splitlines()[:FIRST_SCREEN])
    for words in (
        'pip install -c constraints.txt -e ".[demo]" && python -m snack_cupy demo\n',
        'pip install -c constraints.txt -e ".[test]" && pytest\n',
        ">>> ",
        "SnackLinear(",
        "SET(",
        "## What the demo measures",
    ):
        assert words in screen, words


@pytest.mark.parametrize("name", FILES)
def test_docs_commands_name_what_exists(name):
    extras = tomllib.loads(read("pyproject.toml"))["project"]["optional-dependencies"]
    for words in shell_lines(name):
        for before, word in zip(["", *words], words, strict=False):
            if match := re.fullmatch(r"\.\[([\w,]+)\]", word):
                assert set(match[1].split(",")) <= set(extras), word
            elif before == "snack_cupy":
                with pytest.raises(SystemExit) as caught, contextlib.redirect_stdout(io.StringIO()):
                    command.main([word, "--help"])
                assert caught.value.code == 0, word
            elif re.search(r"/|\.(py|txt|toml|md|json)$", word) and before not in WRITTEN:
                assert "://" in word or (ROOT / word).exists(), word


@pytest.mark.parametrize("name", FILES)
def test_docs_links_lead_somewhere(name):
    headings = {
        re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-")
        for line in read(name).splitlines()
        if line.startswith("#")
    }
    for target in LINK.findall(read(name)):
        path, _, anchor = target.partition("#")
        assert ((ROOT / name).parent / path).exists(), target
        assert path or anchor in headings, target


modules = pytest.mark.parametrize("module", ["snack_cupy", "snack_cupy.dst", "snack_cupy.torch"])


@modules
def test_readme_names_the_whole_api(module):
    text = read("README.md")
    public = importlib.import_module(module).__all__
    missing = [name for name in public if name[0] != "_" and not re.search(rf"`{name}\b", text)]
    assert not missing


@modules
def test_docstrings_name_every_argument_and_what_is_raised(module):
    public = vars(importlib.import_module(module))
    for name in public["__all__"]:
        item = public[name]
        is_exception = inspect.isclass(item) and issubclass(item, Exception)
        if not callable(item) or is_exception:
            continue
        text = inspect.getdoc(item)
        if inspect.signature(item).parameters:
            says = re.search(r"^Raises\n-+$", text, re.MULTILINE)
            assert says, f"{name} does not say what it raises"
        documented = set(re.findall(r"^(\w[\w, ]*) : ", text, re.MULTILINE))
        documented |= set(re.findall(r"^([a-z]\w*(?:, \w+)*)$", text, re.MULTILINE))
        documented = {word for words in documented for word in words.split(", ")}
        if name != "SparseWeight":  # made by layers alone
            missing = set(inspect.signature(item).parameters) - documented
            assert not missing, f"{name} does not document {missing}"


@pytest.mark.parametrize("method", ["prune", "grow", "restructure"])
def test_docstrings_of_updates_name_the_refusal_during_capture(method):
    layer = importlib.import_module("snack_cupy.torch").SnackLinear
    assert re.search(
        r"RuntimeError\n +A CUDA graph is being captured", getattr(layer, method).__doc__
    )


def test_cuda_readme_lists_the_kernels_that_exist():
    listed = set(re.findall(r"^\| `(\w+)` \|", read("cuda/README.md"), re.MULTILINE))
    assert listed == {kernel.name for kernel in kernels.KERNELS}
