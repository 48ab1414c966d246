"""Block selection and block-sparse attention in Triton against torch in fp64, in the interpreter or on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import blockdiff
from blockdiff.canvas import Canvas, CleanRow, lay_out
from blockdiff.diffusion.corruption import UniformCorruption
from blockdiff.diffusion.schedule import Linear
from blockdiff.kernels import IN_TORCH
from blockdiff.kernels.block_sparse import torch as in_torch
from blockdiff.kernels.block_sparse import triton, triton_selection
from blockdiff.kernels.launch import Unserved
from blockdiff.kernels.span_attention.paged import BlockTable, PagedTensor
from blockdiff.models.pages import Pages
from blockdiff.objective import Objective
from tests.kernels.test_block_sparse import documents, drawn
from tests.support.closeness import relative_error
from tests.support.families import CONFIGS, small_model

pytestmark = pytest.mark.usefixtures("unwritten_memory_is_nan")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP32 = 3e-6  # relative


def on(*tensors: Tensor | None) -> list[Any]:
    return [None if x is None else x.to(DEVICE) for x in tensors]


# -- selection -----------------------------------------------------------------------------------------------------


def whole(*shape: int, seed: int = 0, most: int = 3) -> Tensor:
    """Whole numbers, whose products are exact in any order and often equal."""
    return torch.randint(-most, most + 1, shape, generator=torch.Generator().manual_seed(seed)).float()


@pytest.mark.parametrize("score", ["max", "lse"])
@pytest.mark.parametrize("init, local, topk", [(0, 1, 3), (2, 2, 5), (1, 0, 40)])
def test_blocks_are_those_of_torch_ties_included(init, local, topk, score):
    """Scores are whole numbers times a power of two, so that most blocks tie by their maximum; sums do not tie."""
    B, T, H, d, block = 2, 19, 3, 16, 5
    q, k = (
        (whole(B, T, H, d), whole(B, T, d, seed=1, most=1))
        if score == "max"
        else (drawn(B, T, H, d, dtype=torch.float32), drawn(B, T, d, seed=1, dtype=torch.float32))
    )
    visible = torch.arange(1, T + 1).expand(B, T).clone()
    visible[1, -3:] = 0  # padding
    named = dict(block=block, topk=topk, init=init, local=local, score=score)
    truth = in_torch.select_blocks(q, k, visible, **named)
    assert torch.equal(triton.select_blocks(*on(q, k, visible), **named).cpu(), truth)


@pytest.mark.parametrize("block", [4, 16, 40])
def test_blocks_of_packed_documents_begin_with_them(block):
    visible, first = documents(2, [13, 6, 9], 3)
    T = visible.shape[1]
    q, k = whole(2, T, 2, 8), whole(2, T, 8, seed=1)
    truth = in_torch.select_blocks(q, k, visible, first, block=block, topk=2)
    assert torch.equal(triton.select_blocks(*on(q, k, visible, first), block=block, topk=2).cpu(), truth)


def test_many_blocks_compete_some_at_a_time(monkeypatch):
    monkeypatch.setattr(triton_selection, "MOST_CHOSEN_FROM", 4)
    q, k, visible = whole(1, 9, 1, 16), whole(1, 50, 16, seed=1, most=1), torch.arange(42, 51)[None]
    named = dict(block=3, topk=6, init=1, local=2)
    truth = in_torch.select_blocks(q, k, visible, **named)
    assert torch.equal(triton.select_blocks(*on(q, k, visible), **named).cpu(), truth)


@pytest.mark.parametrize("uses_sum", [False, True])
@pytest.mark.parametrize("splits", [1, 3])
def test_scores_of_blocks_are_reduced_over_the_visible_keys(splits, uses_sum):
    """A block of 40 keys takes several tiles; what no query sees may hold anything."""
    q, k, visible = drawn(1, 5, 2, 16), drawn(1, 100, 1, 16, seed=1), torch.tensor([[1, 40, 41, 77, 90]])
    dirty = k.clone()
    dirty[:, 90:] = torch.nan
    inputs = on(q.float(), dirty.float(), visible.int())
    out = torch.ops.blockdiff.block_sparse_scores(*inputs, None, None, 100, 40, 0.25, uses_sum, splits)
    assert out.shape == (1, 5, 2, 3)
    for t, seen in enumerate(visible[0].tolist()):
        for n in range(-(-seen // 40)):
            scores = torch.einsum("hd,sd->hs", q[0, t], k[0, 40 * n : min(40 * n + 40, seen), 0]) * 0.25
            truth = scores.logsumexp(-1) if uses_sum else scores.amax(-1)
            assert relative_error(out[0, t, :, n], truth) < FP32


# -- attention -----------------------------------------------------------------------------------------------------

# B, T, S, h, K, H, d, block
SIZES = {
    "one key head": (1, 13, 13, 4, 1, 1, 16, 4),
    "several, odd sizes": (2, 4, 21, 6, 2, 2, 24, 7),
    "fewer index heads": (1, 4, 13, 8, 4, 2, 16, 4),
    "more index heads": (1, 4, 13, 8, 2, 4, 16, 4),
    "large blocks": (1, 3, 150, 2, 1, 1, 16, 64),
}


def outputs_and_gradients(op: Callable[..., Tensor], tensors: list[Tensor | None], *rest: Any) -> list[Tensor]:
    """Output, and the gradients of an arbitrary function of it."""
    q, k, v, *own = tensors
    out = op(q, k, v, *rest, *own)
    (out.double().sin() * 3).sum().backward()
    return [out.detach(), *(x.grad for x in tensors if x is not None and x.is_floating_point())]


def compare(tensors: list[Tensor | None], *rest: Any) -> None:
    """Outputs and every gradient against torch in fp64, which the reference is compared with."""

    def made(device: str, dtype: torch.dtype) -> list[Tensor | None]:
        is_number = lambda x: x is not None and x.is_floating_point()  # noqa: E731
        return [x.to(device, dtype).requires_grad_() if is_number(x) else None if x is None else x.to(device)
                for x in tensors]  # fmt: skip

    moved = [x.to(DEVICE) if isinstance(x, Tensor) else x for x in rest]
    got = outputs_and_gradients(triton.block_sparse_attention, made(DEVICE, torch.float32), *moved)
    truth = outputs_and_gradients(in_torch.block_sparse_attention, made("cpu", torch.float64), *rest)
    for x, y in zip(got, truth, strict=True):
        assert x.isfinite().all() and relative_error(x, y) < FP32, relative_error(x, y)


@pytest.mark.parametrize("name", SIZES)
def test_attention_and_its_gradients(name):
    B, T, S, h, K, H, d, block = SIZES[name]
    tensors = [drawn(B, *shape, d, seed=n) for n, shape in enumerate(((T, h), (S, K), (S, K)))]
    visible = torch.arange(S - T + 1, S + 1).expand(B, T)
    ids = in_torch.select_blocks(drawn(B, T, H, d, seed=7), drawn(B, S, d, seed=8), visible, block=block, topk=2)
    compare(tensors, ids, visible, None, block, d**-0.5)


def test_packed_rows_and_padding():
    visible, first = documents(1, [7, 3], 2)
    T = visible.shape[1]
    tensors = [drawn(1, T, 4, 16), drawn(1, T, 2, 16, seed=1), drawn(1, T, 2, 16, seed=2)]
    ids = in_torch.select_blocks(drawn(1, T, 2, 8, seed=3), drawn(1, T, 8, seed=4), visible, first, block=3, topk=2)
    compare(tensors, ids, visible, first, 3, 0.3)
    out = triton.block_sparse_attention(*on(*(x.float() for x in tensors), ids, visible, first), 3, 0.3)
    assert not out[:, -2:].any()


def canvas(T: int = 5, S: int = 20, block: int = 4, h: int = 4, K: int = 2) -> tuple[list[Tensor], list[Any]]:
    """Queries of a canvas, keys and values of the prefix and their own ones; one query sees its own keys alone."""
    tensors = [drawn(1, *shape, 16, seed=n) for n, shape in enumerate(((T, h), (S, K), (S, K), (T, K), (T, K)))]
    visible = torch.full((1, T), S - 2)
    ids = in_torch.select_blocks(drawn(1, T, K, 8, seed=7), drawn(1, S, 8, seed=8), visible, block=block, topk=2)
    ids[:, 2] = -1
    ids[:, 3, :, 0] = -1  # a hole
    own = torch.tensor([[0, T]]).repeat(T, 1)[None]
    own[:, -2:, 0] = 1
    return tensors, [ids, visible, None, block, 0.5, own]


def test_own_keys_and_their_gradients():
    tensors, (*rest, own) = canvas()
    compare([*tensors, own], *rest)


def test_all_blocks_are_dense_attention():
    T, h, d = 21, 4, 16
    q, k, v = (drawn(1, T, heads, d, seed=n).float() for n, heads in enumerate((h, 1, 1)))
    visible = torch.arange(1, T + 1)[None]
    ids = triton.select_blocks(*on(q[:, :, :1], k[:, :, 0], visible), block=4, topk=99)
    out = triton.block_sparse_attention(*on(q, k, v), ids, *on(visible), None, 4, 0.25)
    truth = torch.nn.functional.scaled_dot_product_attention(
        *(x.double().transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
    )
    assert relative_error(out, truth.transpose(1, 2)) < FP32


@pytest.mark.parametrize("splits", [2, 5])
def test_splits_are_merged(splits):
    tensors, (ids, visible, _, block, scale, own) = canvas()
    q, k, v, own_k, own_v = on(*(x.float() for x in tensors))
    middle = *on(ids, visible.int()), None, own_k, own_v, own.int().to(DEVICE)
    one, many = (torch.ops.blockdiff.block_sparse_attention(q, k, v, *middle, block, scale, n) for n in (1, splits))
    for x, y in zip(one, many, strict=True):
        assert relative_error(y, x) < FP32


def in_pages(x_BSKd: Tensor, lengths: list[int], page: int) -> PagedTensor:
    """The same in pages in reverse order; what is no row's token is NaN, and page 0 zeros."""
    B, S = x_BSKd.shape[:2]
    width = -(-S // page)
    pool = torch.full((1 + B * width, page, *x_BSKd.shape[2:]), float("nan"), dtype=x_BSKd.dtype)
    pool[0] = 0
    table = torch.arange(B * width, 0, -1).view(B, width)
    for row, length in enumerate(lengths):
        for column in range(length):
            pool[table[row, column // page], column % page] = x_BSKd[row, column]
    tables = BlockTable(table.int().to(DEVICE), torch.tensor(lengths).int().to(DEVICE), page, lengths=lengths)
    return PagedTensor(pool.to(DEVICE), tables)


@pytest.mark.parametrize("page, block, splits", [(7, 8, 1), (16, 8, 2), (32, 16, 1), (32, 16, 2)])
@torch.no_grad()
def test_blocks_in_pages_are_scored_and_read_where_they_stand(page, block, splits, monkeypatch):
    """Main keys and index keys by one block table, tile by tile where tiles are parts of pages; and own keys."""
    monkeypatch.setattr(triton, "splits_of", lambda *_: splits)
    lengths, T, S = [30, 17], 3, 30
    q, idx_q, idx_k = drawn(2, T, 4, 16), drawn(2, T, 2, 16, seed=1), drawn(2, S, 1, 16, seed=2)
    k, v, own_k, own_v = (drawn(2, n, 2, 16, seed=3 + s) for s, n in enumerate((S, S, T, T)))
    visible = torch.tensor(lengths)[:, None].expand(2, T)
    own = torch.tensor([0, T]).expand(2, T, 2)
    truth_ids = in_torch.select_blocks(idx_q.float(), idx_k.float().squeeze(2), visible, block=block, topk=2)
    truth = in_torch.block_sparse_attention(q, k, v, truth_ids, visible, None, block, 0.3, own_k, own_v, own)
    monkeypatch.setattr(PagedTensor, "dense", None)
    pages = [in_pages(x.float(), lengths, page) for x in (idx_k, k, v)]
    ids = triton.select_blocks(idx_q.float().to(DEVICE), pages[0], *on(visible), block=block, topk=2)
    assert torch.equal(ids.cpu(), truth_ids)
    rest = *on(visible), None, block, 0.3, *on(own_k.float(), own_v.float(), own)
    out = triton.block_sparse_attention(q.float().to(DEVICE), *pages[1:], ids, *rest)
    assert relative_error(out, truth) < FP32


@pytest.mark.parametrize("row", ["whole", "packed", "in pages"])
@torch.no_grad()
def test_a_long_row_goes_from_block_to_block_and_gives_the_same(row, monkeypatch):
    """Queries in two pieces, parts that nobody wrote, and in packed rows two blocks that begin in one tile of keys."""
    for name, value in dict(LEAST_QUERIES=1, SHARED_BY=0, PART_BYTES=4 * 2 * 4 * 16 * 13).items():
        monkeypatch.setattr(triton, name, value)
    visible, first = documents(1, [5, 7, 9], 2) if row == "packed" else (torch.arange(1, 24)[None], None)
    T = visible.shape[1]
    q, k, v = drawn(1, T, 4, 16), drawn(1, T, 2, 16, seed=1), drawn(1, T, 2, 16, seed=2)
    ids = in_torch.select_blocks(drawn(1, T, 2, 8, seed=3), drawn(1, T, 8, seed=4), visible, first, block=16, topk=2)
    monkeypatch.setattr(triton.kernels, "block_sparse_forward", None)
    keys = [in_pages(x.float(), [T], 8) for x in (k, v)] if row == "in pages" else on(k.float(), v.float())
    out = triton.block_sparse_attention(*on(q.float()), *keys, *on(ids, visible, first), 16, 0.3)
    assert relative_error(out, in_torch.block_sparse_attention(q, k, v, ids, visible, first, 16, 0.3)) < FP32


def test_rows_go_by_block_where_they_are_long_and_a_block_fits():
    def goes(T: int, S: int, d: int, block: int, dtype: torch.dtype = torch.bfloat16) -> bool:
        q = torch.empty(1, T, 2, d, dtype=dtype, device="meta")
        return triton.goes_by_block(q, S, dict(BLOCK=block, TOPK=16))

    assert goes(4096, 4096, 128, 128)
    assert not goes(1024, 4096, 128, 128)  # few queries
    assert not goes(4096, 1 << 20, 128, 128)  # few of them for each block
    assert not goes(4096, 4096, 256, 128) and not goes(4096, 4096, 128, 128, torch.float32)  # heads too large
    assert not goes(4096, 4096, 128, 100) and not goes(1 << 20, 4096, 128, 256)


def test_what_has_no_kernel_is_said():
    q, k, ids = torch.zeros(1, 1, 1, 300), torch.zeros(1, 1, 1, 300), torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    one = torch.ones(1, 1, dtype=torch.int64)
    with pytest.raises(Unserved, match=r"256.*300"):
        triton.block_sparse_attention(q, k, k, ids, one, None, 4, 1.0)
    with pytest.raises(Unserved, match="one dtype"):
        triton.select_blocks(q[..., :16], k[..., 0, :16].bfloat16(), one)


def test_keys_that_no_query_sees_may_hold_anything_and_get_no_gradient():
    tensors, (ids, visible, *rest) = canvas()
    q, k, v, own_k, own_v = on(*(x.float() for x in tensors))
    for x in (k, v):
        x[:, 18:] = torch.nan
        x.requires_grad_()
    own = rest[-1]
    out = triton.block_sparse_attention(q, k, v, *on(ids, visible), *rest[:3], own_k, own_v, own.to(DEVICE))
    out.sum().backward()
    assert out.isfinite().all()
    for x in (k, v):
        assert x.grad.isfinite().all() and not x.grad[:, 18:].any() and x.grad[:, :18].any()


# -- the model -----------------------------------------------------------------------------------------------------


def sparse_on_triton() -> tuple[Any, Any]:
    """A small MiniMax M3 in fp32 whose attention and selection run in Triton, and the same in torch in fp64."""
    ops = ("span_attention", "select_blocks", "block_sparse_attention")
    kernels = IN_TORCH.replaced(**dict.fromkeys(ops, "triton"))
    truth = small_model("minimax_m3 denoising")
    model = blockdiff.init(CONFIGS["minimax_m3 denoising"](), seed=0, device=DEVICE, kernels=kernels)
    model.load_state_dict({name: x.float() for name, x in truth.state_dict().items()})
    return model, truth


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 90, shape, generator=torch.Generator().manual_seed(seed))


def test_a_step_of_the_model_has_the_losses_and_gradients_of_torch():
    model, truth = sparse_on_triton()
    row = CleanRow(tokens(14).tolist(), [Canvas(tokens(8, seed=1).tolist(), 11, coin=False)])
    found = []
    for each in (model, truth):
        losses = Objective(each, Linear(), UniformCorruption(96))(lay_out([row], 8, 0).to(each.device))
        (losses["canvas"] + losses["ar"]).backward()
        found.append(losses | {n: p.grad for n, p in each.named_parameters()})
    for name, x in found[1].items():
        if x is not None and float(x.detach().norm()) > 1e-3:
            assert relative_error(found[0][name], x) < 2e-4, name


@torch.no_grad()
def test_canvases_over_pages_are_denoised_where_the_pages_stand(monkeypatch):
    model, truth = sparse_on_triton()
    canvas, prompt = tokens(2, 8, seed=1), tokens(2, 12)
    pages = Pages(model, page_tokens=8, capacity=160)
    rows = [pages.open(), pages.open()]
    pages.encode(rows, prompt, [12, 10])
    monkeypatch.setattr(PagedTensor, "dense", None)
    found = pages.denoise(rows, canvas.to(DEVICE))
    for n, length in enumerate((12, 10)):
        alone = truth.denoise(canvas[n : n + 1], truth.encode(prompt[n : n + 1, :length]))
        assert relative_error(found[n : n + 1], alone) < 1e-4


# -- on a GPU, in the model's dtype --------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["causal", "canvas"])
def test_bf16_is_about_as_close_to_fp64_as_torch_in_bf16(name):
    """MiniMax M3's heads. Twice torch's own error is allowed: the order of sums differs."""
    T, S, h, K, d, block = (300, 300, 64, 4, 128, 128) if name == "causal" else (64, 700, 64, 4, 128, 128)
    shapes = [(T, h), (S, K), (S, K), *([(T, K), (T, K)] if name == "canvas" else [])]
    tensors = [drawn(1, *shape, d, seed=n).bfloat16() for n, shape in enumerate(shapes)]
    visible = torch.arange(1, T + 1)[None] if name == "causal" else torch.full((1, T), S)
    ids = in_torch.select_blocks(drawn(1, T, K, d, seed=7), drawn(1, S, d, seed=8), visible, block=block, topk=2)
    own = [torch.tensor([0, T]).expand(1, T, 2).to(DEVICE)] if name == "canvas" else []
    rest = *on(ids, visible), None, block, d**-0.5

    def made(op: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(DEVICE, dtype).requires_grad_() for x in tensors]
        return outputs_and_gradients(op, [*leaves, *own], *rest)

    got, torchs, truth = (
        made(op, dtype)
        for op, dtype in (
            (triton.block_sparse_attention, torch.bfloat16),
            (in_torch.block_sparse_attention, torch.bfloat16),
            (in_torch.block_sparse_attention, torch.float64),
        )
    )
    for x, y, exact in zip(got, torchs, truth, strict=True):
        assert x.isfinite().all() and relative_error(x, exact) <= 2 * relative_error(y, exact) + 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128, 256])
def test_bf16_scores_choose_as_fp32_ones_do_on_whole_numbers(d):
    q, k = (whole(1, 500, 4, d, most=2), whole(1, 500, d, seed=1, most=2))
    visible = torch.arange(1, 501)[None].to(DEVICE)
    ids = triton.select_blocks(q.bfloat16().to(DEVICE), k.bfloat16().to(DEVICE), visible, block=32, topk=5)
    assert torch.equal(ids.cpu(), in_torch.select_blocks(q, k, visible.cpu(), block=32, topk=5))
