"""Ways that only a GPU can judge, beside the program's: `python -m benchmarks.variants [PART...]`, a line of JSON each.

Every way is timed in bf16 at the released model's shapes with random weights, alone on the GPU, and where it is part of
sampling as a captured graph. `--device cpu --preset tiny` runs the same lines, whose figures say nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.quick_start import config_of, random_model
from blockdiff.canvas import Canvas, CleanRow, lay_out
from blockdiff.diffusion.corruption import UniformCorruption
from blockdiff.diffusion.schedule import Linear
from blockdiff.kernels import relaunch, resolve, tiles
from blockdiff.kernels.gated import triton as gated
from blockdiff.kernels.launch import forget_sizes
from blockdiff.layers.lora import LowRank
from blockdiff.models.adapters import adapt, cast_once, draw_adapters, targets
from blockdiff.objective import Objective
from blockdiff.training.recomputation import checkpoint_activations

LAYERS, REPEATS = 6, 20
Work = Callable[[], Any]


class Machine:
    """The device, the preset's config, and the clock."""

    def __init__(self, device: torch.device, preset: str):
        self.device, self.preset = device, preset
        self.is_cuda = device.type == "cuda"
        self.dtype = torch.bfloat16 if self.is_cuda else torch.float32
        self.config = config_of(preset, LAYERS)

    def drawn(self, *shape: int) -> Tensor:
        """Return random numbers with the deviation of weights."""
        return torch.randn(*shape, device=self.device, dtype=self.dtype) * 0.02

    def model(self) -> Any:
        """Return a model of a few layers."""
        return random_model(self.config, self.device, kernels=resolve("auto"))

    def wait(self) -> None:
        """Wait for the device."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def captured(self, work: Work) -> Work:
        """Return the work as a CUDA graph; on a CPU unchanged."""
        work()
        if not self.is_cuda:
            return work
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            work()
        self.wait()
        with torch.cuda.graph(graph):
            work()
        return graph.replay

    def seconds(self, *ways: Work) -> list[float]:
        """Return the median seconds of each way, timed in turns."""
        found: list[list[float]] = [[] for _ in ways]
        for _ in range(REPEATS):
            for way, seconds in zip(ways, found, strict=True):
                self.wait()
                begin = time.perf_counter()
                way()
                self.wait()
                seconds.append(time.perf_counter() - begin)
        return [statistics.median(each) for each in found]


def say(part: str, way: str, **figures: Any) -> None:
    """Print a line."""
    rounded = {name: round(each, 4) if isinstance(each, float) else each for name, each in figures.items()}
    print(json.dumps(dict(part=part, way=way) | rounded), flush=True)


@torch.no_grad()
def experts(machine: Machine) -> None:
    """Time experts of 48 to 384 rows each, with tiles of 64 and of 128 rows."""
    model = machine.model()
    layer, config = model.layers[0].experts, machine.config
    E, k = config.experts, config.experts_per_token
    wide = {name: table[-1][1] for (name, on, size), table in tiles.table().items() if (on, size) == (90, 2)}
    few = {
        name: table[-2][1] for (name, on, size), table in tiles.table().items() if (on, size) == (90, 2) and table[1:]
    }
    for rows in (48, 96, 128, 192, 384):
        tokens = max(1, rows * E // k)
        x, weight = machine.drawn(tokens, config.hidden_size), torch.ones(tokens, k, device=machine.device)
        index = torch.rand(tokens, E, device=machine.device).topk(k).indices
        ways = []
        for chosen in (few, wide):
            lines = {key: [(float("inf"), chosen.get(key[0], table[-1][1]))] for key, table in tiles.table().items()}
            with patch.object(tiles, "table", lambda lines=lines: lines):
                forget_sizes()
                ways.append(machine.captured(lambda: layer(x, index, weight)))  # noqa: B023 (called in this turn)
        forget_sizes()
        for way, seconds in zip(("64 rows", "128 rows"), machine.seconds(*ways), strict=True):
            say("experts", way, rows_of_an_expert=rows, milliseconds=1e3 * seconds)


@torch.no_grad()
def gate_up(machine: Machine) -> None:
    """Time the gated half of the dense MLP of many tokens, done in three ways.

    Two products and a walk; one product and a walk; one kernel.
    """
    config, kernels = machine.config, resolve("auto")
    D, width = config.hidden_size, config.intermediate_size
    both = machine.drawn(2 * width, D)
    gate, up = both.split(width)

    def of_halves(product: Tensor) -> Tensor:
        return kernels.gated(product[:, :width], product[:, width:], "gelu_tanh")

    for tokens in (1024, 2048, 4096, 8192):
        x = machine.drawn(tokens, D)
        ways: dict[str, Work] = {
            "two products": lambda: kernels.gated(F.linear(x, gate), F.linear(x, up), "gelu_tanh"),  # noqa: B023
            "one product": lambda: of_halves(F.linear(x, both)),  # noqa: B023
        }
        if machine.is_cuda:
            ways["one kernel"] = lambda: gated.gated_linear(x, gate, up, "gelu_tanh")  # noqa: B023
        with patch.object(gated, "FEW_ROWS", 1 << 20):
            captured = [machine.captured(way) for way in ways.values()]
        for way, seconds in zip(ways, machine.seconds(*captured), strict=True):
            say("gate_up", way, tokens=tokens, microseconds=1e6 * seconds)


def lora(machine: Machine) -> None:
    """Time a LoRA micro-batch of 4,096 tokens with relaunch and without: the step, and the host until all is queued.

    If the host's time equals the step's, the host is the bound; the device's own floor is not known here.
    """
    model, length = machine.model().train(), machine.config.canvas_length
    adapt(model, targets(model, {part: LowRank(16, 32) for part in ("attention", "mlp")}))
    draw_adapters(model, 0, machine.device, model.dtype)
    objective = Objective(model, Linear(), UniformCorruption(model.vocab_size), seed=5)
    canvases = 8
    row = torch.randint(3, 300, (canvases * length + 1,)).tolist()
    starts = [1 + n * length for n in range(canvases)]
    cut = [Canvas(row[s : s + length], s, 0, None, 0.4, True, address=(0, 0, s)) for s in starts]
    batch = lay_out([CleanRow(row, cut, 0)], length, pad_id=0).to(machine.device)

    def step() -> float:
        begin = time.perf_counter()
        with cast_once(objective):
            sums: Any = objective(batch)
            (sums["canvas"] / 16 + sums["ar"] / 30).backward()
        queued = time.perf_counter() - begin
        for parameter in model.parameters():
            parameter.grad = None
        return queued

    for recomputes in (False, True):
        if recomputes:
            checkpoint_activations(model)
        for is_on in (True, False):
            with patch.object(relaunch, "IS_ON", is_on):
                forget_sizes()
                for _ in range(3):
                    step()
                hosts: list[float] = []
                (seconds,) = machine.seconds(lambda hosts=hosts: hosts.append(step()))  # type: ignore[misc]
            words = f"{'with' if recomputes else 'without'} recomputation, relaunch {'on' if is_on else 'off'}"
            host = statistics.median(hosts)
            milliseconds = dict(milliseconds_of_a_layer=1e3 * seconds / LAYERS, queued_after=1e3 * host / LAYERS)
            say("lora", words, layers=LAYERS, **milliseconds)
    forget_sizes()


PARTS = {each.__name__: each for each in (lora, experts, gate_up)}


def main(words: Sequence[str] | None = None) -> None:
    """Run the named parts, or all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.variants", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; all by default")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--preset", default="diffusiongemma-26b-a4b")
    options = parser.parse_args(words)
    if unknown := set(options.parts) - PARTS.keys():
        parser.error(f"there is no part {', '.join(sorted(unknown))}; choose from {', '.join(PARTS)}")
    machine = Machine(torch.device(options.device), options.preset)
    for name in options.parts or PARTS:
        PARTS[name](machine)
        if machine.is_cuda:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
