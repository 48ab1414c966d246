"""The table of ops with their backends, and `Kernels`, the set of ops that a model computes with."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import torch

from blockdiff.errors import BlockdiffError
from blockdiff.kernels.automaton import torch as automata
from blockdiff.kernels.block_sparse import torch as block_sparse
from blockdiff.kernels.expert_mlp import torch as experts
from blockdiff.kernels.fp8 import torch as fp8
from blockdiff.kernels.gated import torch as gates
from blockdiff.kernels.heads import torch as heads
from blockdiff.kernels.norm_rope import torch as norms
from blockdiff.kernels.nvfp4 import torch as nvfp4
from blockdiff.kernels.op import Composition, Op
from blockdiff.kernels.routing import torch as routing
from blockdiff.kernels.span_attention import torch as spans
from blockdiff.kernels.vocabulary import torch as vocabulary

ON_GPU = ("auto", "triton", "shapes")  # backends that run Triton's functions


class Kernels:
    """The ops that a model computes with, as functions of the chosen backend.

    backend:
    - "torch": plain torch.
    - "c": C, torch if C cannot compute a call.
    - "triton": Triton, Unserved if it cannot compute a call; torch for ops without a Triton function.
    - "auto": Triton for CUDA tensors, C for CPU tensors, torch if these cannot compute a call and for fp64.
    - "shapes": Triton on every device, torch if it cannot compute a call; for plans, whose tensors have no memory.

    overrides: another backend, or a function, for single ops by name.
    """

    span_attention = Op(spans.span_attention, "c", "triton")
    attention_heads = Composition(heads.attention_heads, "triton")
    select_blocks = Op(block_sparse.select_blocks, "triton")
    block_sparse_attention = Op(block_sparse.block_sparse_attention, "triton")
    rms_norms = Op(norms.rms_norms, "c", "triton")
    add_rms_norm = Op(norms.add_rms_norm, "c", "triton")
    norm_rope = Op(norms.norm_rope, "c", "triton")
    residual_norms = Composition(norms.residual_norms, "triton")
    layer_end = Composition(norms.layer_end, "triton")
    route = Op(routing.route, "c")
    routed_tokens = Composition(routing.routed_tokens, "triton")
    expert_mlp = Op(experts.expert_mlp, "c", "triton")
    expert_slots = Composition(experts.expert_slots, "triton")
    gated = Op(gates.gated, "c", "triton")
    gated_linear = Composition(gates.gated_linear, "triton")
    fp8_linear = Op(fp8.fp8_linear, "triton")
    nvfp4_linear = Op(nvfp4.nvfp4_linear, "c", "triton")
    logits = Op(vocabulary.logits)
    divergence = Op(vocabulary.divergence)
    linear_cross_entropy = Op(vocabulary.linear_cross_entropy, "c", "triton")
    soft_embedding = Op(vocabulary.soft_embedding, "c", "triton")
    token_stats = Op(vocabulary.token_stats, "c", "triton")
    token_scores = Op(vocabulary.token_scores, "triton")
    log_sums = Op(vocabulary.log_sums, "triton")
    class_stats = Op(vocabulary.class_stats, "triton")
    look_ahead = Op(automata.look_ahead, "triton")
    reach = Op(automata.reach, "triton")

    def __init__(self, backend: str, **overrides: str | Callable[..., Any]):
        self.backend, self.overrides = backend, overrides
        for name, op in OPS.items():
            override = overrides.get(name, backend)
            self.__dict__[name] = op.bound(self, override) if isinstance(override, str) else override

    def replaced(self, **overrides: str | Callable[..., Any]) -> Kernels:
        """Return these kernels with other backends, or functions, for some ops."""
        return Kernels(self.backend, **self.overrides | overrides)

    def __deepcopy__(self, memo: Any) -> Kernels:
        """Return self: copies of a model share the functions."""
        return self

    @property
    def is_capturable(self) -> bool:
        """Whether attention's launches are independent of the data, so that a CUDA graph can capture a step."""
        return self.overrides.get("span_attention", self.backend) in ON_GPU

    @property
    def filters_on_device(self) -> bool:
        """Whether `token_stats` applies top_p without reading a token count back to the host."""
        return self.overrides.get("token_stats", self.backend) in ON_GPU


OPS: dict[str, Op[..., Any]] = {name: op for name, op in vars(Kernels).items() if isinstance(op, Op)}
IN_TORCH = Kernels("torch")
IN_C = Kernels("c")


def resolve(kernels: str | Kernels = "auto") -> Kernels:
    """Return the kernels for "torch" (plain torch), "triton" (every op in Triton) or "auto" (the fastest available).

    With "auto", ops on CUDA tensors run in Triton, fp32 ops on a CPU in C if there is a C compiler, everything else in
    torch. A warning reports why Triton cannot run on a GPU at all, or why an op of it cannot compute a call. Raises
    BlockdiffError for an unknown name and if "triton" is not available.
    """
    if isinstance(kernels, Kernels):
        return kernels
    if kernels not in ("auto", "torch", "triton"):
        raise BlockdiffError(f'kernels={kernels!r} is not known; use "auto", "torch" or "triton"')
    if kernels == "torch":
        return IN_TORCH
    if kernels == "auto" and not torch.cuda.is_available():
        return IN_C
    obstacle = _why_not_triton()
    if obstacle is not None and kernels == "triton":
        raise BlockdiffError(f'kernels="triton": {obstacle}; use "auto" or "torch"')
    if obstacle is not None:
        warnings.warn(f'kernels="auto": no Triton: {obstacle}', stacklevel=2)
        return IN_C
    return Kernels(kernels)


def _why_not_triton() -> str | None:
    """Return why Triton cannot run in this process, None if it can."""
    if importlib.util.find_spec("triton") is None:
        return "the triton package is not installed"
    import triton

    if triton.knobs.runtime.interpret:  # TRITON_INTERPRET=1 when triton is imported: numpy on the CPU, for tests
        return None
    if not torch.cuda.is_available():
        return "Triton needs a CUDA device, and torch finds none"
    if torch.version.hip is not None:
        return "this torch is built for ROCm, and the Triton kernels are made for NVIDIA GPUs"
    major, minor = torch.cuda.get_device_capability()
    return None if major >= 8 else f"Triton's kernels need compute capability 8.0, this GPU has {major}.{minor}"
