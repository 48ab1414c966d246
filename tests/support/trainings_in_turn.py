"""The rank of `test_two_trainings_of_one_program`: one that trains, trains again, fails, and cannot go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import blockdiff
from blockdiff.errors import RunError
from blockdiff.parallel.ranks import Ranks


def two_trainings_and_a_failure(ranks: Ranks, folder: Path, recipe: dict[str, Any]) -> None:
    """Write what became of each to `folder`."""
    said = []
    for name, output in {"first": "first", "second": "second", "over the first": "first", "late": "late"}.items():
        try:
            blockdiff.train(recipe, output=folder / output)
            said.append(f"{name}: trained")
        except RunError as error:
            said.append(f"{name}: {error}")
    (folder / f"said-{ranks.rank}").write_text("\n".join(said))
