"""Configs of MiniMax M3: read, checked field by field, and put in words that all families share."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from blockdiff.errors import CheckpointError
from blockdiff.kernels.expert_mlp.activations import oai
from blockdiff.models.causal import denoises, wrong_canvas_length
from blockdiff.models.config_checks import (
    is_above_zero,
    other_values,
    refuse_first,
    sizes_below_one,
    sizes_out_of_range,
)
from blockdiff.models.family import Outline

TEXT = "minimax_m3_vl_text"  # the model type of the text side alone, as transformers' MiniMaxM3VLForCausalLM saves it
KINDS = {"full_attention": "full", "minimax_m3_sparse": "sparse"}  # layer types, and our names of the kinds
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "max_position_embeddings", "dense_intermediate_size", "shared_intermediate_size"),
    *("num_local_experts", "num_experts_per_tok", "index_n_heads", "index_head_dim", "index_block_size"),
    *("index_topk_blocks",),
)
# How canvases select, the default first: each query for itself or all with the mean of the canvas's index queries, and
# whether the selection of a canvas's first step stands for its other steps.
SELECTIONS: dict[str, tuple[Any, ...]] = {
    "canvas_selection": ("query", "canvas"),
    "canvas_selection_kept": (False, True),
}
# What has to be as the released model has it; transformers does not declare all of them, but keeps what a file has.
ONE_VALUE: dict[str, tuple[Any, ...]] = {
    "attention_dropout": (0.0, None),
    "router_jitter_noise": (0.0, None),
    "use_gemma_norm": (True,),
    "use_qk_norm": (True,),
    "qk_norm_type": ("per_head",),
    "attention_output_gate": (False, None),
    "scoring_func": ("sigmoid",),
    "use_routing_bias": (True,),
    "n_shared_experts": (1,),
}


def read(values: Mapping[str, Any]) -> Any:
    """A config from the content of a config.json: of weights that are stored in MXFP8 it says nothing any more.

    Raises CheckpointError for values that are not supported, and what transformers raises for those that cannot be.
    """
    from transformers import MiniMaxM3VLConfig
    from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig

    own: dict[str, Any] = json.loads(json.dumps(values))
    is_text = own.get("model_type") == TEXT
    text, where = (own, "") if is_text else (own.get("text_config"), "text_config.")
    if not isinstance(text, dict):
        raise CheckpointError("no text_config")
    refuse_first(sizes_out_of_range(text, SIZES, where))
    own.pop("quantization_config", None)
    sparse = text.get("sparse_attention_config") or {}
    metric_values = sparse.get("sparse_disable_index_value", 1)
    carry = [not off for off in metric_values] if isinstance(metric_values, list) else [not metric_values]
    if any(carry):
        raise CheckpointError(f"{where}sparse_attention_config: layers whose index path carries values are refused")
    for ours, theirs in (("index_init_blocks", "sparse_init_block"), ("index_score_type", "sparse_score_type")):
        if theirs in sparse:  # transformers knows neither, and would drop them
            text.setdefault(ours, sparse[theirs])
    rope = text.get("rope_parameters") or {}
    if "partial_rotary_factor" not in rope and "partial_rotary_factor" not in text and "rotary_dim" in text:
        text["partial_rotary_factor"] = text["rotary_dim"] / text.get("head_dim", 128)
    config = (MiniMaxM3VLTextConfig if is_text else MiniMaxM3VLConfig)(**own)
    check(config)
    return config


def check(config: Any) -> None:
    """Raises CheckpointError, naming the field, for a config that our model does not compute as transformers does."""
    refuse_first(_wrong(config))


def _wrong(config: Any) -> Iterator[str]:
    text = config.get_text_config()
    where = "" if text is config else "text_config."
    yield from other_values(text, ONE_VALUE, where)
    yield from sizes_below_one(text, SIZES, where)
    for heads in ("num_key_value_heads", "index_n_heads"):
        if text.num_attention_heads % getattr(text, heads):
            yield f"{where}{heads} {getattr(text, heads)} does not divide num_attention_heads"
    larger, smaller = sorted((text.index_n_heads, text.num_key_value_heads), reverse=True)
    if larger % smaller:
        yield f"{where}index_n_heads {text.index_n_heads} and num_key_value_heads must divide one another"
    if text.num_experts_per_tok > text.num_local_experts:
        yield f"{where}num_experts_per_tok is {text.num_experts_per_tok}, of {text.num_local_experts} experts"
    for name, known in (("layer_types", KINDS), ("mlp_layer_types", ("dense", "sparse"))):
        kinds = getattr(text, name)
        if len(kinds) != text.num_hidden_layers:
            yield f"{where}{name} names {len(kinds)} layers, but there are {text.num_hidden_layers}"
        for kind in kinds:
            if kind not in known:
                yield f"{where}{name} {kind!r} is not supported; there are: {', '.join(known)}"
    for name in ("index_init_blocks", "index_local_blocks"):
        if not isinstance(getattr(text, name, 0), int) or getattr(text, name, 0) < 0:
            yield f"{where}{name} is {getattr(text, name)!r}; it must be at least 0"
    if getattr(text, "index_score_type", "max") not in ("max", "lse"):
        yield f"{where}index_score_type is {text.index_score_type!r}; there are: max, lse"
    for name in ("swiglu_alpha", "swiglu_limit"):
        if not isinstance(getattr(text, name), int | float) or getattr(text, name) < 0:
            yield f"{where}{name} is {getattr(text, name)!r}; it must be at least 0"
    rope = text.rope_parameters or {}
    if not is_above_zero(rope.get("rope_theta")) or rope.get("rope_type", "default") != "default":
        yield f"{where}rope_parameters is {rope!r}; rope_type default with a rope_theta is supported"
    turned = int(text.head_dim * rope.get("partial_rotary_factor", 1.0))
    if turned < 2 or turned % 2 or turned > text.index_head_dim:
        yield f"{where}rope_parameters: {turned} dimensions turn; it must be even, and index heads as wide"
    yield from wrong_canvas_length(config)
    for name, values in SELECTIONS.items():
        if getattr(config, name, values[0]) not in values:
            yield f"{name} is {getattr(config, name)!r}; there are: {', '.join(map(str, values))}"
        if not denoises(config) and getattr(config, name, values[0]) != values[0]:
            yield f"{name} is of canvases, which a causal model has none of; leave it out or give a canvas_length"


def selects_per_canvas(config: Any) -> bool:
    """True where the queries of a canvas share one selection of the blocks of their prefix."""
    return bool(getattr(config, "canvas_selection", "query") == "canvas")


def keeps_selection(config: Any) -> bool:
    """True where the selection of a canvas's first denoising step serves its other steps, too."""
    return bool(getattr(config, "canvas_selection_kept", False))


