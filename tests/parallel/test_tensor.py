"""Tensor parallelism: one model over several ranks computes what it computes on one."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

import blockdiff
from blockdiff import checkpoint
from tests.support.families import CONFIGS
from tests.support.forked import in_turn, run, run_ranks
from tests.support.next_token_ranks import next_tokens
from tests.support.tensor_ranks import (
    capturable,
    computed_alone,
    least_pages,
    read_rounded,
    sampled,
    vocabularies,
    whole_models,
)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of what one process computes."""
    directory = tmp_path_factory.mktemp("alone")
    run(computed_alone, directory, log=directory / "log")
    return directory


def test_two_ranks_read_compute_and_sample_what_one_process_does(alone: Path, tmp_path: Path):
    model = blockdiff.init(CONFIGS["diffusion_gemma"](), seed=1, device="cpu", kernels="torch")
    base = blockdiff.save(model, tmp_path / "base")
    stored = checkpoint.export(base, tmp_path / "stored", quantize="nvfp4")
    targets = {
        "models": partial(whole_models, alone=alone),
        "files": partial(read_rounded, base=base, stored=stored),
        "vocabularies": vocabularies,
        "samplings": partial(sampled, alone=alone),
        "pages": least_pages,
        "steps": capturable,
    }
    run_ranks(2, in_turn, tmp_path, targets)


def test_four_ranks_which_are_more_than_the_kv_heads_compute_and_sample_the_same(alone: Path, tmp_path: Path):
    targets = {
        "models": partial(whole_models, alone=alone),
        "vocabularies": vocabularies,
        "samplings": partial(sampled, alone=alone),
        "next tokens": next_tokens,
    }
    run_ranks(4, in_turn, tmp_path, targets)
