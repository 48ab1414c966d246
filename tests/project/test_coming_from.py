"""docs/coming-from.md: what it says to write here runs, and it leaves out no name of transformers' generation."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

from transformers import DiffusionGemmaForBlockDiffusion
from transformers.models.diffusion_gemma.generation_diffusion_gemma import DiffusionGemmaGenerationConfig

from blockdiff.training.recipe import kinds_with
from blockdiff.training.recipe_files import read_recipe
from tests.support.documents import ROOT, Python, blocks, code_of, table_rows
from tests.support.recipes import MINIMAL_TREE

DOCUMENT = ROOT / "docs" / "coming-from.md"
KEY = re.compile(r"(seed|output|(model|lora|parallel|data|objective|optim|train|evaluation|generation)\.\w+)=")
REQUIRED = {"drafter": {"target": "a"}, "policy": {"over": "next_token"}, "distil": {}}


def test_every_line_runs_or_says_why_there_is_none(quickstart: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    pieces: list[Python] = list(blocks(DOCUMENT))
    for line, (theirs, here, why) in table_rows(DOCUMENT):
        assert code_of(theirs), f"{DOCUMENT.name}:{line}: the first column names something"
        code = code_of(here)
        if not code:
            assert here == "—" and len(why) > 10, f"{DOCUMENT.name}:{line}: neither code nor a reason"
        elif KEY.match(code[0]):
            key = code[0].partition("=")[0].removeprefix("objective.")
            having = kinds_with().get(key, []) if code[0].startswith("objective.") else []
            if not having or "canvas" in having:
                read_recipe("recipes/quickstart.yaml", code)
            else:
                objective = {"kind": having[0]} | REQUIRED[having[0]]
                read_recipe(MINIMAL_TREE | {"objective": objective}, code, needs_data=False)
        else:
            pieces += [Python(DOCUMENT, line, each) for each in code]
    for piece in sorted(pieces, key=lambda piece: piece.line):
        piece.run(names)


def test_every_option_of_transformers_is_named() -> None:
    theirs = [code for _, cells in table_rows(DOCUMENT) for code in code_of(cells[0])]
    named = {word for code in theirs for word in re.findall(r"\w+", code)}
    options = {name for name in vars(DiffusionGemmaGenerationConfig()) if not name.startswith("_")}
    for function in (DiffusionGemmaForBlockDiffusion.generate, DiffusionGemmaForBlockDiffusion.forward):
        options |= set(inspect.signature(function).parameters)
    assert not options - named - {"self", "kwargs", "transformers_version"}
