"""Reads beside full sampling: how often the likeliest choice is right and what the sampler says, and how honest the
probabilities are, after 1, 2 and 4 steps and over 1, 2 and 4 draws.

    python -m benchmarks.reads --puzzles runs/quickstart/model data/sudoku4/test.jsonl
    python -m benchmarks.reads --talk runs/chat/model data/chat/test.jsonl

Puzzles: a blank cell of each, once with the rest of the solution written out and once with all blank cells as holes.
Talk: the word or number of each answer that has one, among all words or numbers of its kind with as many tokens.
The expected calibration error has ten bins of equal width over the probability of the likeliest choice.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import blockdiff
from benchmarks import machine
from blockdiff.checkpoint.tokenizer import load_tokenizer
from blockdiff.errors import BlockdiffError
from blockdiff.recipes import small_talk
from blockdiff.sampling import Engine, Request, Result, RunningRead, Sampler

STEPS, DRAWS, BINS = (1, 2, 4), (1, 2, 4), 10
NUMBERS = tuple(map(str, range(19)))
KINDS: dict[str, tuple[str, ...]] = {  # the text before the word, the word, and the text after it
    r"(\d+ [+-] \d+ =)( \d+)(\.)": NUMBERS,
    r"(The capital of .+ is)( .+)(\.)": tuple(small_talk.CAPITALS.values()),
    r"(The opposite of .+ is)( .+)(\.)": (*small_talk.OPPOSITES.values(), *small_talk.OPPOSITES),
    r"(The .+ says)( .+)(\.)": tuple(small_talk.SOUNDS.values()),
    r"(.+ is)( \w+)(\.)": tuple(small_talk.COLOURS.values()),
}


@dataclass(frozen=True)
class Question:
    """A prompt, a template with holes, the choices for these, and the right choices."""

    request: Request
    template: str
    choices: dict[str, list[str]]
    truth: dict[str, str]


@dataclass(frozen=True)
class Line:
    """One line of the table. agreement: with full sampling in the same template; seconds: per question."""

    task: str
    steps: int
    draws: int
    holes: int
    accuracy: float
    agreement: float
    calibration_error: float
    seconds: float


def cells(rows: Sequence[dict[str, Any]], is_rest_written: bool, seed: int = 0) -> list[Question]:
    """Return a question per puzzle: about one blank cell, or about all of them together.

    is_rest_written: ask about one cell, with the rest of the solution written.
    """
    draw, found, digits = random.Random(seed), [], ["1", "2", "3", "4"]
    for number, row in enumerate(rows):
        prompt, solution = row["prompt"], row["response"]
        blank = [place for place, cell in enumerate(prompt) if cell == "."]
        holes = [draw.choice(blank)] if is_rest_written else blank
        template = "".join(f"<?c{place}>" if place in holes else cell for place, cell in enumerate(solution))
        truth = {f"c{place}": solution[place] for place in holes}
        found.append(Question(Request(number, prompt=prompt), template, dict.fromkeys(truth, digits), truth))
    return found


def words(rows: Sequence[dict[str, Any]], tokenizer: Any, canvas_length: int) -> list[Question]:
    """Return a question per conversation whose last answer has a word or number of a known kind.

    The hole is that word or number, and the rest of the answer is written. All choices have equally many tokens.
    """
    found = []
    for number, row in enumerate(rows):
        *before, answer = row["messages"]
        for pattern, kind in KINDS.items():
            match = re.fullmatch(pattern, answer["content"])
            length = len(tokenizer(answer["content"], add_special_tokens=False)["input_ids"])
            if match is None or match[2][1:] not in kind or length >= canvas_length:
                continue
            tokens = {f" {each}": len(tokenizer(f" {each}", add_special_tokens=False)["input_ids"]) for each in kind}
            choices = [each for each, count in tokens.items() if count == tokens[match[2]]]
            if len(choices) > 1:
                request = Request(number, messages=before)
                found.append(Question(request, f"{match[1]}<?word>{match[3]}", {"word": choices}, {"word": match[2]}))
            break
    return found


def lines_of(task: str, sampler: Sampler, questions: Sequence[Question]) -> Iterator[Line]:
    """Yield the lines of a task."""
    sampled = _sampled(sampler, questions)
    for steps in STEPS:
        engine, started = Engine(sampler.model, settings=sampler.settings), time.perf_counter()
        readings = []
        for each in questions:
            given = each.request, each.template, each.choices, sampler.model, sampler.settings
            readings.append(RunningRead.prepare(*given, steps=steps, draws=max(DRAWS)))
            engine.submit(each.request, draws=readings[-1].sequences)
        while engine.step():
            pass
        if failed := [event for event in engine.events() if isinstance(event, Result) and event.error is not None]:
            raise BlockdiffError(f"prompt {failed[0].id}: {failed[0].error}")
        seconds = (time.perf_counter() - started) / len(questions) / max(DRAWS)
        for draws in DRAWS:
            scored = [
                _scored(each, name, reading, draws, tokens)
                for each, reading, tokens in zip(questions, readings, sampled, strict=True)
                for name in each.truth
            ]
            top, is_right, agrees = torch.tensor(scored, dtype=torch.float64).unbind(-1)
            error = calibration_error(top, is_right)
            shares = float(is_right.mean()), float(agrees.mean()), error
            yield Line(task, steps, draws, len(scored), *shares, seconds * draws)


def calibration_error(top_N: Tensor, is_right_N: Tensor) -> float:
    """Return the mean distance of confidence and accuracy over bins, weighted by their size (Guo et al. 2017)."""
    bin_N = (top_N * BINS).long().clamp_(max=BINS - 1)
    zeros = torch.zeros(BINS, dtype=torch.float64)
    gap = zeros.index_add(0, bin_N, top_N) - zeros.index_add(0, bin_N, is_right_N)
    return float(gap.abs().sum() / len(top_N))


def _scored(
    question: Question, name: str, reading: RunningRead, draws: int, sampled: Sequence[int]
) -> tuple[float, float, float]:
    """Return the likeliest choice's probability, whether it is right, and whether it agrees with full sampling."""
    mean_X = reading.scores(name)[:draws].softmax(-1).mean(0)
    best, (places, choices) = question.choices[name][int(mean_X.argmax())], reading.holes[name]
    says_the_same = choices is not None and choices[best] == list(sampled[places[0] : places[-1] + 1])
    return float(mean_X.max()), best == question.truth[name], says_the_same


