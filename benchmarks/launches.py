"""Host time of a layer of a denoising step on the Triton path: `python -m benchmarks.launches`, on any machine.

Counted for each kind of layer at batch 1 over pages: launches of Triton kernels, and torch's own operations; the same
of a commit, and the bytes that its operations copy at the released model's sizes, and of a sliding layer whose
compositions run op by op. A denoising step is timed, too, with
the launches and torch's products left out (their results are made, but nothing is computed), on small tensors of the
CPU; the time of a layer is what layers more make a step longer by. What Triton takes for a launch, and torch for a
product, comes on top on a GPU. What stands in for both is part of that time, and its own time is given beside it.

Of an engine are counted and timed: opening a row, admitting requests in one step and finishing one, of a model of 2,000
tensors of weights. No model call is made for them.
"""

from __future__ import annotations

import argparse

from tests.support.launches import (
    COMPOSITIONS,
    KINDS,
    Commit,
    RequestPath,
    beside_seconds,
    calls_within,
    copied_bytes,
    counted,
    host_seconds,
    processor_seconds,
    python_calls,
)


def main() -> None:
    """Print a Markdown table."""
    argparse.ArgumentParser(prog="python -m benchmarks.launches", description=__doc__).parse_args()
    of_time = "host microseconds | of them stand-ins | look-ups on a GPU, on top"
    print(f"| layer | Triton launches | torch operations | Python calls | {of_time} |\n|---|---|---|---|---|---|---|")
    for kind in KINDS:
        launches, operations = counted(kind)
        times = [host_seconds(kind), *beside_seconds(kind)]
        numbers = sum(launches.values()), sum(operations.values()), python_calls(kind)
        cells = [kind, *map(str, numbers), *(f"{1e6 * each:.0f}" for each in times)]
        print(f"| {' | '.join(cells)} |", flush=True)
    print("\n| op by op | Triton launches | torch operations |\n|---|---|---|")
    for names in COMPOSITIONS:
        counts = (str(sum(found.values())) for found in counted("sliding", composed=names))
        print(f"| {' | '.join([', '.join(names), *counts])} |", flush=True)
    print("\n| layer in a commit | Triton launches | torch operations | bytes copied |\n|---|---|---|---|")
    for kind in KINDS:
        counts = (str(sum(found.values())) for found in counted(kind, Commit))
        print(f"| {' | '.join([kind, *counts, f'{copied_bytes(kind):,}'])} |", flush=True)
    print("\n| of a model of 2,000 tensors | Python calls | host microseconds |\n|---|---|---|")
    path = RequestPath(2000)
    seconds = path.counted(processor_seconds, repeats=100)
    for part, calls in path.counted(calls_within).items():
        cells = [part, str(calls), f"{1e6 * seconds[part]:.0f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
