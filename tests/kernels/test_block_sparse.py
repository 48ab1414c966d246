"""Block selection and block-sparse attention against their oracles: forced blocks, ties, documents, gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from blockdiff.kernels.block_sparse import torch as in_torch
from tests.oracles import block_sparse as reference

pytestmark = pytest.mark.quick


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def listed(ids_k: Tensor) -> list[int]:
    """The blocks of one query and head; what follows the first unused place is unused, too."""
    ids = ids_k.tolist()
    used = [each for each in ids if each >= 0]
    assert ids == used + [-1] * (len(ids) - len(used)) and len(set(used)) == len(used)
    return used


@pytest.mark.parametrize("score", ["max", "lse"])
@pytest.mark.parametrize("init, local", [(0, 1), (1, 1), (2, 2), (0, 0), (3, 2)])
def test_blocks_are_those_of_the_reference_in_the_same_order(init, local, score):
    B, T, H, d, block, topk = 2, 29, 3, 8, 4, 4
    q, k = drawn(B, T, H, d, dtype=torch.float32), drawn(B, T, d, seed=1, dtype=torch.float32)
    visible = torch.arange(1, T + 1).expand(B, T)
    found = in_torch.select_blocks(q, k, visible, block=block, topk=topk, init=init, local=local, score=score)
    assert found.shape == (B, T, H, topk)
    for b in range(B):
        for head in range(H):
            truth = reference.select_blocks(q[b, :, head], k[b], visible[b].tolist(), block, topk, init, local, score)
            assert [listed(each) for each in found[b, :, head]] == truth


def test_of_equal_blocks_the_lower_comes_first_and_forced_ones_count():
    q, k = torch.ones(1, 1, 1, 4), torch.ones(1, 64, 4)
    ids = in_torch.select_blocks(q, k, torch.tensor([[64]]), block=4, topk=5)
    assert ids[0, 0, 0].tolist() == [15, 0, 1, 2, 3]
    ids = in_torch.select_blocks(q, k, torch.tensor([[62]]), block=4, topk=4, init=2, local=3)
    assert ids[0, 0, 0].tolist() == [0, 1, 13, 14]
    ids = in_torch.select_blocks(-q, torch.cat([k[:, :4], -0.0 * k[:, :4]], 1), torch.tensor([[8]]), block=4, topk=9)
    assert ids[0, 0, 0].tolist() == [1, 0] and ids.shape[-1] == 2


def test_in_fp64_blocks_whose_scores_only_rounding_tells_apart_are_equal():
    q, k = drawn(1, 1, 1, 16), drawn(1, 48, 16, seed=1)
    k += (1 - k @ q[0, 0, 0])[..., None] * q[0, 0] / q.square().sum()  # q . k is 1 for every key, but for rounding
    ids = in_torch.select_blocks(q, k, torch.tensor([[48]]), block=4, topk=6)
    assert ids[0, 0, 0].tolist() == [11, 0, 1, 2, 3, 4]


def test_keys_after_a_query_in_its_block_do_not_lift_the_block():
    """The best key of the first block is not visible yet, so that block has the score of the visible ones."""
    q, k = torch.ones(1, 1, 1, 1), torch.tensor([1.0, 9.0, 2.0, 2.0, 0.0, 0.0])[None, :, None]
    for visible, best in ((5, 0), (1, 0)):
        ids = in_torch.select_blocks(q, k, torch.tensor([[visible]]), block=2, topk=1, local=0)
        assert ids[0, 0, 0].tolist() == [best]
    later = torch.tensor([0.0, 0.0, 1.0, 9.0])[None, :, None]
    assert in_torch.select_blocks(q, later, torch.tensor([[3]]), block=2, topk=2, local=0)[0, 0, 0].tolist() == [1, 0]
    low = torch.tensor([2.0, 0.0, 1.0, 9.0])[None, :, None]
    assert in_torch.select_blocks(q, low, torch.tensor([[3]]), block=2, topk=1, local=0)[0, 0, 0].tolist() == [0]


def documents(B: int, lengths: list[int], padding: int) -> tuple[Tensor, Tensor]:
    """visible_BT and first_BT of rows of documents, the last columns of which are padding."""
    visible = [n + 1 for length in lengths for n in range(length)] + [0] * padding
    starts = [sum(lengths[:n]) for n in range(len(lengths))]
    first = [start for start, length in zip(starts, lengths, strict=True) for _ in range(length)] + [0] * padding
    return torch.tensor(visible).expand(B, -1), torch.tensor(first).expand(B, -1)


def test_blocks_begin_with_the_document_and_padding_has_none():
    lengths, H, d = [13, 6, 9], 2, 8
    visible, first = documents(2, lengths, 3)
    T = visible.shape[1]
    q, k = drawn(2, T, H, d, dtype=torch.float32), drawn(2, T, d, seed=1, dtype=torch.float32)
    ids = in_torch.select_blocks(q, k, visible, first, block=4, topk=2)
    assert bool((ids[:, sum(lengths) :] == -1).all())
    for start, length in zip((0, 13, 19), lengths, strict=True):
        of = slice(start, start + length)
        alone = in_torch.select_blocks(q[:, of], k[:, of], visible[:, of], block=4, topk=2)
        assert torch.equal(ids[:, of], alone)


SIZES = {
    "one key head": (1, 37, 37, 4, 1, 1, 16, 8),
    "several": (2, 50, 50, 4, 2, 2, 8, 4),
    "fewer index heads": (1, 21, 21, 8, 4, 2, 8, 4),
    "more index heads": (1, 21, 21, 8, 2, 4, 8, 4),
    "more keys than queries": (2, 5, 33, 4, 2, 2, 8, 16),
}


def case(name: str, seed: int = 0) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor, int]:
    B, T, S, h, K, H, d, block = SIZES[name]
    q, k, v = (drawn(B, *shape, d, seed=seed + n) for n, shape in enumerate(((T, h), (S, K), (S, K))))
    visible = torch.arange(S - T + 1, S + 1).expand(B, T)
    idx_q, idx_k = drawn(B, T, H, d, seed=7), drawn(B, S, d, seed=8)
    return (q, k, v), in_torch.select_blocks(idx_q, idx_k, visible, block=block, topk=2), visible, block


@pytest.mark.parametrize("path", ["whole", "in parts"])
@pytest.mark.parametrize("name", SIZES)
def test_attention_and_its_gradients_are_those_of_the_reference(name, path, monkeypatch):
    monkeypatch.setattr(in_torch, "MASK", 1 << 40 if path == "whole" else 1 << 11)
    inputs, ids, visible, block = case(name)
    B, T, h, d = inputs[0].shape
    K, H, weight, grads = inputs[1].shape[2], ids.shape[2], drawn(B, T, h, d, seed=9), []
    for is_truth in (True, False):
        q, k, v = (x.clone().requires_grad_() for x in inputs)
        if is_truth:
            out = torch.stack(
                [
                    torch.stack(
                        [
                            reference.attention(
                                q[b, :, n],
                                k[b, :, n * K // h],
                                v[b, :, n * K // h],
                                [listed(each) for each in ids[b, :, n * H // h]],
                                visible[b].tolist(),
                                block,
                                d**-0.5,
                            )
                            for n in range(h)
                        ],
                        1,
                    )
                    for b in range(B)
                ]
            )
        else:
            out = in_torch.block_sparse_attention(q, k, v, ids, visible, None, block, d**-0.5)
        (out * weight).sum().backward()
        grads.append((out.detach(), q.grad, k.grad, v.grad))
    for truth, found in zip(*grads, strict=True):
        torch.testing.assert_close(found, truth, rtol=1e-9, atol=1e-12)


def test_both_paths_agree_on_packed_rows_and_padding_gets_zero(monkeypatch):
    visible, first = documents(2, [13, 6, 9], 3)
    T = visible.shape[1]
    q, k, v = drawn(2, T, 4, 8), drawn(2, T, 2, 8, seed=1), drawn(2, T, 2, 8, seed=2)
    ids = in_torch.select_blocks(drawn(2, T, 2, 8, seed=3), drawn(2, T, 8, seed=4), visible, first, block=4, topk=2)
    outs = []
    for limit in (1 << 40, 1 << 11):
        monkeypatch.setattr(in_torch, "MASK", limit)
        outs.append(in_torch.block_sparse_attention(q, k, v, ids, visible, first, 4, 0.3))
    torch.testing.assert_close(*outs, rtol=1e-9, atol=1e-12)
    assert bool((outs[1][:, -3:] == 0).all())


def test_own_keys_stand_outside_the_budget():
    """A canvas sees its own keys whole, and of the prefix what it chose: as one softmax over both."""
    q, k, v = drawn(1, 3, 2, 8), drawn(1, 20, 1, 8, seed=1), drawn(1, 20, 1, 8, seed=2)
    own_k, own_v = drawn(1, 3, 1, 8, seed=3), drawn(1, 3, 1, 8, seed=4)
    ids = torch.tensor([[2, 4], [0, -1], [-1, -1]])[None, :, None]
    visible, first = torch.full((1, 3), 18), torch.zeros(1, 3, dtype=torch.int64)
    own = torch.tensor([[0, 3]]).expand(1, 3, 2)
    out = in_torch.block_sparse_attention(q, k, v, ids, visible, first, 4, 0.5, own_k, own_v, own)
    for t, kept in enumerate(([*range(8, 12), 16, 17], [*range(4)], [])):
        keys, values = torch.cat([k[0, kept, 0], own_k[0, :, 0]]), torch.cat([v[0, kept, 0], own_v[0, :, 0]])
        torch.testing.assert_close(out[0, t], (q[0, t] @ keys.t() * 0.5).softmax(-1) @ values)


def test_memory_for_long_rows_is_linear(monkeypatch):
    """The scores of a row of 3,000 queries and keys are never all there."""
    T, largest = 3000, 0
    monkeypatch.setattr(in_torch, "SCORE_BYTES", 1 << 20)
    monkeypatch.setattr(in_torch, "MASK", 1 << 18)

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), named=None):
            nonlocal largest
            out = function(*arguments, **(named or {}))
            made = [x.numel() for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, Tensor)]
            largest = max([largest, *made])
            return out

    q, k, visible = torch.randn(1, T, 2, 16), torch.randn(1, T, 1, 16), torch.arange(1, T + 1)[None]
    with Watch():
        ids = in_torch.select_blocks(q[:, :, :1], k[:, :, 0], visible, block=32, topk=4)
        in_torch.block_sparse_attention(q, k, k, ids, visible, None, 32, 0.25)
    assert T * 2 * 16 <= largest <= 1 << 19
