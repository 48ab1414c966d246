"""The table of a run's metrics, and metrics.jsonl, the log of their records."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from blockdiff.errors import RunError
from blockdiff.files import write_text

FILE_NAME = "metrics.jsonl"
SAMPLES = "samples.jsonl"  # texts that were sampled during training
Record = dict[str, Any]  # "step", "kind" and metrics of that kind
Kind = Literal["train", "heldout", "sample", "skipped"]


@dataclass(frozen=True)
class Metric:
    """A metric in the records of one kind: its label, its format, and which values are better.

    in_line: show it in the line of a record.
    in_report: put its last value into the report ("last"), show it in the report's line, too ("line"), or also add the
        best value ("best" with the line, "best, silent" without).
    """

    kind: Kind
    label: str
    better: Literal["lower", "higher"] | None = None
    format: str = ".4f"
    unit: str = ""  # written after the number; without a unit the label is written before it
    in_line: bool = False
    in_report: Literal["", "last", "line", "best", "best, silent"] = ""

    def number(self, value: float) -> str:
        """Format a value: "3.2500", "50.0%"."""
        return format(value, self.format)

    def text(self, value: float) -> str:
        """Format a value with its label or unit: "canvas loss 3.2500", "6.0 steps per canvas"."""
        return f"{self.number(value)} {self.unit}" if self.unit else f"{self.label} {self.number(value)}"


def _of_part(part: str) -> dict[str, Metric]:
    """The held-out metrics of "corrupted" positions, which the noise chose for replacement, or of "kept" ones."""
    shown = part == "corrupted"
    metrics = {
        f"heldout_{part}_loss": Metric("heldout", f"held-out {part} loss", "lower", in_line=shown),
        f"heldout_{part}_accuracy": Metric(
            "heldout", f"held-out {part} tokens right", "higher", ".1%", "right", in_line=shown
        ),
    }
    silent = {
        f"{key}_no_signal": replace(metric, label=f"{metric.label}, no signal", in_line=False)
        for key, metric in metrics.items()
    }
    return metrics | silent


# The metrics of blockdiff's runs by key. Losses are in nats per token. docs/cli.md explains each one.
METRICS: dict[str, Metric] = {
    "loss": Metric("train", "loss", "lower", in_line=True),
    "canvas_loss": Metric("train", "canvas loss", "lower", in_line=True, in_report="line"),
    "ar_loss": Metric("train", "next-token loss", "lower", in_line=True, in_report="line"),
    "draft_loss": Metric("train", "draft loss", "lower", in_line=True, in_report="line"),
    "grad_norm": Metric("train", "gradient norm", format=".2f", in_line=True),
    "lr": Metric("train", "learning rate", format=".1e", in_line=True),
    "epoch": Metric("train", "epoch", format=".2f"),
    "reward": Metric("train", "reward", "higher", ".3f", in_line=True, in_report="line"),
    "reward_spread": Metric("train", "standard deviation of rewards", format=".3f"),
    "groups_without_spread": Metric(
        "train", "groups whose rewards are equal", format=".1%", unit="of groups with equal rewards", in_line=True
    ),
    "rollout_steps_per_canvas": Metric(
        "train", "steps per canvas rolled out", "lower", ".2f", "steps per canvas", in_line=True
    ),
    "rollout_settled": Metric("train", "canvases rolled out that settled", "higher", ".1%", "settled", in_line=True),
    "reward_failures": Metric("train", "rewards that failed", "lower", "d", "rewards failed"),
    "policy_loss": Metric("train", "policy loss"),
    "answer_tokens": Metric("train", "tokens of an answer", format=".1f", unit="tokens an answer"),
    "ratio_clipped": Metric("train", "actions whose ratio is clipped", format=".1%", unit="clipped"),
    "entropy": Metric("train", "entropy of an action", format=".3f"),
    "kl": Metric("train", "divergence from the reference, per action", format=".4f"),
    "acceptance_changed": Metric("train", "positions that would be accepted otherwise now", format=".1%"),
    "agreement": Metric("train", "tokens on which head and canvases agree", "higher", ".1%"),
    "rollout_seconds": Metric("train", "time spent on rollouts", "lower", ".1f", "s"),
    "update_seconds": Metric("train", "time spent on updates", "lower", ".1f", "s"),
    "rollout_tokens_per_second": Metric("train", "tokens rolled out per second", "higher", ",.0f", "tokens/s"),
    "tokens_per_second": Metric("train", "tokens per second", "higher", ",.0f", "tokens/s", in_line=True),
    "scored_tokens_per_second": Metric(
        "train", "scored tokens per second", "higher", ",.0f", "scored tokens/s", in_line=True
    ),
    "memory_gib": Metric("train", "most memory", "lower", ".1f", "GiB", in_line=True),
    "seconds": Metric("train", "time spent on training", "lower", ".0f", "s"),
    "skipped": Metric("skipped", "optimiser steps skipped", "lower", "d", "optimiser steps skipped", in_line=True),
    "heldout_canvas_loss": Metric("heldout", "held-out canvas loss", "lower", in_line=True, in_report="best"),
    "heldout_canvas_accuracy": Metric(
        "heldout", "held-out canvas tokens right", "higher", ".1%", "right", in_line=True, in_report="best, silent"
    ),
    "heldout_response_accuracy": Metric(
        "heldout",
        "held-out response tokens right",
        "higher",
        ".1%",
        "right without fill",
        in_line=True,
        in_report="best",
    ),
    "heldout_weighted_loss": Metric("heldout", "held-out weighted canvas loss", "lower"),
    **_of_part("corrupted"),
    **_of_part("kept"),
    "heldout_ar_loss": Metric("heldout", "held-out next-token loss", "lower", in_line=True, in_report="best"),
    "heldout_ar_accuracy": Metric("heldout", "held-out next tokens right", "higher", ".1%", "right", in_line=True),
    "heldout_accepted_length": Metric(
        "heldout", "held-out accepted length", "higher", ".2f", "tokens a round", in_line=True, in_report="best"
    ),
    "heldout_draft_accuracy": Metric(
        "heldout", "held-out drafted tokens right", "higher", ".1%", "right", in_line=True, in_report="best"
    ),
    "heldout_draft_loss": Metric("heldout", "held-out draft loss", "lower", in_line=True),
    "sample_reward": Metric("sample", "reward of sampled prompts", "higher", ".3f", in_line=True, in_report="best"),
    "sample_accuracy": Metric(
        "sample", "sampled prompts right", "higher", ".1%", "of sampled prompts right", in_line=True, in_report="best"
    ),
    "sample_count": Metric("sample", "sampled prompts", format="d", unit="prompts", in_line=True),
    "sample_steps_per_canvas": Metric(
        "sample",
        "steps per canvas of sampled prompts",
        "lower",
        ".1f",
        "steps per canvas",
        in_line=True,
        in_report="line",
    ),
    "sample_tokens_per_forward": Metric(
        "sample",
        "tokens per forward of sampled prompts",
        "higher",
        ".1f",
        "tokens per forward",
        in_line=True,
        in_report="last",
    ),
    "sample_max_steps": Metric(
        "sample", "most steps that a canvas of a sampled prompt may take", format="d", in_report="last"
    ),
    "sample_errors": Metric("sample", "sampled prompts that failed", "lower", "d", "sampled prompts failed"),
    "sample_seconds": Metric("sample", "time spent on sampling prompts", "lower", ".1f", "s"),
}
MACHINE_UNITS = ("s", "GiB", "tokens/s", "scored tokens/s")  # their numbers depend on clocks and machines
UNTOLD_AT_0 = ("skipped", "reward_failures")  # counts of failures


def metric(key: str) -> Metric:
    """The metric of a key. One that is not in the table gets a label from its key."""
    kinds: tuple[Kind, ...] = ("heldout", "sample")
    kind: Kind = next((kind for kind in kinds if key.startswith(f"{kind}_")), "train")
    return METRICS.get(key) or Metric(kind, key.replace("_", " "), in_line=True)


def unlisted_keys(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """The keys of numbers in records that are not in the table, from a user's kind of run or trainer."""
    numbers = (key for record in records for key, value in record.items() if type(value) in (int, float))
    return [key for key in dict.fromkeys(numbers) if key not in METRICS and key != "step"]