def _sampled(sampler: Sampler, questions: Sequence[Question]) -> list[list[int]]:
    """Return the tokens of answers in the same templates, denoised to their end."""
    requests = []
    for each in questions:
        template = each.template
        for name, choices in each.choices.items():
            size = len(sampler.tokenizer(choices[0], add_special_tokens=False)["input_ids"])  # type: ignore[misc]
            template = template.replace(f"<?{name}>", f"<?{size}>")
        requests.append(replace(each.request, template=template, max_new_tokens=sampler.model.canvas_length))
    return [result.tokens for result in sampler.generate(requests)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, and write it where asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reads", description=__doc__)
    parser.add_argument("--puzzles", nargs=2, type=Path, metavar=("MODEL", "ROWS"), help="a model of 4x4 puzzles")
    parser.add_argument("--talk", nargs=2, type=Path, metavar=("MODEL", "ROWS"), help="one of `blockdiff data chat`")
    parser.add_argument("--count", type=int, default=200, help="the most rows of each (default 200)")
    parser.add_argument("--output", type=Path, help="FILE.json; the table goes beside it as .md")
    given = parser.parse_args(arguments)
    record = machine.describe(torch.device("cpu"))
    head = "| task | steps | draws | holes | right | as full sampling | calibration error | ms a question |"
    text = [machine.place(record), "", head, "|---" * 8 + "|"]
    print("\n".join(text))
    found: list[Line] = []
    try:
        for task, sampler, questions in _tasks(given):
            for line in lines_of(task, sampler, questions):
                found.append(line)
                shares = f"{line.accuracy:.1%} | {line.agreement:.1%} | {line.calibration_error:.3f}"
                text.append(
                    f"| {task} | {line.steps} | {line.draws} | {line.holes} | {shares} | {1e3 * line.seconds:.1f} |"
                )
                print(text[-1], flush=True)
    except (OSError, ValueError, BlockdiffError) as error:
        print(f"benchmarks.reads: {error}", file=sys.stderr)
        return 1
    if given.output is not None:
        contents = {"machine": record, "lines": [asdict(line) for line in found]}
        machine.write(given.output, contents, "\n".join(text) + "\n")
    return 0


def _tasks(given: argparse.Namespace) -> Iterator[tuple[str, Sampler, list[Question]]]:
    for name in ("puzzles", "talk"):
        if (asked := getattr(given, name)) is None:
            continue
        directory, file = asked
        tokenizer = load_tokenizer(directory)
        sampler = Sampler(blockdiff.load(directory, dtype="float32", device="cpu"), tokenizer)
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        if name == "puzzles":
            yield "a cell, the rest written", sampler, cells(rows[: given.count], is_rest_written=True)
            yield "all blank cells at once", sampler, cells(rows[: given.count], is_rest_written=False)
        else:
            yield "the word of an answer", sampler, words(rows, tokenizer, sampler.model.canvas_length)[: given.count]


if __name__ == "__main__":
    sys.exit(main())
