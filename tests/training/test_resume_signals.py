"""`blockdiff train`, alone and under a launcher: told to stop, a rank or the launcher lost, a rank hung; resumed."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from blockdiff.cli.main import app
from blockdiff.metrics import read
from blockdiff.training.checkpoint_content import steps_saved
from tests.support import forked
from tests.support.little_model import LITTLE, save_preset
from tests.support.meeting import meeting

RECIPE = """\
seed: 1
model: {preset: FOLDER/preset.json, tokenizer: FOLDER/puzzles/tokenizer}
data: {train: FOLDER/puzzles/train.jsonl, cache: FOLDER/cache}
train: {steps: 100000, batch_size: 6, log_every: 1, save_every: 5, timeout: 600}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows and a recipe for a run that goes on until it is stopped."""
    folder = tmp_path_factory.mktemp("workshop")
    words = ["data", "sudoku", "--split", "train=24", "--output", str(folder / "puzzles")]
    assert CliRunner().invoke(app, words).exit_code == 0
    made = next((folder / "puzzles").glob("*.jsonl"))
    save_preset(folder / "preset.json", LITTLE)
    recipe = RECIPE.replace("FOLDER", str(folder)).replace("train.jsonl", made.name)
    (folder / "recipe.yaml").write_text(recipe)
    return folder


def alone(words: list[str]) -> None:
    """`blockdiff WORDS`."""
    from blockdiff.cli.main import main

    sys.argv = ["blockdiff", *words]
    main()


def two_ranks(words: list[str]) -> None:
    """`torchrun`, the launcher within `accelerate launch`, with ranks that it forks."""
    from torch.distributed.run import main

    command = forked.ROOT / "blockdiff" / "__main__.py"
    main(["--standalone", "--nproc-per-node", "2", "--start-method", "fork", "--run-path", str(command), *words])


def two_children(words: list[str]) -> None:
    """A launcher that does nothing for its ranks; they have a file open as long as they live."""
    os.open(Path(words[words.index("--output") + 1]).with_suffix(".alive"), os.O_WRONLY)
    with meeting(2) as variables:
        for own in variables:
            if not os.fork():
                os.environ |= {**own, "TORCHELASTIC_RUN_ID": "none"}
                try:
                    alone(words)
                finally:
                    os._exit(1)  # the store is the launcher's to take down
        signal.pause()


@contextlib.contextmanager
def training(how: Callable[[list[str]], None], folder: Path, run: Path, *more: str) -> Iterator[ForkServerProcess]:
    """A training that has logged some steps."""
    words = ["train", str(folder / "recipe.yaml"), "--output", str(run), *more]
    log, metrics, until = said(run), run / "metrics.jsonl", time.monotonic() + forked.HUNG
    with forked.started(how, words, log=log, ACCELERATE_USE_CPU="1") as process:
        while not (metrics.exists() and len(read(metrics)) > 6):
            assert process.exitcode is None and time.monotonic() < until, log.read_text()
            time.sleep(0.02)
        yield process


def said(run: Path) -> Path:
    """The file with what the training of a run said."""
    return run.with_suffix(".log")


def ended(process: ForkServerProcess, run: Path, word: str) -> list[str]:
    """The lines in which a word stands, after the process ended."""
    process.join(forked.HUNG)
    return [line for line in said(run).read_text().splitlines() if word in line]


def second_rank(launcher: ForkServerProcess) -> int:
    """The process id of the second of two ranks."""
    ranks = subprocess.run(["pgrep", "-P", str(launcher.pid)], capture_output=True, text=True, check=True)
    return max(int(child) for child in ranks.stdout.split())


def goes_on(folder: Path, run: Path, start: int) -> None:
    """Resume for two steps, in this process, and compare the log's steps."""
    words = ["train", folder / "recipe.yaml", "--resume", "--output", run, "--set", f"train.steps={start + 2}"]
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    assert [record["step"] for record in read(run / "metrics.jsonl")] == list(range(1, start + 3))


