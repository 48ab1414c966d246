"""The picture of a model that `blockdiff inspect` prints: sizes by part, what trains, memory by dtype."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockdiff.checkpoint.config import config_from, read_config
from blockdiff.checkpoint.files import CONFIG, first_line, read_json, stored_tensors
from blockdiff.errors import CheckpointError
from blockdiff.models.family import Family, family_of

if TYPE_CHECKING:
    from rich.console import Console

CARRIED = "vision"  # the part of what is kept and written back, but not run
TRAINS = {
    CARRIED: "no, carried",
    "layer_scalars": "no, buffers",
    "router": "only from scratch",
}


@dataclass(frozen=True)
class Part:
    """Some tensors of a model, added up."""

    name: str
    tensors: int
    parameters: int
    dtypes: tuple[str, ...]


def part_of(hub_name: str, family: Family) -> str:
    """The part that a tensor belongs to, by its Hub name."""
    ours = family.names.to_ours(hub_name)
    return family.part_of(ours) if ours is not None else CARRIED if family.names.is_carried(hub_name) else "other"


def parts(tensors: Iterable[tuple[str, tuple[int, ...], str]], family: Family) -> list[Part]:
    """(Hub name, shape, dtype) of all tensors, added up by part, largest first."""
    sums: dict[str, list[Any]] = {}
    for name, shape, dtype in tensors:
        entry = sums.setdefault(part_of(name, family), [0, 0, set()])
        entry[0] += 1
        entry[1] += math.prod(shape)
        entry[2].add(dtype)
    found = [Part(name, n, count, tuple(sorted(kinds))) for name, (n, count, kinds) in sums.items()]
    return sorted(found, key=lambda part: -part.parameters)


def show_model(target: str, console: Console) -> None:
    """Print what a checkpoint directory or hub id holds."""
    config, tensors, origin = _headers(target)
    show_config(config, console, origin)
    show_parts(parts(tensors, family_of(config)), config, console)


def show_config(config: Any, console: Console, origin: str) -> None:
    """Print the shape of a model in a few lines."""
    console.print(origin)
    for line in family_of(config).outline(config).lines:
        console.print(f"  {line}")


def show_parts(found: list[Part], config: Any, console: Console) -> None:
    """Print sizes by part, then parameters per token and memory by dtype."""
    from rich.table import Table

    total = sum(part.parameters for part in found)
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    for name in ("part", "tensors", "parameters", "share", "stored as", "trains"):
        is_number = name in ("tensors", "parameters", "share")
        table.add_column(name, justify="right" if is_number else "left", no_wrap=True)
    for part in found:
        share = f"{part.parameters / max(1, total):.1%}"
        kinds = ", ".join(part.dtypes).lower()
        trains = TRAINS.get(part.name, "yes")
        table.add_row(part.name, f"{part.tensors:,}", f"{part.parameters:,}", share, kinds, trains)
    table.add_row("total", f"{sum(part.tensors for part in found):,}", f"{total:,}", "", "", "")
    console.print(table)
    sizes = {part.name: part.parameters for part in found}
    show_memory(sizes, config, console)


def show_memory(sizes: Mapping[str, int], config: Any, console: Console) -> None:
    """Print how many parameters a token meets, and what weights, training and the prefix need."""
    outline, vision = family_of(config).outline(config), sizes.get(CARRIED, 0)
    run = sum(sizes.values()) - vision
    experts = sizes.get("experts", 0)
    active = run - experts + experts * outline.experts_per_token // max(1, outline.experts)
    console.print(f"text model {run:,} parameters, {active:,} of them met by one token; vision {vision:,}")
    trained = run - sizes.get("router", 0) - sizes.get("layer_scalars", 0)
    console.print(f"fine-tuning trains {trained:,}; from scratch the router too ({sizes.get('router', 0):,})")
    weights = ", ".join(f"{name} {_bytes(run * size)}" for name, size in (("bf16", 2), ("fp32", 4)))
    # fp32 weights, gradients and two AdamW moments; what stands still has weights only.
    training = _bytes(16 * trained + 4 * (run - trained))
    console.print(f"memory: weights {weights}; full training in fp32 with AdamW {training} and activations")
    prefix = _bytes(2 * outline.cached_per_token * 1024)
    console.print(f"prefix in bf16: {prefix} for 1,024 tokens of one row")


def _headers(target: str) -> tuple[Any, list[tuple[str, tuple[int, ...], str]], str]:
    """Config and (name, shape, dtype) of every tensor; from the Hub only headers are fetched."""
    directory = Path(target).expanduser()
    if directory.exists() or "/" not in target or target.count("/") > 1:
        if not directory.is_dir():
            what = "a file" if directory.exists() else "not there"
            raise CheckpointError(
                f"{target}: {what}; name a checkpoint directory, a hub id or a .yaml recipe"
            )
        config = read_config(directory)
        stored = stored_tensors(directory)
        return config, [(name, place.shape, place.dtype) for name, place in stored.items()], target
    from huggingface_hub import get_safetensors_metadata, hf_hub_download

    try:
        file = Path(hf_hub_download(target, CONFIG))
        metadata = get_safetensors_metadata(target)
    except Exception as error:  # offline, no such repository, gated, no safetensors: one line serves them all
        raise CheckpointError(
            f"{target}: no such directory, and not to be had from the Hub ({first_line(error)})"
        ) from error
    tensors = [
        (name, tuple(info.shape), str(info.dtype))
        for headers in metadata.files_metadata.values()
        for name, info in headers.tensors.items()
    ]
    return config_from(read_json(file), target), tensors, target


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:,.1f} GB"
