"""A causal model made a denoiser, on a CPU: `python -m benchmarks.conversion --output DIR`.

A little MiniMax M3 learns 4x4 sudoku by next-token prediction (recipes/sudoku4_m3.yaml). `blockdiff init --from` adds
what denoising needs, and the same puzzles train it as a denoiser, its next-token loss going on. The table has the share
of test puzzles solved and the forward passes that a puzzle takes: greedy next tokens before, after conversion (which
has to change nothing, to the bit) and after the training, and block diffusion after it. Beside it stands a denoiser
of random weights that is trained as long as that.

What lies in DIR is used again; remove DIR/causal, DIR/denoiser or DIR/scratch to train that again.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import blockdiff
from benchmarks import machine
from blockdiff import evals
from blockdiff.cli.init import init
from blockdiff.data.sources import Source, rows_of
from blockdiff.data.sudoku import alphabet, make_splits
from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.evals.run import evaluate
from blockdiff.sampling import Sampler
from blockdiff.terminal import quiet

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
CANVAS = 17  # the cells of a puzzle and the end
NEXT_TOKEN = "next_token"
Rows = list[dict[str, str]]


def causal(directory: Path, rows: dict[str, Rows], o: argparse.Namespace) -> blockdiff.Run:
    """The model that has learnt next tokens."""
    tokenizer = directory / "tokenizer"
    character_tokenizer(alphabet(4)).save_pretrained(tokenizer)
    given = {"extends": str(RECIPES / "sudoku4_m3.yaml"), "data": {"train": rows["train"], "heldout": rows["test"]}}
    changes = [f"model.tokenizer={tokenizer}", f"train.steps={o.causal_steps}", *settings(o)]
    return blockdiff.train(given, changes, directory / "causal")


def converted(run: blockdiff.Run, directory: Path) -> Path:
    """What `blockdiff init --from` makes of a run's model."""
    with contextlib.redirect_stdout(io.StringIO()):
        init(None, directory, source=str(run.directory / "model"), canvas_length=CANVAS)
    return directory


def denoiser(model: Path, directory: Path, rows: dict[str, Rows], o: argparse.Namespace) -> blockdiff.Run:
    """The run that trains a model with canvases, by both losses."""
    recipe = {
        "seed": 1,
        "model": {"path": str(model)},
        "lora": "none",
        "data": {"train": rows["train"], "heldout": rows["test"]},
        "objective": {"ar_loss": {"weight": 1.0, "scope": "response"}, "router": "trained"},
        "optim": {"lr": o.lr, "betas": [0.9, 0.99], "warmup_steps": 50, "schedule": {"cosine": {"final_ratio": 0.01}}},
        "train": {"steps": o.steps, "log_every": 25},
        "generation": {"entropy_bound": 0.02, "confidence": 0.02, "max_new_tokens": CANVAS},
    }
    return blockdiff.train(recipe, settings(o), directory)


def settings(o: argparse.Namespace) -> list[str]:
    """What all trainings have in common."""
    return [f"train.batch_size={o.batch_size}", "train.eval_every=0", "evaluation.rows=200"]


def drawn_anew(model: Path, directory: Path) -> Path:
    """A model of the same config and tokenizer with random weights."""
    with contextlib.redirect_stdout(io.StringIO()):
        init(str(model / "config.json"), directory, seed=1, tokenizer=str(model))
    return directory


def asked(model: Path, rows: Rows, strategy: str | None = None) -> dict[str, Any]:
    """The share of puzzles that a model solves, the forward passes that one takes, and the texts."""
    sampler = Sampler.from_pretrained(model, "float32", strategy=strategy)
    report = evaluate(sampler, list(rows_of(Source(rows=rows))), evals.task("sudoku"), max_new_tokens=CANVAS)
    records = report["records"]
    return {
        "solved": report["solved_share"],
        "steps": sum(sum(record["steps"]) for record in records) / len(records),
        "seconds": report["seconds"],
        "texts": [record["text"] for record in records],
    }


@torch.no_grad()
def encode_alike(one: Path, other: Path, rows: Rows) -> bool:
    """Whether two models encode puzzles and their solutions to the same bits, in batches of 100."""
    models = [blockdiff.load(path, dtype="float32", device="cpu") for path in (one, other)]
    tokenizer = Sampler.from_pretrained(one, "float32").tokenizer
    assert tokenizer is not None
    texts = [row["prompt"] + row["response"] for row in rows]
    tokens = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts])
    pairs = ([model.encode(some).hidden for model in models] for some in tokens.split(100))
    return all(torch.equal(a, b) for a, b in pairs)


