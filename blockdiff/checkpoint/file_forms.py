"""The forms of a matrix of fewer bits in files: MXFP8, fp8, and NVFP4 in two layouts.

The suffixes of tensor names decide the form, so a config may be missing or wrong. MXFP8 is decoded on reading; a model
computes with the codes of the other forms (`kernels/stored.py`), bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from blockdiff.checkpoint.files import DTYPES, Stored, read_tensors
from blockdiff.checkpoint.stream import TensorSource
from blockdiff.errors import CheckpointError
from blockdiff.kernels.fp8 import Fp8
from blockdiff.kernels.nvfp4 import Nvfp4
from blockdiff.kernels.nvfp4.matrix import BLOCK, LARGEST_SCALE
from blockdiff.kernels.stored import StoredMatrix
from blockdiff.layers.weights import Form

WEIGHT = ".weight"  # suffix of a matrix; other tensors of one in fewer bits extend it
MX_BLOCK = 32  # numbers along the input dimension that share a scale in MXFP8
# Suffixes of scales by which other programs round inputs, keys and values; these are not rounded here.
ACTIVATIONS = (".input_scale", ".input_global_scale", ".k_scale", ".v_scale")


@dataclass(frozen=True)
class Part:
    """A tensor of a stored matrix in files.

    end: the suffix of the tensor's name. dtype: in files; bytes in memory are viewed as this dtype. number: the shape
    in the file of a tensor with one number for the matrix, which is repeated for all rows in memory (None: a tensor as
    in memory). to_file: converts the numbers in memory to those in the file.
    """

    end: str
    dtype: torch.dtype
    number: tuple[int, ...] | None = None
    to_file: Callable[[Tensor], Tensor] | None = None

    def source(self, part: TensorSource) -> TensorSource:
        """Return the source of this part in files from that of the tensor in memory."""
        shape = part.shape if self.number is None else self.number
        return TensorSource(shape, self.dtype, lambda: self._of(part.read()), (part,))

    def _of(self, tensor: Tensor) -> Tensor:
        if self.number is not None:
            assert bool((tensor == tensor[:1]).all()) or not bool(tensor.isfinite().all())
            tensor = tensor.flatten()[0].reshape(self.number)
        tensor = tensor if self.to_file is None else self.to_file(tensor)
        return tensor if tensor.dtype == self.dtype else tensor.view(self.dtype)


@dataclass(frozen=True, eq=False)
class FileForm:
    """A form of matrices in files.

    name: for messages. parts: its tensors, the codes first. form: the form in a model (None: a tensor). dtype: of
    decoded numbers. shape: a function from the entries of the tensors to the shape of the matrix, or None if they do
    not have this form. read: a function from the tensors to the matrix. algorithm: ModelOpt's name of the form. words,
    weights, inputs: the format and the settings by which compressed-tensors' config describes it.
    """

    name: str
    parts: tuple[Part, ...]
    form: Form | None
    dtype: str
    shape: Callable[..., tuple[int, ...] | None]
    read: Callable[..., Any]
    algorithm: str = ""
    words: str = ""
    weights: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Quantised(Stored):
    """The entry of a matrix in fewer bits: its form, and the names and entries of its tensors."""

    form: FileForm | None = None
    tensors: tuple[tuple[str, Stored], ...] = ()

    def matrix(self) -> Tensor | StoredMatrix:
        """Read the matrix in its form. Raises CheckpointError."""
        assert self.form is not None
        try:
            read: Tensor | StoredMatrix = self.form.read(*(read_whole(name, in_file) for name, in_file in self.tensors))
        except ValueError as error:
            raise CheckpointError(f"{self.file}: {self.tensors[0][0]} {error}; write the file again") from None
        return read

    def decoded(self) -> Tensor:
        """Read the matrix and decode it to a tensor."""
        matrix = self.matrix()
        return matrix if isinstance(matrix, Tensor) else matrix.decoded(DTYPES[self.dtype])


def read_whole(name: str, in_file: Stored) -> Tensor:
    """Read a tensor of a file."""
    return next(read_tensors({name: in_file}, [name]))[1]


# -- MXFP8 -----------------------------------------------------------------------------------------------------


def _shape_mxfp8(codes: Stored, scale: Stored) -> tuple[int, ...] | None:
    expected = (*codes.shape[:-1], -(-codes.shape[-1] // MX_BLOCK)) if codes.shape else None
    fits = codes.dtype == "F8_E4M3" and scale.dtype in ("U8", "F8_E8M0") and scale.shape == expected
    return codes.shape if fits else None


def dequantised(values: Tensor, scale: Tensor) -> Tensor:
    """Decode MXFP8 to bf16, which holds every such number exactly.

    values: e4m3 [out, in]. scale: exponents, as bytes, [out, in / 32].
    """
    factor = torch.ldexp(torch.ones(scale.shape), scale.view(torch.uint8).int() - 127)
    factor = factor.repeat_interleave(MX_BLOCK, -1)[..., : values.shape[-1]]
    return (values.float() * factor).to(torch.bfloat16)


# -- fp8 -------------------------------------------------------------------------------------------------------


def _shape_fp8(codes: Stored, scale: Stored) -> tuple[int, ...] | None:
    sizes = {(*codes.shape[:-1], 1), codes.shape[:-1], (1,), ()}
    return codes.shape if codes.dtype == "F8_E4M3" and scale.dtype in DTYPES and scale.shape in sizes else None


def _read_fp8(values: Tensor, scale: Tensor) -> Fp8:
    """Return the matrix: one scale for each channel or one for all. A channel with a NaN has a NaN as its scale."""
    rows = values.shape[:-1]
    codes, scale = values.view(torch.uint8), scale.float()
    scale = (scale.expand(rows) if scale.numel() == 1 else scale).reshape(*rows, 1)
    return Fp8(codes, torch.where(((codes & 127) == 127).any(-1, keepdim=True), float("nan"), scale))


# -- NVFP4 -----------------------------------------------------------------------------------------------------


def _shape_nvfp4(codes: Stored, block_scale: Stored, scale: Stored) -> tuple[int, ...] | None:
    rows, columns = codes.shape[:-1], 2 * codes.shape[-1] if codes.shape else 0
    fits = codes.dtype == "U8" and block_scale.dtype == "F8_E4M3" and scale.dtype == "F32" and columns % BLOCK == 0
    fits = fits and block_scale.shape == (*rows, columns // BLOCK) and scale.shape in ((), (1,))
    return (*rows, columns) if fits else None


def _read_nvfp4(codes: Tensor, block_scale: Tensor, scale: Tensor) -> Nvfp4:
    in_bytes = block_scale.view(torch.uint8)
    if in_bytes.numel() and int(in_bytes.max()) > LARGEST_SCALE:
        raise ValueError("has block scales that are negative or no numbers")
    return Nvfp4(codes, in_bytes, scale.expand(*codes.shape[:-1], 1))


def _divisor(scale: Tensor) -> Tensor:
    """Return the fp32 number whose reciprocal equals a scale bit for bit, or else nearly."""
    near = 1 / scale
    tried = torch.stack([near, *(torch.nextafter(near, torch.full_like(near, end)) for end in (0.0, float("inf")))])
    return tried[(1 / tried == scale).int().argmax(0)].reshape(scale.shape)


E4M3, F32, U8 = torch.float8_e4m3fn, torch.float32, torch.uint8
MXFP8 = FileForm("MXFP8", (Part("", E4M3), Part("_scale_inv", U8)), None, "BF16", _shape_mxfp8, dequantised)
NUMBER = {"type": "float", "symmetric": True}
FP8 = FileForm(
    "fp8",
    (Part("", E4M3), Part("_scale", F32)),
    Fp8, "F32", _shape_fp8, _read_fp8, "FP8",
    "float-quantized", {"num_bits": 8, **NUMBER, "strategy": "channel", "dynamic": False},
    # the form that vLLM loads for DiffusionGemma (FP8-Dynamic); vLLM rounds inputs, too
    {"num_bits": 8, **NUMBER, "strategy": "token", "dynamic": True},
)  # fmt: skip
MODELOPT = FileForm(
    "NVFP4 of ModelOpt",
    (Part("", U8), Part("_scale", E4M3), Part("_scale_2", F32, ())),
    Nvfp4, "F32", _shape_nvfp4, _read_nvfp4, "NVFP4",
)  # fmt: skip
PACKED = FileForm(
    "NVFP4 of compressed-tensors",
    (Part("_packed", U8), Part("_scale", E4M3), Part("_global_scale", F32, (1,), _divisor)),
    Nvfp4, "F32", _shape_nvfp4, lambda codes, block_scale, divisor: _read_nvfp4(codes, block_scale, 1 / divisor),
    "", "nvfp4-pack-quantized",
    {"num_bits": 4, **NUMBER, "strategy": "tensor_group", "group_size": BLOCK, "dynamic": False,
     "scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"},
)  # fmt: skip
FILE_FORMS = (MODELOPT, PACKED, FP8, MXFP8)  # forms with more tensors first, because ModelOpt's include those of fp8
# The form in files of weights that were not read from a file.
WRITTEN: dict[Form, FileForm] = {form.form: form for form in (FP8, PACKED) if form.form is not None}


def joined(stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """Return the tensors of a checkpoint without activation scales; a matrix in fewer bits is one entry by its name.

    Raises CheckpointError for tensors of a form that is not read.
    """
    tensors: dict[str, Stored] = {}
    taken: set[str] = set()
    for form in FILE_FORMS:
        first, *others = (part.end for part in form.parts)
        for name in stored:
            hub = name.removesuffix(first)
            names = [name, *(hub + end for end in others)]
            if name.endswith(first) and name not in taken and all(each in stored for each in names):
                tensors[hub] = _quantised(form, hub, [(each, stored[each]) for each in names])
                taken.update(names)
    return tensors | {
        name: in_file for name, in_file in stored.items() if name not in taken and not name.endswith(ACTIVATIONS)
    }


def _quantised(form: FileForm, hub: str, tensors: Sequence[tuple[str, Stored]]) -> Quantised:
    places = [in_file for _, in_file in tensors]
    shape = form.shape(*places)
    if shape is None:
        rest = " and ".join(f"{in_file.dtype} {list(in_file.shape)}" for in_file in places[1:])
        raise CheckpointError(
            f"{places[0].file}: {hub} is {places[0].dtype} {list(places[0].shape)} with scales {rest}, which is not "
            f"{form.name}; of weights in fewer bits MXFP8 is read, e4m3 with a scale for each output channel, and NVFP4"
        )
    nbytes = sum(in_file.nbytes for in_file in places)
    return Quantised(places[0].file, shape, form.dtype, nbytes, form=form, tensors=tuple(tensors))
