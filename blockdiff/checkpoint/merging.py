"""`export`: write the result of a run, or a model with an adapter, as a checkpoint or as an adapter for PEFT."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockdiff.checkpoint.adapter_base import require_base, warn_of_other_weights
from blockdiff.checkpoint.adapter_names import Part, adapts_images
from blockdiff.checkpoint.adapters import adapted_checkpoint, check_parts, load_adapter, read_adapter, save_adapter
from blockdiff.checkpoint.added import read_added
from blockdiff.checkpoint.config import read_config
from blockdiff.checkpoint.digests import compare, read_back
from blockdiff.checkpoint.files import find
from blockdiff.checkpoint.images import with_image_side
from blockdiff.checkpoint.opening import model_files
from blockdiff.checkpoint.read import carried_by, empty, resolve_dtype, stored_matrices, stored_weights
from blockdiff.checkpoint.stored import chosen_layers, form_below
from blockdiff.checkpoint.stream import TensorSource
from blockdiff.checkpoint.write import save
from blockdiff.errors import CheckpointError
from blockdiff.kernels.stored import StoredMatrix
from blockdiff.layers.experts import Experts
from blockdiff.layers.lora import merged
from blockdiff.layers.weights import FORMS, Form, dtype_of
from blockdiff.models.adapters import TOKEN_ROWS, adapt, adapters_of, require_mergeable
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.models.stored import check_quantize, frozen_weights, store


def export(
    source: str | Path,
    directory: str | Path,
    adapter: str | Path | None = None,
    *,
    peft: bool = False,
    base: str | None = None,
    dtype: str = "auto",
    quantize: str | None = None,
    merge_into: str | Path | None = None,
    canvas_length: int | None = None,
) -> Path:
    """Write a run's model, or a model with an adapter, to `directory`, and read it back; returns the directory.

    The adapters are added to the weights in fp32 or wider, the sums are rounded once to their dtype, and the result is
    a checkpoint like any other. An adapter that was trained over rounded weights is added to the rounded weights. The
    host holds one tensor at a time (two, for experts that a file has one by one).

    source: a run directory, a checkpoint, an adapter that names its base, or a Hub id. adapter: an adapter of that
    checkpoint. peft: write the adapters alone, in PEFT's format, for the checkpoint `base` (None: the one that the
    adapter names). dtype: of the written weights ("auto": as stored). quantize: as in `load`; without it, weights in
    fp8 that an adapter changes are written in `dtype`, because fp8 would round much of the change away. merge_into: the
    checkpoint that gets the adapters, in place of the rounded one that they were trained over. Adapters of experts in
    four bits need merge_into or quantize. canvas_length: the tokens of a canvas, written into a config.json that lacks
    them.

    Raises CheckpointError, also if weights differ from their digests.
    """
    check_quantize(quantize)
    files = model_files(source, adapter)
    if merge_into is not None:
        if files.adapter is None or peft:
            raise CheckpointError(f"{source}: merge_into is for adapters that are merged; leave it out")
        files = replace(files, weights=find(merge_into))
    compare([files.weights, files.adapter])
    weights, beside = files.weights, files.adapter
    model = empty(read_config(weights, canvas_length), "torch")
    below = None if beside is None or merge_into is not None else form_below(beside)
    if beside is not None:
        require_base(beside, model)
        if adapts_images(beside, model):
            with_image_side(model)
        if merge_into is None:
            warn_of_other_weights(beside, weights)
    if peft:
        if beside is None:
            raise CheckpointError(f"{source}: has no adapters to write in PEFT's format; name some with --adapter")
        if below is not None:
            store(model, chosen_layers(model, weights, below))
        load_adapter(model, beside)
        model.carried = carried_by(weights, model)
        adapted = base or (adapted_checkpoint(beside) if adapter is None else str(source))
        return read_back(save_adapter(model, directory, adapted))
    stored = stored_weights(model, weights)
    target = stored[model.typical].dtype if dtype == "auto" else resolve_dtype(dtype)
    model.to(target)
    read_added(model, weights, target, torch.device("cpu"))
    model.carried = carried_by(weights, model)
    stored |= {name: TensorSource.of(tensor) for name, tensor in model.state_dict().items() if name not in stored}
    sums: dict[str, TensorSource] = {}
    if beside is not None:
        model.carried = model.carried.over(beside)
        rounded_below = {} if below is None else _rounded(model, weights, below)
        sums_in = partial(_sums, model, stored | rounded_below, beside)
        sums = sums_in(target)
        for name, form in list(_rounded_again(model, weights, sums, below, quantize).items())[:1]:
            _refuse_loss(stored_matrices(model, weights)(name, form), sums_in(torch.float32)[name], quantize)
    written = _written(model, weights, stored | sums, sums, target, quantize or below, keeps_sums=quantize is None)
    return read_back(save(model, directory, weights=written))


def _rounded_again(
    model: BlockDiffusionModel,
    weights: Path,
    sums: Mapping[str, TensorSource],
    below: str | None,
    quantize: str | None,
) -> dict[str, Form]:
    """Return the expert weights in fewer than 8 bits that adapters change, each with its form.

    If `quantize` stores them in another form they are left out, since they are not rounded to the old form again.
    Changed weights of other layers are written in the model's dtype, or in fp8.
    """
    layers = chosen_layers(model, weights, below)
    written = layers if quantize is None else chosen_layers(model, weights, quantize)
    again = {
        layer: form
        for layer, form in layers.items()
        if form.BITS < 8 and written.get(layer) is form and isinstance(model.get_submodule(layer), Experts)
    }
    return {name: again[layer] for name in sums if (layer := name.rpartition(".")[0]) in again}


def _refuse_loss(matrix: StoredMatrix, sum_of: TensorSource, quantize: str | None) -> None:
    """Raise CheckpointError with the share of a change that is lost by rounding experts again.

    With `quantize` it only warns. sum_of: the changed weight in fp32. The share is measured on the first four experts.
    """
    word = next(word for word, form in FORMS.items() if isinstance(matrix, form))
    some = matrix.part(slice(4))
    lost = 100 * lost_share(some, sum_of.read()[:4] - some.decoded(torch.float32))
    what = f"the adapters change experts that are stored in {word}"
    if quantize is not None:
        warnings.warn(f"{what}; rounded to it again they lose {lost:.0f} % of the change", stacklevel=4)
        return
    raise CheckpointError(
        f"{what}; rounded to it again they would lose {lost:.0f} % of the change. Give --merge-into with the weights "
        "that they were rounded from, --quantize none for weights like others, --peft for the adapter alone, or "
        f"--quantize {word} to lose it"
    )


def lost_share(matrix: StoredMatrix, change: Tensor) -> float:
    """Return the share of `change` that is lost when its sum with a stored matrix is rounded to the matrix's form."""
    numbers = matrix.decoded(torch.float32)
    kept_change = type(matrix).nearest(numbers + change).decoded(torch.float32) - numbers
    return 1 - float((kept_change * change).sum() / change.square().sum())


