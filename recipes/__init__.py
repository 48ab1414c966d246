"""Recipes with their presets, and the generators of their toy tasks.

Tasks are sudoku (also as images), countdown, addition and small talk.

The directory `recipes/` is beside the package for readers, and is installed as `blockdiff.recipes`.
"""

from __future__ import annotations

from pathlib import Path


def packaged(name: str | Path) -> Path | None:
    """Return the file of a packaged recipe such as `quickstart`.

    None if there is no such recipe, or if a file or directory has that name.
    """
    file = Path(__file__).parent / f"{name}.yaml"
    is_name = Path(name).name == str(name) and not Path(name).exists()
    return file if is_name and file.is_file() else None
