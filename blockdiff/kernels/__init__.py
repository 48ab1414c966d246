"""Kernels: one folder per op (native, C, Triton), resolved once to a frozen set of functions."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdiff.errors import BlockdiffError
from blockdiff.kernels.expert_mlp import Slots
from blockdiff.kernels.fp8 import Fp8
from blockdiff.kernels.launch import Unserved
from blockdiff.kernels.span_attention.paged import PagedTensor, PrefixTensor

# The ops of every folder. Its native.py says what they compute and holds a function of each name; so does its
# triton.py (imported when it is asked for), but for `logits`, whose native form is a single product.
FOLDERS = {
    "span_attention": ("span_attention",),
    "expert_mlp": ("expert_mlp", "gated", "route"),
    "fp8": ("fp8_linears",),
    "linear": ("linears",),
    "block_sparse": ("select_blocks", "block_sparse_attention"),
    "norm_rope": ("rms_norms", "add_rms_norm", "norm_rope"),
    "vocabulary": (
        *("logits", "linear_cross_entropy", "soft_embedding"),
        *("token_stats", "token_scores", "log_sums", "class_stats"),
    ),
}
NATIVE_ONLY = ("linears", "logits", "gated", "route")
# Those that also have C functions, in their folder's cpu.py and cpu.c.
IN_C = (
    *("span_attention", "expert_mlp", "gated", "route", "rms_norms", "add_rms_norm", "norm_rope"),
    *("linear_cross_entropy", "soft_embedding", "token_stats", "select_blocks", "block_sparse_attention"),
)
OPS = {op: folder for folder, ops in FOLDERS.items() for op in ops}


@dataclass(frozen=True)
class Kernels:
    """The functions a model computes with; which implementation each is was decided when the model was built."""

    span_attention: Callable[..., Any]
    expert_mlp: Callable[..., torch.Tensor]
    fp8_linears: Callable[..., tuple[torch.Tensor, ...]]
    linears: Callable[..., tuple[torch.Tensor, ...]]
    select_blocks: Callable[..., torch.Tensor]
    block_sparse_attention: Callable[..., torch.Tensor]
    gated: Callable[..., torch.Tensor]
    route: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    rms_norms: Callable[..., tuple[torch.Tensor, ...]]
    add_rms_norm: Callable[..., torch.Tensor]
    norm_rope: Callable[..., torch.Tensor]
    logits: Callable[..., torch.Tensor]
    linear_cross_entropy: Callable[..., torch.Tensor]
    soft_embedding: Callable[..., torch.Tensor]
    token_stats: Callable[..., Any]
    token_scores: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    log_sums: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    class_stats: Callable[..., Any]
    sweep_attention: Callable[..., Tensor | None] | None = None  # what `span_attention` gives of a sweep, in one call
    fused: Any = None  # the module `fused.triton`, whose functions do the work of a method below in one launch

    def __deepcopy__(self, memo: Any) -> Kernels:
        """A copy of a model has the same functions; modules among them cannot be copied."""
        return self

    @property
    def is_capturable(self) -> bool:
        """Whether a denoising step launches alike whatever rows hold, and reads nothing on the host."""
        return self.fused is not None

    # Compositions of the ops above, in one launch where that is there and no gradient is needed.

    def attention_heads(
        self, q: Tensor, *rest: Any, into: tuple[PagedTensor, ...] | None
    ) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """What `layers.attention.heads` gives, in one launch; None where that is not there."""
        heads: tuple[Tensor, Tensor, Tensor | None] | None = None
        if self.fused is not None and self.fused.serves(q):
            heads = self.fused.attention_heads(q, *rest, into)
        return heads

    def attended(
        self, products: Sequence[Tensor], head_dim: int, *rest: Any, past: tuple[PrefixTensor, ...] | None,
        spans: Any, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor] | None:  # fmt: skip
        """What queries gather over pages and their own tokens, [B, T, h * d], and the own keys and values, of the
        products of tokens with the three (or two, if values are raw keys) projections; None where no kernel does that.

        rest: as in `attention_heads`, from the norms' weights on.
        """
        made: tuple[Tensor, Tensor, Tensor] | None = None
        if past is not None and self.fused is not None and self.fused.serves(products[0]):
            made = self.fused.attended(products, head_dim, *rest, past, spans.written_BT4, scale)
        return made

    def residual_norms(
        self, x: Tensor, y: Tensor, weight: Tensor, weights: Sequence[Tensor | None], eps: float
    ) -> tuple[Tensor, ...]:
        """`x + rms_norm(y)`, and what `rms_norms` gives of that under up to three weights."""
        if self.fused is not None and self.fused.serves(x):
            sums: tuple[Tensor, ...] = self.fused.residual_norms(x, y, weight, weights, eps)
            return sums
        x = self.add_rms_norm(x, y, weight, eps)
        return x, *self.rms_norms(x, weights, eps)

    def routed_tokens(
        self, x: Tensor, scale_D: Tensor, root: float, weight_ED: Tensor, expert_scale_E: Tensor, k: int
    ) -> tuple[Tensor, Tensor]:
        """What `route` gives of the scores `(x * scale * root) weight^T` of tokens [..., D]."""
        if self.fused is not None and self.fused.serves(x):
            routes: tuple[Tensor, Tensor] = self.fused.routed_tokens(x, scale_D, root, weight_ED, expert_scale_E, k)
            return routes
        x_ND = x.flatten(0, -2)
        if x_ND.dtype == torch.bfloat16:  # the released model rounds after each factor
            scores = F.linear(x_ND * scale_D * root, weight_ED)
        else:
            scores = F.linear(x_ND, weight_ED * (scale_D * root))
        return self.route(scores, expert_scale_E, k)

    def layer_end(
        self, x: Tensor, dense: Tensor, routed: Slots | Tensor, weights: tuple[Tensor, Tensor, Tensor], eps: float,
        scalar: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """`(x + norm(norm(dense) + norm(routed))) * scalar`; weights: of dense, of routed, of their sum."""
        if self.fused is not None and self.fused.serves(x):
            end: Tensor = self.fused.layer_end(x, dense, routed, weights, eps, scalar)
            return end
        assert isinstance(routed, Tensor)
        (of_dense,) = self.rms_norms(dense, (weights[0],), eps)
        both = self.add_rms_norm(of_dense, routed.view_as(x), weights[1], eps)
        return self.add_rms_norm(x, both, weights[2], eps, scalar)

    def expert_slots(self, x: Tensor, *of_experts: Any) -> Slots | Tensor:
        """What `expert_mlp` gives of tokens [..., D], for `layer_end`: where that is fused, before it is summed."""
        if self.fused is not None and self.fused.serves(x):
            slots: Slots = self.fused.expert_slots(x, *of_experts)
            return slots
        return self.expert_mlp(x.flatten(0, -2), *of_experts)

    def linear(self, x: Tensor, weight: Tensor | Fp8) -> Tensor:
        """`x weight^T`."""
        return (self.fp8_linears if isinstance(weight, Fp8) else self.linears)(x, (weight,))[0]

    def products(self, x: Tensor, weights: Sequence[Tensor | Fp8]) -> tuple[Tensor, ...]:
        """`x weight^T` for every weight."""
        kinds = [type(weight) for weight in weights]
        if Fp8 not in kinds:
            return self.linears(x, weights)
        if kinds.count(Fp8) < len(kinds):
            return tuple(self.linear(x, weight) for weight in weights)
        return self.fp8_linears(x, weights)

    def gated_linear(self, x: Tensor, gate_FD: Tensor | Fp8, up_FD: Tensor | Fp8, activation: str) -> Tensor:
        """`gated` of the products of x with two weights."""
        rounds_inputs = isinstance(gate_FD, Fp8) and gate_FD.rounds_inputs
        is_fused = self.fused is not None and self.fused.serves(x) and not rounds_inputs
        if is_fused and x.numel() <= self.fused.FEW_ROWS * x.shape[-1]:
            product: Tensor = self.fused.gated_product(x, gate_FD, up_FD, activation)
            return product
        return self.gated(*self.products(x, (gate_FD, up_FD)), activation)


def _op(name: str, implementation: str) -> Callable[..., Any]:
    return getattr(importlib.import_module(f"blockdiff.kernels.{OPS[name]}.{implementation}"), name)


NATIVE = Kernels(**{name: _op(name, "native") for name in OPS})
CPU = Kernels(
    **{name: _op(name, "cpu" if name in IN_C else "native") for name in OPS},
    sweep_attention=importlib.import_module("blockdiff.kernels.span_attention.cpu").sweep_attention,
)


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
    choose = triton_op if kernels == "triton" else _on_gpu
    fused = importlib.import_module("blockdiff.kernels.fused.triton")
    return Kernels(**{name: choose(name) for name in OPS}, fused=fused)


def triton_op(name: str) -> Callable[..., Any]:
    """The Triton implementation of one op (ImportError where triton is not installed)."""
    return _op(name, "native" if name in NATIVE_ONLY else "triton")


def planned_op(name: str) -> Callable[..., Any]:
    """What one op runs on a GPU, for plans: the Triton one, and natively what that has no kernel for."""
    triton, native = triton_op(name), getattr(NATIVE, name)

    def run(*args: Any, **named: Any) -> Any:
        try:
            return triton(*args, **named)
        except Unserved:
            return native(*args, **named)

    return run


def _why_not_triton() -> str | None:
    """What keeps Triton from running in this process, in words; None where it runs."""
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


def _on_gpu(name: str) -> Callable[..., Any]:
    """The Triton op for CUDA tensors; that of a CPU elsewhere, for fp64 and for what Triton has no kernel for."""
    triton, native = triton_op(name), getattr(CPU, name)
    warned: set[str] = set()

    @functools.wraps(triton)
    def choose(x: torch.Tensor, *rest: Any, **named: Any) -> Any:
        if x.is_cuda and x.dtype != torch.float64:
            try:
                return triton(x, *rest, **named)
            except Unserved as obstacle:
                if obstacle.reason not in warned:
                    warned.add(obstacle.reason)
                    warnings.warn(f'kernels="auto": {name} runs natively: {obstacle.reason}', stacklevel=2)
        return native(x, *rest, **named)

    return choose
