"""EAGLE3 as two families, one for each layout of a head's files.

In the layout of `LlamaForCausalLMEagle3` all fields of config.json are on one level. In the layout of speculators the
fields of the head's layer are in `transformer_layer_config`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from blockdiff.errors import CheckpointError
from blockdiff.models.config_checks import refuse_first
from blockdiff.models.eagle3.model import Eagle3
from blockdiff.models.family import Family
from blockdiff.models.llama import LlamaFamily, Qwen3Family
from blockdiff.models.names import Names

BLOCK = 8  # tokens of a block: no config says how many tokens a head drafts at most
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
NO_BOUND = 2**31  # positions
LAYERS = {"llama": LlamaFamily, "qwen3": Qwen3Family}  # by the model type of a head's layer
MOST_LAYERS_READ = 16

TABLE: tuple[tuple[str, str], ...] = (
    # ours                                      Hub
    ("fc.weight", "fc.weight"),
    ("input_norm.weight", "input_norm.weight"),
    *((f"fc_norm.{n}.weight", f"fc_norm.{n}.weight") for n in range(MOST_LAYERS_READ)),
    ("norm.weight", "norm.weight"),
    ("table", "embed_tokens.weight"),
    ("head.table", "lm_head.weight"),
    ("d2t", "d2t"),
)
# `@` is the layer's name in files.
OF_LAYER: tuple[tuple[str, str], ...] = (
    ("layers.0.input_norm.weight", "@.input_layernorm.weight"),
    ("layers.0.hidden_norm.weight", "@.hidden_norm.weight"),
    ("layers.0.post_attention_norm.weight", "@.post_attention_layernorm.weight"),
    ("layers.0.attention.q_proj.weight", "@.self_attn.q_proj.weight"),
    ("layers.0.attention.k_proj.weight", "@.self_attn.k_proj.weight"),
    ("layers.0.attention.v_proj.weight", "@.self_attn.v_proj.weight"),
    ("layers.0.attention.o_proj.weight", "@.self_attn.o_proj.weight"),
    ("layers.0.attention.q_norm.weight", "@.self_attn.q_norm.weight"),
    ("layers.0.attention.k_norm.weight", "@.self_attn.k_norm.weight"),
    ("layers.0.mlp.gate_proj.weight", "@.mlp.gate_proj.weight"),
    ("layers.0.mlp.up_proj.weight", "@.mlp.up_proj.weight"),
    ("layers.0.mlp.down_proj.weight", "@.mlp.down_proj.weight"),
)


def _names(layer: str) -> Names:
    """Return the names of a head's tensors; `layer` is the name of its one layer in files."""
    return Names(
        (*TABLE, *((ours, hub.replace("@", layer)) for ours, hub in OF_LAYER)),
        carried=("t2d",),
        optional=("embed_tokens.weight", "lm_head.weight", "d2t"),
    )