def test_a_signal_saves_and_says_in_one_line_how_to_go_on(folder, tmp_path):
    run = tmp_path / "run"
    with training(alone, folder, run) as process:
        process.terminate()
        lines = ended(process, run, "")
        assert process.exitcode == 143
    reached = read(run / "metrics.jsonl")[-1]["step"]
    assert lines == [
        "SIGTERM: saving after this optimiser step; a second one ends at once",
        f"stopped by SIGTERM after step {reached}; `--resume --output {run}` goes on from there",
    ]
    assert max(steps_saved(run)) == reached
    goes_on(folder, run, reached)


def test_a_signal_to_the_launcher_stops_all_ranks_after_the_same_step(folder, tmp_path):
    run = tmp_path / "run"
    with training(two_ranks, folder, run) as process:
        process.terminate()
        lines = ended(process, run, "stopped by SIGTERM after step")
        assert process.exitcode
    reached = read(run / "metrics.jsonl")[-1]["step"]
    assert lines == [f"stopped by SIGTERM after step {reached}; `--resume --output {run}` goes on from there"]
    assert max(steps_saved(run)) == reached
    with pytest.warns(UserWarning, match="saved by 2 processes, resumed by 1"):
        goes_on(folder, run, reached)


def test_a_killed_rank_ends_the_launch_with_one_line_and_the_run_can_go_on(folder, tmp_path):
    run = tmp_path / "run"
    with training(two_ranks, folder, run) as process:
        os.kill(second_rank(process), signal.SIGKILL)
        lines = ended(process, run, "blockdiff: error")
        assert process.exitcode
    assert "forcefully exiting" not in said(run).read_text()  # rank 0 ended by itself
    assert all("rank 0: another rank was lost during" in line and "go on with --resume" in line for line in lines)
    # our line, and again as the cause in torchrun's last words unless torchrun noticed the killed rank before us
    places = [line.split("blockdiff")[0].strip() for line in lines]
    assert places in (["", "traceback :"], [""])
    with pytest.warns(UserWarning, match="saved by 2 processes, resumed by 1"):
        goes_on(folder, run, max(steps_saved(run)))


def test_a_rank_that_hangs_ends_the_launch_after_the_timeout_and_the_run_can_go_on(folder, tmp_path):
    run = tmp_path / "run"
    with training(two_ranks, folder, run, "--set", "train.timeout=8") as process:
        os.kill(hung := second_rank(process), signal.SIGSTOP)
        until = time.monotonic() + forked.HUNG
        while "another rank hung" not in said(run).read_text():
            assert process.exitcode is None and time.monotonic() < until, said(run).read_text()
            time.sleep(0.1)
        os.kill(hung, signal.SIGKILL)  # as torchrun does 30 s after it has told the rank to end
        lines = ended(process, run, "blockdiff: error")
        assert process.exitcode
    assert lines and all("rank 0: another rank hung for 8 s during" in line for line in lines)
    with pytest.warns(UserWarning, match="saved by 2 processes, resumed by 1"):
        goes_on(folder, run, max(steps_saved(run)))


def test_ranks_whose_launcher_is_killed_save_after_the_same_step_and_end(folder, tmp_path):
    run = tmp_path / "run"
    os.mkfifo(tmp_path / "run.alive")
    alive = os.open(tmp_path / "run.alive", os.O_RDONLY | os.O_NONBLOCK)
    with training(two_children, folder, run) as process:
        process.kill()
        lines = ended(process, run, "")
        ends, _, _ = select.select([alive], [], [], forked.HUNG)  # it can be read once no process has it open any more
        assert ends and os.read(alive, 1) == b""
    os.close(alive)
    lines = [line for line in said(run).read_text().splitlines() if "SIGTERM" in line]
    reached = read(run / "metrics.jsonl")[-1]["step"]
    assert lines == [
        "SIGTERM: saving after this optimiser step; a second one ends at once",
        f"stopped by SIGTERM after step {reached}; `--resume --output {run}` goes on from there",
    ]
    assert max(steps_saved(run)) == reached
    with pytest.warns(UserWarning, match="saved by 2 processes, resumed by 1"):
        goes_on(folder, run, reached)
