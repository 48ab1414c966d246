"""The content of a checkpoint of a run, `checkpoints/step-N`: its files, and the tensors and values in them by name.

It holds weights, optimiser state, averaged weights, step, facts and what the next record of the log has counted so far,
and no random state: every draw is addressed. Its tensors are safetensors files and the rest is JSON, so no file is a
pickle. Where nothing was sharded, a file has whole tensors: `model.safetensors`. Otherwise each rank wrote the pieces
that it owns, `model-RANK.safetensors`, and `pieces.json` says where they lie. `checkpoint_writer` writes it,
`checkpoint_reader` reads it.
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
MODEL, OPTIMISER, AVERAGE = KINDS = ("model", "optimiser", "ema")  # the tensors, and how their files begin
FORMAT = 8  # of trainer.json and what it lists; a checkpoint of another one is refused
STREAMED = "data.train: content"  # a fact: of a stream, whose rows may be corrected before a run goes on
ALONE = Ranks(torch.device("cpu"))
SHARED = ("qmap1", "qmap2")  # tables that bitsandbytes keeps once for all parameters
# Of parameter groups: the rate is set before every step, the others say how this machine computes.
NOT_RESTORED = ("lr", "fused", "foreach", "capturable")
_COMPLETE = re.compile(r"step-(\d+)")

Facts = Mapping[str, Any]
JsonValue = str | bool | int | float | None


def steps_saved(run: Path) -> dict[int, Path]:
    """The complete checkpoints of a run directory by step, oldest first. A directory so named is complete."""
    found = [(_COMPLETE.fullmatch(path.name), path) for path in (run / FOLDER).glob("step-*")]
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def require_own_names(objective: nn.Module) -> None:
    """Raises RunError where what an objective has beside its model has a name of the model's: one would be lost."""
    names = list(objective.state_dict())
    shared = {short_name(name) for name in names if short_name(name) != name} & {*names}
    if shared:
        raise RunError(f"objective: its tensor {min(shared)} has the name of one of the model; rename it")


def short_name(name: str) -> str:
    """The name of a tensor of the objective: those of its model without the prefix."""
    return name.removeprefix("model.")


def saved_weights(objective: nn.Module) -> dict[str, Tensor]:
    """The weights in a checkpoint: all tensors of the objective, or of a model with adapters these alone.

    The weights that they adapt do not change; the recipe of the run names the checkpoint that has them.
    """
    state = objective.state_dict()
    if any(is_adapter(short_name(name)) for name in state):
        state = {name: x for name, x in state.items() if is_adapter(short_name(name)) or short_name(name) == name}
    return {short_name(name): tensor for name, tensor in state.items()}


def optimiser_state(objective: nn.Module, optimiser: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Optimiser state by `parameter name/key`: the tensors, and the JSON values of parameters and groups.

    Raises RunError for state that could not be given back: what is no tensor or JSON value, and what is spread over
    the ranks in another way than its parameter.
    """
    tensors: dict[str, Tensor] = {}
    values: dict[str, JsonValue] = {}
    for name, parameter in objective.named_parameters():
        for key, value in optimiser.state.get(parameter, {}).items():
            full_name = f"{short_name(name)}/{key}"
            if isinstance(value, Tensor):
                require_like(full_name, parameter, tuple(value.shape))
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


def require_like(full_name: str, parameter: Tensor, shape: tuple[int, ...]) -> None:
    """Raise RunError for state of a parameter that is spread over ranks in another way than this shape can be."""
    if is_spread(parameter) and shape and shape != tuple(parameter.shape):
        raise RunError(
            f"optimiser: its state {full_name} has the shape {list(shape)}, so it cannot be spread over ranks as its "
            "parameter is; leave parallel.shard and parallel.experts out, or choose optim.name: adamw"
        )


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of a checkpoint: what it is, and in which files its pieces lie."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[tuple[str, Block], ...]


class SavedTensors:
    """The tensors of a checkpoint, to be read in pieces.

    digests: of all its files but trainer.json. Raises OSError, ValueError, KeyError, TypeError, SafetensorError or
    CheckpointError for files that are not as they were written.
    """

    def __init__(self, checkpoint: Path, digests: Mapping[str, str]) -> None:
        self.checkpoint, self.digests = checkpoint, digests
        self._index: dict[str, dict[str, SavedTensor]] | None = None
        self._kinds: dict[str, dict[str, SavedTensor]] = {}
        self._open: dict[str, Any] = {}

    @property
    def is_sharded(self) -> bool:
        """True where several ranks wrote pieces."""
        return PIECES in self.digests

    def has(self, kind: str) -> bool:
        """True where there are tensors of a kind."""
        return any(_holds(name, kind) for name in self.digests)

    def files(self, kinds: Iterable[str]) -> list[str]:
        """The names of the files with tensors of these kinds; KeyError where there are none of one."""
        found = {kind: [name for name in self.digests if _holds(name, kind)] for kind in kinds}
        for kind, names in found.items():
            if not names:
                raise KeyError(f"{kind}.safetensors")
        return sorted(name for names in found.values() for name in names) + [PIECES] * self.is_sharded

    def verify(self, kinds: Iterable[str], ranks: Ranks) -> str | None:
        """Compare the digests of this rank's share of the files of some kinds; says which one is not as it was.

        The largest files go first, each to the rank with the fewest bytes so far.
        """
        try:
            names = self.files(kinds)
            for name in _dealt({name: self._path(name).stat().st_size for name in names}, ranks.world)[ranks.rank]:
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
        """A block of a tensor (None: all of it) in memory of its own, put together of the pieces that were saved."""
        found = self.tensors(kind)[name]
        read = torch.empty((block or Block.whole(found.shape)).sizes, dtype=found.dtype)
        self.copy(kind, name, block, read)
        return read

    def copy(self, kind: str, name: str, block: Block | None, target: Tensor) -> None:
        """The same into a tensor of the block's shape."""
        found = self.tensors(kind)[name]
        target_block = block or Block.whole(found.shape)
        left = target_block.numel
        for file, piece in found.pieces:
            if (common := target_block.within(piece)) is not None:
                # Of a tensor in a file, which is mapped into memory, nothing is read but what is copied.
                content = self._handle(file).get_tensor(name)[common.seen_from(piece.offsets).slices]
                target[common.seen_from(target_block.offsets).slices].copy_(content)
                left -= common.numel
        if left:
            raise ValueError(f"{name} is not whole")

    def _whole(self, file: str) -> dict[str, SavedTensor]:
        return {
            name: SavedTensor(DTYPE_OF[stored.dtype], stored.shape, ((file, Block.whole(stored.shape)),))
            for name, stored in tensors_in(self._path(file)).items()
        }

    def _pieces(self) -> dict[str, dict[str, SavedTensor]]:
        if self._index is None:
            said = json.loads(self._path(PIECES).read_text(encoding="utf-8"))
            self._index = {
                kind: {
                    name: SavedTensor(
                        DTYPE_OF[entry["dtype"]],
                        tuple(entry["shape"]),
                        tuple((file, Block(tuple(offsets), tuple(sizes))) for file, offsets, sizes in entry["pieces"]),
                    )
                    for name, entry in tensors.items()
                }
                for kind, tensors in said.items()
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


def _dealt(sizes: Mapping[str, int], world: int) -> list[list[str]]:
    """Files for each rank, so that all have about as many bytes."""
    shares: list[list[str]] = [[] for _ in range(world)]
    bytes_of = [0] * world
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        least = bytes_of.index(min(bytes_of))
        shares[least].append(name)
        bytes_of[least] += sizes[name]
    return shares
