"""`export`: what a run or an adapter made becomes a checkpoint of its own, or an adapter for PEFT."""

from __future__ import annotations

from pathlib import Path

from blockdiff.checkpoint.adapters import base_of, has_adapter, save_adapter
from blockdiff.checkpoint.files import find
from blockdiff.checkpoint.read import load
from blockdiff.checkpoint.write import save
from blockdiff.errors import CheckpointError
from blockdiff.models.adapters import is_adapted, merge


def export(
    source: str | Path,
    directory: str | Path,
    adapter: str | Path | None = None,
    *,
    peft: bool = False,
    base: str | None = None,
    dtype: str = "auto",
    device: str = "cpu",
) -> Path:
    """Write a run's model, or a model with an adapter, to `directory`; returns it.

    The adapters are added to the weights in fp32 at least, which are then rounded once to their dtype, and the result
    is a checkpoint like any other. source: a run directory, a checkpoint, an adapter that says what it adapts, or a Hub
    id; adapter: of that checkpoint. peft: write the adapters alone, in PEFT's format, for the checkpoint `base` (None:
    the one that the adapter names). dtype: of what is written ("auto": as it is stored). Raises CheckpointError.
    """
    if adapter is not None and has_adapter(find(source)):
        raise CheckpointError(f"{source}: is an adapter itself; name the model that {adapter} adapts")
    model = load(source, dtype=dtype, device=device, kernels="torch", adapter=adapter)
    if not peft:
        if is_adapted(model):
            merge(model)
        return save(model, directory)
    if not is_adapted(model):
        raise CheckpointError(f"{source}: has no adapters to write in PEFT's format; name some with --adapter")
    return save_adapter(model, directory, base or (base_of(find(source)) if adapter is None else str(source)))