def measured(record: Mapping[str, Any], key: str) -> float | None:
    """A record's value of a metric; None if it was not measured or is not finite."""
    value = record.get(key)
    if not isinstance(value, int | float) or not math.isfinite(value) or (value == 0 and key in UNTOLD_AT_0):
        return None
    return value


def texts(record: Mapping[str, Any], keys: Iterable[str]) -> dict[str, str]:
    """Format the metrics of a record, in the order of `keys`. Values that were not measured are left out."""
    words = {key: metric(key).text(value) for key in keys if (value := measured(record, key)) is not None}
    if "sample_steps_per_canvas" in words:
        words["sample_steps_per_canvas"] += at_limit(record["sample_steps_per_canvas"], record.get("sample_max_steps"))
    return words


def at_limit(steps_per_canvas: float, max_steps: int | None) -> str:
    """A remark if canvases used all allowed steps on average, else an empty text."""
    is_limit = max_steps is not None and steps_per_canvas >= max_steps
    return " (the limit: no canvas converged)" if is_limit else ""


def decisive_metrics() -> list[str]:
    """The keys that `evaluation.best` may have: held-out and sampled metrics with a better direction."""
    return [
        key
        for key, metric in METRICS.items()
        if metric.kind in ("heldout", "sample") and metric.better and metric.unit not in MACHINE_UNITS
    ]


