"""The writer of a run's checkpoints: every rank writes its own pieces, at once or while training goes on.

The directory is written under a hidden name. It gets the name `step-N` when all ranks have said that their files are on
the disk, so what is called so is complete, whenever a rank is killed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from blockdiff import __version__
from blockdiff.checkpoint.stream import WORDS, TensorSource, write_stream
from blockdiff.errors import RESUME, RunError
from blockdiff.files import (
    digest,
    hidden_directory,
    piecewise_digest,
    publish,
    room_remedy,
    seal,
    sync,
    unwritten,
    write_text,
)
from blockdiff.metrics import FILE_NAME, SAMPLES
from blockdiff.parallel.ranks import Ranks
from blockdiff.tensor_pieces import Block, Piece, is_spread, piece_of
from blockdiff.training.checkpoint_content import (
    AVERAGE,
    FOLDER,
    FORMAT,
    MODEL,
    OPTIMISER,
    PIECES,
    TRAINER,
    Facts,
    optimiser_state,
    saved_weights,
    steps_saved,
)
from blockdiff.training.optimiser import Ema

LOGS = (FILE_NAME, SAMPLES)  # logs whose content up to a checkpoint is compared on resuming


class CheckpointWriter:
    """Writes the checkpoints of a run. All ranks call its methods together.

    in_background: a copy of what this rank writes is taken in the memory of the host, and a thread writes it while
    training goes on. Otherwise `start` returns when the checkpoint is complete.
    """

    def __init__(self, run: Path, ranks: Ranks, in_background: bool = False) -> None:
        self.run, self.ranks, self.in_background = run, ranks, in_background
        self.step = 0  # the step whose checkpoint is being written, 0 = none
        self._thread: Thread | None = None
        self._error: RunError | None = None
        self._hidden: Path | None = None  # the directory that is being written, not yet named as a checkpoint
        self._mine: dict[str, dict[str, Piece]] = {}  # the tensors' pieces that this rank writes, by file and name

    def start(
        self,
        step: int,
        objective: nn.Module,
        optimiser: torch.optim.Optimizer,
        facts: Facts,
        average: Ema | None = None,
        counts: Mapping[str, float] | None = None,
    ) -> None:
        """Begin the checkpoint of a step, once the one before is complete.

        objective: what trains; the tensors of its `model` have the names they have there. `facts` (JSON values, such as
        seed and recipe) are compared by `restore`, and `read_counts` gives `counts` back. Raises RunError in one line
        for what cannot be written, which leaves the earlier checkpoints as they were.
        """
        self.wait()
        ranks = self.ranks
        self._hidden, self._final = None, self.run / FOLDER / f"step-{step}"
        states, values = optimiser_state(objective, optimiser)
        tensors = {MODEL: saved_weights(objective), OPTIMISER: states} | ({AVERAGE: average.state()} if average else {})
        self._is_sharded = any(is_spread(tensor) for named in tensors.values() for tensor in named.values())
        self._mine = mine = {kind: _owned(named, ranks.rank) for kind, named in tensors.items()}
        self._needed = sum(piece.local.nbytes for named in mine.values() for piece in named.values())
        kept = {"step": step, "world": ranks.world, "facts": dict(facts), "counts": counts or {}, "optimiser": values}
        self._trainer = {"format": FORMAT, "version": __version__, **kept}
        self.step = step
        with ranks.guarded(f"saving step {step}"), self._abandoned_if_it_fails():
            if self._is_sharded:
                self._hidden = self._agreed_directory()
            if ranks.is_main:
                with self._refused():
                    self._trainer["logs"] = _synced_logs(self.run)
            if not self.in_background:
                self._complete()
                return
            self._mine = {kind: {name: _copied(piece) for name, piece in each.items()} for kind, each in mine.items()}
            self._thread = Thread(target=self._write_in_background, daemon=True)
            self._thread.start()

    def poll(self) -> int:
        """The step whose checkpoint has been completed since it was begun, 0 = none; to be called after every step.

        Raises RunError when a rank could not write.
        """
        if self._thread is None:
            return 0
        with self.ranks.guarded(f"saving step {self.step}"):
            (is_going_on,) = self.ranks.any(self._thread.is_alive())
        return 0 if is_going_on else self.wait()

    def wait(self) -> int:
        """Wait for the checkpoint that is being written; otherwise as `poll`."""
        if self._thread is None:
            return 0
        step = self.step
        with self.ranks.guarded(f"saving step {step}"), self._abandoned_if_it_fails():
            self._complete()
        return step

    def close(self) -> None:
        """At the end of a run that may have failed: complete what is being written if no other rank is needed for it.

        What several ranks were writing stays hidden; `hold_run` removes it.
        """
        if self._thread is not None and self.ranks.is_main and not (self._is_sharded and self.ranks.world > 1):
            self._write_or_wait()
            self._join()
        self._forget()

    def _forget(self) -> None:
        """Go back to writing nothing."""
        self.step, self._thread, self._error, self._mine = 0, None, None, {}

    def _write_in_background(self) -> None:
        try:
            self._write()
        except RunError as error:  # the run's own thread raises it
            self._error = error

    def _write_or_wait(self) -> None:
        """Write this rank's files, or wait for the thread that does."""
        if self._thread is None:
            self._write()
            return
        self._thread.join()
        if self._error is not None:
            raise self._error

    @property
    def _beside(self) -> Path:
        """The hidden directory that is being written, which stands beside the finished checkpoints."""
        assert self._hidden is not None
        return self._hidden

    def _write(self) -> None:
        """Write this rank's files and the list of the pieces in them; all are on the disk afterwards."""
        with self._refused():
            self._write_files()

    def _write_files(self) -> None:
        digests: dict[str, str] = {}
        entries: dict[str, Any] = {}
        if not self._is_sharded:
            if not self.ranks.is_main:
                return
            self._hidden = hidden_directory(self._final)
        for kind, pieces in self._mine.items():
            if not pieces and self._is_sharded:
                continue
            name = f"{kind}-{self.ranks.rank}.safetensors" if self._is_sharded else f"{kind}.safetensors"
            sources = {key: TensorSource.of(piece.local) for key, piece in pieces.items()}
            digests[name] = write_stream(self._beside / name, sources)
            entries[kind] = _entries(name, pieces)
        self._part: dict[str, dict[str, Any]] = {"digests": digests, "pieces": entries}
        if self._is_sharded:
            write_text(self._beside / _said_by(self.ranks.rank), json.dumps(self._part))

    def _complete(self) -> None:
        """Write, or wait for the thread that does; then rank 0 makes one checkpoint of it and gives it its name.

        Where nothing is sharded rank 0 does both, even if another one is lost meanwhile.
        """
        doing = f"saving step {self.step}"
        if self._is_sharded:
            with self.ranks.at_own_pace(doing):
                self._write_or_wait()
        with self.ranks.main_first(doing):
            if self.ranks.is_main:
                if not self._is_sharded:
                    self._write_or_wait()
                self._join()
        self._forget()

    def _join(self) -> None:
        """Make one checkpoint of the files that the ranks have written."""
        with self._refused():
            digests = self._joined_digests()
            logs = self._trainer.pop("logs")
            trainer = {**self._trainer, "digests": dict(sorted(digests.items())), "logs": logs}
            trainer["seal"] = seal(trainer)
            (self._beside / TRAINER).write_text(json.dumps(trainer, indent=1), encoding="utf-8")
            sync(self._beside / TRAINER)
            publish(self._beside, self._final)

    def _joined_digests(self) -> dict[str, str]:
        """The digests of all files with tensors; of several ranks' pieces an index is written, too."""
        if not self._is_sharded:
            return dict(self._part["digests"])
        lists = [self._beside / _said_by(rank) for rank in range(self.ranks.world)]
        parts = [json.loads(part.read_text(encoding="utf-8")) for part in lists]
        for part in lists:
            part.unlink()
        index = _joined_index([part["pieces"] for part in parts])
        (self._beside / PIECES).write_text(json.dumps(index, separators=(",", ":")), encoding="utf-8")
        sync(self._beside / PIECES)
        digests = {name: value for part in parts for name, value in part["digests"].items()}
        return {**digests, PIECES: piecewise_digest(self._beside / PIECES)}

    def _agreed_directory(self) -> Path:
        """The hidden directory that rank 0 makes; RunError where it cannot, or where another rank does not see it."""
        said: tuple[str, str] = ("", "")
        if self.ranks.is_main:
            try:
                said = (str(hidden_directory(self._final)), "")
            except OSError as error:
                said = ("", self._refusal(error))
        name, refusal = self.ranks.agree(said)
        if refusal:
            raise RunError(refusal)
        hidden = Path(name)
        blind = [rank for rank, sees in enumerate(self.ranks.gather(hidden.is_dir())) if not sees]
        if blind:
            if self.ranks.is_main:
                shutil.rmtree(hidden, ignore_errors=True)
            raise RunError(
                f"{self.run}: rank {blind[0]} does not see what rank 0 writes there; the ranks of a sharded run all "
                "write, so choose an output on a disk that all machines share"
            )
        return hidden

    @contextmanager
    def _abandoned_if_it_fails(self) -> Iterator[None]:
        """Removes what was written of a checkpoint that will not be completed."""
        try:
            yield
        except BaseException:
            if self.ranks.is_main and self._hidden is not None:
                shutil.rmtree(self._hidden, ignore_errors=True)
            self._forget()
            raise

    @contextmanager
    def _refused(self) -> Iterator[None]:
        """Turns errors inside into a RunError of one line, which says which step is saved."""
        try:
            yield
        except (OSError, SafetensorError, ValueError) as error:
            raise RunError(self._refusal(error)) from error

    def _refusal(self, error: Exception) -> str:
        last = max(steps_saved(self.run), default=None)
        kept = "nothing is saved yet" if last is None else f"step {last} is saved"
        return f"{unwritten(self._final, error, self._needed)}; {kept}: {room_remedy(error)} and {RESUME}"


