"""`python -m benchmarks.kills`: kill -9 a tiny training run again and again, and damage its files: what becomes of it?

A chain is one run directory: `blockdiff train --resume` is started and killed up to five times, then left to end. Its
metrics, samples and weights must equal those of a run that nobody killed, to the bit. A third of the kills come after
a random time, a third at a random file operation of the run (logs, samples, export, token cache), a third at one in
the folder of the checkpoints. Then the cases of `benchmarks.damage` are tried. One table says what became of all.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.damage import PROMPT, SILENT, Damage, all_damages, copy_to, outcome
from blockdiff.metrics import FILE_NAME, read, reproducible
from blockdiff.training import state

IN_A_CHAIN = 5
LONGEST = 600  # seconds after which a command counts as hung
STEPS = 12
OPERATIONS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir")  # Python's audit events
PRESET = {
    "model_type": "diffusion_gemma",
    "canvas_length": 9,
    "text_config": {
        "vocab_size": 16,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 8,
        "use_bidirectional_attention": "vision",
    },
    "vision_config": {
        "model_type": "gemma4_vision",
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "position_embedding_size": 8,
        "patch_size": 4,
    },
}
RECIPE = f"""\
seed: 1
model: {{preset: {{folder}}/preset.json, tokenizer: {{folder}}/puzzles/tokenizer}}
data: {{train: {{folder}}/puzzles/train.jsonl, heldout: {{folder}}/puzzles/test.jsonl, cache: {{folder}}/cache}}
optim: {{lr: 1.0e-3, warmup_steps: 1, ema: 0.9}}
train: {{steps: {STEPS}, batch_size: 6, micro_batch_size: 4, log_every: 1, eval_every: 2, save_every: 3,
  keep: 1, keep_every: 6}}
evaluation: {{prompts: {{folder}}/puzzles/test.jsonl, prompts_every: 4, prompts_count: 3, best: heldout_canvas_loss}}
generation: {{max_steps: 4}}
"""


@dataclass
class Kill:
    """Where an attempt died: after so many seconds or at its n-th file operation, and how far the run had got."""

    kind: str  # "time", "file" (anywhere), "save" (among the checkpoints)
    at: float
    stage: str = ""


@dataclass
class Chain:
    """What became of one run directory."""

    kills: list[Kill] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)  # from the run that nobody killed; empty = nothing


def main(words: list[str] | None = None) -> int:
    """Returns 1 when a killed run differs from the one that nobody killed or a damage went unnoticed, else 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kills", description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="kills (default 100)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments to kill at")
    parser.add_argument("--every", type=int, default=1, help="take every n-th damage (default 1: all; 0: none)")
    parser.add_argument("--output", type=Path, help="a JSON file for the figures")
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        whole = Whole.trained(Path(directory))
        chains = list(kill_many(whole, options.count, options.seed))
        damages = list(all_damages())[:: options.every] if options.every else []
        outcomes = [(damage, damaged(whole, damage, number)) for number, damage in enumerate(damages)]
    kills = [kill for chain in chains for kill in chain.kills]
    silent = [f"{damage.part}: {damage.what}" for damage, found in outcomes if found == SILENT]
    figures = {
        "kills": len(kills),
        "runs": len(chains),
        "runs_that_differ": [chain.differs for chain in chains if chain.differs],
        "stages": dict(Counter(kill.stage for kill in kills).most_common()),
        "kinds": dict(Counter(kill.kind for kill in kills)),
        "damages": len(damages),
        "outcomes": dict(Counter(found for _, found in outcomes)),
        "unnoticed": silent,
        "seconds": round(time.perf_counter() - began, 1),
    }
    print("\n".join(table(chains, outcomes)))
    if options.output:
        options.output.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 1 if figures["runs_that_differ"] or silent else 0


def table(chains: list[Chain], outcomes: list[tuple[Damage, str]]) -> list[str]:
    """The lines that say what was done, how often, and what became of it."""
    rows = []
    for stage, count in Counter(kill.stage for chain in chains for kill in chain.kills).most_common():
        spoilt = sum(bool(chain.differs) for chain in chains if stage in {kill.stage for kill in chain.kills})
        rows.append((f"kill -9 {stage}", count, f"{spoilt} runs differ" if spoilt else "every run equal to the bit"))
    for part in dict.fromkeys(damage.part for damage, _ in outcomes):
        found = Counter(word for damage, word in outcomes if damage.part == part)
        rows.append((f"damage to {part}", found.total(), ", ".join(f"{n} {word}" for word, n in found.items())))
    widths = [max(len(str(row[column])) for row in rows) for column in (0, 1)] if rows else []
    lines = [f"{what:<{widths[0]}}  {times:>{widths[1]}}  {became}" for what, times, became in rows]
    return lines + [f"UNNOTICED {damage.part}: {damage.what}" for damage, word in outcomes if word == SILENT]


