"""A program for test_sanitizers.py: every C function at odd sizes, in both directions, against torch in fp64."""

from __future__ import annotations

import torch
from torch import Tensor

from blockdiff.kernels import IN_C, IN_TORCH, Kernels, c_library
from blockdiff.kernels.nvfp4 import Nvfp4
from blockdiff.kernels.span_attention import c as attention
from blockdiff.spans import Spans, Sweep, denoise_spans, encode_spans
from tests.support.closeness import relative_error

SANITIZERS = ("-O0", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")

CALLED: set[str] = set()
EPS, BOUND = 1e-6, 2e-5


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_()


def compare(function, *inputs: Tensor) -> None:
    """`function(kernels, *inputs)` and all gradients by the C functions are those in torch in fp64."""
    results = []
    for kernels, dtype in ((IN_C, torch.float32), (IN_TORCH, torch.float64)):
        mine = [x.detach().to(dtype).requires_grad_() if x.is_floating_point() else x for x in inputs]
        outs = function(kernels, *mine)
        outs = [x for x in (outs if isinstance(outs, tuple) else (outs,)) if x.is_floating_point()]
        trained = [x for x in mine if x.requires_grad]
        total = sum((x * torch.cos(torch.arange(x.numel(), dtype=dtype)).view(x.shape)).sum() for x in outs)
        results.append([*outs, *torch.autograd.grad(total, trained, allow_unused=True)])
        with torch.no_grad():
            function(kernels, *mine)
    for mine, truth in zip(*results, strict=True):
        if mine is not None and truth is not None:
            assert relative_error(mine, truth, floor=1.0) < BOUND, relative_error(mine, truth)


def norms() -> None:
    for shape in ((3, 5, 7), (1, 1, 1), (2, 9, 100), (37, 11, 129)):
        weights = [drawn(shape[-1]) for _ in range(3)]
        compare(lambda ops, x, *w: tuple(ops.rms_norms(x, w, EPS)), drawn(*shape), *weights)
        compare(lambda ops, x: tuple(ops.rms_norms(x, (None,), EPS)), drawn(*shape))
        for scalar in (None, torch.tensor([0.5]), torch.rand(*shape[:-1], 1)):
            by = None if scalar is None else scalar
            compare(
                lambda ops, x, y, w, by=by: ops.add_rms_norm(x, y, w, EPS, None if by is None else by.to(x.dtype)),
                *(drawn(*shape), drawn(*shape), weights[0]),
            )
    for B, T, h, d in ((2, 5, 3, 6), (1, 1, 1, 2), (3, 17, 5, 34)):
        rope = [drawn(B, T, d).detach() for _ in range(2)]
        compare(
            lambda ops, x, w, rope=rope: ops.norm_rope(x, w, *(each.to(x.dtype) for each in rope), EPS),
            *(drawn(B, T, h, d), drawn(d)),
        )
        compare(lambda ops, x: tuple(ops.rms_norms(x, (None,), EPS)), drawn(B, T, h, d))


def experts() -> None:
    for N, k, E, D, F in ((1, 1, 1, 16, 16), (37, 3, 5, 13, 7), (61, 2, 4, 32, 48), (301, 2, 3, 272, 64)):
        index = torch.randint(0, max(1, E - 1), (N, k), generator=torch.Generator().manual_seed(N))  # the last has none
        index.view(-1)[3::7] = E
        inputs = drawn(N, D), drawn(E, 2 * F, D), drawn(E, D, F), drawn(N, k).detach().softmax(-1)
        for activation in ("gelu_tanh", "silu"):
            compare(lambda ops, x, up, down, w, i=index, a=activation: ops.expert_mlp(x, up, down, i, w, a), *inputs)
        low_rank = drawn(E, 16, D), drawn(E, 2 * F, 16), drawn(E, 3, F), drawn(E, D, 3)
        compare(
            lambda ops, x, up, down, w, *a, i=index: ops.expert_mlp(x, up, down, i, w, "silu", a), *inputs, *low_rank
        )
        if D % 16 == F % 16 == 0:
            up, down = (Nvfp4.nearest(each.detach()) for each in inputs[1:3])
            compare(
                lambda ops, x, w, *a, i=index, up=up, down=down: ops.expert_mlp(x, up, down, i, w, "silu", a),
                *(inputs[0], inputs[3], *low_rank),
            )
            compare(lambda ops, x, up=up: ops.nvfp4_linear(x, up.part(0)), inputs[0])
        compare(lambda ops, gate, up: ops.gated(gate, up), drawn(N, F), drawn(N, F))
        compare(lambda ops, scores, scale, k=k: ops.route(scores, scale, k), drawn(N, E + k), drawn(E + k))


def spans_of(B: int, T: int, P: int) -> Spans:
    g = torch.Generator().manual_seed(T)
    bounds = torch.cat([torch.randint(0, size + 1, (B, T, 2), generator=g).sort(-1)[0] for size in (P, T)], -1)
    return Spans(bounds.to(torch.int32))


def attend() -> None:
    for B, T, P, K, group, d in (
        (2, 1, 9, 2, 1, 16),
        (1, 17, 41, 1, 5, 48),
        (2, 131, 107, 1, 2, 32),
        (1, 3, 5, 20, 1, 80),
    ):
        inputs = [drawn(B, T, K * group, d), *(drawn(B, S, K, d) for S in (P, P, T, T))]
        for spans in (spans_of(B, T, P), Spans(torch.tensor([0, P, 0, T]).int().expand(B, T, 4), sees_all=True)):
            compare(lambda ops, *x, spans=spans: ops.span_attention(*x, spans, 0.3), *inputs)
    doc_start = torch.tensor([[0] * 30 + [30] * 41, [0] * 12 + [12] * 50 + [-1] * 9])
    start, doc = torch.tensor([[11, 24, 60], [5, 40, 0]]), torch.tensor([[0, 0, 30], [0, 12, 0]])
    noisy = denoise_spans(start, doc, torch.tensor([[9, 6, 9], [7, 9, 0]]), 9)
    for K in (1, 9):  # queries of few heads are divided
        q, k, v = drawn(2, 98, 2 * K, 16), drawn(2, 98, K, 16), drawn(2, 98, K, 16)
        out = attention.span_attention(q, None, None, k, v, Sweep(encode_spans(doc_start), noisy, columns=60), 0.3)
        out.sum().backward()


def vocabulary() -> None:
    for N, D, V in ((1, 3, 2), (7, 5, 37), (40, 8, 701)):
        target, observed = (torch.randint(0, V, (N,), generator=torch.Generator().manual_seed(n)) for n in range(2))
        bonus, x = torch.rand(N), drawn(N, D)
        for cap in (None, 30.0, 50.0):
            compare(
                lambda ops, x, table, cap=cap, t=target, o=observed, b=bonus: ops.linear_cross_entropy(
                    x, table, t, cap, o, b
                ),
                *(drawn(N, D), drawn(V, D)),
            )
            with torch.no_grad():
                compare_stats(N, D, V, cap)
            compare(lambda ops, table, cap=cap, x=x: embedded(ops, x, table, cap), drawn(V, D))


def embedded(ops: Kernels, x: Tensor, table: Tensor, cap: float | None) -> Tensor:
    return ops.soft_embedding(x.detach().to(table.dtype), table, cap, 0.7)


def compare_stats(N: int, D: int, V: int, cap: float | None) -> None:
    allowed = torch.full((N, -(-V // 32)), 0x5B5B5B5B, dtype=torch.int32)
    for args in ((), (allowed,), (allowed[:1].expand(N, -1),)):
        found = IN_C.token_stats(drawn(N, D), drawn(V, D), cap, torch.rand(N) + 0.5, torch.rand(N), *args)
        assert found.entropy.isfinite().all() and (found.sample < V).all()


def not_finite() -> None:
    x = drawn(40, 33).detach()
    x[3, 5], x[4, 5], x[5, 5], x[6] = torch.nan, torch.inf, -torch.inf, 3e38
    IN_C.gated(x, x, "silu"), IN_C.gated(x, x), IN_C.route(x, x[0], 3)
    IN_C.linear_cross_entropy(x, drawn(50, 33), torch.arange(40), None).sum().backward()
    IN_C.token_stats(x, drawn(50, 33).detach(), None, 1.0, torch.rand(40))
    q = drawn(1, 40, 2, 16).detach()
    q[0, 3, 0, 5] = torch.nan
    IN_C.span_attention(q, None, None, q, q, spans_of(1, 40, 0), 0.3)


if __name__ == "__main__":
    c_library.FLAGS = (*(flag for flag in c_library.FLAGS if flag != "-O3"), *SANITIZERS)
    assert c_library.library() is not None
    functions = c_library._functions()
    c_library._functions = lambda: _Noting(functions)

    class _Noting(dict):
        def __getitem__(self, name: str):
            CALLED.add(name)
            return super().__getitem__(name)

    for part in (norms, experts, attend, vocabulary, not_finite):
        part()
    assert c_library.SIGNATURES.keys() == CALLED, c_library.SIGNATURES.keys() - CALLED
    print("all functions called")
