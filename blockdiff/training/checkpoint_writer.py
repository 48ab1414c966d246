"""The writer of a run's checkpoints: every rank writes its own pieces, at once or while training continues.

The directory is written under a hidden name and renamed to `step-N` when all ranks' files are on the disk. A directory
with that name is therefore complete, whenever a rank is killed.
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

LOGS = (FILE_NAME, SAMPLES)  # logs whose content up to a checkpoint is compared when the run is resumed


class CheckpointWriter:
    """Writes the checkpoints of a run. All ranks must call its methods together.

    in_background: copy this rank's tensors to host memory and write them in a thread while training continues.
        Otherwise `start` returns when the checkpoint is complete.
    """

    def __init__(self, run: Path, ranks: Ranks, in_background: bool = False) -> None:
        self.run, self.ranks, self.in_background = run, ranks, in_background
        self.step = 0  # the step whose checkpoint is being written, 0 = none
        self._thread: Thread | None = None
        self._error: RunError | None = None
        self._hidden_directory: Path | None = None  # the directory that is being written, before it is renamed
        self._pieces: dict[str, dict[str, Piece]] = {}  # the pieces that this rank writes, by kind and tensor name

    def start(
        self,
        step: int,
        objective: nn.Module,
        optimiser: torch.optim.Optimizer,
        facts: Facts,
        average: Ema | None = None,
        counts: Mapping[str, float] | None = None,
    ) -> None:
        """Begin the checkpoint of a step, after the one before is complete.

        facts: JSON values, such as seed and recipe, which `restore` compares.
        counts: the counts of the log's next record, which `read_counts` returns.

        Raises RunError in one line if the checkpoint cannot be written; earlier checkpoints stay.
        """
        self.wait()
        ranks = self.ranks
        self._hidden_directory, self._final = None, self.run / FOLDER / f"step-{step}"
        states, values = optimiser_state(objective, optimiser)
        tensors = {MODEL: saved_weights(objective), OPTIMISER: states} | ({AVERAGE: average.state()} if average else {})
        self._is_sharded = any(is_spread(tensor) for named in tensors.values() for tensor in named.values())
        pieces = {kind: _owned(named, ranks.rank) for kind, named in tensors.items()}
        self._pieces = pieces
        self._bytes = sum(piece.local.nbytes for named in pieces.values() for piece in named.values())
        self._trainer = {
            "format": FORMAT,
            "version": __version__,
            "step": step,
            "world": ranks.world,
            "facts": dict(facts),
            "counts": counts or {},
            "optimiser": values,
        }
        self.step = step
        with ranks.guarded(f"saving step {step}"), self._removed_on_failure():
            if self._is_sharded:
                self._hidden_directory = self._shared_directory()
            if ranks.is_main:
                with self._one_line_errors():
                    self._trainer["logs"] = _synced_logs(self.run)
            if not self.in_background:
                self._complete()
                return
            self._pieces = {kind: {key: _copied(each) for key, each in named.items()} for kind, named in pieces.items()}
            self._thread = Thread(target=self._write_in_background, daemon=True)
            self._thread.start()

    def poll(self) -> int:
        """Complete the checkpoint if its files are written. Returns its step, or 0. Call it after every step.

        Raises RunError if a rank could not write.
        """
        if self._thread is None:
            return 0
        with self.ranks.guarded(f"saving step {self.step}"):
            (is_writing,) = self.ranks.any(self._thread.is_alive())
        return 0 if is_writing else self.wait()

    def wait(self) -> int:
        """Wait for the checkpoint that is being written and complete it; otherwise like `poll`."""
        if self._thread is None:
            return 0
        step = self.step
        with self.ranks.guarded(f"saving step {step}"), self._removed_on_failure():
            self._complete()
        return step

    def close(self) -> None:
        """End a run, which may have failed: complete the checkpoint being written if no other rank is needed for it.

        One that several ranks were writing stays hidden until `hold_run` removes it.
        """
        if self._thread is not None and self.ranks.is_main and not (self._is_sharded and self.ranks.world > 1):
            self._write_or_wait()
            self._publish()
        self._reset()

    def _reset(self) -> None:
        """Forget the checkpoint that was being written."""
        self.step, self._thread, self._error, self._pieces = 0, None, None, {}

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
    def _hidden(self) -> Path:
        """The hidden directory that is being written, in the same folder as the finished checkpoints."""
        assert self._hidden_directory is not None
        return self._hidden_directory

    def _write(self) -> None:
        """Write this rank's files and the list of their pieces to the disk."""
        with self._one_line_errors():
            self._write_files()

    def _write_files(self) -> None:
        digests: dict[str, str] = {}
        entries: dict[str, Any] = {}
        if not self._is_sharded:
            if not self.ranks.is_main:
                return
            self._hidden_directory = hidden_directory(self._final)
        for kind, pieces in self._pieces.items():
            if not pieces and self._is_sharded:
                continue
            name = f"{kind}-{self.ranks.rank}.safetensors" if self._is_sharded else f"{kind}.safetensors"
            sources = {key: TensorSource.of(piece.local) for key, piece in pieces.items()}
            digests[name] = write_stream(self._hidden / name, sources)
            entries[kind] = _entries(name, pieces)
        self._part: dict[str, dict[str, Any]] = {"digests": digests, "pieces": entries}
        if self._is_sharded:
            write_text(self._hidden / _list_name(self.ranks.rank), json.dumps(self._part))

    def _complete(self) -> None:
        """Write the files, or wait for the thread that does; then rank 0 publishes the checkpoint.

        Of an unsharded run rank 0 does both, even if another rank is lost meanwhile.
        """
        doing = f"saving step {self.step}"
        if self._is_sharded:
            with self.ranks.at_own_pace(doing):
                self._write_or_wait()
        with self.ranks.main_first(doing):
            if self.ranks.is_main:
                if not self._is_sharded:
                    self._write_or_wait()
                self._publish()
        self._reset()

    def _publish(self) -> None:
        """Join the files that the ranks have written into one checkpoint and rename its directory."""
        with self._one_line_errors():
            digests = self._joined_digests()
            logs = self._trainer.pop("logs")
            trainer = {**self._trainer, "digests": dict(sorted(digests.items())), "logs": logs}
            trainer["seal"] = seal(trainer)
            (self._hidden / TRAINER).write_text(json.dumps(trainer, indent=1), encoding="utf-8")
            sync(self._hidden / TRAINER)
            publish(self._hidden, self._final)

    def _joined_digests(self) -> dict[str, str]:
        """Return the digest of every file with tensors.

        In a sharded run first merge the ranks' lists into the index of pieces, whose digest is included, and delete the
        lists.
        """
        if not self._is_sharded:
            return dict(self._part["digests"])
        lists = [self._hidden / _list_name(rank) for rank in range(self.ranks.world)]
        parts = [json.loads(part.read_text(encoding="utf-8")) for part in lists]
        for part in lists:
            part.unlink()
        index = _joined_index([part["pieces"] for part in parts])
        (self._hidden / PIECES).write_text(json.dumps(index, separators=(",", ":")), encoding="utf-8")
        sync(self._hidden / PIECES)
        digests = {name: value for part in parts for name, value in part["digests"].items()}
        return {**digests, PIECES: piecewise_digest(self._hidden / PIECES)}

    def _shared_directory(self) -> Path:
        """Make a hidden directory on rank 0. Raises RunError if that fails or if a rank does not see it."""
        path, message = "", ""
        if self.ranks.is_main:
            try:
                path = str(hidden_directory(self._final))
            except OSError as error:
                message = self._message(error)
        path, message = self.ranks.agree((path, message))
        if message:
            raise RunError(message)
        hidden = Path(path)
        blind = [rank for rank, sees in enumerate(self.ranks.gather(hidden.is_dir())) if not sees]
        if blind:
            if self.ranks.is_main:
                shutil.rmtree(hidden, ignore_errors=True)
            raise RunError(
                f"{self.run}: rank {blind[0]} does not see the files that rank 0 writes there; all ranks of a sharded "
                "run write, so choose an output on a disk that all machines share"
            )
        return hidden

    @contextmanager
    def _removed_on_failure(self) -> Iterator[None]:
        """Remove the unfinished checkpoint if a block fails."""
        try:
            yield
        except BaseException:
            if self.ranks.is_main and self._hidden_directory is not None:
                shutil.rmtree(self._hidden_directory, ignore_errors=True)
            self._reset()
            raise

    @contextmanager
    def _one_line_errors(self) -> Iterator[None]:
        """Turn errors of a block into a RunError of one line, which names the step that is saved."""
        try:
            yield
        except (OSError, SafetensorError, ValueError) as error:
            raise RunError(self._message(error)) from error

    def _message(self, error: Exception) -> str:
        last = max(steps_saved(self.run), default=None)
        saved = "nothing is saved yet" if last is None else f"step {last} is saved"
        return f"{unwritten(self._final, error, self._bytes)}; {saved}: {room_remedy(error)} and {RESUME}"


