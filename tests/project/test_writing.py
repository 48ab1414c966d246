"""Names and sentences of the code: docstrings name the thing first, and a call can be read."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).resolve().parents[2]
MOST = 8  # arguments of a function
# Public calls whose options are keywords that users know, and constructors, whose options are those of an object.
PUBLIC = {
    "blockdiff/checkpoint/write.py": {"save"},
    "blockdiff/evals/run.py": {"evaluate"},
    "blockdiff/models/model.py": {"forward"},
    "blockdiff/sampling/sampler.py": {"from_pretrained"},
    "blockdiff/training/train.py": {"train"},
}
# Ops and what launches them: the tensors and sizes of one call.
LEFT = {
    "blockdiff/kernels/block_sparse/torch.py": {"select_blocks", "block_sparse_attention"},
    "blockdiff/kernels/block_sparse/triton.py": {"_forward", "_blocks_backward", "block_sparse_attention"},
    "blockdiff/kernels/block_sparse/triton_selection.py": {"select_blocks"},
    "blockdiff/kernels/expert_mlp/triton.py": {"_fill_slots", "_forward_of"},
    "blockdiff/kernels/heads/triton.py": {"_launch_heads"},
    "blockdiff/kernels/span_attention/triton.py": {"_forward_of", "_backward_keys"},
    "blockdiff/kernels/vocabulary/torch.py": {"class_stats"},
    "blockdiff/kernels/vocabulary/triton_classes.py": {"class_stats"},
}


def files(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    """The parsed Python files of some folders by their path inside the repository."""
    for folder in folders:
        for file in sorted((ROOT / folder).rglob("*.py")):
            yield file.relative_to(ROOT).as_posix(), ast.parse(file.read_text(encoding="utf-8"))


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    """ "The pages of a row" or "Encode ...", not "What a row has", "Whether ..." or "How ..."."""
    found = []
    for folder in ("blockdiff", "cli", "recipes", "benchmarks", "tests"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            said = re.findall(r'(?m)^ *"""\s*((?:What|Whether|How)\b.*)', file.read_text(encoding="utf-8"))
            found += [f"{file.relative_to(ROOT)}: {words}" for words in said]
    assert not found


def is_bound(node: ast.FunctionDef | ast.AsyncFunctionDef, path: str) -> bool:
    """True where the number of arguments is not ours to choose: Triton's kernels, ops and gradients as torch calls
    them, commands with their options, constructors, and the public calls above."""
    decorators = [ast.unparse(each).partition("(")[0].rpartition(".")[2] for each in node.decorator_list]
    is_torchs = node.name == "forward" and "staticmethod" in decorators
    return (
        bool({"jit", "registered"} & {*decorators}) or is_torchs or path.startswith("cli/") or node.name == "__init__"
    )


def test_no_function_takes_more_than_eight_arguments() -> None:
    found = set()
    for path, tree in files("blockdiff", "cli", "recipes"):
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            names = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            count = len([name for name in names if name not in ("self", "cls")])
            count += (node.args.vararg is not None) + (node.args.kwarg is not None)
            if count > MOST and not is_bound(node, path):
                found.add((path, node.name))
    known = {(path, name) for listed in (PUBLIC, LEFT) for path, names in listed.items() for name in names}
    assert found == known, (found - known, known - found)