def activation(text: Any) -> str:
    """SwiGLU-OAI with the config's numbers, by its name in `kernels.expert_mlp.activations`."""
    return oai(text.swiglu_alpha, text.swiglu_limit)


def outline(config: Any) -> Outline:
    """The config in words that all families share."""
    text = config.get_text_config()
    layers, sparse = text.num_hidden_layers, list(text.layer_types).count("minimax_m3_sparse")
    canvas = f"canvas {config.canvas_length}" if denoises(config) else "causal"
    if denoises(config) and selects_per_canvas(config):
        canvas += " with one selection"
    return Outline(
        vocab_size=text.vocab_size,
        canvas_length=getattr(config, "canvas_length", None) or 1,
        bos=text.bos_token_id,
        eos=text.eos_token_id,
        pad=text.pad_token_id,
        initializer_range=text.initializer_range,
        experts=text.num_local_experts,
        experts_per_token=text.num_experts_per_tok,
        cached_per_token=2 * layers * text.num_key_value_heads * text.head_dim + sparse * text.index_head_dim,
        positions=text.max_position_embeddings,
        lines=(
            f"{layers} layers ({sparse} sparse: {text.index_topk_blocks} blocks of {text.index_block_size} keys), "
            f"hidden {text.hidden_size}, vocabulary {text.vocab_size:,}, {canvas}",
            f"{text.num_local_experts} experts of {text.intermediate_size}, {text.num_experts_per_tok} per token, "
            f"beside a shared one of {text.shared_intermediate_size}; {text.num_attention_heads} query heads",
        ),
        denoises=denoises(config),
    )


def with_tokens(config: Any, vocab_size: int, special: Mapping[str, int | None]) -> Any:
    """The config with another vocabulary; special: bos_token_id, eos_token_id and pad_token_id."""
    values = config.to_dict()
    values.get("text_config", values).update(vocab_size=vocab_size, **special)
    return read(values)


def with_canvases(config: Any, canvas_length: int) -> Any:
    """The config of the same model as a denoiser of canvases of so many tokens."""
    return read(config.to_dict() | {"canvas_length": canvas_length})
