"""A prefix of blocks: each clean token sees its whole block, and canvases begin where blocks do."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config

from blockdiff.errors import BlockdiffError, CheckpointError
from tests.support.families import SMALL, m3_text_config, small_model
from tests.support.oracle import our_config

pytestmark = pytest.mark.quick

L = 4
BLOCKS = dict(canvas_length=L, prefix="blocks")


@pytest.fixture(scope="module")
def model():
    return small_model("qwen3 sliding, blocks")


def test_a_clean_token_sees_its_whole_block(model):
    tokens = torch.arange(2 * 15).view(2, 15)
    whole = model.encode(tokens).hidden
    changed = tokens.clone()
    changed[:, 10] += 1  # in the block of columns 8 to 11
    has_changed = (model.encode(changed).hidden != whole).any(-1)
    assert has_changed.tolist() == [[column >= 8 for column in range(15)]] * 2


def test_nothing_follows_a_row_that_ends_within_a_block(model):
    prefix = model.encode(torch.ones(1, L + 1, dtype=torch.int64))
    with pytest.raises(BlockdiffError, match="block of 4"):
        model.denoise(torch.ones(1, L, dtype=torch.int64), prefix)
    with pytest.raises(BlockdiffError, match="block of 4"):
        model.encode(torch.ones(1, 1, dtype=torch.int64), prefix=prefix)


def test_the_config_says_it_and_is_written_as_it_was_read():
    config = our_config(LlamaConfig(**SMALL, **BLOCKS))
    assert (config.block, config.predicts_next_tokens) == (L, False)
    assert type(config).read(config.to_dict()) == config
    causal = our_config(LlamaConfig(**SMALL))
    assert (causal.block, causal.predicts_next_tokens) == (None, True)
    assert causal.with_canvases(L, "blocks").block == L


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SMALL, canvas_length=L, prefix="block"),
        Qwen3Config(**SMALL, prefix="blocks"),
        m3_text_config(**BLOCKS),
    ],
    ids=["a wrong word", "no canvas_length", "minimax_m3"],
)
def test_another_word_and_a_family_without_it_are_refused(config):
    with pytest.raises(CheckpointError, match="prefix"):
        our_config(config)
