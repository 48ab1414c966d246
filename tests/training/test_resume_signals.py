"""`blockdiff train`, alone and on two ranks of a launcher: told to stop, or with a rank killed; then resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.kills import PRESET
from blockdiff.cli.main import app
from blockdiff.metrics import read
from blockdiff.training.state import steps_saved

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1", "PYTHONUNBUFFERED": "1"}
ALONE = [sys.executable, "-m", "blockdiff"]
TWO_RANKS = [
    *(sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"),
    *("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"),
    *("-m", "blockdiff"),
]
RECIPE = """\
seed: 1
model: {preset: FOLDER/preset.json, tokenizer: FOLDER/puzzles/tokenizer}
data: {train: FOLDER/puzzles/train.jsonl, cache: FOLDER/cache}
train: {steps: 100000, batch_size: 6, log_every: 1, save_every: 5, timeout: 30}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows and a recipe for a run that goes on until it is stopped."""
    folder = tmp_path_factory.mktemp("workshop")
    words = ["data", "sudoku", "--count", "24", "--output", str(folder / "puzzles")]
    assert CliRunner().invoke(app, words).exit_code == 0
    made = next((folder / "puzzles").glob("*.jsonl"))
    (folder / "preset.json").write_text(json.dumps(PRESET))
    recipe = RECIPE.replace("FOLDER", str(folder)).replace("train.jsonl", made.name)
    (folder / "recipe.yaml").write_text(recipe)
    return folder


def started(launcher: Sequence[str], folder: Path, run: Path) -> subprocess.Popen[str]:
    """A training that has logged some steps."""
    words = ["train", str(folder / "recipe.yaml"), "--output", str(run)]
    process = subprocess.Popen(
        [*launcher, *words], cwd=ROOT, env=ENVIRONMENT, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    metrics, until = run / "metrics.jsonl", time.monotonic() + 120
    while not (metrics.exists() and len(read(metrics)) > 6):
        assert process.poll() is None and time.monotonic() < until, process.communicate()[1]
        time.sleep(0.02)
    return process


def ended(process: subprocess.Popen[str], word: str) -> list[str]:
    """The lines on stderr in which a word stands, after the process ended."""
    return [line for line in process.communicate(timeout=90)[1].splitlines() if word in line]


def goes_on(folder: Path, run: Path, start: int) -> None:
    """Resume for two steps, in this process, and compare the log's steps."""
    words = ["train", folder / "recipe.yaml", "--resume", "--output", run, "--set", f"train.steps={start + 2}"]
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    assert [record["step"] for record in read(run / "metrics.jsonl")] == list(range(1, start + 3))


def test_a_signal_saves_and_says_in_one_line_how_to_go_on(folder, tmp_path):
    run = tmp_path / "run"
    process = started(ALONE, folder, run)
    process.terminate()
    lines = ended(process, "")
    assert process.returncode == 143
    reached = read(run / "metrics.jsonl")[-1]["step"]
    assert lines == [
        "SIGTERM: saving after this optimiser step; a second one ends at once",
        f"stopped by SIGTERM after step {reached}; `--resume --output {run}` goes on from there",
    ]
    assert max(steps_saved(run)) == reached
    goes_on(folder, run, reached)


def test_a_signal_to_the_launcher_stops_all_ranks_after_the_same_step(folder, tmp_path):
    run = tmp_path / "run"
    process = started(TWO_RANKS, folder, run)
    process.terminate()
    lines = ended(process, "stopped by SIGTERM after step")
    assert process.returncode != 0
    reached = read(run / "metrics.jsonl")[-1]["step"]
    assert lines == [f"stopped by SIGTERM after step {reached}; `--resume --output {run}` goes on from there"]
    assert max(steps_saved(run)) == reached
    with pytest.warns(UserWarning, match="saved by 2 processes, resumed by 1"):
        goes_on(folder, run, reached)


def test_a_killed_rank_ends_the_launch_with_one_line_and_the_run_can_go_on(folder, tmp_path):
    run = tmp_path / "run"
    process = started(TWO_RANKS, folder, run)
    ranks = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True)
    children = [int(child) for child in ranks.stdout.split()]
    second = next(child for child in children if b"\0RANK=1\0" in Path(f"/proc/{child}/environ").read_bytes())
    os.kill(second, signal.SIGKILL)
    began = time.monotonic()
    lines = ended(process, "blockdiff: error")
    assert process.returncode != 0
    assert time.monotonic() - began < 30
    assert len(lines) == 1
    assert "rank 0: another rank was lost during" in lines[0] and "go on with --resume" in lines[0]
    with pytest.warns(UserWarning, match="saved by 2 processes, resumed by 1"):
        goes_on(folder, run, max(steps_saved(run)))
