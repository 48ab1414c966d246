"""Adapting a trained model to a new task with LoRA, on a CPU: `python -m benchmarks.adaptation --output DIR`.

A base of the quickstart's kind learns 4x4 sudoku in digits, with a tokenizer that also knows letters and other signs.
Then adapters, and the embedding rows of the signs that the base has never seen, learn puzzles in letters with another
prompt: `#ab__/__cd/...?`. The table has the share of puzzles solved in both tasks, before and after, the seconds of the
two trainings, and what transformers' `generate` solves with the merged checkpoint. A puzzle has one solution, so a
text is right if it equals the reference.

What lies in DIR is used again; remove DIR/base or DIR/adapted to train that again. Settings were chosen with
`--seed 2`, which deals the grids to training and test in another way; what is reported is seed 0.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

import blockdiff
from benchmarks import machine
from blockdiff import checkpoint, evals
from blockdiff.checkpoint.tokenizer import load_tokenizer
from blockdiff.data.sources import Source, rows_of
from blockdiff.data.sudoku import alphabet, make_splits
from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.evals.run import evaluate
from blockdiff.sampling import Sampler
from blockdiff.terminal import quiet

LETTERS = str.maketrans("1234.", "abcd_")
NEW = "abcd_#/?"  # signs of the new task
RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "quickstart.yaml"


def in_letters(row: dict[str, str]) -> dict[str, str]:
    """A puzzle in digits as one in letters: `12..34..=` becomes `#ab__/cd__?`."""
    cells = row["prompt"].removesuffix("=").translate(LETTERS)
    rows = [cells[first : first + 4] for first in range(0, len(cells), 4)]
    return {"prompt": f"#{'/'.join(rows)}?", "response": row["response"].translate(LETTERS)}


def trained_base(directory: Path, rows: dict[str, list[dict[str, str]]], steps: int) -> blockdiff.Run:
    """The model that solves puzzles in digits: the quickstart's recipe, but AdamW, as for the adapters."""
    tokenizer = directory / "tokenizer"
    character_tokenizer(alphabet(4) + NEW).save_pretrained(tokenizer)
    overrides = [f"model.tokenizer={tokenizer}", f"train.steps={steps}", "train.eval_every=0"]
    adamw = {"name": "adamw", "lr": 3e-3, "weight_decay": 1e-4}
    given = {"extends": str(RECIPE), "data": {"train": rows["train"], "heldout": rows["test"][:64]}, "optim": adamw}
    return blockdiff.train(given, overrides, directory / "base")


def adapted(directory: Path, base: blockdiff.Run, rows: dict[str, list[dict[str, str]]], o: Any) -> blockdiff.Run:
    """The run that adapts it to puzzles in letters."""
    recipe = {
        "seed": 1,
        "model": {"path": str(base.directory / "model")},
        "lora": {
            "rank": o.rank,
            "parts": {"attention": o.rank, "mlp": o.rank, "experts": o.rank, "self_conditioning": o.rank},
            "tokens": list(NEW),
        },
        "data": {"train": [in_letters(row) for row in rows["train"]]},
        "objective": {"ar_loss": "none"},
        "optim": {
            "lr": o.lr,
            "betas": [0.9, 0.99],
            "warmup_steps": 20,
            "schedule": {"cosine": {"final_ratio": 0.01}},
            "ema": o.ema,
        },
        "train": {"steps": o.steps, "batch_size": o.batch_size, "log_every": 25},
    }
    return blockdiff.train(recipe, (), directory / "adapted")


def solved(model: Path, rows: list[dict[str, str]]) -> float:
    """The share of puzzles that a model solves, an adapter among them by its directory."""
    questions = list(rows_of(Source(rows=rows)))
    report = evaluate(Sampler.from_pretrained(model, "float32"), questions, evals.task("exact"))
    return float(report["solved_share"])


