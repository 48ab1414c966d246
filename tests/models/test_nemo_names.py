"""The names that NeMo AutoModel's documentation has for MiniMax M3, with its arguments and results."""

from __future__ import annotations

import inspect

import pytest
import torch

from blockdiff.kernels.block_sparse.torch import seen_keys, select_blocks
from blockdiff.models import minimax_m3
from blockdiff.models.minimax_m3 import _padding_mask_to_additive_bias, build_block_sparse_attn_bias, swiglu_oai
from tests.families import small_model

pytestmark = pytest.mark.quick


def test_the_modules_are_what_a_model_is_made_of():
    model = small_model("minimax_m3")
    dense, sparse = model.layers[0], model.layers[1]
    assert type(dense) is type(sparse) is minimax_m3.Block
    assert type(sparse.attention) is minimax_m3.MiniMaxM3Attention and dense.attention.indexer is None
    assert type(sparse.attention.indexer) is minimax_m3.MiniMaxM3Indexer
    assert type(dense.mlp) is type(sparse.shared) is minimax_m3.MiniMaxM3MLP
    norms = (model.norm, dense.input_norm, sparse.attention.q_norm, sparse.attention.indexer.k_norm)
    assert {type(norm) for norm in norms} == {minimax_m3.MiniMaxM3RMSNorm}
    assert {name for name in minimax_m3.__all__ if name not in ("FAMILIES", "MiniMaxM3")} <= vars(minimax_m3).keys()


def test_the_functions_take_the_arguments_by_their_names():
    sizes = ("block_size", "topk_blocks", "init_blocks", "local_blocks", "num_q_heads")
    named = inspect.signature(build_block_sparse_attn_bias).parameters
    assert tuple(named) == ("idx_q", "idx_k", *sizes, "score_type") and named["score_type"].default == "max"
    assert tuple(inspect.signature(swiglu_oai).parameters) == ("gate", "up", "alpha", "limit")
    assert tuple(inspect.signature(_padding_mask_to_additive_bias).parameters) == ("mask", "ref")


def test_index_heads_are_repeated_over_the_query_heads_that_they_choose_for():
    q, k = torch.randn(1, 13, 2, 8), torch.randn(1, 13, 1, 8)
    bias = build_block_sparse_attn_bias(q, k, 4, 2, 0, 1, num_q_heads=6)
    visible = torch.arange(1, 14)[None]
    ids = select_blocks(q, k.squeeze(2), visible, block=4, topk=2)
    seen = seen_keys(ids, visible, None, 4, 13)
    for head in range(6):
        assert torch.equal(bias[:, head] == 0, seen[:, :, head // 3])
    assert set(bias.unique().tolist()) == {0.0, -torch.inf}


def test_masks_of_padding_become_biases_and_biases_stay():
    keep = torch.tensor([[1, 1, 0], [1, 0, 0]])
    expected = torch.tensor([[[[0.0, 0.0, -torch.inf]]], [[[0.0, -torch.inf, -torch.inf]]]])
    for mask in (keep, keep.bool(), keep.bool()[:, None, None], keep.float()):
        bias = _padding_mask_to_additive_bias(mask, torch.zeros(1, dtype=torch.bfloat16))
        assert bias.dtype == torch.bfloat16 and torch.equal(bias, expected.bfloat16())
    assert torch.equal(_padding_mask_to_additive_bias(expected, torch.zeros(1)), expected)
