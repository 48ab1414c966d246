"""Parts of the modules that hold weights: the form in which a weight is stored, and the adapter over it.

A weight is a parameter, or it is frozen in a form of fewer bits (`kernels/stored.py`), whose tensors are buffers: X has
the codes and X_scale the scales of a weight X in fp8, X_scale_2 those of the tensor in NVFP4. Neither part changes the
names of tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from blockdiff.kernels.fp8 import Fp8
from blockdiff.kernels.nvfp4 import Nvfp4
from blockdiff.kernels.stored import StoredMatrix
from blockdiff.layers.lora import LowRank, merged

Form = type[StoredMatrix]
FORMS: dict[str, Form] = {"fp8": Fp8, "nvfp4": Nvfp4}
NAMES = ("weight", "gate_up_proj", "down_proj")  # of all weights that can be stored in a form


def local_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank computes with: of a DTensor the local one, else all of it."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def is_scale(name: str) -> bool:
    """True for a buffer with scales of a stored weight."""
    leaf = name.rpartition(".")[2]
    return any(leaf == weight + end for weight in NAMES for form in FORMS.values() for end in form.SUFFIXES if end)


def is_wide(name: str) -> bool:
    """True for a buffer that has fp32 at least in a model of any dtype: the bias by which a router chooses experts."""
    return name.endswith("router.bias")


def dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a tensor in a model of a dtype."""
    return torch.promote_types(dtype, torch.float32) if is_wide(name) else dtype


class HasWeights(nn.Module):
    """A module with weights [..., out, in], and two of its optional parts.

    stored: the form that its weights are frozen in, None for parameters. low_rank: the adapter over them. WEIGHTS: the
    names of the weights, each with what its adapter's names begin with.
    """

    WEIGHTS: ClassVar[dict[str, str]]
    stored: Form | None = None
    low_rank: LowRank | None = None
    kept_casts: dict[Any, Any] | None = None  # of the adapter, within `adapters.cast_once`

    def adapts(self, is_noisy: bool | Tensor) -> bool:
        """True if an adapter takes part in a call over these tokens: all clean, all noisy, or as booleans say."""
        return self.low_rank is not None and not (self.low_rank.noisy_only and is_noisy is False)

    def held(self, weight: str) -> Any:
        """The weight as the module holds it: a parameter, or a stored matrix; on several ranks of DTensors."""
        if self.stored is None:
            return self._parameters[weight]
        return self.stored(*(self._buffers[weight + end] for end in self.stored.SUFFIXES))

    def held_here(self, weight: str) -> Tensor | StoredMatrix:
        """The part of the weight that this rank holds."""
        held = self.held(weight)
        return local_part(held) if self.stored is None else self.stored(*map(local_part, held))

    def store(self, form: Form) -> None:
        """Freeze the weights in a form, which has no values yet. Adapters come afterwards."""
        made = {weight: form.empty_like(self.held(weight).detach()) for weight in self.WEIGHTS}
        for weight, matrix in made.items():
            del self._parameters[weight]
            self.hold(weight, matrix)

    def hold(self, weight: str, matrix: StoredMatrix) -> None:
        """Let a stored matrix be the weight."""
        self.stored = type(matrix)
        for name, part in self.named_parts(weight, matrix):
            self.register_buffer(name, part)

    def named_parts(self, weight: str, matrix: Any) -> list[tuple[str, Tensor]]:
        """The tensors of a stored matrix with the names that they have in this module."""
        return [(weight + end, part) for end, part in zip(type(matrix).SUFFIXES, matrix, strict=True)]

    def adapt(self, low_rank: LowRank) -> None:
        """Put an adapter over each weight: A and B in fp32, which hold no values yet."""
        self.low_rank = low_rank
        for weight, prefix in self.WEIGHTS.items():
            *experts, outputs, inputs = self.held(weight).shape
            device = getattr(self, weight).device
            A, B = (*experts, low_rank.rank, inputs), (*experts, outputs, low_rank.rank)
            self.register_parameter(f"{prefix}lora_A", nn.Parameter(torch.empty(A, device=device)))
            self.register_parameter(f"{prefix}lora_B", nn.Parameter(torch.empty(B, device=device)))

    @torch.no_grad()
    def merge(self, dtype: torch.dtype) -> None:
        """Add the adapters to the weights, which are parameters then: summed in fp32 at least, and rounded once.

        dtype: of weights that were stored in a form, in which an adapter's change would be lost; others keep theirs.
        """
        assert self.low_rank is not None
        for weight, prefix in self.WEIGHTS.items():
            A, B = (self.get_parameter(f"{prefix}lora_{letter}") for letter in "AB")
            held = self.held(weight)
            total = merged(held, A, B, self.low_rank.scale, held.dtype if self.stored is None else dtype)
            for name, _ in [] if self.stored is None else self.named_parts(weight, held):
                del self._buffers[name]
            self._parameters[weight] = nn.Parameter(total, requires_grad=False)
            del self._parameters[f"{prefix}lora_A"], self._parameters[f"{prefix}lora_B"]
        self.stored = self.low_rank = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Cast and move what the module holds; stored weights are moved alone."""
        before = {} if self.stored is None else dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in before.items():
            made = self._buffers[name]
            if old is not None and made is not None and made.dtype != old.dtype:
                self._buffers[name] = made.to(old.dtype) if old.device.type == "meta" else old.to(made.device)
        return self
