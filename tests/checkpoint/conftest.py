"""The checkpoint of transformers that tests read and damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import DiffusionGemmaForBlockDiffusion

from tests.support.oracle import oracle, tiny_config


@pytest.fixture(scope="module")
def theirs() -> DiffusionGemmaForBlockDiffusion:
    config = tiny_config(final_logit_softcapping=20.0)
    config.vision_config.position_embedding_size = 32
    return oracle(config, dtype=torch.float32)


@pytest.fixture(scope="module")
def written_by_transformers(theirs, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("hub") / "model"
    theirs.save_pretrained(directory)
    (directory / "generation_config.json").write_text('{"max_denoising_steps": 7}\n')
    (directory / "tokenizer.json").write_text('{"any": "bytes"}')
    return directory


@pytest.fixture
def damaged(written_by_transformers, tmp_path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(written_by_transformers, tmp_path / "damaged"))
