"""Where ranks on this machine find one another: in a store of the process that starts them, whose port is its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed import TCPStore


@contextmanager
def meeting(world: int) -> Iterator[list[dict[str, str]]]:
    """The variables of each of `world` ranks on the CPU, which can meet until the end of the context."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield [rank_variables(rank, world, store.port) for rank in range(world)]
    del store


def rank_variables(rank: int, world: int, port: int) -> dict[str, str]:
    """The variables that a launcher whose store listens on `port` puts in the environment of a rank on the CPU."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    words = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True", "ACCELERATE_USE_CPU": "1"}
    return {name: str(number) for name, number in numbers.items()} | words
