"""The set of ops that a model computes with: which form of each runs is chosen once, when the set is made."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import torch

from blockdiff.errors import BlockdiffError
from blockdiff.kernels.block_sparse import op as block_sparse
from blockdiff.kernels.expert_mlp import op as experts
from blockdiff.kernels.fp8 import op as fp8
from blockdiff.kernels.gated import op as gates
from blockdiff.kernels.heads import op as heads
from blockdiff.kernels.layer_end import op as ends
from blockdiff.kernels.linear import op as products
from blockdiff.kernels.norm_rope import op as norms
from blockdiff.kernels.op import Op
from blockdiff.kernels.routing import op as routing
from blockdiff.kernels.span_attention import op as spans
from blockdiff.kernels.vocabulary import op as vocabulary

ON_GPU = ("auto", "triton", "shapes")  # choices that run Triton's forms


class Kernels:
    """The ops that a model computes with: each is a function, whose form was chosen when these were made.

    choice: "torch": native forms. "c": C where it serves, else native. "triton": Triton or a refusal, and native where
    an op has no such form. "auto": Triton for CUDA tensors, C for those of a CPU, native where these do not serve and
    for fp64. "shapes": Triton, or native where that does not serve, wherever tensors are: for plans, whose tensors have
    no memory.
    """

    span_attention = spans.span_attention
    sweep_attention = spans.sweep_attention
    attend = spans.attend
    attention_heads = heads.attention_heads
    attention = heads.attention
    select_blocks = block_sparse.select_blocks
    block_sparse_attention = block_sparse.block_sparse_attention
    sparse_attention = block_sparse.sparse_attention
    rms_norms = norms.rms_norms
    add_rms_norm = norms.add_rms_norm
    norm_rope = norms.norm_rope
    residual_norms = norms.residual_norms
    layer_end = ends.layer_end
    route = routing.route
    routed_tokens = routing.routed_tokens
    expert_mlp = experts.expert_mlp
    expert_slots = experts.expert_slots
    gated = gates.gated
    gated_linear = gates.gated_linear
    linear = products.linear
    linears = products.linears
    fp8_linears = fp8.fp8_linears
    logits = vocabulary.logits
    linear_cross_entropy = vocabulary.linear_cross_entropy
    soft_embedding = vocabulary.soft_embedding
    token_stats = vocabulary.token_stats
    token_scores = vocabulary.token_scores
    log_sums = vocabulary.log_sums
    class_stats = vocabulary.class_stats

    def __init__(self, choice: str, **others: str | Callable[..., Any]):
        self.choice, self.others = choice, others
        for name, op in OPS.items():
            other = others.get(name, choice)
            self.__dict__[name] = op.bound(self, other) if isinstance(other, str) else other

    def replaced(self, **others: str | Callable[..., Any]) -> Kernels:
        """The same but for some ops, which get another choice, or a function in their place."""
        return Kernels(self.choice, **self.others | others)

    def __deepcopy__(self, memo: Any) -> Kernels:
        """A copy of a model computes with the same functions."""
        return self

    @property
    def is_capturable(self) -> bool:
        """True where attention launches the same whatever rows hold, so that a CUDA graph can hold a step."""
        return self.others.get("span_attention", self.choice) in ON_GPU

    @property
    def filters_on_device(self) -> bool:
        """True where `token_stats` keeps the most likely tokens (top_p) without the host knowing how many they are."""
        return self.others.get("token_stats", self.choice) in ON_GPU


OPS: dict[str, Op[..., Any]] = {name: op for name, op in vars(Kernels).items() if isinstance(op, Op)}
NATIVE = Kernels("torch")
CPU = Kernels("c")


def resolve(kernels: str | Kernels = "auto") -> Kernels:
    """The kernels for a choice: "torch" (plain torch), "triton" (every op in Triton) or "auto" (the best there is).

    With "auto", ops on CUDA tensors run in Triton, fp32 ones on a CPU by C functions where a C compiler is found, and
    everything else runs natively; one warning says why Triton cannot run on a GPU at all, and one for each op why it
    cannot serve some call. Raises BlockdiffError for a choice that cannot be had.
    """
    if isinstance(kernels, Kernels):
        return kernels
    if kernels not in ("auto", "torch", "triton"):
        raise BlockdiffError(f'kernels={kernels!r} is not known; use "auto", "torch" or "triton"')
    if kernels == "torch":
        return NATIVE
    if kernels == "auto" and not torch.cuda.is_available():
        return CPU
    obstacle = _why_not_triton()
    if obstacle is not None and kernels == "triton":
        raise BlockdiffError(f'kernels="triton": {obstacle}; use "auto" or "torch"')
    if obstacle is not None:
        warnings.warn(f'kernels="auto": native ops only: {obstacle}', stacklevel=2)
        return CPU
    return Kernels(kernels)


def _why_not_triton() -> str | None:
    """The reason for which Triton cannot run in this process, in words; None where it can."""
    if importlib.util.find_spec("triton") is None:
        return "the triton package is not installed"
    import triton

    if triton.knobs.runtime.interpret:  # TRITON_INTERPRET=1 when triton is imported: numpy on the CPU, for tests
        return None
    if not torch.cuda.is_available():
        return "Triton needs a CUDA device, and torch finds none here"
    if torch.version.hip is not None:
        return "this torch is built for ROCm, and the Triton kernels are made for NVIDIA GPUs"
    major, minor = torch.cuda.get_device_capability()
    return None if major >= 8 else f"Triton's kernels need compute capability 8.0, this GPU has {major}.{minor}"
