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

if TYPE_CHECKING:
    from rich.console import Console

# Words in a Hub name, tried in this order, and the part of the model they belong to.
PARTS = (
    ("vision", ("vision_tower.", "embed_vision.")),
    ("layer scalars", ("layer_scalar",)),
    ("router", (".router.",)),
    ("experts", (".experts.",)),
    ("self-conditioning", (".self_conditioning.",)),
    ("norms", ("norm",)),
    ("attention", (".self_attn.",)),
    ("dense MLP", (".mlp.",)),
    ("embedding", ("embed_tokens", "lm_head")),
)
TRAINS = {
    "vision": "no, carried",
    "layer scalars": "no, buffers",
    "router": "only from scratch",
}


@dataclass(frozen=True)
class Part:
    """Some tensors of a model, added up."""

    name: str
    tensors: int
    parameters: int
    dtypes: tuple[str, ...]


def part_of(hub_name: str) -> str:
    """The part that a tensor belongs to, by its Hub name."""
    return next((part for part, words in PARTS if any(word in hub_name for word in words)), "other")


def parts(tensors: Iterable[tuple[str, tuple[int, ...], str]]) -> list[Part]:
    """(Hub name, shape, dtype) of all tensors, added up by part, largest first."""
    sums: dict[str, list[Any]] = {}
    for name, shape, dtype in tensors:
        entry = sums.setdefault(part_of(name), [0, 0, set()])
        entry[0] += 1
        entry[1] += math.prod(shape)
        entry[2].add(dtype)
    found = [Part(name, n, count, tuple(sorted(kinds))) for name, (n, count, kinds) in sums.items()]
    return sorted(found, key=lambda part: -part.parameters)


def show_model(target: str, console: Console) -> None:
    """Print what a checkpoint directory or hub id holds."""
    config, tensors, origin = _headers(target)
    show_config(config, console, origin)
    show_parts(parts(tensors), config, console)


def show_config(config: Any, console: Console, origin: str) -> None:
    """Print the shape of a model in a few lines."""
    text = config.text_config
    sliding = sum(kind == "sliding_attention" for kind in text.layer_types)
    full = len(text.layer_types) - sliding
    console.print(origin)
    console.print(
        f"  {len(text.layer_types)} layers ({sliding} sliding, window {text.sliding_window}; {full} full), "
        f"hidden {text.hidden_size}, vocabulary {text.vocab_size:,}, canvas {config.canvas_length}"
    )
    console.print(
        f"  {text.num_experts} experts of {text.moe_intermediate_size}, {text.top_k_experts} per token, "
        f"beside a dense MLP of {text.intermediate_size}; {text.num_attention_heads} query heads"
    )


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
    text = config.text_config
    vision = sizes.get("vision", 0)
    run = sum(sizes.values()) - vision
    experts = sizes.get("experts", 0)
    active = run - experts + experts * text.top_k_experts // text.num_experts
    console.print(f"text model {run:,} parameters, {active:,} of them met by one token; vision {vision:,}")
    trained = run - sizes.get("router", 0) - sizes.get("layer scalars", 0)
    console.print(f"fine-tuning trains {trained:,}; from scratch the router too ({sizes.get('router', 0):,})")
    weights = ", ".join(f"{name} {_bytes(run * size)}" for name, size in (("bf16", 2), ("fp32", 4)))
    # fp32 weights, gradients and two AdamW moments; what stands still has weights only.
    training = _bytes(16 * trained + 4 * (run - trained))
    console.print(f"memory: weights {weights}; full training in fp32 with AdamW {training} and activations")
    console.print(f"prefix in bf16: {_bytes(prefix_bytes(config, 1024))} for 1,024 tokens of one row")


def prefix_bytes(config: Any, tokens: int, width: int = 2) -> int:
    """Bytes of one row's cached keys and values for a prefix of `tokens`."""
    text = config.text_config
    per_token = 0
    for layer in range(len(text.layer_types)):
        heads = text.per_layer_config[layer]
        per_token += 2 * heads.num_key_value_heads * heads.head_dim * width
    return per_token * tokens


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
