"""The ranks of `test_sharded_files.py`: reading and writing a model that is spread over them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import blockdiff.checkpoint.files
from blockdiff.checkpoint import draw_weights, empty, load_weights, read_adapter, read_config, save, save_adapter
from blockdiff.checkpoint.adapter_names import WEIGHTS, Part
from blockdiff.checkpoint.files import tensors_in
from blockdiff.errors import CheckpointError
from blockdiff.layers.lora import LowRank
from blockdiff.models.adapters import adapt, draw_adapters, targets
from blockdiff.parallel.ranks import Ranks
from blockdiff.tensor_pieces import is_spread, local_of, piece_of
from tests.support.spread import How, spread


def sharded(source: Path, how: How, dtype: torch.dtype = torch.bfloat16, lora: bool = False) -> Any:
    """A model of the config in `source`, spread over the ranks, whose memory holds NaN."""
    model = empty(read_config(source), kernels="torch").to(dtype)
    if lora:
        adapt(model, targets(model, {"attention": LowRank(4, 8.0), "experts": LowRank(2, 4.0)}), (3, 5))
    spread(model, how)
    for name, parameter in list(model.named_parameters()):
        if not is_spread(parameter):
            continue
        module = model.get_submodule(name.rpartition(".")[0])
        module._apply(lambda tensor: torch.full_like(tensor, float("nan"), device="cpu"), recurse=False)
    return model


def read_and_write(ranks: Ranks, directory: Path, source: Path, how: How) -> None:
    """Each rank reads its own parts and no others; together they write the files that one process writes."""
    sizes = []
    original = blockdiff.checkpoint.files.read_block

    def counted(handle: Any, name: str, block: Any) -> torch.Tensor:
        read = original(handle, name, block)
        sizes.append(read.nbytes)
        return read

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockdiff.checkpoint.files, "read_block", counted)
        model = load_weights(sharded(source, how), source, "auto", "cpu")
    whole = load_weights(empty(read_config(source)), source, "auto", "cpu").state_dict()
    mine = 0
    for name, tensor in model.state_dict().items():
        piece = piece_of(tensor, ranks.rank)
        expected = whole[name][piece.block.slices] if piece.block.sizes else whole[name]
        assert torch.equal(piece.local, expected), name
        assert tensor.dtype == whole[name].dtype, name
        mine += piece.local.nbytes
    assert sum(sizes) == mine  # nothing is read beside it
    total = sum(tensor.nbytes for tensor in whole.values())
    assert mine < total * (0.9 if how == "experts" else 1.1 / ranks.world)
    with pytest.raises(CheckpointError, match=r"is sharded as torch\.bfloat16, float32 was asked for"):
        load_weights(model, source, "float32", "cpu")

    save(model, directory / "out", shard_bytes=200_000)
    drawn = draw_weights(sharded(source, how, torch.float32), seed=5, device="cpu")
    save(drawn, directory / "drawn")
    if ranks.is_main:
        (directory / "taken").mkdir()
        (directory / "taken" / "letter.txt").write_text("dear")
    ranks.barrier()
    with pytest.raises(CheckpointError, match="is no checkpoint"):  # on all ranks, and none of them waits
        save(model, directory / "taken", overwrite=True)


def write(ranks: Ranks, directory: Path, source: Path) -> None:
    """The ranks of a sharded model write it together."""
    save(load_weights(sharded(source, "full"), source, "auto", "cpu"), directory / "out")


def full_disk(ranks: Ranks, directory: Path, source: Path) -> None:
    """The disk of rank 0 is full in the middle of writing: one line on all ranks, nothing is left of it."""
    model = load_weights(sharded(source, "full"), source, "auto", "cpu")

    def full(*arguments: Any) -> str:
        next(iter(arguments[1].values())).read()
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("blockdiff.checkpoint.write.write_stream", full)
        with pytest.raises(CheckpointError, match=r"No space left on device.*nothing is left of it"):
            save(model, directory / "out")
    assert not (directory / "out").exists()


def adapters(ranks: Ranks, directory: Path, source: Path) -> None:
    """The adapters of a sharded model are read and written as those of one process."""
    model = load_weights(sharded(source, "both", lora=True), source, "auto", "cpu")
    plain = load_weights(empty(read_config(source)), source, "auto", "cpu")
    adapt(plain, targets(plain, {"attention": LowRank(4, 8.0), "experts": LowRank(2, 4.0)}), (3, 5))
    draw_adapters(plain, 3, torch.device("cpu"), torch.float32)
    values = {name: tensor for name, tensor in plain.state_dict().items() if "lora" in name or "token_rows" in name}
    for name in values:  # B is 0 at first, which would hide a mistake
        values[name] = values[name] + torch.arange(values[name].numel()).view_as(values[name]) / 1000
    parts = {name: Part.of(value) for name, value in values.items()}

    def require_own_values() -> None:
        for name, tensor in model.state_dict().items():
            if name in values:
                piece = piece_of(tensor, ranks.rank)
                assert torch.equal(local_of(tensor), values[name][piece.block.slices]), name

    blockdiff.checkpoint.adapters.fill_adapters(model, parts, "here")
    require_own_values()
    save_adapter(model, directory / "adapter", "base")
    ranks.barrier()
    read = blockdiff.checkpoint.files.read_block
    numbers: dict[str, int] = {}

    def counted(handle: Any, name: str, block: Any) -> Tensor:
        tensor = read(handle, name, block)
        numbers[name] = numbers.get(name, 0) + tensor.numel()
        return tensor

    for tensor in (tensor for name, tensor in model.state_dict().items() if name in values):
        local_of(tensor).zero_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("blockdiff.checkpoint.files.read_block", counted)
        found = read_adapter(directory / "adapter", model)
        assert not numbers  # the header alone
        blockdiff.checkpoint.adapters.fill_adapters(model, found.parts, "here")
    require_own_values()
    whole = {name: place.shape for name, place in tensors_in(directory / "adapter" / WEIGHTS).items()}
    for name, count in numbers.items():  # no rank reads more than its half, but of the Bs of experts
        is_B = "experts" in name and "lora_B" in name
        assert count <= math.prod(whole[name]) // (1 if is_B else ranks.world) + max(whole[name]), name
    if ranks.is_main:
        blockdiff.checkpoint.adapters.fill_adapters(plain, parts, "here")
        save_adapter(plain, directory / "plain", "base")
    ranks.barrier()
