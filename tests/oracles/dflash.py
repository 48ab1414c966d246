"""A drafter in plain torch, from the tensors of its checkpoint, and greedy drafting beside a target of transformers.

Nothing is cached: every round runs the target over all tokens, and the drafter over all of their features. The names
and the formulas are those of the released drafters (arXiv 2602.06036).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = Mapping[str, Tensor]


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def turned(x_ThD: Tensor, position_T: Tensor, theta: float) -> Tensor:
    half = x_ThD.shape[-1] // 2
    frequencies = 1.0 / theta ** (torch.arange(0, 2 * half, 2, dtype=torch.float32) / (2 * half))
    angle = position_T.float()[:, None] * frequencies
    cos, sin = (torch.cat([x, x], -1).to(x_ThD.dtype)[:, None] for x in (angle.cos(), angle.sin()))
    return x_ThD * cos + torch.cat([-x_ThD[..., half:], x_ThD[..., :half]], -1) * sin


def seen(config: Any, layer: int, context: int, block: int) -> Tensor:
    """Which of the context's and the block's tokens each token of the block sees, [block, context + block]."""
    slides = config.layer_types[layer] == "sliding_attention"
    says = getattr(config, "is_causal", None)
    is_causal = slides if says is None else says
    query, key = context + torch.arange(block)[:, None], torch.arange(context + block)[None]
    mask = torch.ones(block, context + block, dtype=torch.bool)
    if is_causal:
        mask &= key <= query
    if slides:
        mask &= (query - key < config.sliding_window) & (key - query < config.sliding_window)
    return mask


def keys_and_values(weights: Weights, config: Any, layer: int, x_TD: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """The keys and values [T, K, d] of context or block tokens that stand from position `first` on."""
    at = f"layers.{layer}.self_attn."
    k, v = (F.linear(x_TD, weights[f"{at}{name}_proj.weight"]).unflatten(-1, (-1, config.head_dim)) for name in "kv")
    k = norm(k, weights[f"{at}k_norm.weight"], config.rms_norm_eps)
    return turned(k, first + torch.arange(len(x_TD)), config.rope_parameters["rope_theta"]), v


def context_of(weights: Weights, config: Any, features_TF: Tensor) -> Tensor:
    return norm(F.linear(features_TF, weights["fc.weight"]), weights["hidden_norm.weight"], config.rms_norm_eps)


def block_hidden(weights: Weights, config: Any, features_TF: Tensor, embeddings_LD: Tensor) -> Tensor:
    """The hidden states [L, D] of a block whose context has these features."""
    x, context, eps = embeddings_LD, context_of(weights, config, features_TF), config.rms_norm_eps
    S, L = len(context), len(x)
    for n in range(config.num_hidden_layers):
        at = f"layers.{n}."
        normed = norm(x, weights[f"{at}input_layernorm.weight"], eps)
        q = F.linear(normed, weights[f"{at}self_attn.q_proj.weight"]).unflatten(-1, (-1, config.head_dim))
        q = norm(q, weights[f"{at}self_attn.q_norm.weight"], eps)
        q = turned(q, S + torch.arange(L), config.rope_parameters["rope_theta"])
        parts = [keys_and_values(weights, config, n, *each) for each in ((context, 0), (normed, S))]
        k, v = (
            torch.cat(each).repeat_interleave(q.shape[1] // each[0].shape[1], 1) for each in zip(*parts, strict=True)
        )
        scores = torch.einsum("qhd,khd->hqk", q, k) * config.head_dim**-0.5
        probabilities = scores.masked_fill(~seen(config, n, S, L), -torch.inf).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", probabilities, v).flatten(1)
        x = x + F.linear(attended, weights[f"{at}self_attn.o_proj.weight"])
        normed = norm(x, weights[f"{at}post_attention_layernorm.weight"], eps)
        gate, up = (F.linear(normed, weights[f"{at}mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        x = x + F.linear(F.silu(gate) * up, weights[f"{at}mlp.down_proj.weight"])
    return norm(x, weights["norm.weight"], eps)


def features_of(hidden_states: Any, ids: list[int]) -> Tensor:
    """The features [T, layers * D] of one row by transformers' hidden states, of which the first are embeddings."""
    return torch.cat([hidden_states[n + 1][0] for n in ids], -1)


def generate(weights: Weights, config: Any, target: Any, prompt: list[int], count: int) -> tuple[list[int], list[int]]:
    """The `count` tokens of greedy drafting, and how many of each round stand (the one that the target adds, too)."""
    own = config.values["dflash_config"]
    block, ids, mask = (
        own.get("block_size", config.values.get("block_size", 16)),
        own["target_layer_ids"],
        own["mask_token_id"],
    )
    table, head = target.get_input_embeddings().weight, target.lm_head.weight
    tokens, accepted = list(prompt), []
    tokens.append(int(target(torch.tensor([prompt])).logits[0, -1].argmax()))
    while len(tokens) < len(prompt) + count:
        features = features_of(target(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states, ids)
        noisy = F.embedding(torch.tensor([tokens[-1], *[mask] * (block - 1)]), table)
        draft = F.linear(block_hidden(weights, config, features, noisy)[1:], head).argmax(-1).tolist()
        likeliest = target(torch.tensor([tokens + draft])).logits[0, len(tokens) - 1 :].argmax(-1).tolist()
        right = next((n for n, token in enumerate(draft) if token != likeliest[n]), len(draft))
        tokens += likeliest[: right + 1]
        accepted.append(right + 1)
    return tokens[len(prompt) :][:count], accepted
