"""The released models with random weights on one GPU, in minutes: `python -m benchmarks.quick PART`.

Every figure is one JSON line, printed and added to `--output`; "short" says what falls short in it, in words, and a
figure that fails takes none of the others with it. Parts: "bf16" and "fp8": from an engine's start to its memory, its
first compilations and steps of 1 and 32 rows with prompts of 1,024 tokens, plain, with top_p and under a JSON schema;
"drafted": rounds of a drafter and its target beside next tokens one by one; "policy": rollouts and updates of
reinforcement learning; "nccl": tiny trainings of two processes, one for each way to split a model. On a CPU small
presets take the same way.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.quick_policy import policy
from benchmarks.quick_sampling import RELEASED, Measurement, drafted, one_gpu

SPLITS = {"FSDP2": "parallel.shard=full", "experts": "parallel.experts=2", "tensor": "parallel.tensor=2"}


def nccl(device: torch.device) -> Iterator[Measurement]:
    """A tiny training of two processes for each way to split a model."""
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        return
    from tests.support.tiny_run import make_inputs  # needs what `blockdiff train` needs

    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        make_inputs(folder)
        for name, setting in SPLITS.items():
            yield name, partial(trained, folder, name, setting)


def trained(folder: Path, name: str, setting: str) -> dict[str, Any]:
    """The seconds of a training of two processes."""
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "blockdiff", "train"]
    words += [str(folder / "recipe.yaml"), "--output", str(folder / name), "--set", setting]
    begin = time.monotonic()
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if "error" in line.lower()] or ["it ended without a word"]
    return dict(seconds=round(time.monotonic() - begin, 1), short=said[0] if done.returncode else "")


def figures(measurements: Iterator[Measurement]) -> Iterator[dict[str, Any]]:
    """The lines of a part; those that fail say how."""
    while True:
        name = "start"
        try:
            name, measure = next(measurements)
            line = measure()
        except StopIteration:
            return
        except Exception as error:
            traceback.print_exc()
            line = dict(short=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}")
            del error
            gc.collect()  # what the error held
        yield dict(figure=name) | line


def main(words: list[str] | None = None) -> int:
    """Prints one JSON object a figure; returns 1 where one falls short."""
    one_model: dict[str, Callable[..., Iterator[Measurement]]] = dict(bf16=partial(one_gpu, False))
    one_model |= dict(fp8=partial(one_gpu, True), drafted=drafted, policy=policy)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quick", description=__doc__)
    parser.add_argument("part", choices=(*one_model, "nccl"))
    parser.add_argument("--device", default="cuda", help="cuda or cpu (cuda)")
    parser.add_argument("--preset", default=RELEASED, help=f"in recipes/presets ({RELEASED})")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt (1024)")
    parser.add_argument("--rows", type=int, default=32, help="rows at most (32)")
    parser.add_argument("--output", type=Path, help="a file that lines are added to")
    options = parser.parse_args(words)
    device, falls_short = torch.device(options.device), False
    sizes = options.preset, device, options.prompt, options.rows
    for line in figures(nccl(device) if options.part == "nccl" else one_model[options.part](*sizes)):
        text = json.dumps(dict(part=options.part, device=machine.name(device), **line))
        print(text, flush=True)
        falls_short |= bool(line.get("short"))
        if options.output is not None:
            with options.output.open("a", encoding="utf-8") as file:
                file.write(text + "\n")
    return int(falls_short)


if __name__ == "__main__":
    sys.exit(main())
