"""The content of a run's checkpoint, `checkpoints/step-N`: its files, and the tensors and values in them by name.

It has weights, optimiser state, averaged weights, step, facts and the counts of the log's next record. It has no random
state, because every draw has an address. Tensors are in safetensors files and the rest is JSON, so no file is a pickle.
An unsharded run writes whole tensors, `model.safetensors`. In a sharded run each rank writes the pieces that it owns,
`model-RANK.safetensors`, and `pieces.json` lists them. `checkpoint_writer` writes them, `checkpoint_reader` reads them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from blockdiff.checkpoint.files import CHECKPOINTS, tensors_in
from blockdiff.checkpoint.stream import DTYPE_OF
from blockdiff.errors import RunError
from blockdiff.files import piecewise_digest
from blockdiff.models.adapters import is_adapter
from blockdiff.parallel.ranks import Ranks
from blockdiff.tensor_pieces import Block, is_spread

FOLDER, TRAINER, PIECES = CHECKPOINTS, "trainer.json", "pieces.json"
MODEL, OPTIMISER, AVERAGE = KINDS = ("model", "optimiser", "ema")  # kinds of tensors, and the beginnings of file names
FORMAT = 8  # of trainer.json and the files that it lists; other formats are refused
STREAMED = "data.train: content"  # the fact about a stream's rows, which may change before a run resumes
ALONE = Ranks(torch.device("cpu"))
SHARED = ("qmap1", "qmap2")  # tables that bitsandbytes has once for all parameters
# Keys of parameter groups: the rate is set before every step, the others depend on the machine.
NOT_RESTORED = ("lr", "fused", "foreach", "capturable")
_COMPLETE = re.compile(r"step-(\d+)")

Facts = Mapping[str, Any]
JsonValue = str | bool | int | float | None


def steps_saved(run: Path) -> dict[int, Path]:
    """The complete checkpoints of a run directory by step, oldest first."""
    matches = [(_COMPLETE.fullmatch(path.name), path) for path in (run / FOLDER).glob("step-*")]
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


def require_distinct_names(objective: nn.Module) -> None:
    """Raise RunError if a tensor of the objective has the name of one of its model, since one would be lost."""
    names = list(objective.state_dict())
    shared = {short_name(name) for name in names if short_name(name) != name} & {*names}
    if shared:
        raise RunError(f"objective: its tensor {min(shared)} has the name of a tensor of the model; rename it")


def short_name(name: str) -> str:
    """The name of an objective's tensor in checkpoints: without the prefix of the objective's model."""
    return name.removeprefix("model.")


def saved_weights(objective: nn.Module) -> dict[str, Tensor]:
    """Return the weights of a checkpoint: all tensors of the objective, or with adapters all but the adapted weights.

    The adapted weights do not change; the run's recipe names the checkpoint that has them.
    """
    state = objective.state_dict()
    if any(is_adapter(short_name(name)) for name in state):
        state = {name: x for name, x in state.items() if is_adapter(short_name(name)) or short_name(name) == name}
    return {short_name(name): tensor for name, tensor in state.items()}


def optimiser_state(objective: nn.Module, optimiser: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Optimiser state by `parameter name/key`: the tensors, and the JSON values of parameters and groups.

    Raises RunError for state that could not be restored: values that are neither tensors nor JSON, and tensors that are
    not sharded like their parameter.
    """
    tensors: dict[str, Tensor] = {}
    values: dict[str, JsonValue] = {}
    for name, parameter in objective.named_parameters():
        for key, value in optimiser.state.get(parameter, {}).items():
            full_name = f"{short_name(name)}/{key}"
            if isinstance(value, Tensor):
                require_shardable(full_name, parameter, tuple(value.shape))
                tensors[full_name] = value.detach().clone() if key in SHARED else value.detach()
            elif isinstance(value, JsonValue):
                values[full_name] = value
            else:
                kind = type(value).__name__
                raise RunError(f"optimiser: its state {full_name} is a {kind}; only tensors and plain values are saved")
    groups = [
        {key: value for key, value in group.items() if isinstance(value, JsonValue) and key not in NOT_RESTORED}
        for group in optimiser.param_groups
    ]
    return tensors, {"state": values, "groups": groups}


def require_shardable(full_name: str, parameter: Tensor, shape: tuple[int, ...]) -> None:
    """Raise RunError if the parameter is sharded and state of this shape cannot be sharded like it."""
    if is_spread(parameter) and shape and shape != tuple(parameter.shape):
        raise RunError(
            f"optimiser: its state {full_name} has the shape {list(shape)}, so it cannot be sharded like its "
            "parameter; leave parallel.shard and parallel.experts out, or set optim.name: adamw"
        )


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of a checkpoint, with the file and the block of each of its pieces."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[tuple[str, Block], ...]


