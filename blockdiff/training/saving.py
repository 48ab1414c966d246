"""How a checkpoint comes to the disk: every rank writes its own pieces, at once or while training goes on.

The directory is written under a hidden name. It gets the name `step-N` when all ranks have said that their files are on
the disk, so what is called so is complete, whenever a rank is killed.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from blockdiff.checkpoint.stream import Source, write_stream
from blockdiff.errors import RESUME, RunError
from blockdiff.files import digest, hidden_directory, publish, seal, sync, unwritten, write_text
from blockdiff.metrics import FILE_NAME, SAMPLES
from blockdiff.parallel.ranks import Ranks
from blockdiff.pieces import Piece, is_spread, piece_of
from blockdiff.training.checkpoint_tensors import pack, weights_of
from blockdiff.training.ema import Ema
from blockdiff.training.saved import AVERAGE, MODEL, OPTIMISER, PIECES, described, joined

FOLDER, TRAINER = "checkpoints", "trainer.json"
# Of trainer.json. Without a format it is 1, whose facts have the recipe keys of before. 2, and 3 with pieces of several
# ranks, have digests of whole files, and 4 those of `PiecewiseDigest`.
FORMAT, READABLE = 4, (2, 3, 4)
_COMPLETE = re.compile(r"step-(\d+)")
LOGS = (FILE_NAME, SAMPLES)  # whose content up to a checkpoint is compared

Facts = Mapping[str, Any]


def steps_saved(run: Path) -> dict[int, Path]:
    """The complete checkpoints of a run directory by step, oldest first. A directory so named is complete."""
    found = [(_COMPLETE.fullmatch(path.name), path) for path in (run / FOLDER).glob("step-*")]
    return dict(sorted((int(match[1]), path) for match, path in found if match))


class Saver:
    """Writes the checkpoints of a run. All ranks call its methods together.

    in_background: a copy of what this rank writes is taken in the memory of the host, and a thread writes it while
    training goes on. Otherwise `start` returns when the checkpoint is complete.
    """

    def __init__(self, run: Path, ranks: Ranks, in_background: bool = False) -> None:
        self.run, self.ranks, self.in_background = run, ranks, in_background
        self.step = 0  # whose checkpoint is being written, 0 = none is
        self._thread: Thread | None = None
        self._error: RunError | None = None
        self._hidden: Path | None = None

    def start(
        self,
        step: int,
        objective: nn.Module,
        optimiser: torch.optim.Optimizer,
        facts: Facts,
        average: Ema | None = None,
    ) -> None:
        """Begin the checkpoint of a step, after the one before is complete.

        objective: what trains; the tensors of its `model` have the names they have there. `facts` (JSON values, such as
        seed and recipe) are compared by `restore`. Raises RunError in one line for what cannot be written, which leaves
        the earlier checkpoints as they were.
        """
        self.wait()
        ranks = self.ranks
        self._hidden, self._final = None, self.run / FOLDER / f"step-{step}"
        states, values = pack(objective, optimiser)
        tensors = {MODEL: weights_of(objective), OPTIMISER: states} | ({AVERAGE: average.state()} if average else {})
        self._is_sharded = any(is_spread(tensor) for named in tensors.values() for tensor in named.values())
        mine = {kind: _owned(named, ranks.rank) for kind, named in tensors.items()}
        self._needed = sum(piece.local.nbytes for named in mine.values() for piece in named.values())
        kept = {"step": step, "world": ranks.world, "facts": dict(facts), "optimiser": values}
        self._trainer = {"format": FORMAT, **kept}
        self.step = step
        with ranks.guarded(f"saving step {step}"), self._abandoned_if_it_fails():
            if self._is_sharded:
                self._hidden = self._agreed_directory()
            if ranks.is_main:
                self._trainer["logs"] = self._refused(lambda: _synced_logs(self.run))
            if self.in_background:
                copies = {kind: {name: _copied(piece) for name, piece in each.items()} for kind, each in mine.items()}
                self._thread = Thread(target=self._run, args=(copies,), daemon=True)
                self._thread.start()
            else:
                self._complete(lambda: self._refused(lambda: self._write(mine)))

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
            self._complete(self._join_thread)
        return step

    def close(self) -> None:
        """At the end of a run that may have failed: complete what is being written if no other rank is needed for it.

        What several ranks were writing stays hidden; `entered` removes it.
        """
        if self._thread is not None and self.ranks.is_main and not (self._is_sharded and self.ranks.world > 1):
            with self.ranks.undisturbed():
                self._join_thread()
                self._refused(self._join)
        self.step, self._thread = 0, None

    def _run(self, copies: dict[str, dict[str, Piece]]) -> None:
        try:
            self._refused(lambda: self._write(copies))
        except RunError as error:  # the run's own thread raises it
            self._error = error

    def _join_thread(self) -> None:
        assert self._thread is not None
        self._thread.join()
        if self._error is not None:
            raise self._error

    @property
    def _beside(self) -> Path:
        """The directory that is written, which has no name of a checkpoint yet."""
        assert self._hidden is not None
        return self._hidden

    def _write(self, mine: Mapping[str, Mapping[str, Piece]]) -> None:
        """Write this rank's files and what they hold; all are on the disk afterwards."""
        digests: dict[str, str] = {}
        held: dict[str, Any] = {}
        if not self._is_sharded:
            if not self.ranks.is_main:
                return
            self._hidden = hidden_directory(self._final)
        for kind, pieces in mine.items():
            if not pieces and self._is_sharded:
                continue
            name = f"{kind}-{self.ranks.rank}.safetensors" if self._is_sharded else f"{kind}.safetensors"
            sources = {key: Source.of(piece.local) for key, piece in pieces.items()}
            digests[name] = write_stream(self._beside / name, sources)
            held[kind] = described(name, pieces)
        self._part: dict[str, dict[str, Any]] = {"digests": digests, "pieces": held}
        if self._is_sharded:
            write_text(self._beside / _said_by(self.ranks.rank), json.dumps(self._part))

    def _complete(self, write: Callable[[], None]) -> None:
        """Write, or wait for the thread that does; then rank 0 makes one checkpoint of it and gives it its name.

        Where nothing is sharded rank 0 does both, even if another one is lost meanwhile.
        """
        doing = f"saving step {self.step}"
        if self._is_sharded:
            with self.ranks.at_own_pace(doing):
                write()
        with self.ranks.main_first(doing):
            if self.ranks.is_main:
                if not self._is_sharded:
                    write()
                self._refused(self._join)
        self.step, self._thread = 0, None

    def _join(self) -> None:
        """Make one checkpoint of what the ranks have written."""
        parts = [self._part]
        if self._is_sharded:
            said = [self._beside / _said_by(rank) for rank in range(self.ranks.world)]
            parts = [json.loads(part.read_text(encoding="utf-8")) for part in said]
            for part in said:
                part.unlink()
        digests = {name: said for part in parts for name, said in part["digests"].items()}
        if self._is_sharded:
            index = joined([part["pieces"] for part in parts])
            (self._beside / PIECES).write_text(json.dumps(index, separators=(",", ":")), encoding="utf-8")
            digests[PIECES] = digest(self._beside / PIECES)
            sync(self._beside / PIECES)
        logs = self._trainer.pop("logs")
        trainer = {**self._trainer, "digests": dict(sorted(digests.items())), "logs": logs}
        trainer["seal"] = seal(trainer)
        (self._beside / TRAINER).write_text(json.dumps(trainer, indent=1), encoding="utf-8")
        sync(self._beside / TRAINER)
        publish(self._beside, self._final)

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
            self.step, self._thread, self._error = 0, None, None
            raise

    def _refused(self, work: Callable[[], Any]) -> Any:
        """What work returns; its errors become one line that says what is saved."""
        try:
            return work()
        except (OSError, SafetensorError, ValueError) as error:
            raise RunError(self._refusal(error)) from error

    def _refusal(self, error: Exception) -> str:
        last = max(steps_saved(self.run), default=None)
        kept = "nothing is saved yet" if last is None else f"step {last} is saved"
        return f"{unwritten(self._final, error, self._needed)}; {kept}: make room and {RESUME}"


def _owned(tensors: Mapping[str, Tensor], rank: int) -> dict[str, Piece]:
    """The pieces that a rank writes: of all that hold the same numbers one does, and nobody writes empty pieces."""
    pieces = {name: piece_of(tensor, rank) for name, tensor in tensors.items()}
    is_empty = {name: 0 in piece.block.sizes and 0 not in piece.shape for name, piece in pieces.items()}
    return {name: piece for name, piece in pieces.items() if piece.is_owned and not is_empty[name]}


def _copied(piece: Piece) -> Piece:
    return replace(piece, local=piece.local.to("cpu", copy=True))


def _synced_logs(run: Path) -> dict[str, Any]:
    """How long the logs are and what is in them; a checkpoint never outlives the records of its steps."""
    logs: dict[str, Any] = {}
    for path in (run / name for name in LOGS if (run / name).exists()):
        sync(path)
        logs[path.name] = {"bytes": path.stat().st_size, "digest": digest(path)}
    return logs


def _said_by(rank: int) -> str:
    """The file in which a rank says what it has written; rank 0 joins them and removes them."""
    return f"rank-{rank}.json"