def _owned(tensors: Mapping[str, Tensor], rank: int) -> dict[str, Piece]:
    """The pieces that a rank writes. Of equal pieces on several ranks only one is written, of empty ones none."""
    pieces = {name: piece_of(tensor, rank) for name, tensor in tensors.items()}
    is_empty = {name: 0 in piece.block.sizes and 0 not in piece.shape for name, piece in pieces.items()}
    return {name: piece for name, piece in pieces.items() if piece.is_owned and not is_empty[name]}


def _copied(piece: Piece) -> Piece:
    return replace(piece, local=piece.local.to("cpu", copy=True))


def _synced_logs(run: Path) -> dict[str, Any]:
    """Flush the logs to the disk, and return their lengths and digests."""
    logs: dict[str, Any] = {}
    for path in (run / name for name in LOGS if (run / name).exists()):
        sync(path)
        logs[path.name] = {"bytes": path.stat().st_size, "digest": digest(path)}
    return logs


def _list_name(rank: int) -> str:
    """The name of the file that lists a rank's pieces until rank 0 joins the lists."""
    return f"rank-{rank}.json"


def _entries(file: str, pieces: Mapping[str, Piece]) -> dict[str, Any]:
    """The entries of pieces.json for the pieces in one file."""
    return {
        name: {
            "dtype": WORDS[piece.local.dtype],
            "shape": list(piece.shape),
            "pieces": [[file, list(piece.block.offsets), list(piece.block.sizes)]],
        }
        for name, piece in pieces.items()
    }


def _joined_index(parts: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Join the ranks' entries into the content of pieces.json. Raises ValueError for a tensor that is not whole."""
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
