"""Checks of configs that several families make: each yields the reasons, in words, why a config is refused."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from blockdiff.errors import CheckpointError

# Limits of sizes for which transformers or we build lists before any weights are read; other sizes: up to 2^31.
LARGEST = {"num_hidden_layers": 1000, "head_dim": 2**16, "global_head_dim": 2**16}
LARGEST_OF_IMAGES = {"num_hidden_layers": 1000, "hidden_size": 2**16, "head_dim": 2**16, "num_attention_heads": 4096}
LARGEST_OF_IMAGES |= {"patch_size": 1024, "spatial_merge_size": 64}
NEUTRAL = {"factor": 1.0, "partial_rotary_factor": 1.0}  # parameters of RoPE that change nothing


def is_above_zero(value: Any) -> bool:
    """Whether a value is a finite number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def refuse_first(reasons: Iterator[str]) -> None:
    """Raise CheckpointError for the first reason, if there is any."""
    if (reason := next(reasons, None)) is not None:
        raise CheckpointError(reason)


def sizes_out_of_range(values: Mapping[str, Any], names: Collection[str], where: str = "") -> Iterator[str]:
    """Yield a reason for each size in a config.json that no model has. Call it before anything is built."""
    for name in names:
        size, most = values.get(name), LARGEST.get(name, 2**31)
        if isinstance(size, int) and not 1 <= size <= most:
            yield f"{where}{name} is {size}; it must be at least 1 and at most {most}"


def image_sizes_out_of_range(vision: Any) -> Iterator[str]:
    """Yield a reason for each size in a `vision_config` that no model has, before image modules are built."""
    for name, most in LARGEST_OF_IMAGES.items():
        size = vision.get(name) if isinstance(vision, Mapping) else None
        if isinstance(size, int) and not 1 <= size <= most:
            yield f"vision_config.{name} is {size}; it must be at least 1 and at most {most}"


def sizes_below_one(config: Any, names: Collection[str], where: str = "") -> Iterator[str]:
    """Yield a reason for each size of a config that is not a number of at least 1."""
    for name in names:
        if not isinstance(getattr(config, name), int) or getattr(config, name) < 1:
            yield f"{where}{name} is {getattr(config, name)!r}; it must be at least 1"


def other_values(config: Any, computed: Mapping[str, tuple[Any, ...]], where: str = "") -> Iterator[str]:
    """Yield a reason for each field of a config whose value is not supported.

    computed: field -> the supported values, of which the first is the default.
    """
    for name, allowed in computed.items():
        value = getattr(config, name, allowed[0])
        if value not in allowed:
            yield f"{where}{name} is {value!r}; only {allowed[0]!r} is supported"


def wrong_rope(rope: Mapping[str, Any] | None, known: Mapping[str, tuple[str, ...]], where: str) -> Iterator[str]:
    """Yield a reason for each parameter of RoPE that is missing or unsupported; known: rope_type -> its parameters."""
    if not rope or not rope.get("rope_theta"):
        yield f"{where}: missing, or without rope_theta"
        return
    rope_type = rope.get("rope_type", "default")
    if rope_type not in known:
        yield f"{where}: rope_type {rope_type!r} is not supported; there are: {', '.join(known)}"
        return
    if not is_above_zero(rope["rope_theta"]):
        yield f"{where}: rope_theta is {rope['rope_theta']!r}; it must be a number above 0"
    for name in known[rope_type]:
        if name in rope and not is_above_zero(rope[name]):
            yield f"{where}: {name} is {rope[name]!r}; rope_type {rope_type!r} needs a number above 0"
    if rope.get("partial_rotary_factor") is not None and rope["partial_rotary_factor"] > 1:
        yield f"{where}: partial_rotary_factor is {rope['partial_rotary_factor']!r}; more than all cannot turn"
    for name in rope.keys() - {"rope_type", "type", "rope_theta", *known[rope_type]}:
        if rope[name] is not None and rope[name] != NEUTRAL.get(name):
            yield f"{where}: {name} {rope[name]!r} is not supported with rope_type {rope_type!r}"
