"""Recipes with their presets, and the generators of the toy tasks that they learn: sudoku (also as images),
countdown, addition and small talk.

`recipes/` lies beside the package for the reader and installs as `blockdiff.recipes`.
"""

from __future__ import annotations

from pathlib import Path


def packaged(name: str | Path) -> Path | None:
    """The recipe of this package with a name such as `quickstart`; None if a file or directory has that name."""
    file = Path(__file__).parent / f"{name}.yaml"
    is_name = Path(name).name == str(name) and not Path(name).exists()
    return file if is_name and file.is_file() else None
