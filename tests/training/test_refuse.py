"""Refusals of recipes before anything is loaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.diffusion.corruption import MaskCorruption
from blockdiff.errors import BlockdiffError
from blockdiff.training.recipe import Recipe
from blockdiff.training.recipe_checks import refuse, without_effect
from blockdiff.training.recipe_choices import MaskToken

pytestmark = pytest.mark.quick


def recipe(**sections: dict[str, Any]) -> Recipe:
    base: dict[str, dict[str, Any]] = {
        "model": {"preset": "tiny"},
        "data": {"train": "a.jsonl"},
        "train": {"steps": 9, "batch_size": 2},
    }
    return Recipe.model_validate(base | {name: base.get(name, {}) | section for name, section in sections.items()})


HELD = {"train": "a.jsonl", "heldout": "b.jsonl"}


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"evaluation": {"patience": 2}}, r"evaluation\.patience: .*evaluation\.best"),
        ({"evaluation": {"best": "heldout_cnavas_loss"}, "data": HELD}, "'heldout_cnavas_loss'"),
        ({"evaluation": {"best": "heldout_canvas_loss"}}, r"data\.heldout"),
        ({"evaluation": {"best": "sample_accuracy"}, "data": HELD}, r"evaluation\.prompts"),
        (
            {"evaluation": {"best": "heldout_ar_loss"}, "data": HELD, "objective": {"ar_loss": "none"}},
            r"canvas.*heldout_ar_loss",
        ),
        (
            {"evaluation": {"best": "heldout_canvas_loss", "patience": 1}, "data": HELD},
            r"train\.eval_every",
        ),
        (
            {
                "evaluation": {"best": "heldout_canvas_loss"},
                "data": HELD,
                "objective": {"kind": "drafter", "target": "a"},
            },
            r"drafter.*heldout_accepted_length",
        ),
        ({"evaluation": {"best": "heldout_draft_loss"}, "data": HELD}, r"canvas.*heldout_draft_loss"),
        (
            {"evaluation": {"best": "sample_reward", "prompts": "a"}},
            r"canvas.*sample_reward",
        ),
        ({"train": {"steps": None, "epochs": 2}, "data": {"streaming": True}}, r"train\.epochs: "),
        ({"train": {"trackers": ["tensorbord"]}}, "'tensorbord'"),
        ({"objective": {"normalisation": "corrupted"}}, r"objective\.normalisation: .*objective\.positions: corrupted"),
    ],
)
def test_what_would_only_fail_after_training_is_refused_before(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(BlockdiffError, match=said):
        refuse(recipe(**sections))


def test_more_processes_than_examples_of_a_step_are_refused() -> None:
    refuse(recipe(), world=2)
    with pytest.raises(BlockdiffError, match=r"2 .*3 processes"):
        refuse(recipe(), world=3)


@pytest.mark.parametrize("token", ["<eos>", "<pad>", "<bos>", "nowhere"])
def test_a_mask_token_that_texts_contain_is_refused(token: str) -> None:
    tokenizer = character_tokenizer("ab?")
    reserved = (1, 0, tokenizer.bos_token_id)
    assert MaskToken("?").for_tokenizer(tokenizer, 6, reserved, None) == MaskCorruption(5)
    assert MaskToken().for_tokenizer(tokenizer, 6, reserved, 4) == MaskCorruption(4)  # that of the model's config
    with pytest.raises(BlockdiffError, match=r"objective\.corruption: "):
        MaskToken(token).for_tokenizer(tokenizer, 6, reserved, 4)


def test_keys_that_need_those_of_another_section_are_named() -> None:
    assert without_effect(recipe(optim={"warmup_steps": 8}), 9) == []
    changed = recipe(
        train={"keep_every": 7, "save_every": 5, "eval_every": 3, "steps": 30},
        evaluation={"prompts_every": 4, "strategy": "confident"},
        optim={"momentum": 0.9, "eps": 1e-6},
        given={"optimiser": torch.optim.SGD},
    )
    keys = [line.split()[0] for line in without_effect(changed, 30)]
    assert keys == [
        *("optim.momentum", "optim.eps", "train.eval_every", "train.keep_every"),
        *("evaluation.prompts_every", "evaluation.strategy"),
    ]
    canvases = recipe(generation={"temperature": 0.5, "max_steps": 9})
    assert [line.split()[0] for line in without_effect(canvases, 9)] == ["generation.temperature"]
    next_tokens = recipe(objective={"kind": "next_token"}, generation={"temperature": 0.5, "max_steps": 9})
    assert [line.split()[0] for line in without_effect(next_tokens, 9)] == ["generation.max_steps"]
    drafted = recipe(objective={"kind": "drafter", "target": "a", "anchors": 9})
    assert without_effect(drafted, 9) == []
    for passes, said in ((1, ["data.canvases", "objective.ratio_clip"]), (2, ["data.canvases"])):
        policy = {
            "kind": "policy",
            "over": "next_token",
            "reward": "sudoku",
            "ratio_clip": [0.1, 0.1],
            "passes": passes,
        }
        reinforced = recipe(objective=policy, data={"canvases": "all"}, train={"batch_size": 128})
        assert [line.split()[0] for line in without_effect(reinforced, 9)] == said
    for lora, said in (
        ({"tokens": ["a"]}, ["lora.alpha", "lora.dropout"]),
        ({"parts": {"experts": 2}}, ["lora.dropout"]),
        ({"rank": 2}, []),
    ):
        adapted = recipe(lora=lora | {"alpha": 3, "dropout": 0.1})
        assert [line.split()[0] for line in without_effect(adapted, 9)] == said


def test_a_warm_up_that_never_ends_is_named() -> None:
    (line,) = without_effect(recipe(optim={"warmup_steps": 25}), 20)
    assert line == "optim.warmup_steps: the warm-up of 25 steps does not end within the 20 steps of the run"
