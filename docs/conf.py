"""Sphinx configuration: Markdown pages, the repository's own Markdown files, and docstrings."""

import importlib
import inspect
import pkgutil
import re
from pathlib import Path

from sphinx.util import logging

import snack_cupy

project = "snack_cupy"
author = "snack_cupy contributors"
project_copyright = "2026, snack_cupy contributors"
version = release = snack_cupy.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
templates_path = ["_templates"]
html_theme = "furo"
html_title = f"snack_cupy {version}"

# Docstrings give types and shapes in words, and names between single backticks.
default_role = "code"
autodoc_typehints = "none"
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
napoleon_google_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
myst_heading_anchors = 3
# A word such as "array" in a parameter's type is no reference.
suppress_warnings = ["ref.python"]

ROOT = Path(__file__).resolve().parent.parent
# Files of the repository that are shown as pages here.
PAGES = {
    "README.md": "quickstart.md",
    "CONTRIBUTING.md": "development.md",
    "CHANGELOG.md": "changelog.md",
    "cuda/README.md": "kernels.md",
    "benchmarks/README.md": "benchmarks.md",
}


def public_names(module):
    """Pairs (name, home) of what a package offers, and whether its home has a page."""
    names = []
    for name in getattr(module, "__all__", ()):
        thing = getattr(module, name)
        if not (inspect.isclass(thing) or inspect.isroutine(thing)):
            continue
        home = f"{thing.__module__}.{thing.__qualname__}"
        kind = "class" if inspect.isclass(thing) else "function"
        names.append({"name": name, "home": home, "kind": kind, "paged": "._" not in home})
    return names


def packages():
    """Every package of snack_cupy, itself first."""
    yield snack_cupy
    for info in pkgutil.walk_packages(snack_cupy.__path__, "snack_cupy."):
        if info.ispkg:
            yield importlib.import_module(info.name)


autosummary_context = {"public": {module.__name__: public_names(module) for module in packages()}}


def rewrite_links(app, path, docname, content):
    """Turn links between files of the repository into links between pages.

    A link to a file without a page becomes its text; one to a file that is not there is reported.
    """
    source = (Path(app.srcdir) / path).resolve()

    def rewrite(match):
        image, text, target, anchor = match.groups()
        file = (source.parent / target).resolve()
        if not file.exists():
            logging.getLogger(__name__).warning("%s links to %s: no such file", source.name, target)
            return text
        name = file.relative_to(ROOT).as_posix()
        if name in PAGES:
            return f"[{text}]({PAGES[name]}{anchor or ''})"
        if name.startswith("docs/") and file.is_file():
            return f"{image}[{text}]({name.removeprefix('docs/')}{anchor or ''})"
        return f"![{text}](../{name})" if image else text

    link = r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)"
    content[0] = re.sub(link, rewrite, content[0])


def setup(app):
    """Register the link rewriting for included files."""
    app.connect("include-read", rewrite_links)
