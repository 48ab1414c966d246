"""Tensor parallelism: one model over several ranks computes what it computes on one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forked import run_ranks
from tests.tensor_ranks import sampled, vocabularies, whole_models


@pytest.mark.quick
@pytest.mark.parametrize("world", [2, 4])
def test_losses_and_gradients_are_those_of_one_process(world, tmp_path: Path):
    run_ranks(world, whole_models, tmp_path)


@pytest.mark.quick
@pytest.mark.parametrize("world", [2, 4])
def test_a_vocabulary_over_ranks_gives_what_one_gives_and_gathers_no_logits(world, tmp_path: Path):
    run_ranks(world, vocabularies, tmp_path)


@pytest.mark.quick
@pytest.mark.parametrize("world", [2, 4])
def test_any_number_of_ranks_samples_the_same_tokens(world, tmp_path: Path):
    run_ranks(world, sampled, tmp_path)