def _written(
    model: BlockDiffusionModel,
    weights: Path,
    sources: Mapping[str, TensorSource],
    sums: Mapping[str, TensorSource],
    dtype: torch.dtype,
    form: str | None,
    keeps_sums: bool,
) -> dict[str, TensorSource]:
    """Return the tensors of a merged checkpoint: every weight in `dtype`, or as the word `form` stores it.

    The model's layers are changed to these forms, too. keeps_sums: layers with weights in `sums` are not stored in
    `form`.
    """

    def source_of(name: str) -> TensorSource:
        target = dtype_of(name, dtype)
        return TensorSource(sources[name].shape, target, lambda: sources[name].read().to(target))

    layers = chosen_layers(model, weights, form)
    if keeps_sums:
        summed = {name.rpartition(".")[0] for name in sums}
        layers = {layer: form for layer, form in layers.items() if layer not in summed}
    read = stored_matrices(model, weights)

    @functools.lru_cache(maxsize=2)
    def rounded(name: str, form: Form) -> Any:
        return form.nearest(sums[name].read()) if name in sums else read(name, form)

    store(model, layers)
    frozen = frozen_weights(model)
    written = {name: source_of(name) for name in sources if name not in frozen}
    for name, (module, weight) in frozen.items():
        assert module.stored is not None
        for n, (leaf, part) in enumerate(module.named_parts(weight, module.held(weight))):
            tensor_name = f"{name.removesuffix(weight)}{leaf}"
            read_part = partial(_part, rounded, name, module.stored, n)
            written[tensor_name] = TensorSource(tuple(part.shape), part.dtype, read_part)
    return written


def _rounded(model: BlockDiffusionModel, directory: Path, form: str) -> dict[str, TensorSource]:
    """Return the weights that the word `form` stores in fewer bits, decoded, each read on use."""
    read, sources = stored_matrices(model, directory), {}
    for layer, stored in chosen_layers(model, directory, form).items():
        for leaf, parameter in model.get_submodule(layer).named_parameters(recurse=False):
            name = f"{layer}.{leaf}"
            value = partial(_decoded, read, name, stored)
            sources[name] = TensorSource(tuple(parameter.shape), torch.float32, value)
    return sources


def _decoded(read: Callable[[str, Form], StoredMatrix], name: str, form: Form) -> Tensor:
    return read(name, form).decoded(torch.float32)


def _part(read: Callable[[str, Form], Any], name: str, form: Form, part: int) -> Tensor:
    tensor: Tensor = read(name, form)[part]
    return tensor


def _sums(
    model: BlockDiffusionModel,
    weights: Mapping[str, TensorSource],
    directory: Path,
    dtype: torch.dtype,
) -> dict[str, TensorSource]:
    """Return the weights that the adapter in `directory` changes, each read and summed on use.

    Raises CheckpointError if the adapter does not fit a model of this config.
    """
    model = empty(model.config, "torch")
    adapter = read_adapter(directory, model)
    require_mergeable(adapter.modules.values())
    adapt(model, adapter.modules, adapter.tokens)
    check_parts(model, adapter.parts, str(directory))
    changed: dict[str, TensorSource] = {}
    for name, module in adapters_of(model).items():
        assert module.low_rank is not None
        for leaf, prefix in module.WEIGHTS.items():
            A, B = (adapter.parts[f"{name}.{prefix}lora_{letter}"] for letter in "AB")
            weight = weights[f"{name}.{leaf}"]
            sum_of = partial(_sum, weight, A, B, module.low_rank.scale, dtype)
            changed[f"{name}.{leaf}"] = TensorSource(weight.shape, dtype, sum_of)
    if adapter.tokens:
        table = weights["vocabulary.table"]
        with_rows = partial(_with_rows, table, adapter.parts[TOKEN_ROWS], adapter.tokens, dtype)
        changed["vocabulary.table"] = TensorSource(table.shape, dtype, with_rows)
    return changed


def _sum(weight: TensorSource, A: Part, B: Part, scale: float, dtype: torch.dtype) -> Tensor:
    """Return a weight plus its adapter, B A times `scale`."""
    return merged(weight.read(), A.read(None), B.read(None), scale, dtype)


def _with_rows(table: TensorSource, rows: Part, tokens: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the embedding table with the rows of `tokens` replaced by an adapter's."""
    return table.read().to(dtype).index_copy(0, torch.tensor(tokens), rows.read(None).to(dtype))
