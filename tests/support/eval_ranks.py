"""The ranks of `test_eval_ranks.py`, one process and three: held-out figures and sampled prompts of one model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from blockdiff.canvas import Batch
from blockdiff.checkpoint import draw_weights, empty
from blockdiff.data.canvas_choice import RandomCanvases
from blockdiff.data.collate import Collator
from blockdiff.data.example import Example
from blockdiff.data.rows import Row
from blockdiff.data.step_batches import heldout_batches
from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.diffusion.corruption import UniformCorruption
from blockdiff.diffusion.schedule import Linear, StratifiedTime
from blockdiff.errors import DataError, RunError
from blockdiff.evals import task
from blockdiff.objective import Objective
from blockdiff.parallel.mesh import Mesh
from blockdiff.parallel.ranks import Ranks
from blockdiff.parallel.shard import split
from blockdiff.parallel.signals import Interrupted
from blockdiff.sampling import Generation, Sampler
from blockdiff.training.kinds.canvas_heldout import heldout
from blockdiff.training.samples import sample_prompts
from tests.support.oracle import TWO_LAYERS, our_config, tiny_config

EXAMPLES = [Example(n, [2, *range(3 + n, 20 + 2 * n)], [(4, 18 + n)]) for n in range(8)]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
ROWS = [Row(f"f:{n}", prompt=LETTERS[: 1 + n], response=LETTERS[n : n + 9]) for n in range(5)]


def figures(mesh: Mesh) -> dict[str, Any]:
    """Everything that evaluating in training gives on this rank: 8 examples and 5 prompts do not divide by 3."""
    ranks, model = mesh.ranks, empty(our_config(tiny_config(canvas_length=8, **TWO_LAYERS)), kernels="torch")
    if mesh.is_split:
        split(model, mesh, torch.float64)
    draw_weights(model, seed=3, dtype="float64", device="cpu")
    objective = Objective(model, Linear(), UniformCorruption(model.vocab_size), seed=11)
    collator = Collator(8, pad_id=0, fill_id=1, seed=5, time=StratifiedTime(1e-4), canvases=RandomCanvases(2))

    def batches(examples: int) -> Any:
        return heldout_batches(EXAMPLES[:examples], collator, 2, rank=ranks.rank, world=ranks.world)

    def disturbed(error: Exception) -> str:
        """The words of every rank when the last one leaves its second batch with an error."""

        def until_it_leaves() -> Iterator[Batch]:
            for place, batch in enumerate(batches(8)):
                if place == 1 and ranks.rank == ranks.world - 1:
                    raise error
                yield batch

        try:
            heldout(objective, until_it_leaves(), ranks)
        except (DataError, RunError, Interrupted) as raised:
            return f"{type(raised).__name__}: {raised}"
        return "finished"

    sampler = Sampler(model, character_tokenizer(LETTERS), Generation(max_steps=3, eos_ids=(1,)))
    exact = task("exact")
    return {
        "heldout": heldout(objective, batches(8), ranks, noise_levels=3),
        "fewer than ranks": heldout(objective, batches(2), ranks, noise_levels=3),
        "sampled": sample_prompts(sampler, ROWS, exact, ranks, batch_size=2)._asdict(),
        "failed": disturbed(DataError("a row is broken")),
        "interrupted": disturbed(Interrupted()),
        "fewer prompts than ranks": sample_prompts(sampler, ROWS[:2], exact, ranks)._asdict(),
    }


def write_figures(ranks: Ranks, directory: Path) -> None:
    """Write what this rank found to `directory`, with whole weights on every rank and with pieces."""
    found = {shard: figures(Mesh.of(ranks, shard)) for shard in ("none", "full")}
    (directory / f"found-{ranks.rank}.json").write_text(json.dumps(found))
