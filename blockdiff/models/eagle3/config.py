"""The config of an EAGLE3 head: that of its one layer, and what else there is of it.

There are two layouts. In that of `LlamaForCausalLMEagle3` all fields stand side by side; in that of speculators those
of the layer stand in `transformer_layer_config`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from blockdiff.errors import CheckpointError
from blockdiff.models import llama
from blockdiff.models.config_checks import refuse_first
from blockdiff.models.family import Outline

# The layout of each family of this package: its model type, and the name of the layer in its files.
LLAMA, SPECULATORS = "eagle3", "speculators_eagle3"
ARCHITECTURE = "LlamaForCausalLMEagle3"
BLOCK = 8  # tokens of a block: no config says how many tokens a head drafts at most
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
NO_BOUND = 2**31  # positions


@dataclass
class Eagle3Config:
    """A head's config. model_type: of its layout; values: the content of its file; layer: the config of its layer."""

    model_type: str
    values: dict[str, Any]
    layer: Any

    def value_of(self, name: str, default: Any = None) -> Any:
        """An option of the head; the default where it is missing or null."""
        value = self.values.get(name)
        return default if value is None else value

    @property
    def draft_vocab_size(self) -> int:
        """The number of tokens that the head can draft."""
        return int(self.value_of("draft_vocab_size", self.layer.vocab_size))

    @property
    def target_hidden_size(self) -> int:
        """The hidden size of the target."""
        return int(self.value_of("target_hidden_size", self.layer.hidden_size))

    @property
    def layer_ids(self) -> Any:
        """The ids of the target's layers that the config lists; None where it lists none."""
        return self.values.get(LAYER_IDS) or (self.values.get("eagle_config") or {}).get(LAYER_IDS) or None

    def target_layers(self, depth: int) -> tuple[int, ...]:
        """The layers, the first one is 0, of a target of so many layers whose outputs the head reads.

        Ids count the target's hidden states, of which the first are the embeddings, so that layer n puts out n + 1
        (vLLM and speculators). In the layout of `LlamaForCausalLMEagle3` a list that begins with 1 counts layers
        instead: SpecForge writes these, and SGLang tells both apart so.
        """
        ids = self.layer_ids
        if ids is None:
            return tuple(n - 1 for n in (2, depth // 2, depth - 3))
        counts_layers = self.model_type == LLAMA and ids[0] == 1
        return tuple(ids if counts_layers else (n - 1 for n in ids))


def read(values: Mapping[str, Any], model_type: str) -> Eagle3Config:
    """A config from the content of a config.json in the layout of a model type.

    Raises CheckpointError for values that are not supported, and what transformers raises for those that cannot be.
    """
    of_layer = dict(values if model_type == LLAMA else values.get("transformer_layer_config") or {})
    kind = of_layer.get("model_type", "llama")
    if kind not in ("llama", "qwen3"):
        raise CheckpointError(f"the head's layer is one of {kind!r}; layers of Llama and Qwen3 are supported")
    config = Eagle3Config(model_type, copy.deepcopy(dict(values)), llama.read(of_layer, kind))
    check(config)
    return config


def check(config: Eagle3Config) -> None:
    """Raises CheckpointError, naming the field, for a config that our model does not compute."""
    llama.check(config.layer)
    refuse_first(_wrong(config))


def _wrong(config: Eagle3Config) -> Iterator[str]:
    layer, ids = config.layer, config.layer_ids
    if layer.num_hidden_layers != 1:
        yield f"num_hidden_layers is {layer.num_hidden_layers}; heads of one layer are supported"
    if "sliding_attention" in llama.layer_types(layer):
        yield "layer_types has 'sliding_attention'; a head's layer sees all tokens"
    if config.value_of("norm_before_fc") and config.value_of("fc_norm"):
        yield "norm_before_fc and fc_norm are both true; a head has one of them"
    if not 1 <= config.draft_vocab_size <= layer.vocab_size:
        yield f"draft_vocab_size is {config.draft_vocab_size}; it must be from 1 to the target's {layer.vocab_size}"
    if not (config.values.get("eagle_config") or {}).get("use_aux_hidden_state", True):
        yield "use_aux_hidden_state is false; heads that read the last layer alone are not supported"
    if ids is not None and not (isinstance(ids, list) and all(isinstance(n, int) and n >= 1 for n in ids)):
        yield f"{LAYER_IDS} is {ids!r}; it must list layers of the target, from 1 on"


def outline(config: Eagle3Config) -> Outline:
    """The config in words that all families share."""
    of_layer = llama.outline(config.layer)
    tokens = f"drafts from {config.draft_vocab_size:,} of {config.layer.vocab_size:,} tokens"
    which = ", ".join(map(str, config.layer_ids)) if config.layer_ids else "by default"
    return replace(
        of_layer,
        canvas_length=BLOCK,
        cached_per_token=of_layer.cached_per_token + config.layer.hidden_size,
        positions=NO_BOUND,  # those of its config are of its training rows, and drafts may be wrong
        denoises=True,
        is_drafter=True,
        lines=(f"EAGLE3 head, hidden {config.layer.hidden_size}, {tokens}, layer ids {which}", of_layer.lines[1]),
    )


def with_tokens(config: Eagle3Config, vocab_size: int, special: Mapping[str, int | None]) -> Eagle3Config:
    """Raises CheckpointError: a head drafts the tokens that it was trained for."""
    raise CheckpointError("an EAGLE3 head has the tokens of its target and takes no others")
