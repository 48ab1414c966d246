"""A gradient that is differentiated again: right where autograd sees every operation, refused everywhere else."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import blockdiff.kernels.norm_rope.triton as norms_in_triton
from blockdiff.errors import BlockdiffError
from blockdiff.kernels import IN_C, IN_TORCH
from blockdiff.kernels.c_library import library
from blockdiff.kernels.vocabulary import triton as vocabulary_in_triton
from blockdiff.spans import encode_spans

PROGRAM = Path(__file__).resolve().parents[2] / "blockdiff"
CAUSAL = encode_spans(torch.zeros(2, 5, dtype=torch.int64))
EXPERTS = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2], [1, 0]])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# Each op as a function of tensors that all have gradients, with these tensors.
RIGHT_IN_TORCH: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "rms_norms": (lambda ops, x, w: ops.rms_norms(x, (w, None), 1e-6), [normal(3, 8), normal(8)]),
    "add_rms_norm": (
        lambda ops, x, y, w: ops.add_rms_norm(x, y, w, 1e-6),
        [normal(3, 8), normal(3, 8, seed=1), normal(8)],
    ),
    "norm_rope": (
        lambda ops, x, w: ops.norm_rope(x, w, *(f(normal(2, 5, 8)).to(x.dtype) for f in (torch.cos, torch.sin)), 1e-6),
        [normal(2, 5, 3, 8), normal(8)],
    ),
    "route": (lambda ops, scores, scale: ops.route(scores, scale, 2)[1], [normal(5, 4), normal(4).abs() + 0.5]),
    "gated": (lambda ops, gate, up: ops.gated(gate, up), [normal(3, 8), normal(3, 8, seed=1)]),
    "span_attention": (
        lambda ops, q, k, v: ops.span_attention(q, None, None, k, v, CAUSAL, 0.5),
        [normal(2, 5, 4, 16), normal(2, 5, 2, 16, seed=1), normal(2, 5, 2, 16, seed=2)],
    ),
}
REFUSED_IN_TORCH: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "expert_mlp": (
        lambda ops, x, up, down, share: ops.expert_mlp(x, up, down, EXPERTS, share),
        [normal(5, 16), normal(3, 32, 16), normal(3, 16, 16), normal(5, 2).abs()],
    ),
    "linear_cross_entropy": (
        lambda ops, hidden, table: ops.linear_cross_entropy(hidden, table, torch.arange(5), None),
        [normal(5, 8), normal(16, 8)],
    ),
    "divergence": (
        lambda ops, hidden: ops.divergence(hidden, hidden.detach() + 1, normal(16, 8).to(hidden.dtype), None),
        [normal(5, 8)],
    ),
    "soft_embedding": (
        lambda ops, table: ops.soft_embedding(normal(5, 8).to(table.dtype), table, None, 1.0),
        [normal(16, 8)],
    ),
}


def penalty(function: Callable[..., Any], tensors: list[Tensor]) -> Tensor:
    """The squared size of the gradients of a function's outputs, whose own gradient is a second derivative."""
    outputs = function(*tensors)
    total = sum(out.square().sum() for out in (outputs if isinstance(outputs, tuple) else (outputs,)))
    assert isinstance(total, Tensor)
    return sum(grad.square().sum() for grad in torch.autograd.grad(total, tensors, create_graph=True))  # type: ignore[return-value]


def leaves(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [x.to(dtype).requires_grad_() for x in tensors]


@pytest.mark.parametrize("name", RIGHT_IN_TORCH)
def test_a_second_derivative_in_torch_is_right(name):
    op, tensors = RIGHT_IN_TORCH[name]
    mine, step = leaves(tensors, torch.float64), 1e-5
    directions = [normal(*x.shape, seed=9 + index) for index, x in enumerate(mine)]

    def moved(by: float) -> float:
        at = [(x + by * way).detach().requires_grad_() for x, way in zip(mine, directions, strict=True)]
        return float(penalty(lambda *x: op(IN_TORCH, *x), at).detach())

    grads = torch.autograd.grad(penalty(lambda *x: op(IN_TORCH, *x), mine), mine)
    slope = sum(float((grad * way).sum()) for grad, way in zip(grads, directions, strict=True))
    assert slope == pytest.approx((moved(step) - moved(-step)) / (2 * step), rel=1e-6)


@pytest.mark.parametrize("name", REFUSED_IN_TORCH)
def test_an_op_in_torch_with_a_gradient_of_its_own_refuses_a_second_one(name):
    op, tensors = REFUSED_IN_TORCH[name]
    with pytest.raises(BlockdiffError, match=r"no second derivative.*create_graph=True\)$"):
        penalty(lambda *x: op(IN_TORCH, *x), leaves(tensors, torch.float32))


@pytest.mark.skipif(library() is None, reason="there is no C compiler here")
@pytest.mark.parametrize("name", RIGHT_IN_TORCH | REFUSED_IN_TORCH)
def test_so_does_every_op_in_c(name):
    op, tensors = (RIGHT_IN_TORCH | REFUSED_IN_TORCH)[name]
    with pytest.raises(BlockdiffError, match="no second derivative"):
        penalty(lambda *x: op(IN_C, *x), leaves(tensors, torch.float32))


def test_so_do_the_ops_in_triton():
    x, weight = leaves([normal(3, 8), normal(8)], torch.float32)
    with pytest.raises(BlockdiffError, match=r'norm_rope.*second derivative.*kernels="torch"'):
        penalty(lambda x, w: norms_in_triton.rms_norms(x, (w,), 1e-6), [x, weight])
    hidden, table = leaves([normal(5, 16), normal(32, 16)], torch.float32)
    with pytest.raises(BlockdiffError, match=r'vocabulary.*second derivative.*kernels="torch"'):
        penalty(lambda *x: vocabulary_in_triton.linear_cross_entropy(*x, torch.arange(5), 30.0), [hidden, table])


def test_every_autograd_function_of_the_program_is_once_differentiable():
    functions = {}
    for file in PROGRAM.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and any("autograd.Function" in ast.unparse(base) for base in node.bases):
                (backward,) = [x for x in node.body if isinstance(x, ast.FunctionDef) and x.name == "backward"]
                functions[f"{file.stem}.{node.name}"] = [ast.unparse(x) for x in backward.decorator_list]
    assert "c._NormRope" in functions
    assert [name for name, marks in functions.items() if "once_differentiable" not in marks] == []
