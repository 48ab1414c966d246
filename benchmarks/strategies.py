"""What each sampling strategy gives on one model: the share of rows solved, and the denoising steps that it costs.

    python -m benchmarks.strategies MODEL --task sudoku --data test.jsonl [--limit 200] [--strategy TEXT@STEPS ...]

Every strategy answers the same rows with the same draws, one after the other in one process. STEPS are the most steps
of a canvas; without them they are the settings'. docs/sampling.md quotes what this prints.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks import machine
from blockdiff.data.sources import Source, rows_of
from blockdiff.evals import TASKS, task
from blockdiff.evals.run import evaluate
from blockdiff.sampling import Sampler
from blockdiff.terminal import quiet

STICKY = "sticky=true,stopping=all_kept"
ANCESTRAL = "temperature=constant,t_max=1,stopping=never"
STRATEGIES = (
    *("entropy_bound", f"entropy_bound:{STICKY}", "entropy_bound:temperature=cosine"),
    *("entropy_bound:temperature=constant,t_max=1", "entropy_bound:stopping=stable"),
    *("entropy_bound:stopping=confident", "entropy_bound:stopping=never@8"),
    *("entropy_bound:top_k=1", "entropy_bound:top_p=0.9", "entropy_bound:min_p=0.1", "entropy_bound:guidance=1"),
    *("confident", f"confident:{STICKY}", "quota@16", f"quota:{STICKY}@16", f"quota:{STICKY}@8", f"quota:{STICKY}@4"),
    *(f"quota:pace=cosine,{STICKY}@8", "ddim@16", f"ddim:{ANCESTRAL}@8", f"ddim:{ANCESTRAL}@16"),
    f"ddim:corrections=1,{ANCESTRAL}@16",
)


def measure(
    sampler: Sampler, rows: Sequence[Any], name: str, strategies: Sequence[str], batch_size: int = 100, seed: int = 0
) -> list[dict[str, Any]]:
    """A line per strategy: its text, the most steps, rows, solved, steps per canvas and seconds."""
    lines = []
    for said in strategies:
        text, _, steps = said.partition("@")
        named = Sampler(sampler.model, sampler.tokenizer, sampler.generation, sampler.choices, text)
        most = int(steps) if steps else sampler.generation.max_steps
        found = evaluate(named, rows, task(name), batch_size=batch_size, seed=seed, max_steps=most)
        line = {"strategy": text, "most_steps": most, "rows": found["count"], "solved": found["solved"]}
        lines.append(line | {name: found[name] for name in ("steps_per_canvas", "seconds", "errors")})
    return lines


def table(lines: Sequence[dict[str, Any]]) -> str:
    """The lines as Markdown."""
    rows = ["| strategy | most steps | solved | steps per canvas | seconds |", "|---|---|---|---|---|"]
    for line in lines:
        share = f"{line['solved']} of {line['rows']}"
        figures = f"{line['steps_per_canvas']:.2f} | {line['seconds']:.1f}"
        rows.append(f"| `{line['strategy']}` | {line['most_steps']} | {share} | {figures} |")
    return "\n".join(rows)


def main(words: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Print the table, and write the numbers with their circumstances where asked to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.strategies", description=__doc__.split("\n")[0])
    parser.add_argument("model", help="a checkpoint directory or hub id")
    parser.add_argument("--task", choices=TASKS, default="sudoku")
    parser.add_argument("--data", required=True, help="rows of the task")
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--strategy", action="append", help="TEXT or TEXT@STEPS, instead of those of the table")
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args(words)
    quiet()
    sampler = Sampler.from_pretrained(asked.model, dtype="float32", device="cpu")
    rows = list(islice(rows_of(Source(asked.data, split="test")), asked.limit))
    lines = measure(sampler, rows, asked.task, asked.strategy or STRATEGIES, asked.batch_size, asked.seed)
    print(table(lines))
    if asked.output is not None:
        circumstances = {"machine": machine.describe(sampler.model.device), "model": asked.model, "seed": asked.seed}
        asked.output.write_text(json.dumps({**circumstances, "lines": lines}, indent=1) + "\n", encoding="utf-8")
    return lines


if __name__ == "__main__":
    main()
