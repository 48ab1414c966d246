"""`reinforce`: reinforcement learning in one call, by the same `Trainer` as `train`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from blockdiff.errors import RecipeError
from blockdiff.rl.reward import Reward
from blockdiff.training.callbacks import Callback
from blockdiff.training.recipe_files import AnyRecipe
from blockdiff.training.run import Run
from blockdiff.training.trainer import Trainer


def reinforce(
    recipe: AnyRecipe,
    overrides: Sequence[str] = (),
    output: str | Path | None = None,
    resume: bool = False,
    *,
    reward: Reward | None = None,
    overwrite: bool = False,
    optimiser: Callable[..., torch.optim.Optimizer] | None = None,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Reinforce what earns rewards, as the section `rl` of a recipe says, and return the run.

    reward: called with a row, as its file has it, and the `Result`; it is added to those that the recipe names. The
    others are as in `blockdiff.train`. Raises what `Trainer.fit` raises.
    """
    trainer = Trainer(
        recipe, overrides, output, resume, reward=reward, overwrite=overwrite, optimiser=optimiser, callbacks=callbacks
    )
    if trainer.recipe.rl is None:
        raise RecipeError("rl: missing; say at least which policy is reinforced, `rl: {policy: head}`")
    return trainer.fit()
