"""`python docs/reference.py DIR` (or `make docs`): the reference of all modules as HTML, made of their docstrings."""

from __future__ import annotations

import pkgutil
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pdoc

import blockdiff
import blockdiff.recipes

# Kernels are written for Triton's compiler and have no signature to be read, the adapter of lm_eval needs that package,
# and commands are in docs/cli.md.
LEFT_OUT = r"blockdiff\.(cli|__main__)\b|.*triton|.*lm_eval"


def modules() -> Iterator[str]:
    """The names of all modules in the reference, the package first."""
    yield "blockdiff"
    found = [*pkgutil.walk_packages(blockdiff.__path__, "blockdiff.")]
    found += pkgutil.walk_packages(blockdiff.recipes.__path__, "blockdiff.recipes.")
    yield from (module.name for module in found if not re.match(LEFT_OUT, module.name))


def write(directory: str, *names: str) -> None:
    """Write the pages of some modules and an index to a directory."""
    for name in blockdiff.__all__:  # these are imported when they are first used, which pdoc does not do
        setattr(blockdiff, name, getattr(blockdiff, name))
    pdoc.render.configure(show_source=False, search=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The module specification")  # a package brings its modules along
        warnings.filterwarnings("ignore", "Error parsing type annotation")  # of a name imported for type checkers only
        pdoc.pdoc(*names, f"!{LEFT_OUT}", output_directory=Path(directory))


if __name__ == "__main__":
    write(sys.argv[1], *modules())
