"""Models whose clean tokens see their whole block predict no next tokens: whatever needs those is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import typer

import blockdiff
from blockdiff.checkpoint import Generation
from blockdiff.cli.model import ModelOptions, SamplingOptions
from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.errors import BlockdiffError, RecipeError, RequestError
from blockdiff.models.drafted import Drafted
from blockdiff.models.llama import Llama
from blockdiff.sampling import Request, Sampler
from blockdiff.sampling.scores import score
from blockdiff.training.kinds.kind import kind_of
from blockdiff.training.recipe_files import read_recipe
from tests.support.families import small_model
from tests.support.recipes import MINIMAL_TREE

pytestmark = pytest.mark.quick
WHY = "prefix: blocks"


@pytest.fixture(scope="module")
def model() -> Any:
    return small_model("qwen3 sliding, blocks")


@pytest.mark.parametrize("strategy", ["next_token", "verified", "verified:steps=2"])
def test_strategies_that_ask_the_head_are_refused(model, strategy):
    name = strategy.partition(":")[0]
    with pytest.raises(RequestError, match=f"the strategy {name}: .*{WHY}"):
        Sampler(model, strategy=strategy)
    with pytest.raises(RequestError, match=f"the strategy {name}: .*{WHY}"):
        Sampler(model).generate([Request("a", tokens=[3, 4], strategy=strategy)], max_new_tokens=8)


@pytest.mark.parametrize("asked", [{"scores": True}, {"scores": True, "top_logprobs": 2}, {"best_of": 2}])
def test_scores_and_the_best_by_score_are_refused(model, asked):
    with pytest.raises(RequestError, match=f"{next(iter(asked))}: .*{WHY}"):
        Sampler(model).generate([Request("a", tokens=[3, 4], **asked)], max_new_tokens=8)


def test_texts_are_not_scored(model):
    with pytest.raises(BlockdiffError, match=f"scores: .*{WHY}"):
        score(model, [[3]], [[4]])


def test_such_a_model_neither_verifies_drafts_nor_drafts_for_another(model):
    causal = small_model("qwen3 sliding, denoising")
    with pytest.raises(BlockdiffError, match=WHY):
        Drafted(model, causal)
    with pytest.raises(BlockdiffError, match=f"draft model.*{WHY}"):
        Drafted(causal, model)
    assert isinstance(Drafted(causal, causal).target, Llama)


@pytest.mark.parametrize(
    ("objective", "key"),
    [
        ({"kind": "canvas", "ar_loss": 0.5}, r"objective\.ar_loss"),
        ({"kind": "policy", "over": "next_token"}, r"objective\.over: next_token"),
        ({"kind": "policy", "over": "canvas", "ar_loss": 1.0}, r"objective\.ar_loss"),
    ],
)
def test_losses_of_next_tokens_are_refused(model, objective, key):
    recipe = read_recipe(MINIMAL_TREE | {"objective": objective}, needs_data=False)
    with pytest.raises(RecipeError, match=f"{key}: .*{WHY}"):
        kind_of(recipe).require(recipe, model.config)


def test_the_command_refuses_it_before_weights_are_read(model, tmp_path):
    blockdiff.save(model, tmp_path, tokenizer=character_tokenizer("ab"), generation=Generation(eos_ids=(2,)))
    (tmp_path / "model.safetensors").unlink()
    opened = ModelOptions(str(tmp_path))
    for asked in ({"scores": True}, {"best_of": True}):
        with pytest.raises(typer.BadParameter, match=WHY):
            opened.require_head(**asked)
    opened.require_head(scores=False, best_of=False)
    with pytest.raises(typer.BadParameter, match=WHY):
        SamplingOptions(strategy="next_token").strategy_for(opened)
    assert SamplingOptions(strategy="confident").strategy_for(opened) is not None
    with pytest.raises(BlockdiffError, match=WHY):
        blockdiff.checkpoint.drafter_for(tmp_path)
