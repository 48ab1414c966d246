"""The kernels that Triton compiles while rows come and go: `python -m benchmarks.compilations`, on any machine.

Prompts are encoded, canvases denoised, drawn, committed and verified in batches of several sizes, of two layers of the
released model (one of each kind) on torch's meta device, and blocks of a drafter of two layers drafted and verified by
two layers of Qwen3-8B's shape. Triton tells launches apart as on an H100 with its 132
multiprocessors; what it would compile is counted by kernel, and nothing is compiled. Needs triton, not
TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from benchmarks.compiled import Driver
from blockdiff.checkpoint import empty, preset_config
from blockdiff.checkpoint.config import config_from
from blockdiff.kernels import Kernels, tiles
from blockdiff.kernels import launch as launching
from blockdiff.kernels.span_attention import triton as attention
from blockdiff.kernels.vocabulary import Shaping
from blockdiff.models.diffusion_gemma import DiffusionGemma
from blockdiff.models.drafted import Drafted
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.models.pages import Pages
from tests.support.launches import config_of

ROWS = (1, 2, 3, 4, 8, 16, 32)
LONGEST = (5, 130, 700, 2100)  # tokens of the longest prompt of a batch
LAYERS = ["sliding_attention", "full_attention"]
MULTIPROCESSORS = 132


@contextmanager
def compilations(
    architecture: int = 90, multiprocessors: int = MULTIPROCESSORS, compile_kernel: Callable[..., Any] | None = None
) -> Iterator[dict[str, set[str]]]:
    """In the block no launch runs; yields the keys of the kernels that Triton would compile, by kernel name.

    compile_kernel: called in place of `JITFunction._do_compile` for each new key (None: nothing is compiled).
    """
    found: dict[str, set[str]] = defaultdict(set)

    def note(kernel: JITFunction, key: str, *rest: Any) -> Any:
        found[kernel.__name__].add(key)
        compiled = None if compile_kernel is None else compile_kernel(kernel, key, *rest)
        return kernel.device_caches[architecture][0].setdefault(key, compiled or SimpleNamespace())

    def launch(self: launching.Launch, *arguments: Any) -> None:
        if 0 not in self.grid:
            self.kernel.run(*arguments, grid=self.grid, warmup=True, **self.constants)

    of_table = max(known for known in tiles.SHARED_MEMORY if known <= architecture)
    with (
        patch.object(driver, "_active", Driver(architecture)),
        patch.object(JITFunction, "_do_compile", note),
        patch.object(launching.Launch, "__call__", launch),
        patch.object(launching, "torch_must_see_op", lambda: False),
        patch.object(tiles, "architecture", lambda device: of_table),
        patch.object(attention, "_multiprocessors", lambda device: multiprocessors),
    ):
        launching.forget_sizes()
        yield found
    launching.forget_sizes()


def released_model(preset: str = "diffusiongemma-26b-a4b") -> DiffusionGemma:
    """Return two layers of the released model, or of another preset, on the meta device."""
    with torch.device("meta"):
        model = DiffusionGemma(config_of(preset, LAYERS), kernels=Kernels("triton"))
    return model.to(torch.bfloat16).eval()


def drafted_model() -> Drafted:
    """Return two layers of Qwen3-8B's shape with a drafter of two layers, which sees the first one's output."""
    target, drafter = (preset_config(name).to_dict() for name in ("qwen3-8b", "qwen3-8b-drafter"))
    for values in (target, drafter):
        values.update(num_hidden_layers=2, layer_types=["full_attention"] * 2)
    drafter |= {"num_target_layers": 2, "dflash_config": drafter["dflash_config"] | {"target_layer_ids": [0]}}
    parts = [
        empty(config_from(values, "here"), Kernels("triton")).to(torch.bfloat16).eval() for values in (target, drafter)
    ]
    return Drafted(*parts).eval()


def pages_of(model: BlockDiffusionModel) -> Pages:
    """Return pages for a model, with their memory allocated."""
    pages = Pages(model, capacity=1 << 18)
    pages.make_pools()
    return pages


@torch.no_grad()
def walk(model: DiffusionGemma, pages: Pages) -> None:
    """Call every op of encodes, denoising steps, commits and verifications, for several batch sizes and lengths."""
    L = model.canvas_length
    for count in ROWS:
        for longest in LONGEST:
            lengths = [max(1, longest - 7 * n) for n in range(count)]
            rows = [pages.open() for _ in lengths]
            pages.encode(rows, torch.zeros(count, longest, dtype=torch.int64), lengths)
            canvas, soft = torch.zeros(count, L, device="meta").long(), None
            for shaping in (None, Shaping(top_p=0.9), Shaping(top_k=40, top_p=0.9)):
                hidden = pages.denoise(rows, canvas, soft)
                soft = draw(model, hidden, shaping)
            hidden = pages.encode(rows, torch.zeros(count, L, dtype=torch.int64), [L] * count)
            draw(model, hidden.flatten(0, 1)[:, None][3:], None)  # the head at positions of rejected drafts
            for row in rows:
                pages.release(row)


@torch.no_grad()
def walk_drafted(model: Drafted, pages: Pages) -> None:
    """Call every op of a drafter's rounds, for several numbers of rows, lengths and drafted tokens."""
    drafter = model.drafter
    for count in ROWS:
        for longest in LONGEST:
            rows = [pages.open() for _ in range(count)]
            pages.encode(rows, torch.zeros(count, longest, dtype=torch.int64), [longest] * count)
            for drafts in (1, 6, drafter.canvas_length - 1):
                blocks = torch.zeros(count, drafter.canvas_length, dtype=torch.int64, device="meta")
                hidden = pages.denoise(rows, blocks)[:, 1 : 1 + drafts].flatten(0, 1)
                drafter.vocabulary.scores(hidden, torch.zeros(len(hidden), dtype=torch.int64, device="meta"))
                tokens = torch.zeros(count, 1 + drafts, dtype=torch.int64)
                draw(model, pages.encode(rows, tokens, [1 + drafts] * count).flatten(0, 1)[:, None], None)
            for row in rows:
                pages.release(row)


def draw(model: BlockDiffusionModel, hidden: torch.Tensor, shaping: Shaping | None) -> torch.Tensor:
    """Compute all statistics of the logits; return the soft embedding."""
    uniform, temperature = hidden[..., 0].float(), hidden[:, 0, 0].float()
    return model.vocabulary.stats(hidden, temperature, uniform, None, shaping).soft_embedding


def main() -> None:
    """Print a table, or one JSON object of compilations by kernel."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compilations", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one object")
    options = parser.parse_args()
    counts = {}
    walks: dict[str, tuple[Callable[[], Any], Callable[[Any, Pages], None]]] = {
        "canvases": (released_model, walk),
        "drafts": (drafted_model, walk_drafted),
    }
    for name, (make, run) in walks.items():
        model = make()
        with compilations() as found:
            run(model, pages_of(model))
        counts[name] = {kernel: len(keys) for kernel, keys in sorted(found.items())}
    if options.json:
        print(json.dumps(counts))
        return
    print("| kernel | canvases | drafts |\n|---|---|---|")
    for kernel in sorted({*counts["canvases"], *counts["drafts"]}):
        print(f"| {kernel} | {counts['canvases'].get(kernel, 0)} | {counts['drafts'].get(kernel, 0)} |")
    print(f"| all | {sum(counts['canvases'].values())} | {sum(counts['drafts'].values())} |")


if __name__ == "__main__":
    main()
