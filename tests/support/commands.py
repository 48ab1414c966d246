"""The commands of `blockdiff`, called in the process of the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from blockdiff.cli.main import app


def run(*words: str | Path | int) -> Any:
    """A function that runs a command: it gives its exit code and what it wrote."""
    return CliRunner().invoke(app, [str(word) for word in words])


def works(*words: str | Path | int) -> str:
    """A function that runs a command that has to work: it gives what the command printed."""
    result = run(*words)
    assert result.exit_code == 0, (words, result.output)
    return str(result.stdout)


def refusal(*words: str | Path | int, code: int = 1) -> str:
    """The one line that a failing command writes to stderr."""
    result = run(*words)
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("blockdiff: error: "), result.output
    assert result.exit_code == code
    assert "Traceback" not in result.output
    return str(lines[0])
