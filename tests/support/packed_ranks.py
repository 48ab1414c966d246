"""The ranks of `test_packing.py`, one process and two: packed steps of which the second rank may get nothing."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file

from blockdiff.canvas import Batch
from blockdiff.checkpoint import init
from blockdiff.data.canvas_choice import AllCanvases
from blockdiff.data.collate import Collator
from blockdiff.data.example import Example
from blockdiff.data.order import Order
from blockdiff.data.step_batches import micro_batches
from blockdiff.diffusion.corruption import UniformCorruption
from blockdiff.diffusion.schedule import Linear, StratifiedTime
from blockdiff.objective import Objective
from blockdiff.parallel.ranks import Ranks
from tests.support.oracle import TWO_LAYERS, tiny_config, widen_routers
from tests.support.ranks import train_plainly

L = 8


def everything(ranks: Ranks, directory: Path) -> None:
    """Three steps of six examples: packed into one row, into two, and unpacked."""
    model = init(tiny_config(canvas_length=L, **TWO_LAYERS), seed=3, device="cpu", kernels="torch")
    widen_routers(model)
    objective = Objective(model, Linear(), UniformCorruption(model.vocab_size), seed=11)
    examples = [Example(i, [2, *((7 * i + 3 * j) % 300 + 3 for j in range(12 + i))], [(4, 13 + i)]) for i in range(9)]
    make = Collator(L, 0, 1, 3, StratifiedTime(), canvases=AllCanvases())
    rows: list[int] = []

    def batches(step: int) -> list[Batch]:
        pack = (500, 60, None)[step - 1]
        window = micro_batches(examples, Order(9, 6, seed=1), make, step, pack=pack, rank=ranks.rank, world=ranks.world)
        rows.append(sum(int((batch.doc_start_BS[:, 0] >= 0).sum()) for batch in window))
        return window

    records, tensors = train_plainly(objective, batches, ranks, 5e-4)
    save_file({name: t.contiguous() for name, t in tensors.items()}, directory / f"{ranks.rank}.safetensors")
    (directory / f"{ranks.rank}.json").write_text(json.dumps({"records": records, "rows": rows}))
