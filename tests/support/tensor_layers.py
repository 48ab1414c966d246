"""The ranks of `test_tensor_layers.py`: an MLP and an attention layer, split and whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from blockdiff.kernels import IN_TORCH
from blockdiff.layers.attention import Attention
from blockdiff.layers.linear import Linear
from blockdiff.layers.lora import LowRank
from blockdiff.layers.mlp import MLP
from blockdiff.layers.rope import angles, default_frequencies
from blockdiff.layers.weights import local_part
from blockdiff.parallel.ranks import Ranks
from blockdiff.parallel.tensor import split_attention, split_mlp
from blockdiff.spans import encode_spans

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, TOKENS = 32, 48, 8, 2, 8, 7


def drawn(module: nn.Module) -> nn.Module:
    draw = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data.normal_(0.0, 0.2, generator=draw)
    return module


def attention(is_fused: bool = False) -> Attention:
    """With a bias in every linear layer, which no family here has and the splits take all the same."""
    sizes, rules = (HIDDEN, HEADS, KV_HEADS, HEAD_DIM), {"qk_norm": None, "norms_values": False, "scale": 0.35}
    made = Attention(*sizes, True, 1e-6, IN_TORCH, **rules, is_fused=is_fused)
    for name, linear in list(made.named_children()):
        setattr(made, name, Linear(linear.in_features, linear.out_features))
    drawn(made)
    made.o_proj.bias.data.uniform_(50.0, 100.0, generator=torch.Generator().manual_seed(1))
    return made


def adapted() -> Attention:
    """With one projection of queries, keys and values, and an adapter over it."""
    made = attention(is_fused=True)
    made.qkv_proj.adapt(LowRank(3, 6.0))
    return drawn(made)


def run(module: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The output of a layer for a residual that all ranks have, and every gradient, whole."""
    x = x.clone().requires_grad_()
    if isinstance(module, Attention):
        rope = angles(torch.arange(TOKENS)[None], default_frequencies(HEAD_DIM, 1e4), x.dtype)
        out, _ = module(x, rope, encode_spans(torch.zeros(1, TOKENS, dtype=torch.int64)), None)
    else:
        out = module(x)
    (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    assert x.grad is not None
    grads = {"input": x.grad}
    for name, parameter in module.named_parameters():
        grad = parameter.grad
        assert grad is not None, name
        grads[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return out.detach(), grads


def layers(ranks: Ranks, directory: Path) -> None:
    """Writes what this rank found to a file."""
    mesh = init_device_mesh("cpu", (ranks.world,))
    x = torch.randn(1, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(2))
    found: dict[str, Any] = {}
    split: dict[str, Any] = {}
    for name, make, cut in (
        ("mlp", lambda: drawn(MLP(HIDDEN, INNER, IN_TORCH, "silu")), split_mlp),
        ("attention", attention, split_attention),
        ("fused", adapted, split_attention),
    ):
        found[f"{name} out of one"], found[f"{name} grads of one"] = run(make(), x)
        split[name] = make()
        cut(split[name], mesh)
        found[f"{name} out"], found[f"{name} grads"] = run(split[name], x)
    whole, mlp, heads = drawn(MLP(HIDDEN, INNER, IN_TORCH, "silu")), split["mlp"], split["attention"]
    found["bias"] = attention().o_proj.bias.detach()
    found["whole"] = {name: getattr(whole, name).weight.detach() for name in ("gate_proj", "up_proj")}
    found["held"] = {name: local_part(getattr(mlp, name).weight).detach() for name in ("gate_proj", "up_proj")}
    found["sizes"] = {"heads": heads.heads, "kv_heads": heads.kv_heads, "fused": split["fused"].qkv_proj.out_features}
    for part, name, size in (
        (heads, "q_proj", "out_features"),
        (heads, "o_proj", "in_features"),
        (mlp, "gate_proj", "out_features"),
        (mlp, "down_proj", "in_features"),
    ):
        linear = getattr(part, name)
        found["sizes"][name] = list(local_part(linear.weight).shape), getattr(linear, size)
    sizes = found.pop("sizes")
    tensors = {f"{key}/{name}": x for key, of in found.items() if isinstance(of, dict) for name, x in of.items()}
    tensors |= {key: x for key, x in found.items() if isinstance(x, Tensor)}
    save_file({key: x.detach().contiguous().clone() for key, x in tensors.items()}, directory / f"found-{ranks.rank}")
    (directory / f"sizes-{ranks.rank}.json").write_text(json.dumps(sizes))
