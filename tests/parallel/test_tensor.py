"""Tensor parallelism: one model over several ranks computes what it computes on one."""

from __future__ import annotations

from pathlib import Path

import pytest

import blockdiff
from blockdiff import checkpoint
from tests.families import CONFIGS
from tests.forked import run, run_ranks
from tests.tensor_ranks import capturable, models_alone, read_in_fp8, sampled, sampled_alone, vocabularies, whole_models


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of what one process computes."""
    directory = tmp_path_factory.mktemp("alone")
    run(models_alone, directory, log=directory / "log")
    run(sampled_alone, directory, log=directory / "log")
    return directory


@pytest.mark.quick
@pytest.mark.parametrize("world", [2, 4])
def test_losses_and_gradients_are_those_of_one_process(world, alone: Path, tmp_path: Path):
    run_ranks(world, whole_models, tmp_path, alone)


@pytest.mark.quick
def test_a_checkpoint_in_fp8_is_read_in_parts(tmp_path: Path):
    model = blockdiff.init(CONFIGS["diffusion_gemma"](), seed=1, device="cpu", kernels="torch")
    base = blockdiff.save(model, tmp_path / "base")
    stored = checkpoint.export(base, tmp_path / "stored", quantize="fp8")
    run_ranks(2, read_in_fp8, tmp_path, base, stored)


@pytest.mark.quick
@pytest.mark.parametrize("world", [2, 4])
def test_a_vocabulary_over_ranks_gives_what_one_gives_and_gathers_no_logits(world, tmp_path: Path):
    run_ranks(world, vocabularies, tmp_path)


@pytest.mark.quick
@pytest.mark.parametrize("world", [2, 4])
def test_any_number_of_ranks_samples_the_same_tokens(world, alone: Path, tmp_path: Path):
    run_ranks(world, sampled, tmp_path, alone)


@pytest.mark.quick
def test_the_host_waits_for_nothing_in_a_step_that_two_ranks_would_capture(tmp_path: Path):
    run_ranks(2, capturable, tmp_path)
