"""`train`: a run in one call; `Trainer` is the class that it makes and runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from blockdiff.diffusion.corruption import Corruption
from blockdiff.diffusion.schedule import Schedule
from blockdiff.diffusion.weight import Weight
from blockdiff.objective import Objective
from blockdiff.rl.reward import Reward
from blockdiff.training.callbacks import Callback
from blockdiff.training.kinds.kind import Kind
from blockdiff.training.recipe_files import AnyRecipe
from blockdiff.training.run import Run
from blockdiff.training.trainer import Trainer


def train(
    recipe: AnyRecipe,
    overrides: Sequence[str] = (),
    output: str | Path | None = None,
    resume: bool = False,
    *,
    overwrite: bool = False,
    schedule: Schedule | None = None,
    corruption: Corruption | None = None,
    weight: Weight | None = None,
    objective: Callable[..., Objective] | None = None,
    optimiser: Callable[..., torch.optim.Optimizer] | None = None,
    reward: Reward | Mapping[Reward, float] | None = None,
    kind: Kind | None = None,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Train what a recipe says and return the run: `Trainer(...).fit()`, with every guarantee of the command.

    recipe: the path of a YAML recipe, a mapping with the same keys (rows may stand in it, in memory), or a Recipe.
    overrides: `key.path=value` texts. output: the run directory. resume: go on from its last checkpoint. overwrite:
    replace the run that is there, once the new one can begin. The others are parts of one's own, as `Trainer` takes
    them. Raises what `Trainer.fit` raises.
    """
    return Trainer(
        recipe,
        overrides,
        output,
        resume,
        overwrite=overwrite,
        schedule=schedule,
        corruption=corruption,
        weight=weight,
        objective=objective,
        optimiser=optimiser,
        reward=reward,
        kind=kind,
        callbacks=callbacks,
    ).fit()
