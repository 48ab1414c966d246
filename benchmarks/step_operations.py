"""The operations of a denoising step by kind: `python -m benchmarks.step_operations`, on any machine.

Counted are launches of Triton kernels and torch's own operations that compute something, of a step as a CUDA graph
holds it, for two canvases of 256 tokens and a model of two layers on torch's meta device: drawn from all of the
distribution, with top_p, under a JSON schema, and the head's part of a verification.
"""

from __future__ import annotations

import argparse
import os

if __name__ == "__main__":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # the Triton path is there without a GPU; nothing is launched

from collections import Counter
from typing import Any
from unittest.mock import patch

import torch

from blockdiff.checkpoint.generation import Generation
from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.kernels import Kernels
from blockdiff.kernels import launch as launching
from blockdiff.models.diffusion_gemma import DiffusionGemma
from blockdiff.models.pages import Pages
from blockdiff.sampling.canvas_control import grouped
from blockdiff.sampling.control import compile_control
from blockdiff.sampling.predict import PredictInputs, predict
from blockdiff.sampling.prepare import sampling_settings
from blockdiff.sampling.request import Request
from blockdiff.sampling.step import CanvasStep, StepCall
from blockdiff.sampling.strategy import captured_shape
from tests.support.launches import KINDS, Operations, small_config

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["a"]}
STEPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_p": {"strategy": "entropy_bound:top_p=0.9"},
    "JSON": {"json_schema": SCHEMA},
}
B, LENGTH = 2, 256


@torch.no_grad()
def counted(kind: str) -> Counter[str]:
    """Count Triton launches by kernel, and torch's operations, of a step. kind: a key of STEPS or "verified"."""
    config = small_config(list(KINDS.values()), LENGTH)
    with torch.device("meta"):
        model = DiffusionGemma(config, kernels=Kernels("triton")).eval()
    asked = STEPS.get(kind, {})
    tokenizer = character_tokenizer('abcdefgh0123456789{}[]":,. ')
    found, generation = Counter[str](), Generation(eos_ids=(1,), pad_id=0)
    settings = sampling_settings(model, tokenizer, generation, strategy=asked.get("strategy"))
    with (
        patch.object(launching, "torch_must_see_op", lambda: False),
        patch.object(launching.Launch, "__call__", lambda self, *_: found.update([self.kernel.__name__])),
    ):
        pages = Pages(model, capacity=4096)
        rows = [pages.open() for _ in range(B)]
        hidden_BLD = pages.encode(rows, torch.zeros(B, LENGTH, dtype=torch.int64), [LENGTH] * B)
        if kind == "verified":
            hidden_N1D = hidden_BLD.flatten(0, 1)[:, None]
            zeros = torch.zeros(len(hidden_N1D), 1, device="meta")
            inputs = PredictInputs(hidden_N1D, zeros.long(), zeros[:, 0], zeros, zeros[:, 0].long())
            found.clear()
            with Operations() as operations:
                predict(model, inputs)
        else:
            step, controls = CanvasStep(model, settings, pages, B, keeps=False), []
            if "json_schema" in asked:
                request = Request(0, tokens=[3], json_schema=asked["json_schema"])
                length = dict(max_tokens=2 * LENGTH, max_steps=4, device=torch.device("meta"))
                control = compile_control(request, [3], settings, **length)  # type: ignore[arg-type]
                assert control is not None
                [held] = grouped([control.begin(n) for n in range(B)])
                controls = [held.in_buffers({}, most=4, count=B)]
            shape = captured_shape(settings.strategy, 8)
            assert shape is not None
            step.prefixes.load(rows)
            call = StepCall(B, B, (), ((settings.strategy, None),), controls, [shape] * B)
            step(call)  # the first one fills caches for later ones
            found.clear()
            with Operations() as operations:
                step(call)
    return found + Counter({f"torch {name.removeprefix('aten.')}": n for name, n in operations.found.items()})


def main() -> None:
    """Print a Markdown table."""
    argparse.ArgumentParser(prog="python -m benchmarks.step_operations", description=__doc__).parse_args()
    print("| step | launches | torch operations | both |\n|---|---|---|---|")
    for kind in (*STEPS, "verified"):
        found = counted(kind)
        of_torch = sum(n for name, n in found.items() if name.startswith("torch "))
        print(f"| {kind} | {sum(found.values()) - of_torch} | {of_torch} | {sum(found.values())} |", flush=True)


if __name__ == "__main__":
    main()
