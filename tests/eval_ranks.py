"""What `test_eval_ranks.py` runs on one process and on three: held-out figures and sampled prompts of one model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from blockdiff.checkpoint import init
from blockdiff.data.chat import Example
from blockdiff.data.collate import Collator, RandomCanvases, heldout_batches
from blockdiff.data.rows import Row
from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.diffusion.corruption import UniformCorruption
from blockdiff.diffusion.schedule import Linear, StratifiedTime
from blockdiff.evals import task
from blockdiff.objective import Objective
from blockdiff.parallel.ranks import Ranks
from blockdiff.sampling import Generation, Sampler
from blockdiff.training.heldout import heldout
from blockdiff.training.samples import sample_prompts
from tests.oracle import TWO_LAYERS, tiny_config

EXAMPLES = [Example(n, [2, *range(3 + n, 20 + 2 * n)], [(4, 18 + n)]) for n in range(8)]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
ROWS = [Row(f"f:{n}", prompt=LETTERS[: 1 + n], response=LETTERS[n : n + 9]) for n in range(5)]


def figures(ranks: Ranks) -> dict[str, Any]:
    """Everything that evaluating in training gives on this rank: 8 examples and 5 prompts do not divide by 3."""
    config = tiny_config(canvas_length=8, **TWO_LAYERS)
    model = init(config, seed=3, dtype="float64", device="cpu", kernels="torch")
    objective = Objective(model, Linear(), UniformCorruption(model.vocab_size), seed=11)
    collator = Collator(8, pad_id=0, eos_id=1, seed=5, time=StratifiedTime(1e-4), canvases=RandomCanvases(2))

    def batches(examples: int) -> Any:
        return heldout_batches(EXAMPLES[:examples], collator, 2, rank=ranks.rank, world=ranks.world)

    sampler = Sampler(model, character_tokenizer(LETTERS), Generation(max_steps=3, eos_ids=(1,)))
    exact = task("exact")
    return {
        "heldout": heldout(objective, batches(8), ranks, noise_levels=3),
        "fewer than ranks": heldout(objective, batches(2), ranks, noise_levels=3),
        "sampled": sample_prompts(sampler, ROWS, exact, ranks, batch_size=2)._asdict(),
        "fewer prompts than ranks": sample_prompts(sampler, ROWS[:2], exact, ranks)._asdict(),
    }


def write_figures(ranks: Ranks, directory: Path) -> None:
    """Write what this rank found to `directory`."""
    (directory / f"found-{ranks.rank}.json").write_text(json.dumps(figures(ranks)))
