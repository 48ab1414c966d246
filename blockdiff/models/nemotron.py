"""Nemotron-Labs-Diffusion: Ministral-3's layers, which encode causally and denoise blocks with the same weights.

What is special about it:
- The layers are Llama's, with yarn's frequencies. Queries are scaled at positions behind the original ones.
- Noisy tokens are computed like clean ones: there are no scalars, and the last prediction is not read.
- One head, untied, predicts next tokens of clean rows and the tokens of masks; logits are not shifted.
- Canvases begin where the prompt ends. The first token of a canvas is the head's next token.
- A release has an adapter of noisy tokens only in its folder `linear_spec_lora`.

config.json is that of the released remote code: transformers' `Ministral3Config` with a `block_size` and a
`mask_token_id`. Its yarn `factor` is used as it is, even below 1, not the ratio of its positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from blockdiff.models.config_checks import other_values
from blockdiff.models.llama import ROPES, TABLE, LlamaFamily
from blockdiff.models.names import Names

# Defaults of the released config class that Ministral3Config lacks or has with other values.
DEFAULTS: dict[str, Any] = {
    "block_size": 32,
    "mask_token_id": -1,
    "pad_token_id": None,
    "ar_loss_weight": 1.0,
    "dlm_loss_weight": None,
    "dlm_paradigm": "bidirectional",
}
ONE_VALUE: dict[str, tuple[Any, ...]] = {
    "dlm_paradigm": ("bidirectional", "block_diff"),  # of inference and of training, which are one model
    "sliding_window": (None,),
}
YARN = (
    *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    *("llama_4_scaling_beta", "max_position_embeddings"),
)
DIFFUSION_WEIGHT = 0.3  # in the released recipes; the next-token loss has weight 1


def _hub(name: str) -> str:
    return {"lm_head.weight": "diffusion_head.weight"}.get(name, name.replace("model.", "encoder.", 1))


@dataclass(frozen=True, kw_only=True)
class NemotronFamily(LlamaFamily):
    """Nemotron-Labs-Diffusion, and the config of one of its models."""

    model_type = "nemotron_labs_diffusion"
    architecture = "NemotronLabsDiffusionModel"
    names = Names(
        tuple((ours, _hub(hub)) for ours, hub in TABLE),
        ties=(("diffusion_head.weight", "encoder.embed_tokens.weight"),),
    )
    prefixes = ("causal",)
    transformers_class = "Ministral3Config"
    ropes: ClassVar = ROPES | {"yarn": YARN}
    has_self_conditioning = False
    seeds_canvases = True
    noisy_adapters = ("linear_spec_lora",)
    default_strategy = "confident:threshold=0.9,confidence=0,t_min=1,t_max=1,greedy=true"

    ar_loss_weight: float
    dlm_loss_weight: float | None = None

    @classmethod
    def as_transformers(cls, values: Mapping[str, Any]) -> Any:
        return super().as_transformers({**DEFAULTS, **values, "model_type": "ministral3"})

    @classmethod
    def completed(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**super().completed(values), "model_type": cls.model_type}

    @classmethod
    def own_fields(cls, theirs: Any) -> dict[str, Any]:
        length = getattr(theirs, "canvas_length", None) or theirs.block_size
        return super().own_fields(theirs) | {"canvas_length": length, "denoises": True, "mask": theirs.mask_token_id}

    @classmethod
    def wrong(cls, theirs: Any) -> Iterator[str]:
        yield from super().wrong(theirs)
        yield from other_values(theirs, ONE_VALUE)
        block, mask, other = theirs.block_size, theirs.mask_token_id, getattr(theirs, "canvas_length", None)
        if not isinstance(block, int) or block < 1:
            yield f"block_size is {block!r}; it must be a number of tokens"
        if other not in (None, block):
            yield f"block_size is {block}, and canvas_length {other}; they are the same"
        if not isinstance(mask, int) or not 0 <= mask < theirs.vocab_size:
            yield f"mask_token_id is {mask!r}, which no token of the vocabulary is; that of the released models is 100"

    def with_canvases(self, canvas_length: int, prefix: str = "causal") -> Self:
        more = {} if prefix == "causal" else {"prefix": prefix}
        return self.read(self.to_dict() | {"block_size": canvas_length} | more)

    @property
    def answer_length(self) -> int:
        return 512

    @property
    def trained_with(self) -> dict[str, Any]:
        """NeMo's recipe of fine-tuning: one noise level per document, weight 1 / p at each mask, next-token loss."""
        weight = self.ar_loss_weight / (self.dlm_loss_weight or DIFFUSION_WEIGHT)
        return super().trained_with | {
            "time": {"stratified": {"low": 1e-3, "high": 1.0, "per": "example"}},
            "weight": "elbo",
            "positions": "corrupted",
            "normalisation": "corrupted",
            "ar_loss": {"weight": weight, "scope": "response"} if weight else "none",
        }


FAMILIES = (NemotronFamily,)
