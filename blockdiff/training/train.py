"""`train`: a run in one call, which constructs a `Trainer` and runs it."""

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
    """Train a model as a recipe describes and return the run, like the command `blockdiff train`.

    recipe: the path of a YAML recipe, a mapping with the same keys (rows in memory may replace sources), or a Recipe.
    overrides: `key.path=value` texts.
    output: the run directory.
    resume: continue from its last checkpoint.
    overwrite: replace the run in the directory, once the new one can begin.
    The other arguments are the user's own parts, as in `Trainer`. Raises what `Trainer.fit` raises.
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
