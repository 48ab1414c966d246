"""Batches that are made while an optimiser step runs, and the values of the device for which the host waits in it."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from typing import Any

import pytest
import torch

from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.errors import DataError
from blockdiff.recipes.sudoku import alphabet
from blockdiff.training.data import Ahead
from blockdiff.training.plan.live_bytes import LiveBytes
from blockdiff.training.plan.training import kernels_for, worst_batch
from blockdiff.training.recipe_files import read_recipe
from blockdiff.training.starting_model import read_starting_model, without_weights
from tests.little_model import LITTLE, save_preset

pytestmark = pytest.mark.quick


def test_the_batches_of_the_next_step_are_made_in_a_thread_while_a_step_runs():
    made, is_made = list[int](), threading.Event()

    def make(step: int) -> list[Any]:
        assert threading.current_thread() is not threading.main_thread()
        made.append(step)
        is_made.set()
        if step == 4:
            raise DataError("row 7 is bad")
        return [step]

    ahead = Ahead(make, steps=5, is_pinned=False)
    assert ahead(2) == [2]
    is_made.clear()
    assert 3 in made or is_made.wait(10)
    assert ahead(3) == [3] and made[:2] == [2, 3]
    with pytest.raises(DataError, match="row 7"):
        ahead(4)
    assert ahead(5) == [5] and ahead(1) == [1] and made == [2, 3, 4, 5, 1]


# Operations for whose result, or its size, the host waits; an index that is boolean has the size of what is True.
READS = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "bincount", "_unique2", "unique_dim"}


# These look at tensors of a CPU alone: at `is_cpu` first, or at a number that they have put into one.
OF_THE_HOST = {"spans.Spans.padding_BT", "objective._noise", "layers.vocabulary._rounded"}


class Waits(LiveBytes):
    """Runs a step on shapes, with a GPU's ops, and counts by the line of code what the host has to wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, masks = function.overloadpacket.__name__, ()
        if name in ("index", "index_put", "index_put_"):
            masks = [x for x in args[1] if x is not None and x.dtype in (torch.bool, torch.uint8)]
        if name in READS or masks:
            self.lines[_place()] += 1
        return super().__torch_dispatch__(function, types, args, kwargs)


def _place() -> str:
    """The module and function of blockdiff that runs now."""
    frame = sys._getframe(2)
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module.startswith("blockdiff.") and "live_bytes" not in module:
            return f"{module.removeprefix('blockdiff.')}.{frame.f_code.co_qualname.partition('.<locals>')[0]}"
        frame = frame.f_back
    return "backward"


@pytest.mark.parametrize("sweep", [False, True])
def test_the_host_waits_in_no_layer_of_a_training_step_and_in_few_places_outside(tmp_path, sweep):
    character_tokenizer(alphabet(4)).save_pretrained(tmp_path / "tokenizer")
    save_preset(tmp_path / "little.json", LITTLE)
    recipe = read_recipe(
        {
            "model": {"preset": str(tmp_path / "little.json"), "tokenizer": str(tmp_path / "tokenizer")},
            "data": {"train": [{"prompt": "12", "response": "3"}]},
            "objective": {"sweep": sweep},
            "train": {"steps": 1, "batch_size": 3},
        }
    )
    objective = without_weights(recipe, read_starting_model(recipe), kernels_for("cuda"))
    batch = worst_batch(recipe, objective.model, 60, 3)
    waits = Waits()
    waits.fill(objective)
    with waits:
        losses = objective(batch)
        (losses.canvas_sum + losses.ar_sum).backward()
    found = {place: count for place, count in waits.lines.items() if place not in OF_THE_HOST}
    # scored positions and pairs, canvases with a signal (which, how many in a row), and how far into rows canvases see
    expected = {"objective._marked": 4, "canvas.Batch.select": 2, "objective._columns_seen": 1}
    if sweep:
        expected |= {"objective._columns_seen": 3, "objective.Objective._losses_of_sweep": 1}
    assert found == expected
