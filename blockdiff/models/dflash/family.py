"""DFlash as a family: Qwen3's fields, the length of a drafter's blocks, and the target's layers that it reads.

`block_size`, `mask_token_id`, `target_layer_ids` and a drafter's other fields are in `dflash_config` or on the top
level. Both are read, and written as they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from blockdiff.models.dflash.model import DFlash
from blockdiff.models.family import Family
from blockdiff.models.llama import Qwen3Family
from blockdiff.models.names import Names

DEFAULT_BLOCK = 16
# Fields of other kinds of drafters that change the computation; only these values are supported.
ONE_VALUE: dict[str, Any] = {
    **dict.fromkeys(("conv_kernel_size", "selector_rank")),
    "output_multiplier": 1.0,
    "sample_from_anchor": False,  # True: the anchor's position predicts a token, too
}
# Names that trainers give to our field `is_causal`.
CAUSAL = ("is_causal", "causal", "causal_head")
# Keys of `dflash_config` that are read, and those that change nothing here: the target has its own logits. Every other
# key must be null, false or empty.
READ = ("block_size", "mask_token_id", "target_layer_ids", "input_embedding_scale", "num_target_layers", *CAUSAL)
INERT = ("final_logit_softcapping", "draft_arch", *ONE_VALUE)

# `{}` is the layer number.
TABLE: tuple[tuple[str, str], ...] = (
    # ours                                      Hub
    ("fc.weight", "fc.weight"),
    ("hidden_norm.weight", "hidden_norm.weight"),
    ("norm.weight", "norm.weight"),
    ("layers.{}.input_norm.weight", "layers.{}.input_layernorm.weight"),
    ("layers.{}.post_attention_norm.weight", "layers.{}.post_attention_layernorm.weight"),
    ("layers.{}.attention.q_proj.weight", "layers.{}.self_attn.q_proj.weight"),
    ("layers.{}.attention.k_proj.weight", "layers.{}.self_attn.k_proj.weight"),
    ("layers.{}.attention.v_proj.weight", "layers.{}.self_attn.v_proj.weight"),
    ("layers.{}.attention.o_proj.weight", "layers.{}.self_attn.o_proj.weight"),
    ("layers.{}.attention.q_norm.weight", "layers.{}.self_attn.q_norm.weight"),
    ("layers.{}.attention.k_norm.weight", "layers.{}.self_attn.k_norm.weight"),
    ("layers.{}.mlp.gate_proj.weight", "layers.{}.mlp.gate_proj.weight"),
    ("layers.{}.mlp.up_proj.weight", "layers.{}.mlp.up_proj.weight"),
    ("layers.{}.mlp.down_proj.weight", "layers.{}.mlp.down_proj.weight"),
)


@dataclass(frozen=True, kw_only=True)
class DFlashFamily(Qwen3Family):
    """DFlash, and the config of one drafter, whose files have the model type of its layers, Qwen3's.

    canvas_length: the tokens of a block, the anchor included; mask: the token of the target's vocabulary at positions
    that the drafter predicts; num_target_layers, target_layer_ids: the number of the target's layers, and the layers
    whose outputs are read; is_causal: whether a token of a block sees none after it (None: only in sliding layers).
    """

    model_type = "dflash"
    architecture = "DFlashDraftModel"
    model_class = DFlash
    prefixes: ClassVar[tuple[str, ...]] = ("causal",)
    names = Names(TABLE)
    parts: ClassVar = {
        "norms": ("*norm.weight",),
        "features": ("fc.weight",),
        "attention": ("layers.*.attention.*",),
        "mlp": ("layers.*.mlp.*",),
    }
    adapted_parts = ()
    sharding_units = ("layers.{}",)
    tensor_parts: ClassVar = {}
    predictions = ("posterior",)
    corruptions = ("mask",)
    meshes = ("replicate", "shard")
    is_drafter = True
    makes_drafters = True
    has_self_conditioning = False  # there is one step, so no earlier prediction

    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    is_causal: bool | None
    input_embedding_scale: float

    @classmethod
    def is_of(cls, values: Mapping[str, Any]) -> bool:
        is_drafter = cls.architecture in (values.get("architectures") or ())
        return super().is_of(values) or (is_drafter and Qwen3Family.is_of(values))

    @classmethod
    def own_fields(cls, theirs: Any) -> dict[str, Any]:
        ids, layers, depth = (
            _value_of(theirs, "target_layer_ids"),
            theirs.num_hidden_layers,
            _value_of(theirs, "num_target_layers"),
        )
        return super().own_fields(theirs) | {
            "canvas_length": int(_value_of(theirs, "block_size", DEFAULT_BLOCK)),
            "denoises": True,
            "mask": int(_value_of(theirs, "mask_token_id")),
            "target_layer_ids": tuple(default_ids(depth, layers) if ids is None else ids),
            "num_target_layers": depth,
            "is_causal": next(iter(_causal(theirs).values()), None),
            "input_embedding_scale": float(_value_of(theirs, "input_embedding_scale", 1.0)),
        }

    @classmethod
    def wrong(cls, theirs: Any) -> Iterator[str]:
        yield from super().wrong(theirs)
        section = getattr(theirs, "dflash_config", None) or {}
        if not isinstance(section, Mapping):
            yield f"dflash_config is {section!r:.60}; it must be an object"
            return
        for name, value in section.items():
            if name not in (*READ, *INERT) and value not in (None, False, "", [], {}):
                yield f"dflash_config.{name} is {value!r:.60}; drafters with it are not supported"
        flags = _causal(theirs)
        if len({*flags.values()}) > 1 or not all(isinstance(value, bool) for value in flags.values()):
            yield f"{' and '.join(f'{name} {value!r:.20}' for name, value in flags.items())}: give one, true or false"
        for name, only in ONE_VALUE.items():
            if (value := _value_of(theirs, name, only)) not in (only, None):
                yield f"{name} is {value!r}; drafters with it are not supported"
        block = _value_of(theirs, "block_size", DEFAULT_BLOCK)
        if not isinstance(block, int) or block < 2:
            yield f"block_size is {block!r}; it must be at least 2, a token that stands and one to draft"
        mask = _value_of(theirs, "mask_token_id")
        if not isinstance(mask, int) or not 0 <= mask < theirs.vocab_size:
            yield f"mask_token_id is {mask!r}; it must be one of the target's {theirs.vocab_size} tokens"
        depth, ids = _value_of(theirs, "num_target_layers"), _value_of(theirs, "target_layer_ids")
        if not isinstance(depth, int) or depth < 2:
            yield f"num_target_layers is {depth!r}; it must be the number of the target's layers, at least 2"
            return
        if ids is None:
            ids = default_ids(depth, theirs.num_hidden_layers)
        if not isinstance(ids, Sequence) or not ids or not all(isinstance(n, int) for n in ids):
            yield f"target_layer_ids is {ids!r}; it must list layers of the target"
        elif any(not 0 <= n < depth - 1 for n in ids):
            ends = f"from 0 to {depth - 2}, the last but one of the target's layers"
            yield f"target_layer_ids {list(ids)} must be {ends}"
        scale = _value_of(theirs, "input_embedding_scale", 1.0)
        if not isinstance(scale, int | float) or scale <= 0:
            yield f"input_embedding_scale is {scale!r}; it must be a number above 0"

    @property
    def lines(self) -> tuple[str, ...]:
        first, *others = super().lines
        ids = ", ".join(map(str, self.target_layer_ids))
        reads = f"drafts blocks of {self.canvas_length} and reads layers {ids} of a target's {self.num_target_layers}"
        return first.removesuffix(f", canvas {self.canvas_length}"), reads, *others

    @classmethod
    def for_target(
        cls, target: Family, layers: int, block: int, mask: int, scale: float, softcap: float | None
    ) -> DFlashFamily:
        """Return the config of a drafter for a target with config `target`, with heads like the target's.

        scale: the factor of the target's embeddings. softcap: the cap of its logits (None: uncapped).
        """
        hidden = target.hidden_size
        section: dict[str, Any] = {
            "mask_token_id": mask,
            "target_layer_ids": ids_for(target.num_hidden_layers, layers),
        }
        if scale != 1.0:
            section["input_embedding_scale"] = scale
        if softcap is not None:
            section["final_logit_softcapping"] = softcap
        values = {
            "architectures": [cls.architecture],
            "model_type": Qwen3Family.model_type,
            "vocab_size": target.vocab_size,
            "max_position_embeddings": target.max_position_embeddings,
            "rms_norm_eps": target.rms_norm_eps,
            "bos_token_id": target.bos_token_id,
            "eos_token_id": target.eos_token_id,
            "pad_token_id": target.pad_token_id,
            "hidden_size": hidden,
            "intermediate_size": max(target.intermediate_size, 3 * hidden),
            "num_hidden_layers": layers,
            "num_attention_heads": target.num_attention_heads,
            "num_key_value_heads": target.num_key_value_heads,
            "head_dim": target.head_dim,
            "hidden_act": "silu",
            "rope_parameters": {"rope_type": "default", "rope_theta": target.rope_theta},
            "tie_word_embeddings": False,
            "block_size": block,
            "num_target_layers": target.num_hidden_layers,
            "dflash_config": section,
        }
        return cls.read(cls.completed(values))


def _value_of(theirs: Any, name: str, default: Any = None) -> Any:
    """Return a field of `dflash_config`, else of the top level, else `default`."""
    return (getattr(theirs, "dflash_config", None) or {}).get(name, getattr(theirs, name, default))


def _causal(theirs: Any) -> dict[str, Any]:
    """Return the values of `is_causal` in the config, by the names that it has there."""
    return {name: value for name in CAUSAL if (value := _value_of(theirs, name)) is not None}


def default_ids(target_layers: int, layers: int) -> list[int]:
    """Return the target's layers that a drafter of `layers` layers reads if its config lists none.

    They are evenly spaced from index 1, the second layer, to target_layers - 3; a single one is target_layers // 2.
    """
    if layers == 1:
        return [target_layers // 2]
    return [round(1 + n * (target_layers - 4) / (layers - 1)) for n in range(layers)]


def ids_for(target_layers: int, layers: int) -> list[int]:
    """Return the target's layers that a new drafter reads.

    They are the default ones, or if the target has fewer than 6 layers, evenly spaced ones without the last. The last
    layer is never read, because only the final norm uses its output.
    """
    if target_layers >= 6:
        return sorted(set(default_ids(target_layers, layers)))  # a drafter may have more layers than there are to read
    last = target_layers - 2
    return [last] if layers == 1 else sorted({round(n * last / (layers - 1)) for n in range(layers)})
