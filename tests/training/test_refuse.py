"""What a recipe is told before anything is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from blockdiff.diffusion.corruption import MaskCorruption
from blockdiff.errors import BlockdiffError
from blockdiff.training import assemble
from blockdiff.training.recipe import Recipe
from blockdiff.training.refuse import refuse, without_effect


def recipe(**sections: dict[str, Any]) -> Recipe:
    base: dict[str, dict[str, Any]] = {
        "model": {"preset": "tiny"},
        "data": {"train": "a.jsonl"},
        "train": {"steps": 9, "batch_size": 2},
    }
    return Recipe.model_validate(
        base | {name: base.get(name, {}) | section for name, section in sections.items()}
    )


HELD = {"train": "a.jsonl", "heldout": "b.jsonl"}


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"evaluation": {"patience": 2}}, "needs evaluation.best"),
        ({"evaluation": {"best": "heldout_cnavas_loss"}, "data": HELD}, "no metric 'heldout_cnavas_loss'"),
        ({"evaluation": {"best": "heldout_canvas_loss"}}, "measured on data.heldout, which is not set"),
        ({"evaluation": {"best": "sample_accuracy"}, "data": HELD}, "measured on evaluation.prompts"),
        (
            {"evaluation": {"best": "heldout_ar_loss"}, "data": HELD, "objective": {"ar_weight": 0}},
            "not measured with objective.ar_weight 0",
        ),
        (
            {"evaluation": {"best": "heldout_canvas_loss", "patience": 1}, "data": HELD},
            "measured at the end only; set train.eval_every",
        ),
        ({"train": {"trackers": ["tensorbord"]}}, "no tracker is called 'tensorbord'"),
    ],
)
def test_what_would_only_fail_after_training_is_refused_before(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(BlockdiffError, match=said):
        refuse(recipe(**sections))


def test_more_processes_than_examples_of_a_step_are_refused() -> None:
    refuse(recipe(), world=2)
    with pytest.raises(BlockdiffError, match="2 is less than 3 processes"):
        refuse(recipe(), world=3)


@pytest.mark.parametrize("token", ["<eos>", "<pad>", "<bos>", "nowhere"])
def test_a_mask_token_that_texts_contain_is_refused(token: str) -> None:
    from types import SimpleNamespace

    from blockdiff.data.tokenizer import character_tokenizer

    base = assemble.Basis(character_tokenizer("ab?"), SimpleNamespace(), eos_id=1, pad_id=0)
    chosen = assemble.corruption(recipe(objective={"corruption": "mask", "mask_token": "?"}), base)
    assert isinstance(chosen, MaskCorruption) and chosen.mask_id == 5
    with pytest.raises(BlockdiffError, match=r"objective\.mask_token: "):
        assemble.corruption(recipe(objective={"corruption": "mask", "mask_token": token}), base)


def test_keys_without_effect_are_named() -> None:
    assert without_effect(recipe()) == []
    changed = recipe(
        data={"canvases": "all", "which": "last", "shuffle_buffer": 5, "too_long": "drop"},
        objective={"power": 3, "time_mean": 1, "weight_max": 5, "mask_token": "x"}
        | {"ar_weight": 0, "ar_scope": "response"},
        optim={"decay_steps": 3, "schedule": "constant", "final_lr_ratio": 0.5},
        train={"keep_every": 7, "save_every": 5, "eval_every": 3},
        evaluation={"prompts_every": 4},
    )
    keys = [line.split()[0] for line in without_effect(changed)]
    assert keys == [
        "data.which", "data.shuffle_buffer", "data.too_long", "objective.power", "objective.time_mean",
        "objective.mask_token", "objective.weight_max", "objective.ar_scope", "optim.decay_steps",
        "optim.final_lr_ratio", "train.eval_every", "train.keep_every", "evaluation.prompts_every",
    ]  # fmt: skip
    meant = recipe(objective={"schedule": "polynomial", "power": 3, "weight": "elbo", "weight_max": 5})
    assert without_effect(meant) == []
