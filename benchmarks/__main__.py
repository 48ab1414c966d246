"""`python -m benchmarks`: run the suites, print one table, write JSON and Markdown."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from benchmarks import (
    attempts,
    denoise_step,
    kernel_expert_mlp,
    kernel_span_attention,
    kernel_vocabulary,
    machine,
    models,
    training_step,
    workload,
)
from benchmarks.result import Result, table
from benchmarks.settings import Settings
from blockdiff.terminal import quiet

SUITES = {
    "training": training_step.run,
    "denoise": denoise_step.run,
    "vocabulary": kernel_vocabulary.run,
    "attention": kernel_span_attention.run,
    "experts": kernel_expert_mlp.run,
    "workload": workload.run,
}


def main(words: list[str] | None = None) -> int:
    """Run the suites; return 1 if a line disagrees with the peer or a suite fails, else 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", action="append", choices=SUITES, help="a suite (may be repeated); default: all")
    parser.add_argument("--sizes", help="comma-separated names; default: all that suit the device")
    parser.add_argument("--repeats", type=int, default=9, help="timed repeats of each side (default 9)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--kernels", default="auto", help="our kernels: auto, torch or triton")
    parser.add_argument(
        "--compiled-peer", action="store_true", help="also try transformers' compiled generate (always on a GPU)"
    )
    parser.add_argument(
        "--output",
        type=Path,
        help="FILE.json for all figures, and FILE.md for the table; default: the table is printed only",
    )
    options = parser.parse_args(words)
    device = torch.device(options.device)
    known = models.sizes(device)
    chosen = list(known) if options.sizes is None else options.sizes.split(",")
    unknown = [name for name in chosen if name not in known]
    if unknown or options.repeats < 1:
        parser.error(f"no size {unknown[0]!r}; there are: {', '.join(known)}" if unknown else "--repeats: at least 1")
    quiet()

    compiled_peer = options.compiled_peer or device.type == "cuda"
    settings = Settings(device, options.repeats, options.kernels, compiled_peer)
    output = options.output
    record = machine.describe(device)
    results: list[Result] = []

    def done(result: Result) -> None:
        """Write the results so far after every line, since a rented machine can end early."""
        results.append(result)
        speedup = f"{result.speedup[0]:.2f}x" if result.speedup else f"DISAGREES: {result.agreement}"
        print(f"{result.suite}, {result.size}, {result.case}: {speedup}", file=sys.stderr, flush=True)
        if output is not None:
            lines = [line.to_record() for line in results]
            contents = {"machine": record, "repeats": settings.repeats, "results": lines}
            machine.write(output, contents, report())

    def report() -> str:
        return f"{machine.heading(record, settings.repeats)}\n\n{table(results)}\n"

    attempts.FAILED.clear()
    for suite in options.only or SUITES:
        with attempts.attempt(suite):  # the other suites still run
            SUITES[suite]([known[name] for name in chosen], settings, done)
    print(report())
    if attempts.FAILED:
        print(f"failed: {'; '.join(attempts.FAILED)}", file=sys.stderr)
    if output is not None:
        print(f"written: {output} and {output.with_suffix('.md').name}", file=sys.stderr)
    return 0 if all(result.agreement.is_met for result in results) and not attempts.FAILED else 1


if __name__ == "__main__":
    sys.exit(main())