class SavedTensors:
    """The tensors of a checkpoint, which can be read in blocks.

    digests: of all its files except trainer.json. Methods raise OSError, ValueError, KeyError, TypeError,
    SafetensorError or CheckpointError for files that have changed.
    """

    def __init__(self, checkpoint: Path, digests: Mapping[str, str]) -> None:
        self.checkpoint, self.digests = checkpoint, digests
        self._index: dict[str, dict[str, SavedTensor]] | None = None
        self._kinds: dict[str, dict[str, SavedTensor]] = {}
        self._open: dict[str, Any] = {}

    @property
    def is_sharded(self) -> bool:
        """Whether several ranks wrote pieces."""
        return PIECES in self.digests

    def has(self, kind: str) -> bool:
        """Whether there are tensors of a kind."""
        return any(_holds(name, kind) for name in self.digests)

    def files(self, kinds: Iterable[str]) -> list[str]:
        """The names of the files with tensors of these kinds. Raises KeyError for a kind without files."""
        names_by_kind = {kind: [name for name in self.digests if _holds(name, kind)] for kind in kinds}
        for kind, names in names_by_kind.items():
            if not names:
                raise KeyError(f"{kind}.safetensors")
        return sorted(name for names in names_by_kind.values() for name in names) + [PIECES] * self.is_sharded

    def verify(self, kinds: Iterable[str], ranks: Ranks) -> str | None:
        """Compare the digests of this rank's share of the files of some kinds. Returns what is wrong, or None."""
        try:
            names = self.files(kinds)
            for name in _shares({name: self._path(name).stat().st_size for name in names}, ranks.world)[ranks.rank]:
                if piecewise_digest(self._path(name)) != self.digests[name]:
                    return f"{name} has changed since it was written"
        except OSError as error:
            return f"{Path(error.filename or self.checkpoint).name}: {error.strerror}"
        except KeyError as error:
            return f"{error.args[0]} is missing"
        return None

    def tensors(self, kind: str) -> dict[str, SavedTensor]:
        """The tensors of a kind by name."""
        if kind not in self._kinds:
            self._kinds[kind] = self._pieces()[kind] if self.is_sharded else self._whole(f"{kind}.safetensors")
        return self._kinds[kind]

    def read(self, kind: str, name: str, block: Block | None = None) -> Tensor:
        """Read a block of a tensor (None: the whole tensor), assembled from the saved pieces."""
        saved = self.tensors(kind)[name]
        target = torch.empty((block or Block.whole(saved.shape)).sizes, dtype=saved.dtype)
        self.copy(kind, name, block, target)
        return target

    def copy(self, kind: str, name: str, block: Block | None, target: Tensor) -> None:
        """Read a block of a tensor (None: the whole tensor) into `target`, which has the block's shape."""
        saved = self.tensors(kind)[name]
        target_block = block or Block.whole(saved.shape)
        missing = target_block.numel
        for file, piece in saved.pieces:
            if (common := target_block.within(piece)) is not None:
                # Files are mapped into memory, so only the copied block is read.
                content = self._handle(file).get_tensor(name)[common.seen_from(piece.offsets).slices]
                target[common.seen_from(target_block.offsets).slices].copy_(content)
                missing -= common.numel
        if missing:
            raise ValueError(f"{name}: the checkpoint holds only a part of it")

    def _whole(self, file: str) -> dict[str, SavedTensor]:
        return {
            name: SavedTensor(DTYPE_OF[stored.dtype], stored.shape, ((file, Block.whole(stored.shape)),))
            for name, stored in tensors_in(self._path(file)).items()
        }

    def _pieces(self) -> dict[str, dict[str, SavedTensor]]:
        if self._index is None:
            index = json.loads(self._path(PIECES).read_text(encoding="utf-8"))
            self._index = {
                kind: {
                    name: SavedTensor(
                        DTYPE_OF[entry["dtype"]],
                        tuple(entry["shape"]),
                        tuple((file, Block(tuple(offsets), tuple(sizes))) for file, offsets, sizes in entry["pieces"]),
                    )
                    for name, entry in tensors.items()
                }
                for kind, tensors in index.items()
            }
        return self._index

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            self._open[file] = safe_open(self._path(file), framework="pt", device="cpu")
        return self._open[file]

    def _path(self, file: str) -> Path:
        return self.checkpoint / file


def _holds(file: str, kind: str) -> bool:
    name, _, suffix = file.partition(".")
    return suffix == "safetensors" and (name == kind or name.rpartition("-")[0] == kind)


def _shares(sizes: Mapping[str, int], world: int) -> list[list[str]]:
    """Divide files among `world` ranks by bytes: the largest first, each to the rank with the fewest bytes."""
    shares: list[list[str]] = [[] for _ in range(world)]
    bytes_of = [0] * world
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        least = bytes_of.index(min(bytes_of))
        shares[least].append(name)
        bytes_of[least] += sizes[name]
    return shares
