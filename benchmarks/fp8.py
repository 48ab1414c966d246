"""How far weights in fp8 are from those of a checkpoint: `python -m benchmarks.fp8 MODEL`.

The same random prompts and noisy canvases go through the model with its weights as they are, with those in fp8 and with
the inputs of their products in fp8, too (fp8-dynamic). It prints of both the relative error of the logits and how often
the most likely token is the same one, and the bytes of the weights as they are and in fp8.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch
from torch import Tensor

import blockdiff
from blockdiff.models.family import BlockDiffusionModel


@torch.no_grad()
def logits_of(model: BlockDiffusionModel, rows: int, tokens: int, seed: int = 0) -> Tensor:
    """Logits [rows, L, V] of canvases of random tokens after prefixes of random tokens, in fp32."""
    draw = torch.Generator().manual_seed(seed)
    prefix = torch.randint(model.vocab_size, (rows, tokens), generator=draw).to(model.device)
    canvas = torch.randint(model.vocab_size, (rows, model.canvas_length), generator=draw).to(model.device)
    hidden = model.denoise(canvas, model.encode(prefix)) if model.denoises else model.encode(prefix).hidden
    return model.unembed(hidden)


def main() -> int:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fp8", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    found: dict[str | None, Tensor] = {}
    sizes: list[int] = []
    for quantize in (None, "fp8", "fp8-dynamic"):
        model = blockdiff.load(args.model, dtype=args.dtype, device=args.device, quantize=quantize)
        sizes.append(sum(x.nbytes for x in (*model.parameters(), *model.buffers())))
        found[quantize] = logits_of(model, args.rows, args.tokens).double()
        del model
    truth, record = found.pop(None), dict[str, Any](bytes=sizes[:2])
    for quantize, ours in found.items():
        same = (truth.argmax(-1) == ours.argmax(-1)).double().mean()
        error = (ours - truth).norm() / truth.norm()
        record[str(quantize)] = dict(relative_error=float(error), same_argmax=float(same))
    print(json.dumps(record | {"rows": args.rows, "tokens": args.tokens, "torch": torch.__version__}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
