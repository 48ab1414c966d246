"""The ranks of `test_distil.py`, one process and two, which roll out with weights that training has changed."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file

from blockdiff.canvas import Batch
from blockdiff.data.canvas_choice import AllCanvases
from blockdiff.data.collate import Collator
from blockdiff.data.example import Example
from blockdiff.data.order import Order
from blockdiff.data.step_batches import micro_batches
from blockdiff.diffusion.corruption import UniformCorruption
from blockdiff.diffusion.schedule import Linear, StratifiedTime
from blockdiff.objective import Objective
from blockdiff.parallel.ranks import Ranks
from blockdiff.sampling import Generation, Sampler
from blockdiff.training.kinds.distil import Settled
from tests.support.families import small_model
from tests.support.ranks import train_plainly

L, SEED = 8, 5
GENERATION = Generation(max_steps=4, eos_ids=(1,), entropy_bound=1.0, stability=0, confidence=0.6)
COLLATOR = Collator(L, 0, 1, 3, StratifiedTime(), canvases=AllCanvases())
EXAMPLES = [Example(i, [2, *((7 * i + 3 * j) % 90 + 3 for j in range(12 + i))], [(4, 13 + i)]) for i in range(9)]


def sampler(seed: int = 3) -> Sampler:
    """A sampler of a random model in fp64, whose rule ends about half of the canvases."""
    return Sampler(small_model("diffusion_gemma", seed), generation=GENERATION)


def no_rows(step: int) -> list[Batch]:
    """No rows: the batches are given."""
    return []


def everything(ranks: Ranks, directory: Path) -> None:
    """Five steps of six examples, in micro-batches of two rows."""
    distil = Settled(no_rows, sampler(), sampler(seed=4), SEED)
    model = distil.student.model

    def batches(step: int) -> list[Batch]:
        order = Order(len(EXAMPLES), 6, seed=1)
        return distil.distilled(
            micro_batches(EXAMPLES, order, COLLATOR, step, micro_batch_size=2, rank=ranks.rank, world=ranks.world)
        )

    objective = Objective(model, Linear(), UniformCorruption(model.vocab_size), seed=11)
    _, tensors = train_plainly(objective, batches, ranks, 5e-2)
    record = distil.read(ranks, 1.0)
    assert 0.2 < record["rollout_settled"] < 1 and record["rollout_steps_per_canvas"] > 1
    save_file({name: t.contiguous() for name, t in tensors.items()}, directory / f"{ranks.rank}.safetensors")
