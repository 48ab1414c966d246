"""Batches that are made while an optimiser step runs, and the values of the device for which the host waits in it."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from blockdiff.canvas import Canvas, CleanRow, lay_out
from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.errors import DataError
from blockdiff.images import ImageInput, PlacedImage
from blockdiff.recipes.sudoku import alphabet
from blockdiff.training.data import Ahead
from blockdiff.training.plan.live_bytes import LiveBytes
from blockdiff.training.plan.training import kernels_for
from blockdiff.training.recipe_files import read_recipe
from tests.support.little_model import LITTLE, save_preset
from tests.support.recipes import largest_batch, start, without_weights

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
OF_THE_HOST = {"spans.Spans.padding_BT", "canvas_inputs._checked", "layers.vocabulary._rounded"}


class OfHost(Tensor):
    """A tensor of a batch on the CPU, or one computed from such, for which the host waits for nothing."""


class Waits(LiveBytes):
    """Runs a step on shapes, with a GPU's ops, and counts by the line of code what the host has to wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, masks = function.overloadpacket.__name__, ()
        if name in ("index", "index_put", "index_put_"):
            masks = [x for x in args[1] if x is not None and x.dtype in (torch.bool, torch.uint8)]
        if (name in READS or masks) and not isinstance(args[0], OfHost):
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
def test_the_host_waits_in_no_layer_of_a_training_step_and_in_one_place_outside(tmp_path, monkeypatch, sweep):
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
    objective = without_weights(recipe, start(recipe), kernels_for("cuda"))
    batch = largest_batch(recipe, objective.model, 60, 3)
    batch = replace(batch, host=batch.map(lambda x: x.as_subclass(OfHost)))
    for module in ("canvas", "scored_positions"):
        monkeypatch.setattr(f"blockdiff.{module}.to_device", lambda x, device: x.as_subclass(Tensor))
    waits = Waits()
    waits.fill(objective)
    with waits:
        losses = objective(batch)
        (losses["canvas"] + losses["ar"]).backward()
    found = {place: count for place, count in waits.lines.items() if place not in OF_THE_HOST}
    assert found == {"scored_positions.marked_indices": 1}  # scored positions, which the weights of a loss decide, too


def test_all_of_a_batch_is_pinned_and_a_copy_of_it_has_the_one_on_the_host(monkeypatch):
    image, pinned = ImageInput({"pixel_values": torch.zeros(2, 3)}, 2, b"a"), list[Tensor]()
    batch = lay_out([CleanRow([1, 1, 2], [Canvas([2], 2)], images=[PlacedImage(image, 0)])], 1, 0)
    monkeypatch.setattr(Tensor, "pin_memory", lambda x: pinned.append(x) or x)
    own = [x for field in fields(batch) if isinstance(x := getattr(batch, field.name), Tensor)]
    assert batch.images is not None and batch.in_pinned_memory().images is not None
    of_images = [image.values["pixel_values"], batch.images.row_N, batch.images.column_N, batch.images.source_N]
    assert {id(x) for x in pinned} == {id(x) for x in (*own, *of_images, batch.images.run_BS2)}
    copied = batch.to("meta")
    assert (
        copied.on_host is batch and copied.images is not None and copied.images.inputs[0].values["pixel_values"].is_meta
    )
    assert batch.to("cpu").host is None and replace(batch, host=None).on_host.host is None
