"""An EAGLE3 head in plain torch, from the tensors of its checkpoint, and greedy drafting beside a target.

Nothing is cached: every pass runs over all tokens. The names and the formulas are those of speculators' models, with
which benchmarks/drafters.py compares this. Numbers of layers are those of transformers' hidden states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.oracles.dflash import norm, turned

Weights = Mapping[str, Tensor]


def features_of(weights: Weights, options: Mapping[str, Any], eps: float, shown: Sequence[Tensor]) -> Tensor:
    """The features [T, D] of tokens by the hidden states [T, D] of the target that the head reads."""
    if options.get("fc_norm"):
        shown = [norm(x, weights[f"fc_norm.{n}.weight"], eps) for n, x in enumerate(shown)]
    x = torch.cat(list(shown), -1)
    if options.get("norm_before_fc"):
        x = norm(x, weights["input_norm.weight"], eps)
    return F.linear(x, weights["fc.weight"])


def layer(weights: Weights, config: Any, options: Mapping[str, Any], embedding: Tensor, before: Tensor) -> Tensor:
    """The outputs [T, D] of tokens that stand from position 1 on: embeddings beside what was before each."""
    at = "midlayer." if "midlayer.hidden_norm.weight" in weights else "layers.0."
    eps, T = config.rms_norm_eps, len(embedding)
    normed = norm(before, weights[f"{at}hidden_norm.weight"], eps)
    x = torch.cat([norm(embedding, weights[f"{at}input_layernorm.weight"], eps), normed], -1)
    q, k, v = (
        F.linear(x, weights[f"{at}self_attn.{n}_proj.weight"]).unflatten(-1, (-1, config.head_dim)) for n in "qkv"
    )
    if f"{at}self_attn.q_norm.weight" in weights:
        q, k = (norm(y, weights[f"{at}self_attn.{n}_norm.weight"], eps) for y, n in ((q, "q"), (k, "k")))
    theta, position = config.rope_parameters["rope_theta"], 1 + torch.arange(T)
    q, k = turned(q, position, theta), turned(k, position, theta)
    k, v = (y.repeat_interleave(q.shape[1] // y.shape[1], 1) for y in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * config.head_dim**-0.5
    hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
    attended = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v).flatten(1)
    x = normed if options.get("norm_before_residual") else before
    x = x + F.linear(attended, weights[f"{at}self_attn.o_proj.weight"])
    normed = norm(x, weights[f"{at}post_attention_layernorm.weight"], eps)
    gate, up = (F.linear(normed, weights[f"{at}mlp.{name}_proj.weight"]) for name in ("gate", "up"))
    return x + F.linear(F.silu(gate) * up, weights[f"{at}mlp.down_proj.weight"])


def draft(
    weights: Weights,
    config: Any,
    options: Mapping[str, Any],
    table: Tensor,
    features: Tensor,
    tokens: Sequence[int],
    count: int,
    given: Sequence[int] = (),
) -> tuple[list[int], Tensor]:
    """So many tokens behind `tokens`, of which all but the last have features, and the logits of each [count, V'].

    config: of the layer; table: the embeddings of the target, for heads without any; given: tokens that stand in the
    block in place of those that are drafted.
    """
    eps, table = config.rms_norm_eps, weights.get("embed_tokens.weight", table)
    inputs, before, logits, drafted = list(tokens[1:]), features, list[Tensor](), list[int]()
    for n in range(count):
        last = layer(weights, config, options, F.embedding(torch.tensor(inputs), table), before)[-1]
        normed = norm(last, weights["norm.weight"], eps)
        logits.append(F.linear(normed, weights["lm_head.weight"]))
        likeliest = int(logits[-1].argmax())
        drafted.append(likeliest + (int(weights["d2t"][likeliest]) if "d2t" in weights else 0))
        inputs.append(given[n] if n < len(given) else drafted[-1])
        before = torch.cat([before, (normed if options.get("norm_output") else last)[None]])
    return drafted, torch.stack(logits)


def generate(
    weights: Weights,
    config: Any,
    options: Mapping[str, Any],
    target: Any,
    ids: Sequence[int],
    prompt: Sequence[int],
    count: int,
    block: int,
) -> tuple[list[int], list[int]]:
    """The `count` tokens of greedy rounds, and how many of each stand (the one that the target adds, too)."""
    table, tokens, accepted = target.get_input_embeddings().weight, list(prompt), list[int]()
    tokens.append(int(target(torch.tensor([prompt])).logits[0, -1].argmax()))
    while len(tokens) < len(prompt) + count:
        states = target(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        features = features_of(weights, options, config.rms_norm_eps, [states[n][0] for n in ids])
        drafted, _ = draft(weights, config, options, table, features, tokens, block - 1)
        likeliest = target(torch.tensor([tokens + drafted])).logits[0, len(tokens) - 1 :].argmax(-1).tolist()
        right = next((n for n, token in enumerate(drafted) if token != likeliest[n]), len(drafted))
        tokens += likeliest[: right + 1]
        accepted.append(right + 1)
    return tokens[len(prompt) :][:count], accepted
