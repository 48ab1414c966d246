"""The config of a drafter: Qwen3's fields, how long its blocks are, and what it reads of its target.

`block_size`, `mask_token_id`, `target_layer_ids` and what else is a drafter's own stand in `dflash_config` or beside
it: both are read, and written as they were.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from blockdiff.models import llama
from blockdiff.models.config_checks import refuse_first, sizes_out_of_range
from blockdiff.models.family import Outline

MODEL_TYPE, HUB_TYPE, ARCHITECTURE = "dflash", "qwen3", "DFlashDraftModel"
DEFAULT_BLOCK = 16
# Fields of other kinds of drafters, which change what is computed: only these values are.
ONE_VALUE: dict[str, Any] = {"conv_kernel_size": None, "selector_rank": None, "output_multiplier": 1.0}


@functools.cache
def config_class() -> Any:
    """The class of drafters' configs, in whose files the model type is that of their layers."""
    from transformers import Qwen3Config

    class DFlashConfig(Qwen3Config):
        model_type = MODEL_TYPE

        def to_dict(self) -> dict[str, Any]:
            return super().to_dict() | {"model_type": HUB_TYPE, "architectures": [ARCHITECTURE]}

    return DFlashConfig


def value_of(config: Any, name: str, default: Any = None) -> Any:
    """A value that a drafter has in `dflash_config` or beside it."""
    return (getattr(config, "dflash_config", None) or {}).get(name, getattr(config, name, default))


def block_size(config: Any) -> int:
    """The number of tokens of a block, the one that stands already included."""
    return int(value_of(config, "block_size", DEFAULT_BLOCK))


def mask_id(config: Any) -> int:
    """The token of the target's vocabulary that stands where the drafter predicts."""
    return int(value_of(config, "mask_token_id"))


def target_layer_ids(config: Any) -> tuple[int, ...]:
    """The layers of the target whose outputs a drafter reads."""
    ids = value_of(config, "target_layer_ids")
    return tuple(default_ids(config.num_target_layers, config.num_hidden_layers) if ids is None else ids)


def default_ids(target_layers: int, layers: int) -> list[int]:
    """The layers that a drafter of so many layers reads where its config does not say: evenly, to the last but two."""
    if layers == 1:
        return [target_layers // 2]
    return [round(1 + n * (target_layers - 4) / (layers - 1)) for n in range(layers)]


def ids_for(target_layers: int, layers: int) -> list[int]:
    """The layers that a new drafter reads: the default ones, or of few layers all but the last, evenly.

    Nothing is read of the last layer, whose output counts after the model's final norm alone.
    """
    if target_layers >= 6:
        return sorted(set(default_ids(target_layers, layers)))  # a drafter may have more layers than there are to read
    last = target_layers - 2
    return [last] if layers == 1 else sorted({round(n * last / (layers - 1)) for n in range(layers)})


def read(values: Mapping[str, Any]) -> Any:
    """A config from the content of a config.json.

    Raises CheckpointError for values that are not supported, and what transformers raises for those that cannot be.
    """
    refuse_first(sizes_out_of_range(values, llama.SIZES))
    given = json.loads(json.dumps({key: value for key, value in values.items() if key != "model_type"}))
    config = config_class()(**given)
    check(config)
    return config


def check(config: Any) -> None:
    """Raises CheckpointError, naming the field, for a config that our model does not compute."""
    llama.check(config)
    refuse_first(_wrong(config))


def _wrong(config: Any) -> Iterator[str]:
    for name, only in ONE_VALUE.items():
        if (value := value_of(config, name, only)) not in (only, None):
            yield f"{name} is {value!r}; drafters with it are not supported"
    block = value_of(config, "block_size", DEFAULT_BLOCK)
    if not isinstance(block, int) or block < 2:
        yield f"block_size is {block!r}; it must be at least 2, a token that stands and one to draft"
    mask = value_of(config, "mask_token_id")
    if not isinstance(mask, int) or not 0 <= mask < config.vocab_size:
        yield f"mask_token_id is {mask!r}; it must be one of the target's {config.vocab_size} tokens"
    layers, ids = getattr(config, "num_target_layers", None), value_of(config, "target_layer_ids")
    if not isinstance(layers, int) or layers < 2:
        yield f"num_target_layers is {layers!r}; it must be the number of the target's layers, at least 2"
        return
    if ids is not None and (not isinstance(ids, Sequence) or not ids or not all(isinstance(n, int) for n in ids)):
        yield f"target_layer_ids is {ids!r}; it must list layers of the target"
    elif any(not 0 <= n < layers - 1 for n in target_layer_ids(config)):
        ids = list(target_layer_ids(config))
        yield f"target_layer_ids {ids} must be from 0 to {layers - 2}, the last but one of the target's layers"
    scale = value_of(config, "input_embedding_scale", 1.0)
    if not isinstance(scale, int | float) or scale <= 0:
        yield f"input_embedding_scale is {scale!r}; it must be a number above 0"


def outline(config: Any) -> Outline:
    """The config in words that all families share."""
    of_layers = llama.outline(config)
    ids = ", ".join(map(str, target_layer_ids(config)))
    reads = f"drafts blocks of {block_size(config)} and reads layers {ids} of a target's {config.num_target_layers}"
    first = of_layers.lines[0].removesuffix(", causal")
    return replace(
        of_layers,
        canvas_length=block_size(config),
        denoises=True,
        is_drafter=True,
        mask=mask_id(config),
        lines=(first, reads, *of_layers.lines[1:]),
    )


def with_tokens(config: Any, vocab_size: int, special: Mapping[str, int | None]) -> Any:
    """The config with another vocabulary; special: bos_token_id, eos_token_id and pad_token_id."""
    return read(config.to_dict() | {"vocab_size": vocab_size, **special})


def for_target(target: Any, layers: int, block: int, mask: int, scale: float, softcap: float | None) -> Any:
    """The config of a drafter for a target of this config, with layers like the target's.

    scale, softcap: of the target's embeddings and logits, as its vocabulary has them.
    """
    text = target.get_text_config().to_dict()
    hidden, heads, depth = text["hidden_size"], text["num_attention_heads"], text["num_hidden_layers"]
    rope = text.get("rope_parameters") or {}
    thetas = [rope.get("rope_theta"), *(each.get("rope_theta") for each in rope.values() if isinstance(each, Mapping))]
    own: dict[str, Any] = {"mask_token_id": mask, "target_layer_ids": ids_for(depth, layers)}
    if scale != 1.0:
        own["input_embedding_scale"] = scale
    if softcap is not None:
        own["final_logit_softcapping"] = softcap
    return read(
        {
            **{name: text[name] for name in ("vocab_size", "max_position_embeddings", "rms_norm_eps")},
            **{name: text.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
            "hidden_size": hidden,
            "intermediate_size": max(text["intermediate_size"], 3 * hidden),
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": text["num_key_value_heads"],
            "head_dim": text.get("head_dim") or hidden // heads,
            "hidden_act": "silu",
            "rope_parameters": {"rope_type": "default", "rope_theta": next(filter(None, thetas), 1e4)},
            "tie_word_embeddings": False,
            "block_size": block,
            "num_target_layers": depth,
            "dflash_config": own,
        }
    )
