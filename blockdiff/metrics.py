"""metrics.jsonl: one object per record of a run, written whole and cut back on resume."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from blockdiff.errors import RunError

FILE_NAME = "metrics.jsonl"
Record = dict[str, Any]


class MetricsLog:
    """Appends records to a JSONL file; whoever reads it meanwhile sees whole lines."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: Record) -> None:
        """Write one record as one line. Values must be finite: JSON has no NaN."""
        line = json.dumps(record, allow_nan=False) + "\n"
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line)

    def cut(self, step: int) -> list[Record]:
        """Forget what was logged after optimiser step `step`, and a last line cut short; returns the rest."""
        if not self.path.exists():
            return []
        records = [record for record in read(self.path) if record["step"] <= step]
        beside = self.path.with_name(self.path.name + ".partial")
        with beside.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(record, allow_nan=False) + "\n" for record in records)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self.path)
        return records


def read(path: Path) -> list[Record]:
    """The records of a metrics file; a last line that a kill cut short is left out.

    Raises RunError naming the line when anything else is not a record.
    """
    lines = path.read_text(encoding="utf-8").split("\n")
    records = []
    # A complete file ends in a newline, so what follows the last one was cut short.
    for number, line in enumerate(lines[:-1], start=1):
        try:
            record = json.loads(line)
            if not isinstance(record["step"], int):
                raise TypeError
        except (ValueError, TypeError, KeyError):
            raise RunError(f"{path}:{number}: not a metrics record; remove the line to go on") from None
        records.append(record)
    return records


def reproducible(records: Iterable[Record]) -> list[Record]:
    """The records without what clocks and machines say: the rest of a resumed run equals an uninterrupted one's."""
    measured = ("seconds", "_per_second", "memory_gib")
    return [{key: value for key, value in record.items() if not key.endswith(measured)} for record in records]
