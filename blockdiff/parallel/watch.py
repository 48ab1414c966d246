"""The watch over the other ranks: a rank learns that one is gone, wherever it waits, and ends with one line.

Most collectives fail when a rank dies, but not everything that ranks wait in: while groups are made they wait in the
launcher's store, ranks of a mesh may wait for one another after a third has gone, and NCCL waits for the device. So
during a training every rank has a thread with a connection to rank 0, whichever library sums the gradients. The system
closes the connections of a process that dies; of one that hangs no more signs of life come. Rank 0 tells the others.

The thread looks after the launcher, too. torchrun, and so `accelerate launch`, ends its ranks when it is told to end;
where it is killed instead, every rank asks itself to stop, saves, and ends.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from selectors import EVENT_READ, DefaultSelector
from threading import Event, Lock, Thread
from typing import Any

from blockdiff.errors import RESUME, RunError
from blockdiff.parallel.ranks import Ranks
from blockdiff.parallel.signals import Stopped
from blockdiff.terminal import end_with

BEAT = 2.0  # seconds between two signs of life
GRACE = 5.0  # seconds in which a rank whose collective has failed ends by itself
_LOOK = 0.1  # seconds between two looks whether it does
_ALIVE, _DONE, _LOST, _HUNG = b"a", b"d", b"l", b"h"


@contextmanager
def watched(ranks: Ranks, doing: Callable[[], str]) -> Iterator[Ranks]:
    """Surrounds a training: inside, the loss of a rank ends this process with one line and exit code 1.

    A rank is lost when its process is gone, leaves with an error, or gives no sign of life for `ranks.timeout` seconds;
    it may be busy for longer, because a thread gives them. Who learns of it first has some seconds to end in its own
    way, and `Ranks.undisturbed` work is waited for. Ranks may leave at different times. doing: what they are at, for
    the message. Gives the ranks to use inside. All ranks call it; raises RunError where one cannot be reached.
    """
    if ranks.world == 1:
        yield ranks
        return
    with ranks.guarded("the start"):
        watch = Watch(ranks, doing)
    is_well = False
    try:
        yield replace(ranks, watch=watch)
        is_well = True
    except Stopped:
        is_well = True
        raise
    finally:
        watch.end(is_well)


class Watch:
    """One rank's connections and the thread that looks after them."""

    def __init__(self, ranks: Ranks, doing: Callable[[], str]) -> None:
        self.ranks, self.doing = ranks, doing
        self._beat = min(BEAT, ranks.timeout / 4)
        self.loss: bytes | None = None  # of another rank, once it is known
        self._launcher = (
            os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        )  # others may end before the ranks
        self._is_released = Event()
        self._undisturbed = 0
        self._lock = Lock()
        self._peers = _connected(ranks)
        self._leaving, self._wake = socket.socketpair()  # what is sent there wakes the thread up: this rank leaves
        self._selector = DefaultSelector()
        for each in (self._leaving, *self._peers):
            each.setblocking(False)
            self._selector.register(each, EVENT_READ)
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Let this rank end by itself from now on: it has an error of its own, or one that names the loss already."""
        with self._lock:
            self._is_released.set()

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Inside, the process is not ended."""
        with self._lock:
            self._undisturbed += 1
        try:
            yield
        finally:
            with self._lock:
                self._undisturbed -= 1

    def end(self, is_well: bool) -> None:
        """Leave; the others take this rank for lost unless `is_well`."""
        self.release()
        self._wake.send(_DONE if is_well else _LOST)
        self._thread.join()
        for each in (*self._peers, self._leaving, self._wake):
            each.close()
        self._selector.close()

    def _run(self) -> None:
        self.loss = self._next_loss()
        if self.loss is None:
            return
        for peer in self._peers:
            _tell(peer, self.loss)
        rest = GRACE
        while not self._is_released.wait(_LOOK):
            with self._lock:
                rest = GRACE if self._undisturbed else rest - _LOOK
                if rest <= 0 and not self._is_released.is_set():
                    what = "was lost" if self.loss == _LOST else f"hung for {self.ranks.timeout:g} s"
                    end_with(f"rank {self.ranks.rank}: another rank {what} during {self.doing()}; {RESUME}")

    def _next_loss(self) -> bytes | None:
        """Wait until a rank is lost or hangs, and say which of both; None when this rank leaves or no other is left."""
        silence = dict.fromkeys(self._peers, 0.0)  # seconds without a sign of life
        beaten = time.monotonic()
        while silence:
            for key, _ in self._selector.select(self._beat):
                peer: Any = key.fileobj
                said = _received(peer)
                if peer is self._leaving:
                    for each in silence if said == _DONE else ():
                        _tell(each, _DONE)
                    return None
                if _DONE in said:
                    self._selector.unregister(peer)
                    del silence[peer]
                elif not said or _LOST in said:
                    return _LOST
                elif _HUNG in said:
                    return _HUNG
                else:
                    silence[peer] = 0.0
            if (passed := time.monotonic() - beaten) < self._beat:
                continue
            beaten += passed
            if self._launcher not in (None, os.getppid()):
                self._launcher = None
                os.kill(os.getpid(), signal.SIGTERM)
            for peer in silence:
                _tell(peer, _ALIVE)
                silence[peer] += min(passed, 2 * self._beat)  # while this process itself stands still it hears nobody
            if any(seconds > self.ranks.timeout for seconds in silence.values()):
                return _HUNG
        return None


def _connected(ranks: Ranks) -> list[socket.socket]:
    """Rank 0's connections to all others, or another rank's to rank 0. Raises RunError where one does not come."""
    try:
        if ranks.is_main:
            return _accepted(ranks)
        port, token = ranks.agree(None)
        peer = socket.create_connection((os.environ.get("MASTER_ADDR", "localhost"), port), ranks.timeout)
        peer.sendall(bytes.fromhex(token))
        return [peer]
    except OSError as error:
        raise RunError(
            f"rank {ranks.rank}: the ranks cannot reach one another ({error.strerror or error}); let the first node "
            "accept connections from the others on all ports"
        ) from error


def _accepted(ranks: Ranks) -> list[socket.socket]:
    """The connections of the others to this rank, whose port and word they are told."""
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    peers: list[socket.socket] = []
    with socket.create_server(("", 0), family=family, backlog=ranks.world, dualstack_ipv6=is_dual) as server:
        token = secrets.token_bytes(16)
        ranks.agree((server.getsockname()[1], token.hex()))
        server.settimeout(ranks.timeout)
        while len(peers) < ranks.world - 1:
            peer, _ = server.accept()
            peer.settimeout(ranks.timeout)
            if peer.recv(len(token), socket.MSG_WAITALL) == token:
                peers.append(peer)
            else:  # not one of ours
                peer.close()
    return peers


def _tell(peer: socket.socket, word: bytes) -> None:
    with suppress(OSError):  # whoever is gone is noticed when it is heard
        peer.send(word)


def _received(peer: socket.socket) -> bytes:
    """The words of a peer; empty where it is gone."""
    try:
        return peer.recv(4096)
    except BlockingIOError:
        return _ALIVE
    except OSError:
        return b""