def _owned(tensors: Mapping[str, Tensor], rank: int) -> dict[str, Piece]:
    """The pieces that a rank writes: one rank writes what several hold alike, and none writes empty pieces."""
    pieces = {name: piece_of(tensor, rank) for name, tensor in tensors.items()}
    is_empty = {name: 0 in piece.block.sizes and 0 not in piece.shape for name, piece in pieces.items()}
    return {name: piece for name, piece in pieces.items() if piece.is_owned and not is_empty[name]}


def _copied(piece: Piece) -> Piece:
    return replace(piece, local=piece.local.to("cpu", copy=True))


def _synced_logs(run: Path) -> dict[str, Any]:
    """Lengths and digests of the logs, which are on the disk before the checkpoint whose steps they record."""
    logs: dict[str, Any] = {}
    for path in (run / name for name in LOGS if (run / name).exists()):
        sync(path)
        logs[path.name] = {"bytes": path.stat().st_size, "digest": digest(path)}
    return logs


def _said_by(rank: int) -> str:
    """The name of the file that lists the pieces a rank has written; rank 0 joins the lists and removes them."""
    return f"rank-{rank}.json"


def _entries(file: str, pieces: Mapping[str, Piece]) -> dict[str, Any]:
    """The entries of pieces.json for the pieces that one file holds."""
    return {
        name: {
            "dtype": WORDS[piece.local.dtype],
            "shape": list(piece.shape),
            "pieces": [[file, list(piece.block.offsets), list(piece.block.sizes)]],
        }
        for name, piece in pieces.items()
    }


def _joined_index(parts: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """The content of pieces.json from the entries of each rank; ValueError for a tensor that is not whole."""
    index: dict[str, dict[str, Any]] = {}
    for part in parts:
        for kind, tensors in part.items():
            for name, entry in tensors.items():
                joined = index.setdefault(kind, {}).setdefault(name, {**entry, "pieces": []})
                joined["pieces"] += entry["pieces"]
    for tensors in index.values():
        for name, entry in tensors.items():
            saved = sum(Block((), tuple(sizes)).numel for _, _, sizes in entry["pieces"])
            if saved != Block((), tuple(entry["shape"])).numel:
                raise ValueError(f"the ranks do not have all of {name}")
    return index