@dataclass(frozen=True, kw_only=True)
class Eagle3Family(Family):
    """EAGLE3 heads in the layout of `LlamaForCausalLMEagle3`, and the config of one head.

    layer: the config of the head's layer; counts_layers: whether `layer_ids` that begin with 1 number layers, not
    hidden states. SpecForge writes such lists, and SGLang distinguishes the two in this way.
    """

    model_type = "eagle3"
    architecture = "LlamaForCausalLMEagle3"
    model_class = Eagle3
    names = _names("midlayer")
    parts: ClassVar = {
        "norms": ("*norm.weight", "fc_norm.*"),
        "features": ("fc.weight",),
        "attention": ("layers.*.attention.*",),
        "mlp": ("layers.*.mlp.*",),
        "vocabulary": ("table", "head.*", "d2t"),
    }
    quantised_parts = ("attention", "mlp")
    sharding_units = ("layers.{}",)
    is_drafter = True
    is_written = False
    has_self_conditioning = False
    counts_layers: ClassVar[bool] = True

    layer: LlamaFamily

    @classmethod
    def is_of(cls, values: Mapping[str, Any]) -> bool:
        is_head = cls.architecture in (values.get("architectures") or ())
        return super().is_of(values) or (is_head and LlamaFamily.is_of(values))

    @classmethod
    def of_layer(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the fields of the head's layer, given the content of a config.json."""
        return values

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        of_layer = cls.of_layer(values)
        kind = of_layer.get("model_type", "llama")
        if kind not in LAYERS:
            raise CheckpointError(f"the head's layer is one of {kind!r}; layers of Llama and Qwen3 are supported")
        layer = LAYERS[kind].read(of_layer)
        overrides: dict[str, Any] = dict(canvas_length=BLOCK, denoises=True)
        # the config's limit of positions is of its training rows; beyond it drafts are at worst wrong
        config = cls.of(values, layer, layer=layer, max_position_embeddings=NO_BOUND, **overrides)
        refuse_first(config._wrong())
        return config

    def value_of(self, name: str, default: Any = None) -> Any:
        """Return an option of the head, `default` if it is missing or null."""
        value = self.values.get(name)
        return default if value is None else value

    @property
    def draft_vocab_size(self) -> int:
        """The number of tokens that the head can draft."""
        return int(self.value_of("draft_vocab_size", self.vocab_size))

    @property
    def target_hidden_size(self) -> int:
        """The hidden size of the target."""
        return int(self.value_of("target_hidden_size", self.hidden_size))

    @property
    def layer_ids(self) -> Any:
        """The ids of the target's layers that the config lists, None if it lists none."""
        return self.values.get(LAYER_IDS) or (self.values.get("eagle_config") or {}).get(LAYER_IDS) or None

    def target_layers(self, depth: int) -> tuple[int, ...]:
        """Return the layers (the first is 0) whose outputs the head reads, of a target with `depth` layers.

        Ids number the target's hidden states, of which 0 are the embeddings, so the output of layer n has id n + 1
        (vLLM and speculators). If the config lists none, they are 2, depth // 2 and depth - 3.
        """
        ids = self.layer_ids
        if ids is None:
            return tuple(n - 1 for n in (2, depth // 2, depth - 3))
        return tuple(ids if self.counts_layers and ids[0] == 1 else (n - 1 for n in ids))

    def _wrong(self) -> Iterator[str]:
        """Yield the reasons why the config is refused."""
        layer, ids = self.layer, self.layer_ids
        if layer.num_hidden_layers != 1:
            yield f"num_hidden_layers is {layer.num_hidden_layers}; heads of one layer are supported"
        if "sliding_attention" in layer.layer_types:
            yield "layer_types has 'sliding_attention'; a head's layer sees all tokens"
        if self.value_of("norm_before_fc") and self.value_of("fc_norm"):
            yield "norm_before_fc and fc_norm are both true; a head has one of them"
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            yield f"draft_vocab_size is {self.draft_vocab_size}; it must be from 1 to the target's {self.vocab_size}"
        if not (self.values.get("eagle_config") or {}).get("use_aux_hidden_state", True):
            yield "use_aux_hidden_state is false; heads that read the last layer alone are not supported"
        if ids is not None and not (isinstance(ids, list) and all(isinstance(n, int) and n >= 1 for n in ids)):
            yield f"{LAYER_IDS} is {ids!r}; it must list layers of the target, from 1 on"

    @property
    def cached_per_token(self) -> int:
        return self.layer.cached_per_token + self.hidden_size

    @property
    def lines(self) -> tuple[str, ...]:
        tokens = f"drafts from {self.draft_vocab_size:,} of {self.vocab_size:,} tokens"
        which = ", ".join(map(str, self.layer_ids)) if self.layer_ids else "by default"
        return f"EAGLE3 head, hidden {self.hidden_size}, {tokens}, layer ids {which}", self.layer.lines[1]

    def with_tokens(
        self, vocab_size: int, special: Mapping[str, int | None], vocabulary: Mapping[str, int] | None = None
    ) -> Self:
        """Raise CheckpointError: a head drafts the tokens that it was trained for."""
        raise CheckpointError("an EAGLE3 head has the tokens of its target and takes no others")


class SpeculatorsFamily(Eagle3Family):
    """EAGLE3 heads in the layout of speculators."""

    model_type = "speculators_eagle3"
    architecture = "Eagle3DraftModel"
    names = _names("layers.0")
    counts_layers = False

    @classmethod
    def is_of(cls, values: Mapping[str, Any]) -> bool:
        return bool(values.get("model_type") == cls.model_type)

    @classmethod
    def of_layer(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        return values.get("transformer_layer_config") or {}