def measure(directory: Path, o: argparse.Namespace) -> dict[str, Any]:
    """Train what is not there yet, ask all models, and write DIR/conversion.json."""
    splits = make_splits(4, {"train": o.train_count, "test": o.count}, seed=0)  # the quickstart's puzzles
    test = splits["test"]
    directory.mkdir(parents=True, exist_ok=True)
    runs = {name: blockdiff.Run(directory / name) for name in ("causal", "denoiser", "scratch")}
    if not (runs["causal"].directory / "model").exists():
        runs["causal"] = causal(directory, splits, o)
    of_causal, made = runs["causal"].directory / "model", directory / "converted"
    if not made.exists():
        converted(runs["causal"], made)
    if not (runs["denoiser"].directory / "model").exists():
        runs["denoiser"] = denoiser(made, directory / "denoiser", splits, o)
    if not (runs["scratch"].directory / "model").exists():
        anew = directory / "anew"
        runs["scratch"] = denoiser(anew if anew.exists() else drawn_anew(made, anew), directory / "scratch", splits, o)
    of_denoiser, of_scratch = (runs[name].directory / "model" for name in ("denoiser", "scratch"))
    answers = {
        "causal": asked(of_causal, test),
        "converted": asked(made, test, NEXT_TOKEN),
        "denoiser next tokens": asked(of_denoiser, test, NEXT_TOKEN),
        "denoiser": asked(of_denoiser, test),
        "scratch": asked(of_scratch, test),
    }
    texts = {name: figures.pop("texts") for name, figures in answers.items()}
    figures = {
        "answers": answers,
        "converted_equal": {
            "hidden states to the bit": encode_alike(of_causal, made, test),
            "answers": texts["causal"] == texts["converted"],
        },
        "training_seconds": {name: float(run.report["seconds"]) for name, run in runs.items()},
        "training_steps": {"causal": o.causal_steps, "denoiser": o.steps, "scratch": o.steps},
        "parameters": sum(x.numel() for x in runs["denoiser"].model().parameters()),
        "puzzles": o.count,
        "settings": {key: str(value) for key, value in vars(o).items() if key != "output"},
        **machine.describe(torch.device("cpu")),
    }
    (directory / "conversion.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    (directory / "conversion.md").write_text(table(figures), encoding="utf-8")
    return figures


def table(figures: dict[str, Any]) -> str:
    """The figures as a table in Markdown."""
    seconds, steps, answers = figures["training_seconds"], figures["training_steps"], figures["answers"]
    lines = {
        "causal": f"trained by next tokens: {steps['causal']:,} optimiser steps, {seconds['causal']:.0f} s",
        "converted": "converted",
        "denoiser next tokens": f"then trained as a denoiser: {steps['denoiser']:,} steps, {seconds['denoiser']:.0f} s",
        "denoiser": "the same",
        "scratch": f"a denoiser from scratch: {steps['scratch']:,} steps, {seconds['scratch']:.0f} s",
    }
    ways = {"causal": "next tokens", "converted": "next tokens", "denoiser next tokens": "next tokens"}
    rows = [f"| model | sampled by | solved of {figures['puzzles']:,} | forward passes a puzzle |", "|---|---|---|---|"]
    for name, said in lines.items():
        found = answers[name]
        way = ways.get(name, "block diffusion")
        rows.append(f"| {said} | {way} | {found['solved']:.1%} | {found['steps']:.2f} |")
    same = figures["converted_equal"]
    versions = figures["versions"]
    rows += [
        "",
        f"Converted = causal: {', '.join(name for name, is_same in same.items() if is_same) or 'DIFFERENT'}. "
        f"{figures['parameters']:,} parameters.",
        f"{figures['device']}, torch {versions['torch']}, commit {figures['commit']}.",
    ]
    return "\n".join(rows) + "\n"


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """What the command is given."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.conversion", description=str(__doc__).split("\n")[0])
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--causal-steps", type=int, default=900)
    parser.add_argument("--steps", type=int, default=500, help="as a denoiser")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3, help="as a denoiser")
    parser.add_argument("--count", type=int, default=1000, help="test puzzles")
    parser.add_argument("--train-count", type=int, default=60_000, help="training puzzles")
    return parser.parse_args(words)


def main() -> None:
    o = options()
    quiet()
    print(table(measure(o.output.absolute(), o)), end="")


if __name__ == "__main__":
    main()
