"""`python -m benchmarks.plan`: the memory that `blockdiff plan` says beside what trainings on this CPU take.

Every line is a training of three optimiser steps in processes of its own, of a model of 57 million weights. *Alive* is
the most bytes of tensors that torch's allocator has given out at once, by its trace: this is what a plan counts.
*Resident* is the peak of the process's resident memory in another run (VmHWM, reset before the model is built), less
what was resident after a training of a little model, which has loaded every library. With several processes both are
those of the one that takes most.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.meeting import meeting
from tests.support.tiny_run import PRESET

TOKENS, VOCABULARY = 320, 4096
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 2,
    "sliding_window": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "global_head_dim": 128,
    "num_global_key_value_heads": 2,
    "num_experts": 12,
    "top_k_experts": 2,
    "moe_intermediate_size": 256,
}
LORA = "lora={parts: {attention: 16, mlp: 16, experts: 8}}"
SHARDED = "parallel={shard: full}"


@dataclass(frozen=True)
class Case:
    """A training. name: as printed; overrides: of the recipe; ranks: number of processes."""

    name: str
    overrides: tuple[str, ...] = ()
    ranks: int = 1


CASES = (
    Case("fp32, micro-batches of 1 row", ("train.micro_batch_size=1",)),
    Case("fp32, one micro-batch"),
    Case("one sweep", ("objective.sweep=true",)),
    Case("bf16 autocast", ("train.autocast=bfloat16",)),
    Case("bf16 weights", ("model.dtype=bfloat16",)),
    Case("recomputation", ("train.activation_checkpointing=true",)),
    Case("recomputation, bf16 autocast", ("train.activation_checkpointing=true", "train.autocast=bfloat16")),
    Case("Muon", ("optim.name=muon",)),
    Case("average", ("optim.ema=0.99", "train.micro_batch_size=1")),
    Case("LoRA with experts", ("model={path: base}", LORA)),
    Case("packed rows", ("data.pack=640", "train.micro_batch_size=1")),
    Case("DDP", (), 2),
    Case("DDP, micro-batches of 1 row", ("train.micro_batch_size=1",), 2),
    Case("FSDP2", (SHARDED,), 2),
    Case("FSDP2, micro-batches of 1 row", (SHARDED, "train.micro_batch_size=1"), 2),
    Case("FSDP2, bf16 with masters", (SHARDED, "train.autocast=bfloat16"), 2),
    Case("FSDP2, recomputation", (SHARDED, "train.activation_checkpointing=true"), 2),
    Case("experts split", ("parallel={experts: 2}",), 2),
    Case("FSDP2, experts split", ("parallel={shard: full, experts: 2}",), 2),
    Case("tensor parallelism", ("parallel={tensor: 2}",), 2),
)


def make_inputs(folder: Path) -> None:
    """Make a tokenizer, the preset, and a checkpoint to adapt."""
    from blockdiff import checkpoint
    from blockdiff.checkpoint.tokenizer import load_tokenizer
    from blockdiff.data.tokenizer import character_tokenizer

    character_tokenizer("".join(chr(0x4E00 + n) for n in range(VOCABULARY - 5))).save_pretrained(folder / "tokenizer")
    shapes: dict[str, dict[str, Any]] = {"large": TEXT, "little": {"vocab_size": VOCABULARY}}
    little: Any = PRESET["text_config"]
    for name, text in shapes.items():
        preset = {**PRESET, "canvas_length": 64, "text_config": {**little, **text}}
        (folder / f"{name}.json").write_text(json.dumps(preset))
        model = checkpoint.init(str(folder / f"{name}.json"), seed=0)
        checkpoint.save(model, folder / f"{name}-base", tokenizer=load_tokenizer(folder / "tokenizer"))


def tree_of(folder: Path, name: str = "large") -> dict[str, Any]:
    """Return the recipe that every case changes."""
    response = "".join(chr(0x4E00 + n % 97) for n in range(TOKENS - 70))
    rows = [{"prompt": response[n : n + 56], "response": response} for n in range(8)]
    return {
        "model": {"preset": str(folder / f"{name}.json"), "tokenizer": str(folder / "tokenizer")},
        "data": {"train": rows, "max_length": TOKENS, "canvases": "all", "cache": "off"},
        "train": {"steps": 3, "batch_size": 4, "log_every": 1},
    }


def overrides_of(folder: Path, case: Case, name: str = "large") -> list[str]:
    """Return the overrides of a case, with the path of the checkpoint."""
    return [text.replace("path: base", f"path: {folder / f'{name}-base'}") for text in case.overrides]


def planned(folder: Path, case: Case) -> Any:
    """Return the plan of a case."""
    from blockdiff.training.plan.training import plan_training
    from blockdiff.training.recipe_files import read_recipe

    recipe = read_recipe(tree_of(folder), overrides_of(folder, case))
    return plan_training(recipe, ranks=case.ranks, device="cpu")


def measured(folder: Path, number: int, is_traced: bool) -> int:
    """Return the peak bytes of a training, in the process with the highest peak."""
    case = CASES[number]
    words = [sys.executable, "-m", "benchmarks.plan", "--worker", str(number), "--folder", str(folder)]
    words += ["--trace"] if is_traced else []
    processes = []
    with meeting(case.ranks) as variables:
        for rank, own in enumerate(variables):
            with open(folder / f"said-{rank}", "w") as said:
                environment = {**os.environ, **own} if case.ranks > 1 else None
                processes.append(subprocess.Popen(words, stdout=said, stderr=subprocess.STDOUT, env=environment))
        codes = [process.wait() for process in processes]
    texts = [(folder / f"said-{rank}").read_text() for rank in range(case.ranks)]
    if any(codes):
        raise RuntimeError("\n".join(text[-2000:] for text in texts))
    return max(int(re.findall(r"^peak (\d+)$", text, re.M)[-1]) for text in texts)


def work(folder: Path, case: Case, is_traced: bool) -> None:
    """Train, and print the peak."""
    from blockdiff.training.callbacks import Callback
    from blockdiff.training.trainer import Trainer

    class Last(Callback):
        def on_step(self, trainer: Trainer) -> None:
            if trainer.step == trainer.steps:
                found.append(now("VmHWM") - before)
                found.append(now("VmRSS") - before)

    found: list[int] = []
    before = 0

    def train(name: str) -> None:
        output = folder / f"run-{os.environ.get('RANK', 0)}" if case.ranks == 1 else folder / "run"
        if os.environ.get("RANK", "0") == "0":
            shutil.rmtree(output, ignore_errors=True)
        trainer = Trainer(tree_of(folder, name), overrides_of(folder, case, name), output, callbacks=[Last()])
        trainer.fit()

    train("little")
    gc.collect()
    before = now("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    found.clear()
    if is_traced:
        import torch

        from tests.support.peaks import peak_of_one_call

        print(f"peak {peak_of_one_call(lambda: train('large'), torch.device('cpu'))}")
    else:
        train("large")
        print("after", found[1])
        print(f"peak {found[0]}")


def now(name: str) -> int:
    """Return the figure `name` of this process in /proc, in bytes."""
    return int(re.findall(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)[0]) * 1024


def main() -> None:
    """Print a line for every case."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan", description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name has this")
    parser.add_argument("--trace", action="store_true", help="bytes of tensors alive at once, too")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker is not None:
        work(asked.folder, CASES[asked.worker], asked.trace)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_inputs(folder)
        print(f"{'':36}{'planned':>12}{'resident':>12}{'ratio':>7}{'alive':>12}{'ratio':>7}")
        for number, case in enumerate(CASES):
            if asked.only not in case.name:
                continue
            plan = planned(folder, case)
            line = f"{case.name:36}{plan.total / 2**20:>8,.0f} MiB"
            for is_traced in (False, True) if asked.trace else (False,):
                peak = measured(folder, number, is_traced)
                line += f"{peak / 2**20:>8,.0f} MiB{plan.total / peak:7.2f}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
