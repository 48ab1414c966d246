"""Weights in fewer bits in checkpoints: the layers that have them, and their tensors in files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from blockdiff.checkpoint.adapter_names import WEIGHTS as ADAPTER_WEIGHTS
from blockdiff.checkpoint.assembled import Assembled, assembled, stored_apart
from blockdiff.checkpoint.file_forms import WEIGHT, WRITTEN, FileForm, Part, Quantised
from blockdiff.checkpoint.files import INDEX, Stored, find, metadata_in
from blockdiff.checkpoint.files import WEIGHTS as MODEL_WEIGHTS
from blockdiff.checkpoint.quantization_config import layers_described, quantization_words
from blockdiff.checkpoint.stream import TensorSource
from blockdiff.layers.experts import Experts
from blockdiff.layers.linear import Linear
from blockdiff.layers.weights import Form
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.models.stored import QUANTIZE, check_quantize, frozen_weights, layers_of, quantised_layers, stored_layers

FORM = "base_weights"  # metadata key in an adapter's file: `quantize` of the weights it adapts


def chosen_layers(model: BlockDiffusionModel, path_or_hub_id: str | Path, quantize: str | None) -> dict[str, Form]:
    """Return the layers of an empty model that will be stored in fewer bits, each with its form.

    quantize: None for the layers that the checkpoint stores so; a word adds the layers that it rounds; "none" for no
    layer. If the weights are not on this machine, the checkpoint's config decides. Raises CheckpointError.
    """
    check_quantize(quantize)
    if quantize == "none":
        return {}
    forms_of_layers = quantised_layers(model, quantize)
    directory = find(path_or_hub_id, with_weights=False)
    if not (directory / MODEL_WEIGHTS).exists() and not (directory / INDEX).exists():
        return layers_described(model) | forms_of_layers
    names = model.config.names
    stored = assembled(stored_apart(directory, names), names)
    for layer, module in model.named_modules():
        if isinstance(module, Linear | Experts) and layer not in forms_of_layers:
            hubs = [names.to_hub(f"{layer}.{weight}") for weight in module.WEIGHTS]
            places = [stored.get(hub) for hub in hubs if hub is not None]
            forms = {in_file.form if isinstance(in_file, Assembled) else None for in_file in places}
            if len(forms) == 1 and (form := forms.pop()) is not None:
                forms_of_layers[layer] = form
    return forms_of_layers


def forms_in_files(stored: Mapping[str, Stored], model: BlockDiffusionModel) -> dict[str, FileForm]:
    """Return the form in files of each weight that a model can hold in that form, by our names."""
    names, forms = model.config.names, {}
    for hub, in_file in stored.items():
        ours = names.to_ours(hub)
        if ours is not None and isinstance(in_file, Assembled) and in_file.form is not None:
            first = in_file.parts[0][1]
            assert isinstance(first, Quantised) and first.form is not None
            forms[ours] = first.form
    return forms


def written_forms(model: BlockDiffusionModel) -> dict[str, FileForm]:
    """Return the form in files of each stored weight: the form it was read in, or this program's own."""
    frozen = {name: module.stored for name, (module, _) in frozen_weights(model).items()}
    carried = model.carried if quantization_words(model.config) else None
    read = {} if carried is None else {name: carried.forms.get(name) for name in frozen}
    as_read = {name: form for name, form in read.items() if form is not None and form.form is frozen[name]}
    return as_read if len(as_read) == len(frozen) else {name: WRITTEN[form] for name, form in frozen.items() if form}


def activations_of(model: BlockDiffusionModel, forms: Mapping[str, FileForm]) -> dict[str, Stored]:
    """Return the activation scales of other programs, for weights that are written as they were read."""
    carried, names = model.carried, model.config.names
    if carried is None or not forms or not forms.items() <= carried.forms.items():
        return {}
    gone = carried.forms.keys() - forms.keys()
    tensors = {}
    for hub, in_file in carried.activations.items():
        whole = hub.rpartition(".")[0] + WEIGHT
        piece = names.piece(whole)
        if names.to_ours(whole if piece is None else piece[0]) not in gone:
            tensors[hub] = in_file
    return tensors


def stored_as(model: BlockDiffusionModel) -> str | None:
    """Return the `quantize` word that stores a model's weights as they are; None if there is none."""
    forms = {name: module.stored for name, module in stored_layers(model).items()}
    words = [word for word in QUANTIZE if forms and forms.items() >= layers_of(model, word).items()]
    return words[0] if words else None


def form_below(directory: str | Path) -> str | None:
    """Return the `quantize` word of the weights that the adapter in `directory` was trained over.

    None means weights as their checkpoint stores them, or an adapter of another program. Raises CheckpointError.
    """
    file = Path(directory).expanduser() / ADAPTER_WEIGHTS
    form = metadata_in(file).get(FORM) if file.exists() else None
    form = "fp8" if form == "fp8-dynamic" else form  # it has the same codes, and rounded inputs in addition
    check_quantize(form)
    return form


def parts_in_files(
    model: BlockDiffusionModel, sources: dict[str, TensorSource], forms: Mapping[str, FileForm]
) -> list[tuple[str, Part, TensorSource]]:
    """Move the tensors of weights in fewer bits out of `sources`.

    Returns for each the name of its weight, its part of the weight's form, and its source.
    """
    parts = []
    for name, (module, _) in frozen_weights(model).items():
        assert module.stored is not None
        for end, part in zip(module.stored.SUFFIXES, forms[name].parts, strict=True):
            parts.append((name, part, sources.pop(name + end)))
    return parts
