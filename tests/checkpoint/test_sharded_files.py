"""Hub-layout files of models that are spread over ranks: each rank reads its parts, and what is written is the same."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from blockdiff.checkpoint import draw_weights, empty, init, load, read_config, save
from blockdiff.checkpoint.stream import WORDS, TensorSource, write_stream
from blockdiff.files import piecewise_digest
from tests.support import forked, sharded_files
from tests.support.families import m3_config, m3_text_config
from tests.support.oracle import TWO_LAYERS, tiny_config


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("source") / "model"
    return save(init(tiny_config(**TWO_LAYERS), seed=3, device="cpu", dtype="bfloat16"), directory)


M3 = {"m3": m3_config, "m3 text": m3_text_config}  # whose files have experts one by one, or gate and up as one matrix


@pytest.fixture(scope="module")
def written(source, tmp_path_factory) -> Path:
    """The files that ranks wrote, a folder for each case."""
    directory = tmp_path_factory.mktemp("written")
    two: dict[str, Any] = {
        how: partial(sharded_files.read_and_write, source=source, how=how) for how in ("full", "experts")
    }
    for name, config in M3.items():
        whole = save(init(config(), seed=3, device="cpu", dtype="bfloat16"), directory / f"{name} of one")
        two[name] = partial(sharded_files.write, source=whole)
    two["full disk"] = partial(sharded_files.full_disk, source=source)
    two["adapters"] = partial(sharded_files.adapters, source=source)
    forked.run_ranks(2, forked.in_turn, directory, two)
    four = {"both": partial(sharded_files.read_and_write, source=source, how="both")}
    forked.run_ranks(4, forked.in_turn, directory, four)
    return directory


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


@pytest.mark.parametrize("how", ["full", "experts", "both"])
def test_each_rank_reads_its_parts_alone_and_together_they_write_the_files_of_one_process(
    source, written, tmp_path, how
):
    save(load(source, "auto", "cpu"), tmp_path / "alone", shard_bytes=200_000)
    assert contents(written / how / "out") == contents(tmp_path / "alone")
    save(draw_weights(empty(read_config(source)), seed=5, device="cpu"), tmp_path / "drawn-alone")
    assert contents(written / how / "drawn") == contents(tmp_path / "drawn-alone")


@pytest.mark.parametrize("name", M3)
def test_a_sharded_model_whose_files_have_other_tensors_is_written_as_by_one_process(written, name):
    """Each tensor is gathered once."""
    assert contents(written / name / "out") == contents(written / f"{name} of one")


def test_a_full_disk_of_rank_0_is_one_line_on_all_ranks(written):
    assert not list((written / "full disk").iterdir())


def test_adapters_of_a_sharded_model_are_read_and_written_as_those_of_one_process(written):
    assert contents(written / "adapters" / "adapter") == contents(written / "adapters" / "plain")
