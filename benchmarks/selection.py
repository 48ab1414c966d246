"""How canvases select blocks of their prefix, measured: `python -m benchmarks.selection MODEL --data ROWS`.

MODEL has sparse layers and canvases (`python -m benchmarks.conversion` trains one). It answers with each way of
selecting: per query or per canvas, in every denoising step or in the first. The table has what each solves, its steps,
and how much its answers differ from those with a selection per query in every step.

The second table says how often selections differ, over sparse layers, index heads and queries, in canvases that take
so many steps whatever they hold: that of a step from the first step's and from the step before it, and that of a canvas
from those of its queries, given the same hidden states.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import machine
from blockdiff.data.rows import Row
from blockdiff.data.sources import Source, rows_of
from blockdiff.errors import CheckpointError
from blockdiff.evals import TASKS, task
from blockdiff.evals.questions import questions_of
from blockdiff.evals.run import evaluate
from blockdiff.models.minimax_m3.model import MiniMaxM3, MiniMaxM3Attention, mean_query
from blockdiff.sampling import Sampler
from blockdiff.sampling.loop import generate_in_lockstep
from blockdiff.terminal import quiet

BUDGET = ("index_block_size", "index_topk_blocks", "index_local_blocks")
KINDS = {
    "from_first_step": "from the first step's",
    "from_step_before": "from the step before's",
    "canvas_from_queries": "of the canvas from its queries'",
}
WAYS = (("query", False), ("query", True), ("canvas", False), ("canvas", True))


@contextmanager
def selecting(model: Path, selection: str, is_kept: bool, strategy: str | None = None) -> Iterator[Sampler]:
    """A sampler of the model whose canvases select so."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "model"
        shutil.copytree(model, copy)
        config = json.loads((copy / "config.json").read_text(encoding="utf-8"))
        config |= {"canvas_selection": selection, "canvas_selection_kept": is_kept}
        (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield Sampler.from_pretrained(copy, "float32", device="cpu", strategy=strategy)


def answered(model: Path, rows: Sequence[Row], name: str) -> list[dict[str, Any]]:
    """A line for each way of selecting; `changed` are the rows and tokens that differ from those of the first way."""
    lines: list[dict[str, Any]] = []
    first: list[str] = []
    for selection, is_kept in WAYS:
        with selecting(model, selection, is_kept) as sampler:
            found = evaluate(sampler, rows, task(name))
        texts = [record["text"] for record in found["records"]]
        first = first or texts
        pairs = list(zip(texts, first, strict=True))
        tokens = sum(max(len(a), len(b)) for a, b in pairs)
        lines.append(
            {
                "selection": selection,
                "is_kept": is_kept,
                "solved": found["solved_share"],
                "steps_per_canvas": found["steps_per_canvas"],
                "changed_answers": sum(a != b for a, b in pairs) / len(pairs),
                "changed_characters": sum(difference(a, b) for a, b in pairs) / max(1, tokens),
            }
        )
    return lines


def difference(one: str, other: str) -> int:
    """In how many places two texts differ."""
    return sum(a != b for a, b in zip(one, other, strict=False)) + abs(len(one) - len(other))


class Watched:
    """What the sparse layers of a model select for canvases, as long as they denoise.

    steps: by denoising step, [layers, B, T, heads, k], and what the canvases as wholes would have selected.
    """

    def __init__(self, model: MiniMaxM3):
        self.model, self.steps = model, list[tuple[Tensor, Tensor]]()
        self._of_layers: list[tuple[Tensor, Tensor]] = []
        self._is_denoising = False
        denoise, select = model.denoise, model.kernels.select_blocks

        def denoised(*arguments: Any) -> Tensor:
            self._of_layers, self._is_denoising = [], True
            hidden = denoise(*arguments)
            of_queries, of_canvases = zip(*self._of_layers, strict=True)
            self.steps.append((torch.stack(of_queries), torch.stack(of_canvases)))
            self._is_denoising = False
            return hidden

        def selected(q: Tensor, k: Tensor, visible_BT: Tensor, first_BT: Tensor, **budget: Any) -> Tensor:
            ids = select(q, k, visible_BT, first_BT, **budget)
            if self._is_denoising:
                T = q.shape[1]
                mean = mean_query(q, torch.ones_like(visible_BT, dtype=torch.bool), T)
                whole = select(mean, k, visible_BT[:, :1], first_BT[:, :1], **budget)
                self._of_layers.append((ids, whole.expand(-1, T, -1, -1)))
            return ids

        model.denoise = denoised  # type: ignore[method-assign, assignment]
        for layer in model.layers:
            attention = layer.attention
            if isinstance(attention, MiniMaxM3Attention) and attention.indexer is not None:
                attention.kernels = dataclasses.replace(model.kernels, select_blocks=selected)


def disagreements(model: Path, rows: Sequence[Row], name: str, steps: int) -> dict[str, Any]:
    """By step, the share of selections that differ; and over all steps."""
    with selecting(model, "query", False, "entropy_bound:stopping=never") as sampler:
        watched = Watched(sampler.model) if isinstance(sampler.model, MiniMaxM3) else None
        if watched is None or not sampler.model.denoises:
            raise CheckpointError(f"{model}: no MiniMax M3 with canvases, which is what selects; give one")
        length, questions = sampler.model.canvas_length, questions_of(rows, task(name))
        asked = [dataclasses.replace(q.request(), max_new_tokens=length, max_steps=steps) for q in questions]
        pending = [sampler.context.pending(each, n, 0) for n, each in enumerate(asked)]
        generate_in_lockstep(sampler.context, pending, len(pending))
    found = [ids for ids, _ in watched.steps]
    text = watched.model.config.text_config
    return {
        "from_first_step": [share(ids, found[0]) for ids in found[1:]],
        "from_step_before": [share(ids, before) for before, ids in pairwise(found)],
        "canvas_from_queries": [share(ids, whole) for ids, whole in watched.steps],
        "budget": {name: getattr(text, name) for name in BUDGET},
    }


def share(ids: Tensor, other: Tensor) -> float:
    """The share of selections that are other sets of blocks."""
    return float((ids.sort(-1).values != other.sort(-1).values).any(-1).double().mean())


def table(lines: Sequence[dict[str, Any]], differing: dict[str, Any]) -> str:
    """Both tables as Markdown."""
    rows = ["| selection | solved | steps per canvas | other answers | other tokens |", "|---|---|---|---|---|"]
    for line in lines:
        words = f"per {line['selection']}, {'in the first step' if line['is_kept'] else 'in every step'}"
        figures = f"{line['solved']:.1%} | {line['steps_per_canvas']:.2f} | {line['changed_answers']:.1%}"
        rows.append(f"| {words} | {figures} | {line['changed_characters']:.1%} |")
    steps = len(differing["canvas_from_queries"])
    head = ["selections that differ, by step", *(str(step + 1) for step in range(steps))]
    rows += ["", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for key, words in KINDS.items():
        cells = [""] * (steps - len(differing[key])) + [f"{x:.1%}" for x in differing[key]]
        rows.append(f"| {words} | {' | '.join(cells)} |")
    return "\n".join(rows)


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    """Print the tables, and write the numbers with their circumstances where asked to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.selection", description=str(__doc__).split("\n")[0])
    parser.add_argument("model", type=Path, help="a checkpoint directory")
    parser.add_argument("--task", choices=TASKS, default="sudoku")
    parser.add_argument("--data", required=True, help="rows of the task")
    parser.add_argument("--limit", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=8, help="of the canvases whose selections are compared")
    parser.add_argument("--output", type=Path)
    o = parser.parse_args(words)
    quiet()
    rows = list(islice(rows_of(Source(o.data, split="test")), o.limit))
    differing = disagreements(o.model, rows, o.task, o.steps)
    lines = answered(o.model, rows, o.task)
    print(table(lines, differing))
    figures = {
        "lines": lines,
        "disagreements": differing,
        "rows": len(rows),
        "machine": machine.describe(torch.device("cpu")),
    }
    if o.output is not None:
        o.output.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return figures


if __name__ == "__main__":
    main()
