"""Hub-layout files of models that are spread over ranks: each rank reads its parts, and what is written is the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from blockdiff.checkpoint import draw_weights, empty, init, load, read_config, save
from blockdiff.checkpoint.stream import WORDS, TensorSource, write_stream
from blockdiff.files import piecewise_digest
from tests import forked, sharded_files
from tests.families import m3_config, m3_text_config
from tests.oracle import TWO_LAYERS, tiny_config


@pytest.fixture
def source(tmp_path) -> Path:
    return save(init(tiny_config(**TWO_LAYERS), seed=3, device="cpu", dtype="bfloat16"), tmp_path / "source")


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.quick
@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_a_streamed_file_has_the_bytes_that_safetensors_writes(tmp_path, metadata):
    tensors = {"scalar": torch.tensor(3.0), "empty": torch.zeros(0, 4), 'a "q" ü': torch.ones(2)}
    for size, dtype in enumerate(WORDS, start=1):
        tensors |= {f"{name}.{dtype}": torch.arange(2 * size).view(2, size).to(dtype) for name in "bza"}
    save_file(tensors, tmp_path / "theirs", metadata=metadata)
    said = write_stream(tmp_path / "ours", {name: TensorSource.of(t) for name, t in tensors.items()}, metadata)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert said == piecewise_digest(tmp_path / "ours")


@pytest.mark.parametrize(("world", "how"), [(2, "full"), (2, "experts"), (4, "both")])
def test_each_rank_reads_its_parts_alone_and_together_they_write_the_files_of_one_process(source, tmp_path, world, how):
    forked.run_ranks(world, sharded_files.read_and_write, tmp_path, how)
    save(load(source, "auto", "cpu"), tmp_path / "alone", shard_bytes=200_000)
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")
    save(draw_weights(empty(read_config(source)), seed=5, device="cpu"), tmp_path / "drawn-alone")
    assert contents(tmp_path / "drawn") == contents(tmp_path / "drawn-alone")


@pytest.mark.parametrize("config", [m3_config, m3_text_config])
def test_a_sharded_model_whose_files_have_other_tensors_is_written_as_by_one_process(tmp_path, config):
    """Experts one by one, or gate and up as one matrix: each tensor is gathered once."""
    save(init(config(), seed=3, device="cpu", dtype="bfloat16"), tmp_path / "source")
    forked.run_ranks(2, sharded_files.write, tmp_path)
    assert contents(tmp_path / "out") == contents(tmp_path / "source")


def test_a_full_disk_of_rank_0_is_one_line_on_all_ranks(source, tmp_path):
    forked.run_ranks(2, sharded_files.full_disk, tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_adapters_of_a_sharded_model_are_read_and_written_as_those_of_one_process(source, tmp_path):
    forked.run_ranks(2, sharded_files.adapters, tmp_path, "both")
    assert contents(tmp_path / "adapter") == contents(tmp_path / "plain")
