"""Names and calls of the code: no function takes a long list of arguments, and names that hold anything get fewer."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).resolve().parents[2]
MAX_ARGUMENTS = 8
# Public calls, whose options are keywords that users know; ops and launchers, with the tensors and sizes of one call.
LONGER = {
    "blockdiff/checkpoint/merging.py": {"export"},
    "blockdiff/checkpoint/write.py": {"save"},
    "blockdiff/evals/run.py": {"evaluate"},
    "blockdiff/kernels/block_sparse/torch.py": {"select_blocks", "block_sparse_attention"},
    "blockdiff/kernels/block_sparse/triton.py": {"_forward", "_blocks_backward", "block_sparse_attention"},
    "blockdiff/kernels/block_sparse/triton_selection.py": {"select_blocks"},
    "blockdiff/kernels/expert_mlp/triton.py": {"_fill_slots", "_forward_of"},
    "blockdiff/kernels/heads/triton.py": {"_launch_heads"},
    "blockdiff/kernels/span_attention/triton.py": {"_forward_of", "_backward_keys"},
    "blockdiff/kernels/vocabulary/torch.py": {"class_stats"},
    "blockdiff/kernels/vocabulary/triton_classes.py": {"class_stats"},
    "blockdiff/models/model.py": {"forward"},
    "blockdiff/sampling/sampler.py": {"from_pretrained"},
    "blockdiff/training/train.py": {"train"},
}
# Names that say nothing about their value. Operands called left and right stay.
VAGUE = {"Eight", "asked", "at", "found", "given", "how", "its", "kept"}
VAGUE |= {"left", "made", "of", "own", "place", "said", "sent", "wanted"}
# The bindings of such names that each part still has. A number here only ever falls: lower it with the code.
VAGUE_COUNTS = {
    "blockdiff": 2,
    "blockdiff/data": 2,
    "blockdiff/decisions": 2,
    "blockdiff/evals": 1,
    "blockdiff/models": 3,
    "blockdiff/rl": 3,
    "blockdiff/sampling": 19,
    "blockdiff/serving": 11,
    "blockdiff/training": 6,
    "cli": 7,
}


def functions(*folders: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield the path and the node of every function in some folders."""
    for path, tree in modules(*folders):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield path, node


def modules(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    """Yield the path and the syntax tree of every Python file in some folders."""
    for folder in folders:
        for file in sorted((ROOT / folder).rglob("*.py")):
            yield file.relative_to(ROOT).as_posix(), ast.parse(file.read_text(encoding="utf-8"))


def has_fixed_signature(node: ast.FunctionDef | ast.AsyncFunctionDef, path: str) -> bool:
    """Whether something else decides the arguments: Triton, torch, a command's options, or an object's fields."""
    decorators = [ast.unparse(each).partition("(")[0].rpartition(".")[2] for each in node.decorator_list]
    is_autograd = node.name == "forward" and "staticmethod" in decorators
    is_op = bool({"jit", "registered"} & {*decorators})
    return is_op or is_autograd or path.startswith("cli/") or node.name == "__init__"


def test_no_function_takes_more_than_eight_arguments() -> None:
    longer = set()
    for path, node in functions("blockdiff", "cli", "recipes"):
        arguments = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        count = len([name for name in arguments if name not in ("self", "cls")])
        count += (node.args.vararg is not None) + (node.args.kwarg is not None)
        if count > MAX_ARGUMENTS and not has_fixed_signature(node, path):
            longer.add((path, node.name))
    allowed = {(path, name) for path, names in LONGER.items() for name in names}
    assert longer == allowed, (longer - allowed, allowed - longer)


def vague_names(tree: ast.Module) -> Iterator[str]:
    """Yield each binding of a vague name: an assignment, a loop variable, a field or an argument."""
    names = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    names += [node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)]
    yield from (name for name in names if name in VAGUE and not (name == "left" and "right" in names))


def part_of(path: str) -> str:
    """The package of a module, such as `blockdiff/sampling`, or `blockdiff` for a module directly in it."""
    return "/".join(path.split("/")[:-1][:2])


def test_no_part_gains_names_that_say_nothing() -> None:
    counts = Counter(part_of(path) for path, tree in modules("blockdiff", "cli") for _ in vague_names(tree))
    grown = {part: f"{count} > {VAGUE_COUNTS.get(part, 0)}" for part, count in counts.items()}
    assert not {part: text for part, text in grown.items() if counts[part] > VAGUE_COUNTS.get(part, 0)}


def test_a_vague_name_is_counted_wherever_it_is_bound() -> None:
    source = "def f(own):\n    for place in own:\n        found: int = place\n    left, right = own\n"
    assert sorted(vague_names(ast.parse(source))) == ["found", "own", "place"]
