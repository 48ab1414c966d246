"""Code that a config.json names for programs that run it (`auto_map`), copied as bytes from checkpoint to checkpoint.

Nothing here imports or inspects it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

CODE = "*.py"


def named_code(values: Mapping[str, Any]) -> list[str]:
    """Return the names of the Python files in `auto_map` of a config.json, without those in other repositories."""
    entries = values.get("auto_map")
    classes = entries.values() if isinstance(entries, Mapping) else ()
    modules = (name.partition(".")[0] for name in classes if isinstance(name, str) and "--" not in name)
    return sorted({f"{module}.py" for module in modules if module.isidentifier()})


def code_files(values: Mapping[str, Any], directory: Path) -> tuple[Path, ...]:
    """Return all Python files in `directory` if its config.json names any, since those may import the others."""
    return tuple(sorted(file for file in directory.glob(CODE) if file.is_file())) if named_code(values) else ()


def words_of_missing(values: Mapping[str, Any], there: Iterable[Path]) -> str | None:
    """Return a warning if files named by a config.json are not among the files `there`; None if all are."""
    missing = [name for name in named_code(values) if name not in {file.name for file in there}]
    if not missing:
        return None
    return (
        f"config.json names {', '.join(missing)} (auto_map), which did not lie beside the weights: what loads "
        "checkpoints by their own code cannot load this one; copy the Python files of the release there"
    )
