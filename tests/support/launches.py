"""The cost of a layer of a denoising step, of a commit and of a request for the host on the Triton path."""

from __future__ import annotations

import cProfile
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

if __name__ == "__main__":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # the Triton path is there without a GPU; nothing is launched

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

from blockdiff.kernels import launch as launching
from blockdiff.kernels import relaunch, resolve
from blockdiff.kernels.span_attention import triton as attention
from blockdiff.models.diffusion_gemma import DiffusionGemma, DiffusionGemmaFamily
from blockdiff.models.pages import Pages
from blockdiff.models.stored import quantised_layers, store
from blockdiff.sampling import Engine, Generation, Request
from tests.support.presets import changed_preset

COMPOSITIONS = (  # each alone; slots that layer_end does not sum are summed before
    *(("attention_heads",), ("residual_norms",), ("routed_tokens",), ("expert_slots",)),
    *(("layer_end", "expert_slots"), ("gated_linear",)),
)
FREE = ("view", "reshape", "transpose", "t.", "unsqueeze", "expand", "slice", "select", "split", "detach", "empty",
        "new_empty", "alias", "as_strided", "unbind", "flatten", "permute", "_unsafe_view", "unflatten",
        "lift", "promote_types", "squeeze")  # fmt: skip
COPIES = ("index_copy", "index_select", "index.", "gather", "cat", "clone", "copy_", "_to_copy")
KINDS = {"sliding": "sliding_attention", "full": "full_attention"}


class Operations(TorchDispatchMode):
    """Counts torch's own operations that compute something, and the bytes that those which copy read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.copied = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, out = str(func).removeprefix("aten."), func(*args, **(kwargs or {}))
        if str(func).startswith("aten.") and not name.startswith(FREE):
            self.found[str(func)] += 1
        if name.startswith(COPIES):
            made = args[3] if name.startswith("index_copy") else out
            self.copied += 2 * made.numel() * made.element_size()
        return out


@contextmanager
def launches_left_out() -> Iterator[Counter[str]]:
    """Within it Triton launches nothing: the names of the kernels are counted. Every attention is in two splits.

    Only Triton's part, `kernel[grid](...)`, is left out; what comes before, `blockdiff.kernels.launch` too, is as ever.
    """
    launched: Counter[str] = Counter()

    def launcher(kernel: Any, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **constants: Any) -> None:
            launched[name] += 1

        name = kernel.__name__
        return launch

    with (
        patch.object(InterpretedFunction, "__getitem__", launcher),
        patch.object(attention, "splits_of", lambda *sizes: 2),
    ):
        launching.forget_sizes()
        yield launched
    launching.forget_sizes()


class DenoisingStep:
    """One step of one canvas, of a model with so many layers of one kind before its last one.

    preset: whose sizes it has, without memory for them (None: sizes at which arithmetic takes no time). quantize:
    "fp8", or None for weights like others. composed: the compositions that run op by op.
    """

    def __init__(
        self,
        kind: str,
        layers: int,
        preset: str | None = None,
        quantize: str | None = None,
        composed: Sequence[str] = (),
    ):
        layer_types = [KINDS[kind]] * layers + [KINDS["full"]]
        dtype = torch.float32 if preset is None else torch.bfloat16
        with torch.device("cpu" if preset is None else "meta"):
            config = small_config(layer_types) if preset is None else config_of(preset, layer_types)
            kernels = resolve("triton").replaced(**dict.fromkeys(composed, "torch"))
            self.model = DiffusionGemma(config, kernels=kernels).to(dtype).eval()
            store(self.model, quantised_layers(self.model, quantize))
        self.pages = Pages(self.model, capacity=4096)
        self.row = self.pages.open()
        self.pages.encode([self.row], torch.arange(3, 24)[None], [21])
        L, D = self.model.canvas_length, self.model.vocabulary.table.shape[1]
        self.canvas, self.soft = torch.zeros(1, L, dtype=torch.int64), torch.zeros(1, L, D, dtype=dtype)

    def __call__(self) -> None:
        self.pages.denoise([self.row], self.canvas, self.soft)


class Commit(DenoisingStep):
    """The encoding of a finished canvas."""

    def __call__(self) -> None:
        self.pages.encode([self.row], self.canvas, [self.model.canvas_length])


@torch.no_grad()
def counted(
    kind: str, work: type[DenoisingStep] = DenoisingStep, quantize: str | None = None, composed: Sequence[str] = ()
) -> tuple[Counter[str], Counter[str]]:
    """Launches, and torch's operations, that one layer more makes in a step."""
    counts = []
    with launches_left_out() as launched, patch.object(launching, "torch_must_see_op", lambda: False):
        for layers in (1, 2):
            step = work(kind, layers, quantize=quantize, composed=composed)
            step()
            launched.clear()
            with Operations() as operations:
                step()
            counts.append((Counter(launched), operations.found))
    (fewer, fewer_operations), (more, more_operations) = counts
    return more - fewer, more_operations - fewer_operations


