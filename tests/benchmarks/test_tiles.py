"""The table of tiles: every tile fits into the shared memory of every architecture that it is for.

`python -m benchmarks.tile_memory` has compiled them; `test_compiled_kernels.py` compares its figures with today's.
"""

from __future__ import annotations

import pytest

from benchmarks import compiled
from benchmarks.tile_memory import KERNELS, read
from blockdiff.kernels import launch, tiles
from blockdiff.kernels.tiles import SHARED_MEMORY, table

pytestmark = pytest.mark.quick


def test_every_tile_of_the_table_was_compiled_and_fits():
    memory = read()
    for (kernel, architecture, size), entries in table().items():
        for _, tile in entries:
            sizes = tile.rows, tile.columns, tile.inner, tile.warps, tile.stages
            key = KERNELS.get(kernel, kernel), architecture, size, sizes
            assert key in memory, f"{key}: run python -m benchmarks.tile_memory"
            assert memory[key] <= SHARED_MEMORY[architecture], key


def test_every_launch_of_an_op_fits_whatever_its_tile_comes_from():
    memory = read()
    assert {key[1] for key in memory} == set(SHARED_MEMORY) and {key[2] for key in memory} == {2, 4}
    assert not {key: shared for key, shared in memory.items() if shared > SHARED_MEMORY[key[1]]}


def test_experts_of_every_number_are_routed_on_every_architecture():
    for architecture in SHARED_MEMORY:
        for size in (2, 4):
            served = [limit for limit, _ in table()["routed_tokens", architecture, size]]
            assert served == [128, 256, 512]


@pytest.mark.parametrize("name", compiled.OPS)
def test_no_op_that_is_compiled_is_refused_before_its_last_kernel(name, monkeypatch):
    """`python -m benchmarks.compiled` would end there, and compile none of those after it."""
    launched = list[str]()
    monkeypatch.setattr(launch.Launch, "__call__", lambda self, *_: launched.append(self.kernel.__name__))
    monkeypatch.setattr(tiles, "architecture", lambda device: 90)
    compiled.OPS[name]()
    assert launched
