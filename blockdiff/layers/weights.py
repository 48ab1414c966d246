"""`HasWeights`: the base of modules with weights, which may be stored in fewer bits and have an adapter.

A weight X is a parameter, or frozen in a form of fewer bits (`kernels/stored.py`) whose tensors are buffers: X with the
codes and X_scale with the scales, and in NVFP4 X_scale_2 with the scale of the whole tensor. Neither storing nor
adapting a weight changes the names of other tensors.
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
NAMES = ("weight", "gate_up_proj", "down_proj")  # of weights that can be stored in fewer bits


def local_part(tensor: Tensor) -> Tensor:
    """Return the local part of a DTensor, any other tensor unchanged."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def is_scale(name: str) -> bool:
    """Whether a name belongs to a buffer of scales of a stored weight."""
    leaf = name.rpartition(".")[2]
    return any(leaf == weight + end for weight in NAMES for form in FORMS.values() for end in form.SUFFIXES if end)


def is_wide(name: str) -> bool:
    """Whether a buffer of this name has at least fp32 in a model of any dtype: the bias of a sigmoid router."""
    return name.endswith("router.bias")


def dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a named tensor in a model of dtype `dtype`."""
    return torch.promote_types(dtype, torch.float32) if is_wide(name) else dtype


class HasWeights(nn.Module):
    """A module with weights [..., out, in], which may be stored in fewer bits and have adapters.

    stored: the form that the weights are frozen in (None: they are parameters). low_rank: the settings of the adapters.
    WEIGHTS: name of each weight -> prefix of its adapter's names.
    """

    WEIGHTS: ClassVar[dict[str, str]]
    stored: Form | None = None
    low_rank: LowRank | None = None
    cast_cache: dict[Any, Any] | None = None  # adapters in other dtypes, inside `adapters.cast_once`

    def adapts(self, is_noisy: bool | Tensor) -> bool:
        """Whether an adapter acts on a call's tokens: all clean (False), all noisy (True), or booleans for each."""
        return self.low_rank is not None and not (self.low_rank.noisy_only and is_noisy is False)

    def held(self, weight: str) -> Any:
        """Return a weight: a parameter or a stored matrix, of DTensors if it is sharded."""
        if self.stored is None:
            return self._parameters[weight]
        return self.stored(*(self._buffers[weight + end] for end in self.stored.SUFFIXES))

    def held_here(self, weight: str) -> Tensor | StoredMatrix:
        """Return this rank's part of a weight."""
        held = self.held(weight)
        return local_part(held) if self.stored is None else self.stored(*map(local_part, held))

    def store(self, form: Form) -> None:
        """Replace the weights by unfilled matrices of a form. Call it before `adapt`."""
        matrices = {weight: form.empty_like(self.held(weight).detach()) for weight in self.WEIGHTS}
        for weight, matrix in matrices.items():
            del self._parameters[weight]
            self.hold(weight, matrix)

    def hold(self, weight: str, matrix: StoredMatrix) -> None:
        """Set a weight to a stored matrix, whose tensors become buffers."""
        self.stored = type(matrix)
        for name, part in self.named_parts(weight, matrix):
            self.register_buffer(name, part)

    def named_parts(self, weight: str, matrix: Any) -> list[tuple[str, Tensor]]:
        """Pair the tensors of a stored matrix with their names in this module."""
        return [(weight + end, part) for end, part in zip(type(matrix).SUFFIXES, matrix, strict=True)]

    def adapt(self, low_rank: LowRank) -> None:
        """Add an adapter to each weight: unfilled A and B in fp32."""
        self.low_rank = low_rank
        for weight, prefix in self.WEIGHTS.items():
            *experts, outputs, inputs = self.held(weight).shape
            device = getattr(self, weight).device
            A, B = (*experts, low_rank.rank, inputs), (*experts, outputs, low_rank.rank)
            self.register_parameter(f"{prefix}lora_A", nn.Parameter(torch.empty(A, device=device)))
            self.register_parameter(f"{prefix}lora_B", nn.Parameter(torch.empty(B, device=device)))

    @torch.no_grad()
    def merge(self, dtype: torch.dtype) -> None:
        """Add the adapters to the weights and remove them: summed in at least fp32, rounded once.

        dtype: of weights that were stored in fewer bits, which become parameters; others keep their dtype.
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
        """Cast and move the module; stored weights are moved but never cast."""
        before = {} if self.stored is None else dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            if old is not None and new is not None and new.dtype != old.dtype:
                self._buffers[name] = new.to(old.dtype) if old.device.type == "meta" else old.to(new.device)
        return self