@dataclass(frozen=True)
class Whole:
    """A run that nobody killed, in `folder`/whole, with its inputs beside it."""

    folder: Path
    seconds: float
    operations: dict[str, int]
    answer: str  # what its model says to PROMPT

    @property
    def run(self) -> Path:
        """Its directory."""
        return self.folder / "whole"

    @classmethod
    def trained(cls, folder: Path) -> Whole:
        """Make the inputs and the run; says on stderr how long it took."""
        make_inputs(folder)
        attempt(folder, folder / "first", None)
        for name in (folder / "modules").read_text().split():
            with suppress(ImportError):
                importlib.import_module(name)  # once here instead of in every child
        began = time.perf_counter()
        operations = attempt(folder, folder / "whole", None) or {}
        seconds = time.perf_counter() - began
        _, answer = ended(folder, sample_words(folder / "whole"))
        print(f"nobody kills: {seconds:.1f} s, file operations: {operations}", file=sys.stderr, flush=True)
        return cls(folder, seconds, operations, answer)


def sample_words(run: Path) -> list[str]:
    """The command that asks the model of a run."""
    return ["sample", str(run / "model"), "--prompt", PROMPT, "--steps", "2", "--dtype", "auto"]


def damaged(whole: Whole, damage: Damage, number: int) -> str:
    """Damage a copy of everything, go on with it, and say what became of it."""
    place = whole.folder / f"damaged-{number}"
    place.mkdir()
    copy_to(whole.folder, whole.run, place)
    make_recipe(place)
    if not damage.is_model:  # as a kill after step 6 leaves it
        for path in (place / "run").iterdir():
            if path.name not in (state.FOLDER, FILE_NAME, "samples.jsonl", "recipe.yaml", "data.json"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for step, path in state.steps_saved(place / "run").items():
            if step != 6:
                shutil.rmtree(path)
    for file in sorted(place.glob(damage.file)):
        damage.change(file)
    words = sample_words(place / "run") if damage.is_model else train_words(place, place / "run")
    code, said = ended(place, words)
    differing = []
    if code == 0:
        is_other = damage.is_model and whole.answer not in said
        differing = ["answer"] * is_other if damage.is_model else differences(whole.run, place / "run")
    found = outcome(damage, code, said, differing)
    told = " | ".join(line for line in said.splitlines() if "blockdiff: " in line or found == SILENT)
    print(f"{damage.part}: {damage.what}: {found} {differing or ''} {told[-300:]}", file=sys.stderr, flush=True)
    shutil.rmtree(place)
    return found


def kill_many(whole: Whole, count: int, seed: int) -> Iterator[Chain]:
    """Run and kill chains until there were `count` kills; says on stderr how each ended."""
    draw, done, number = random.Random(seed), 0, 0
    folder, seconds, operations = whole.folder, whole.seconds, whole.operations
    while done < count:
        number += 1
        chain, run = Chain(), folder / f"run-{number}"
        for _ in range(min(IN_A_CHAIN, count - done)):
            kind = ("time", *operations)[done % 3]
            at = draw.uniform(0, 0.8 * seconds) if kind == "time" else draw.randint(1, operations[kind])
            kill = Kill(kind, at)
            if attempt(folder, run, kill) is not None:
                break  # it got to its end before
            kill.stage = stage_of(run)
            chain.kills.append(kill)
            done += 1
        attempt(folder, run, None)
        chain.differs = differences(whole.run, run)
        told = ", ".join(f"{kill.kind} {kill.at:.3g} ({kill.stage})" for kill in chain.kills)
        print(f"{'DIFFERS ' * bool(chain.differs)}{done}/{count}: {told}", file=sys.stderr, flush=True)
        yield chain


def make_inputs(folder: Path) -> None:
    """Rows, tokenizer, preset and recipe of the tiny run."""
    (folder / "preset.json").write_text(json.dumps(PRESET), encoding="utf-8")
    make_recipe(folder)
    in_child(
        folder, ["data", "sudoku", "--split", "train=24", "--split", "test=6", "--output", str(folder / "puzzles")]
    )


def make_recipe(folder: Path) -> None:
    """The recipe of the tiny run, whose inputs lie beside it."""
    (folder / "recipe.yaml").write_text(RECIPE.replace("{folder}", str(folder)), encoding="utf-8")


def train_words(folder: Path, run: Path) -> list[str]:
    """The command that goes on with a run."""
    words = ["train", str(folder / "recipe.yaml"), "--resume", "--output", str(run)]
    return [*words, "--set", f"data.cache={run}.cache"]


def attempt(folder: Path, run: Path, kill: Kill | None) -> dict[str, int] | None:
    """`blockdiff train --resume` until it ends or is killed: the file operations there were, or None if it was killed.

    Raises RuntimeError with what the process said when it failed.
    """
    return in_child(folder, train_words(folder, run), kill)


def in_child(folder: Path, words: list[str], kill: Kill | None = None) -> dict[str, int] | None:
    """The file operations of a `blockdiff` command, or None if it was killed; RuntimeError if it failed."""
    code, said = ended(folder, words, kill)
    if code == -signal.SIGKILL and kill:
        return None
    if code:
        raise RuntimeError(f"blockdiff {' '.join(words)}: exit code {code}: {said[-2000:]}")
    return dict(json.loads((folder / "operations").read_text()))


def ended(folder: Path, words: list[str], kill: Kill | None = None) -> tuple[int, str]:
    """Run a `blockdiff` command in a process of its own, forked after the imports: its exit code, and what it said."""
    from blockdiff.cli import main as cli
    from blockdiff.training import export

    counted, log = folder / "operations", folder / "said"
    counted.unlink(missing_ok=True)
    child = os.fork()
    if not child:
        code = 1
        export.draw_curves = lambda *_, **__: None  # would take longer than the run, and nothing comes of it
        try:
            handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(handle, 1), os.dup2(handle, 2)
            if kill and kill.kind == "time":
                threading.Timer(kill.at, os.kill, (os.getpid(), signal.SIGKILL)).start()
            signal.alarm(LONGEST)
            operations = die_at(folder, kill)
            sys.argv[1:] = words
            try:
                cli.main()
            except SystemExit as end:
                code = int(end.code or 0)
            counted.write_text(json.dumps(operations))
            (folder / "modules").write_text("\n".join(sorted(sys.modules)))
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code, log.read_text(errors="replace")


def die_at(folder: Path, kill: Kill | None) -> dict[str, int]:
    """Make this process die before the file operation a kill names; returns the counts by kind, which go on."""
    counts = {"file": 0, "save": 0}
    places = {"file": str(folder), "save": f"{os.sep}{state.FOLDER}{os.sep}"}

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in OPERATIONS or not isinstance(arguments[0], str | os.PathLike):
            return
        path = os.fspath(arguments[0])
        for kind in counts:
            if places["file"] in path and places[kind] in path:
                counts[kind] += 1
                if kill and (kill.kind, kill.at) == (kind, counts[kind]):
                    os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    return counts


def stage_of(run: Path) -> str:
    """How far a run got before it died, by what it left."""
    records = read(run / FILE_NAME) if (run / FILE_NAME).exists() else []
    if (run / "model").exists() or any(run.glob(".model*")) or (records and records[-1]["step"] == STEPS):
        return "at the end"
    if any((run / state.FOLDER).glob(".step-*")):
        return "in a save"
    if state.steps_saved(run):
        return "after a checkpoint"
    return "before the first checkpoint" if records else "before the first record"


def differences(whole: Path, run: Path) -> list[str]:
    """The names of what is not the same in two finished runs."""
    names = [
        file
        for file in (FILE_NAME, "samples.jsonl")
        if reproducible(read(whole / file)) != reproducible(read(run / file))
    ]
    last = Path(state.FOLDER) / f"step-{STEPS}"
    for file in [*sorted(path.name for path in (whole / last).glob("*.safetensors")), "model/model.safetensors"]:
        path = Path(file) if "/" in file else last / file
        expected, got = load_file(whole / path), load_file(run / path)
        same = expected.keys() == got.keys() and all(torch.equal(expected[name], got[name]) for name in expected)
        names += [] if same else [str(path)]
    there = [{str(path.relative_to(each)) for path in each.rglob("*")} for each in (whole, run)]
    return names + sorted(there[0] ^ there[1])


if __name__ == "__main__":
    sys.exit(main())