@torch.no_grad()
def copied_bytes(kind: str) -> int:
    """Bytes that torch reads and writes to copy tensors in a commit, for one layer more of the released model."""
    bytes_of = []
    with patch.object(launching, "torch_must_see_op", lambda: False):
        for layers in (1, 2):
            commit = Commit(kind, layers, "diffusiongemma-26b-a4b")
            commit()
            with Operations() as operations:
                commit()
            bytes_of.append(operations.copied)
    return bytes_of[1] - bytes_of[0]


@torch.no_grad()
def host_seconds(kind: str, few: int = 4, many: int = 16, repeats: int = 100) -> float:
    """Seconds of the host that one layer more adds to a step, with no launches: the least of many, in turns."""
    with launches_left_out(), patch.object(torch.nn.functional, "linear", _product_left_out):
        steps = [DenoisingStep(kind, layers) for layers in (few, many)]
        seconds: list[list[float]] = [[], []]
        for repeat in range(repeats + 5):
            for step, found in zip(steps, seconds, strict=True):
                start = time.process_time()
                step()
                if repeat >= 5:
                    found.append(time.process_time() - start)
    return (min(seconds[1]) - min(seconds[0])) / (many - few)


@torch.no_grad()
def beside_seconds(kind: str, rounds: int = 300, repeats: int = 20) -> tuple[float, float]:
    """Seconds of the stand-ins for launches and products in one layer, and of what a launch on a GPU looks up besides.

    Both are called alone with what a step gives them. Of what stands in for a product its result's allocation is left
    out, which a product makes, too. They are lower bounds: called again and again, all of it stays in the processor's
    cache. What is looked up (`relaunch.launch_signature`) takes no part in the host's time without a GPU.
    """
    stand_ins: list[Callable[[], Any]] = []
    look_ups: list[Callable[[], Any]] = []
    starter, product = relaunch.starter, _product_left_out

    def noting_starter(*launch: Any) -> Any:
        start = starter(*launch)

        def started(*arguments: Any) -> None:
            stand_ins.append(lambda: start(*arguments))
            look_ups.append(lambda: relaunch.launch_signature(arguments))

        return started

    def noting_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        stand_ins.append(lambda: product(x, weight))
        return product(x, weight)

    seconds = []
    products_noted = patch.object(torch.nn.functional, "linear", noting_product)
    with patch.object(relaunch, "starter", noting_starter), launches_left_out(), products_noted:
        for layers in (1, 2):
            step = DenoisingStep(kind, layers)
            stand_ins.clear()
            look_ups.clear()
            step()
            seconds.append([_least_seconds(list(calls), rounds, repeats) for calls in (stand_ins, look_ups)])
    x = torch.zeros(1, 8, 64)
    products = 5 if kind == "sliding" else 4
    allocations = products * _least_seconds([lambda: x.new_empty(1, 8, 64)], rounds, repeats)
    (stood_in, looked_up), (more_stood_in, more_looked_up) = seconds
    return more_stood_in - stood_in - allocations, more_looked_up - looked_up


def _least_seconds(calls: list[Callable[[], Any]], rounds: int, repeats: int) -> float:
    """Processor time of all calls, one after the other: the least of some means."""
    found = []
    for _ in range(repeats):
        start = time.process_time()
        for _ in range(rounds):
            for call in calls:
                call()
        found.append((time.process_time() - start) / rounds)
    return min(found)