class MetricsLog:
    """A JSONL file of records, which can be followed line by line while it is written."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: Record) -> None:
        """Append a record as one line. Values must be finite: JSON has no NaN. Raises OSError with the file's name."""
        line = json.dumps(record, allow_nan=False) + "\n"
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def write(self, records: Iterable[Record]) -> None:
        """Replace all records atomically."""
        write_text(self.path, "".join(json.dumps(record, allow_nan=False) + "\n" for record in records))

    def cut(self, step: int) -> list[Record]:
        """Drop records after optimiser step `step` and an incomplete last line. Returns the rest."""
        if not self.path.exists():
            return []
        records = [record for record in read(self.path) if record["step"] <= step]
        self.write(records)
        return records


def read(path: Path) -> list[Record]:
    """Read the records of a metrics file without an incomplete last line.

    Raises RunError naming the line when anything else is not a record.
    """
    lines = path.read_bytes().split(b"\n")
    records = []
    # A complete file ends in a newline, so text after the last one is an incomplete line.
    for number, line in enumerate(lines[:-1], start=1):
        try:
            record = json.loads(line.decode("utf-8"), parse_constant=_no_number)
            if not isinstance(record["step"], int):
                raise TypeError
        except (ValueError, TypeError, KeyError, RecursionError):
            raise RunError(f"{path}:{number}: not a metrics record; remove the line to go on") from None
        records.append(record)
    return records


def _no_number(word: str) -> None:
    raise ValueError(word)  # NaN and infinities, which no record has


def of_kind(records: Iterable[Record], kind: Kind) -> list[Record]:
    """The records of one kind, in their order."""
    return [record for record in records if record.get("kind") == kind]


def reproducible(records: Iterable[Record]) -> list[Record]:
    """The records without values that depend on clocks and machines; they are equal for resumed runs."""
    of_machine = {key for key, metric in METRICS.items() if metric.unit in MACHINE_UNITS}
    return [{key: value for key, value in record.items() if key not in of_machine} for record in records]
