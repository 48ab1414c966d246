"""One measured line (whether both sides agree, and how long each takes), and the table of such lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.timing import Times, quartiles


def half_precision_bound(peer_error: float) -> float:
    """Return the largest allowed distance of our bf16 to fp32.

    This is twice the peer's distance, since single experts flip, but at most half the value.
    """
    return min(2 * peer_error, 0.5)


@dataclass(frozen=True)
class Agreement:
    """The distances of our outputs to the peer's: name of the compared output -> (error, its bound)."""

    errors: dict[str, tuple[float, float]]

    @property
    def is_met(self) -> bool:
        """True if every error is within its bound (NaN never is)."""
        return all(error <= bound for error, bound in self.errors.values())

    def __str__(self) -> str:
        parts = [f"{name} {error:.1e} (bound {bound:.1e})" for name, (error, bound) in self.errors.items()]
        return ", ".join(parts)


@dataclass(frozen=True)
class Result:
    """One line. `peers` has the timed variants of the peer; ours is compared with the fastest.

    Without agreement there are no times, so no speed-up can be quoted.
    """

    suite: str
    size: str
    case: str
    agreement: Agreement
    ours: Times | None = None
    peers: dict[str, Times] = field(default_factory=dict)
    probed: dict[str, float] = field(default_factory=dict)  # best seconds of every variant that was tried
    memory: tuple[int, int] | None = None  # peak bytes of ours and of the fastest peer

    @property
    def fastest_peer(self) -> str | None:
        """The name of the peer's fastest variant; None without times."""
        return min(self.peers, key=lambda name: self.peers[name].median) if self.peers else None

    @property
    def speedup(self) -> tuple[float, float, float] | None:
        """The median, lower and upper quartile of (fastest peer / ours) over the repeats; None without times."""
        if not self.agreement.is_met or self.ours is None or self.fastest_peer is None:
            return None
        pairs = zip(self.peers[self.fastest_peer].seconds, self.ours.seconds, strict=True)
        ratios = Times(tuple(peer / ours for peer, ours in pairs))
        return ratios.median, *quartiles(ratios.seconds)

    def to_record(self) -> dict[str, Any]:
        """Return the line as JSON values; times in seconds, memory in bytes."""
        speedup = self.speedup
        return {
            "suite": self.suite,
            "size": self.size,
            "case": self.case,
            "agrees": self.agreement.is_met,
            "errors": {k: {"error": error, "bound": bound} for k, (error, bound) in self.agreement.errors.items()},
            "ours_seconds": None if self.ours is None else self.ours.seconds,
            "peer_seconds": {name: times.seconds for name, times in self.peers.items()},
            "peer_probed_seconds": self.probed,
            "fastest_peer": self.fastest_peer,
            "speedup": None if speedup is None else dict(zip(("median", "low", "high"), speedup, strict=True)),
            "peak_bytes": None if self.memory is None else {"ours": self.memory[0], "peer": self.memory[1]},
        }

    @staticmethod
    def of_record(record: dict[str, Any]) -> Result:
        """Return the line from which `to_record` made this record."""
        errors = {name: (both["error"], both["bound"]) for name, both in record["errors"].items()}
        ours, peak = record["ours_seconds"], record["peak_bytes"]
        return Result(
            record["suite"],
            record["size"],
            record["case"],
            Agreement(errors),
            None if ours is None else Times(tuple(ours)),
            {name: Times(tuple(seconds)) for name, seconds in record["peer_seconds"].items()},
            record["peer_probed_seconds"],
            None if peak is None else (peak["ours"], peak["peer"]),
        )


def table(results: Sequence[Result], peer: str = "transformers") -> str:
    """Return a Markdown table of results; a line that disagrees shows its errors instead of times."""
    columns = ["what", "size", "case", "ours ms", f"{peer} ms", "speed-up", "peak MiB", f"{peer}' variant", "errors"]
    rows = [columns, *(_cells(result) for result in results)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    rows.insert(1, ["-" * width for width in widths])
    padded = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in padded)


def _cells(result: Result) -> list[str]:
    names = [result.suite, result.size, result.case]
    if result.speedup is None or result.ours is None or result.fastest_peer is None:
        return [*names, "-", "-", "DISAGREES", "-", "-", str(result.agreement)]
    middle, low, high = result.speedup
    memory = "-" if result.memory is None else " / ".join(f"{size / 2**20:.1f}" for size in result.memory)
    return [
        *names,
        _milliseconds(result.ours),
        _milliseconds(result.peers[result.fastest_peer]),
        f"{middle:.2f} ({low:.2f}-{high:.2f})",
        memory,
        result.fastest_peer,
        ", ".join(f"{name} {error:.0e}" for name, (error, _) in result.agreement.errors.items()),
    ]


def _milliseconds(times: Times) -> str:
    low, high = times.quartiles
    return f"{1e3 * times.median:.2f} ({1e3 * low:.2f}-{1e3 * high:.2f})"
