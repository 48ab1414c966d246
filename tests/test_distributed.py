"""Two processes started by `accelerate launch` (gloo) train as one process does on the same global batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from accelerate.state import PartialState
from safetensors.torch import load_file

from blockdiff.errors import RunError
from blockdiff.training.parallel import Parallel, from_accelerate
from tests.two_ranks import everything

LAUNCH = [
    *(sys.executable, "-m", "accelerate.commands.launch"),
    *("--multi_gpu", "--num_processes", "2", "--num_machines", "1"),
    *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"),
]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    directory = tmp_path_factory.mktemp("one")
    everything(Parallel(torch.device("cpu")), directory)
    return directory


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    directory = tmp_path_factory.mktemp("two")
    subprocess.run(
        [*LAUNCH, "--module", "tests.two_ranks", str(directory)],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"},
        timeout=240,
        check=True,
    )
    return directory


def found(directory: Path, rank: int = 0) -> dict:
    return json.loads((directory / f"found-{rank}.json").read_text())


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm().clamp(min=1e-12))


def test_the_launcher_made_two_ranks(two):
    assert [(found(two, rank)["world"], found(two, rank)["device"]) for rank in (0, 1)] == [(2, "cpu")] * 2


@pytest.mark.parametrize("scenario", ["toy", "lopsided", "real"])
def test_two_ranks_log_the_losses_of_one(one, two, scenario):
    expected, got = found(one)[scenario], found(two)[scenario]
    assert [record["step"] for record in got] == [1, 2, 3, 4, 5]
    for before, after in zip(expected, got, strict=True):
        for key in ("loss", "canvas_loss", "ar_loss"):
            assert after[key] == pytest.approx(before[key], rel=1e-5), (after["step"], key)
    assert found(two, rank=1)[scenario] == []  # only the main process logs


@pytest.mark.parametrize("scenario", ["toy", "lopsided", "real"])
def test_two_ranks_have_the_gradients_and_the_weights_of_one(one, two, scenario):
    expected = load_file(one / f"{scenario}-0.safetensors")
    for rank in (0, 1):
        got = load_file(two / f"{scenario}-{rank}.safetensors")
        weights = [name for name in expected if name.startswith("weight")]
        # The real model's second gradient is taken at weights that already differ by rounding.
        compared = "gradient 1" if scenario == "real" else "gradient"
        gradients = [name for name in expected if name.startswith(compared)]
        assert set(got) == set(expected)
        for name in gradients:
            assert relative_error(got[name], expected[name]) < 1e-5, name
        for name in weights:
            torch.testing.assert_close(got[name], expected[name], rtol=0, atol=1e-6)


def test_a_gradient_that_one_rank_spoils_stops_both_with_the_sample_named(one, two):
    expected = found(one)["failing"]
    assert "step 1: the AR loss is not finite (sample ids 5)" in expected
    assert [found(two, rank)["failing"] for rank in (0, 1)] == [expected] * 2


def test_heldout_losses_are_those_of_one_process_on_every_rank(one, two):
    for rank in (0, 1):
        assert found(two, rank)["heldout"] == pytest.approx(found(one)["heldout"], rel=1e-6)


def test_ranks_save_refuse_and_resume_together(two):
    for rank in (0, 1):
        assert found(two, rank)["resumed"] == ["None", "refused", "2", "same weights True"]
    assert [path.name for path in (two / "run" / "checkpoints").iterdir()] == ["step-2"]
    assert len((two / "run" / "metrics.jsonl").read_text().splitlines()) == 1


@pytest.fixture
def launched(monkeypatch):
    """A process as a launcher would start it, with a fresh accelerate state before and after."""
    for name in ("WORLD_SIZE", "LOCAL_RANK", "RANK", "MASTER_PORT", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    PartialState._reset_state()
    yield monkeypatch
    PartialState._reset_state()


def test_alone_there_is_one_main_process(launched):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallel = from_accelerate(cpu=True)
    assert (parallel.rank, parallel.world, str(parallel.device), parallel.is_main) == (0, 1, "cpu", True)


def test_a_launcher_that_starts_one_process_instead_of_two_is_told(launched):
    # What `accelerate launch --cpu --num_processes 2` leaves in the environment of its only process.
    launched.setenv("MASTER_PORT", "29500")
    launched.setenv("ACCELERATE_MIXED_PRECISION", "no")
    with pytest.warns(UserWarning, match="started one process although several were asked for"):
        from_accelerate(cpu=True)


def test_processes_that_do_not_know_of_each_other_are_refused(launched):
    from_accelerate(cpu=True)
    launched.setenv("WORLD_SIZE", "2")
    with pytest.raises(RunError, match="2 processes started, 1 joined"):
        from_accelerate(cpu=True)
