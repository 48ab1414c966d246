"""Lines about ops at the released model's shapes, ours against peers. Shared by the suites of ops.

Each suite draws inputs, chooses how both sides are compared, and lists the peers. Outputs and gradients are compared
before anything is timed. A peer that computes something else, or cannot run here, is named and left out.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from benchmarks.quick_start import Ceilings
from benchmarks.result import Agreement, Result, half_precision_bound
from benchmarks.settings import Settings
from benchmarks.timing import contenders, interleaved, once, probe
from tests.support.peaks import peak_memory

FP32_BOUND = 1e-4
PEER_BOUND = 0.05  # relative; a wrong mask, expert or weight is far beyond

Work = Callable[[], Any]


def relative_error(values: Tensor, truth: Tensor) -> float:
    """Return the relative 2-norm error; for tokens the share that differs; infinite if any value is not a number."""
    if not truth.is_floating_point():
        return float((values != truth).float().mean())
    error = float((values.float() - truth.float()).norm() / truth.float().norm().clamp(min=1e-30))
    return error if math.isfinite(error) else math.inf


def agreement(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], truth: Mapping[str, Tensor], *, is_fp32: bool
) -> Agreement:
    """Compare our outputs with the fp32 truth by relative error; in half precision a peer's errors are the bound."""
    errors = {}
    for name, exact in truth.items():
        if exact.numel():
            bound = FP32_BOUND if is_fp32 else half_precision_bound(relative_error(theirs[name], exact))
            errors[name] = (relative_error(ours[name], exact), bound)
    return Agreement(errors)


def computes(name: str, work: Callable[[], Sequence[Tensor]], ours: Sequence[Tensor]) -> bool:
    """Return whether a peer runs here and gives our outputs; if not, it is named."""
    try:
        error = max(relative_error(x, y) for x, y in zip(work(), ours, strict=True))
    except Exception as problem:  # any error of a peer that does not support this shape or device
        print(f"{name}: not available: {type(problem).__name__}: {str(problem)[:200]}", file=sys.stderr)
        return False
    if error > PEER_BOUND:
        print(f"{name}: left out, it differs by {error:.2g}", file=sys.stderr)
    return error <= PEER_BOUND


def timed(result: Result, ours: Work, peers: Mapping[str, Work], settings: Settings, has_peak: bool = True) -> Result:
    """Return the line with our times and those of the fastest peers, in turns, and their peak memory."""
    device = settings.device
    probed = probe({name: once(work, device) for name, work in peers.items()})
    chosen = {name: once(peers[name], device) for name in contenders(probed)}
    times = interleaved({"ours": once(ours, device)} | chosen, settings.repeats)
    our_times = times.pop("ours")
    line = replace(result, ours=our_times, peers=times, probed=probed)
    if not has_peak:
        return line
    return replace(line, memory=(peak_memory(ours, device), peak_memory(peers[str(line.fastest_peer)], device)))


def rates(line: Result, operations: float, nbytes: float | None, ceilings: Ceilings | None) -> Result:
    """Return the line with its operations and bytes per second in `case`, also as shares of the ceilings."""
    assert line.ours is not None
    seconds = line.ours.median
    words = f"{operations / seconds / 1e12:.3g} TFLOP/s"
    if ceilings is not None:
        words += f" = {operations / seconds / ceilings.operations_per_second:.0%} of a product's"
        if nbytes is not None:
            rate = nbytes / seconds
            words += f", {rate / 1e12:.2f} TB/s = {rate / ceilings.bytes_per_second:.0%} of a copy's"
    return replace(line, case=f"{line.case}; {words}")