def solved_by_transformers(model: Path, rows: list[dict[str, str]]) -> float:
    """The same with transformers' own `generate`."""
    from transformers import DiffusionGemmaForBlockDiffusion

    theirs = DiffusionGemmaForBlockDiffusion.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer = load_tokenizer(model)
    torch.manual_seed(0)
    ids = [tokenizer(row["prompt"], add_special_tokens=False)["input_ids"] for row in rows]
    prompts = [[tokenizer.bos_token_id, *each] for each in ids]
    out = theirs.generate(torch.tensor(prompts))
    sequences = getattr(out, "sequences", out)[:, len(prompts[0]) :]
    texts = tokenizer.batch_decode(sequences, skip_special_tokens=True)
    return sum(text == row["response"] for text, row in zip(texts, rows, strict=True)) / len(rows)


def seconds(run: blockdiff.Run) -> float:
    """Seconds of training."""
    return float(run.report["seconds"])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adaptation", description=str(__doc__).split("\n")[0])
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--seed", type=int, default=0, help="of the puzzles: which grids train and which test")
    parser.add_argument("--base-steps", type=int, default=2600, help="of the base (default 2600)")
    parser.add_argument("--steps", type=int, default=1400, help="of the adapters (default 1400)")
    parser.add_argument("--batch-size", type=int, default=20)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--lr", type=float, default=7e-3)
    parser.add_argument("--ema", type=float, default=0.99, help="decay of the average of the adapters")
    parser.add_argument("--count", type=int, default=1000, help="test puzzles")
    parser.add_argument("--theirs", type=int, default=200, help="of them with transformers")
    o = parser.parse_args()
    quiet()
    splits = make_splits(4, {"train": 60_000, "test": o.count}, seed=o.seed)
    directory, test = o.output.absolute(), splits["test"]
    directory.mkdir(parents=True, exist_ok=True)
    base, run = blockdiff.Run(directory / "base"), blockdiff.Run(directory / "adapted")
    if not (base.directory / "model").exists():
        base = trained_base(directory, splits, o.base_steps)
    if not (run.directory / "adapter").exists():
        run = adapted(directory, base, splits, o)
    merged = directory / "merged"
    if not merged.exists():
        checkpoint.export(run.directory, merged)
    letters = [in_letters(row) for row in test]
    began = time.perf_counter()
    figures = {
        "base_seconds": seconds(base),
        "adapting_seconds": seconds(run),
        "trained": sum(x.numel() for name, x in run.model().named_parameters() if x.requires_grad),
        "digits_before": solved(base.directory, test),
        "letters_before": solved(base.directory, letters),
        "digits_after": solved(run.directory, test),
        "letters_after": solved(run.directory, letters),
        "letters_merged": solved(merged, letters),
        "letters_transformers": solved_by_transformers(merged, letters[: o.theirs]),
        "puzzles": o.count,
        "settings": {key: str(value) for key, value in vars(o).items() if key != "output"},
        **machine.describe(torch.device("cpu")),
    }
    (directory / "adaptation.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(f"{'':34} {'digits':>8} {'letters':>8}")
    print(f"{'base, ' + format(figures['base_seconds'], '.0f') + ' s of training':34} "
          f"{figures['digits_before']:8.1%} {figures['letters_before']:8.1%}")  # fmt: skip
    print(f"{'adapted, ' + format(figures['adapting_seconds'], '.0f') + ' s':34} "
          f"{figures['digits_after']:8.1%} {figures['letters_after']:8.1%}")  # fmt: skip
    print(f"{'merged':34} {'':8} {figures['letters_merged']:8.1%}")
    print(f"{f'merged, transformers, {o.theirs} puzzles':34} {'':8} {figures['letters_transformers']:8.1%}")
    print(f"{figures['adapting_seconds'] / figures['base_seconds']:.2f} of the base's training time, "
          f"{figures['trained']:,} numbers train; evaluated in {time.perf_counter() - began:.0f} s")  # fmt: skip


if __name__ == "__main__":
    main()
