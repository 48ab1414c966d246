"""The tiny training run of `kills` and `rank_kills`, and its commands in processes that die where they are told to."""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors.torch import load_file

from blockdiff.cli import main as cli
from blockdiff.metrics import FILE_NAME, read, reproducible
from blockdiff.training import export
from blockdiff.training.checkpoint_content import FOLDER, steps_saved

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
    """The end of an attempt: after so many seconds or at its n-th file operation, and how far the run had got."""

    kind: str  # "time", "file" (anywhere), "save" (among the checkpoints)
    at: float
    stage: str = ""


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
    counted, log = folder / "operations", folder / "said"
    counted.unlink(missing_ok=True)
    child = os.fork()
    if not child:
        become(folder, words, log, counted, kill)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code, log.read_text(errors="replace")


def become(folder: Path, words: list[str], log: Path, counted: Path, kill: Kill | None) -> NoReturn:
    """Make this process, which was forked for it, a `blockdiff` command that may be killed; it ends with the command.

    log: what it says. counted: its file operations, once it has come to its end.
    """
    atexit._clear()  # what the parent would do at its end is not this process's to do
    export.draw_curves = lambda *_, **__: None  # would take longer than the run, and nothing comes of it
    code = 1
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
        atexit._run_exitfuncs()
        counted.write_text(json.dumps(operations))
        (folder / "modules").write_text("\n".join(sorted(sys.modules)))
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)


def die_at(folder: Path, kill: Kill | None) -> dict[str, int]:
    """Make this process die before the file operation a kill names; returns the counts by kind, which go on."""
    counts = {"file": 0, "save": 0}
    places = {"file": str(folder), "save": f"{os.sep}{FOLDER}{os.sep}"}

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
    """The stage that a run reached before it died, by what it left."""
    records = read(run / FILE_NAME) if (run / FILE_NAME).exists() else []
    if (run / "model").exists() or any(run.glob(".model*")) or (records and records[-1]["step"] == STEPS):
        return "at the end"
    if any((run / FOLDER).glob(".step-*")):
        return "in a save"
    if steps_saved(run):
        return "after a checkpoint"
    return "before the first checkpoint" if records else "before the first record"


def differences(whole: Path, run: Path) -> list[str]:
    """The names of what is not the same in two finished runs."""
    names = [
        file
        for file in (FILE_NAME, "samples.jsonl")
        if reproducible(read(whole / file)) != reproducible(read(run / file))
    ]
    last = Path(FOLDER) / f"step-{STEPS}"
    for file in [*sorted(path.name for path in (whole / last).glob("*.safetensors")), "model/model.safetensors"]:
        path = Path(file) if "/" in file else last / file
        expected, got = load_file(whole / path), load_file(run / path)
        same = expected.keys() == got.keys() and all(torch.equal(expected[name], got[name]) for name in expected)
        names += [] if same else [str(path)]
    there = [{str(path.relative_to(each)) for path in each.rglob("*")} for each in (whole, run)]
    return names + sorted(there[0] ^ there[1])