@torch.no_grad()
def python_calls(kind: str) -> int:
    """The number of calls of Python functions that one layer more makes in a step."""
    counts = []
    with launches_left_out(), patch.object(torch.nn.functional, "linear", _product_left_out):
        for layers in (1, 2):
            step = DenoisingStep(kind, layers)
            step()
            counts.append(calls_within(step))
    return counts[1] - counts[0]


def calls_within(work: Callable[[], Any]) -> int:
    """The number of calls of Python functions in a call of `work`, its own and resumed generators included."""
    with cProfile.Profile(builtins=False) as profile:
        work()
    return sum(entry.callcount for entry in profile.getstats())


class RequestPath:
    """The parts of a request that call no model, in an engine whose model has so many tensors of weights and buffers.

    Most of the tensors are ones of a single number that no layer reads.
    """

    def __init__(self, tensors: int, max_rows: int = 8):
        model = DiffusionGemma(small_config([KINDS["full"]]), kernels="torch").eval()
        left_over = tensors - sum(1 for _ in (*model.parameters(), *model.buffers()))
        model.add_module("unread", torch.nn.ParameterList(torch.zeros(1) for _ in range(left_over)))
        self.engine = Engine(model, generation=Generation(max_new_tokens=8, eos_ids=(1,)), max_rows=max_rows)
        self.submitted = 0

    def open_row(self) -> None:
        """Open a row of the pages, and give it back."""
        self.engine.pages.release(self.engine.pages.open())

    def admit(self, count: int) -> None:
        """Submit requests and give them their rows, as one step does."""
        for _ in range(count):
            self.engine.submit(Request(self.submitted, tokens=[5, 6, 7]))
            self.submitted += 1
        self.engine._scheduler.admit()

    def finish(self, count: int) -> None:
        """End the requests that were admitted last, each with its result."""
        for number in range(self.submitted - count, self.submitted):
            self.engine.cancel(number)
        self.engine.events()

    def counted(self, measure: Callable[[Callable[[], Any]], float], repeats: int = 1) -> dict[str, float]:
        """The least that `measure` says of each part: `calls_within`, or `processor_seconds`."""
        found: dict[str, list[float]] = {}
        for _ in range(repeats + 1):
            opened = measure(self.open_row)
            admitted, finished = [], []
            for count in (1, 8):
                admitted.append(measure(lambda count=count: self.admit(count)))  # type: ignore[misc]
                finished.append(measure(lambda count=count: self.finish(count)))  # type: ignore[misc]
            parts = {
                "opening a row, and giving it back": opened,
                "admitting one request in a step": admitted[0],
                "admitting eight requests in a step": admitted[1],
                "finishing one request": finished[0],
                "finishing eight requests": finished[1],
            }
            for name, amount in parts.items():
                found.setdefault(name, []).append(amount)
        return {name: min(amounts[1:]) for name, amounts in found.items()}


def processor_seconds(work: Callable[[], Any]) -> float:
    """Processor time of one call."""
    start = time.process_time()
    work()
    return time.process_time() - start


def _product_left_out(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def config_of(preset: str, layer_types: list[str]) -> DiffusionGemmaFamily:
    """The config of a preset with these layers."""
    return changed_preset(preset, {"num_hidden_layers": len(layer_types), "layer_types": layer_types})


def small_config(layer_types: list[str], canvas_length: int = 8) -> DiffusionGemmaFamily:
    """Layers of sizes at which arithmetic takes no time."""
    text = dict(
        vocab_size=384, hidden_size=64, intermediate_size=128, num_hidden_layers=len(layer_types),
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, global_head_dim=32,
        num_global_key_value_heads=1, sliding_window=16, layer_types=layer_types, num_experts=8, top_k_experts=2,
        moe_intermediate_size=32,
        use_bidirectional_attention="vision",
    )  # fmt: skip
    return DiffusionGemmaFamily.read({"text_config": text, "vision_config": None, "canvas_length": canvas_length})
