"""A soak of the engine: random requests that come, go and are cancelled, in too little memory, against the oracle.

    python -m benchmarks.soak --requests 2000

A tiny random model answers, in fp64, where other neighbours in a batch change no token, or with --dtype float32 to
count near-ties. Every answer is compared with that of the loop in lockstep, which gets each request alone; after the
last one no page may be in use. The exit code is 1 when an answer differs in fp64, when more than a hundredth of them
differ in another dtype, or when a page is left.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from blockdiff.checkpoint import init
from tests.support.soak import soak

NEAR_TIES = 0.01  # the share of answers that may differ, since near-ties flip


def main(words: Sequence[str] | None = None) -> int:
    """Run a soak and print its outcome."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float64")
    given = parser.parse_args(words)
    model = init("tiny", seed=1, device="cpu", dtype=given.dtype)
    with torch.no_grad():
        model.self_conditioning.down_proj.weight *= 0.1  # type: ignore[operator, union-attr]
        model.norm.weight.mul_(4)
    found = soak(model, given.requests, given.seed)
    print(
        f"{found.requests} requests in {found.seconds:.0f} s: {found.answered} answered, {found.cancelled} cancelled, "
        f"{found.preemptions} preemptions, {found.reused_tokens} tokens shared, {found.leaked} pages left, "
        f"{len(found.wrong)} answers differ ({len(found.wrong) / max(1, found.answered):.2%})"
    )
    most = 0 if given.dtype == "float64" else NEAR_TIES * found.answered
    return 1 if found.leaked or len(found.wrong) > most else 0


if __name__ == "__main__":
    sys.exit(main())
