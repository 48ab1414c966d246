"""Weights of fewer bits in checkpoints: which layers of a model have them, and which tensors of files they are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from blockdiff.checkpoint.adapter_names import WEIGHTS as ADAPTER_WEIGHTS
from blockdiff.checkpoint.assembled import Assembled, assembled, stored_apart
from blockdiff.checkpoint.file_forms import WEIGHT, WRITTEN, FileForm, Part, Quantised
from blockdiff.checkpoint.files import INDEX, Stored, find, metadata_in
from blockdiff.checkpoint.files import WEIGHTS as MODEL_WEIGHTS
from blockdiff.checkpoint.quantization_config import layers_said, said
from blockdiff.checkpoint.stream import TensorSource
from blockdiff.layers.experts import Experts
from blockdiff.layers.linear import Linear
from blockdiff.layers.weights import Form
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.models.stored import QUANTIZE, check_quantize, frozen_weights, layers_of, quantised_layers, stored_layers

FORM = "base_weights"  # the entry of an adapter's file that names the `quantize` of the weights below


def chosen_layers(model: BlockDiffusionModel, path_or_hub_id: str | Path, quantize: str | None) -> dict[str, Form]:
    """The layers of an empty model whose weights are to be stored in fewer bits, and how.

    quantize: a word for all layers that the family has it for, "none", or None: those that the checkpoint stores so,
    which a word adds to its own. Of a checkpoint whose weights are not here its config says it. Raises CheckpointError.
    """
    check_quantize(quantize)
    if quantize == "none":
        return {}
    found = quantised_layers(model, quantize)
    directory = find(path_or_hub_id, with_weights=False)
    if not (directory / MODEL_WEIGHTS).exists() and not (directory / INDEX).exists():
        return layers_said(model) | found
    names = model.config.names
    stored = assembled(stored_apart(directory, names), names)
    for layer, module in model.named_modules():
        if isinstance(module, Linear | Experts) and layer not in found:
            hubs = [names.to_hub(f"{layer}.{weight}") for weight in module.WEIGHTS]
            places = [stored.get(hub) for hub in hubs if hub is not None]
            forms = {place.form if isinstance(place, Assembled) else None for place in places}
            if len(forms) == 1 and (form := forms.pop()) is not None:
                found[layer] = form
    return found


def forms_in_files(stored: Mapping[str, Stored], model: BlockDiffusionModel) -> dict[str, FileForm]:
    """The form in files of each weight that a model may keep as it is there, by our names."""
    names, found = model.config.names, {}
    for hub, place in stored.items():
        ours = names.to_ours(hub)
        if ours is not None and isinstance(place, Assembled) and place.form is not None:
            first = place.parts[0][1]
            assert isinstance(first, Quantised) and first.form is not None
            found[ours] = first.form
    return found


def written_forms(model: BlockDiffusionModel) -> dict[str, FileForm]:
    """The form in files of each stored weight: those that they were read in, or that of this program."""
    frozen = {name: module.stored for name, (module, _) in frozen_weights(model).items()}
    carried = model.carried if said(model.config) else None
    read = {} if carried is None else {name: carried.forms.get(name) for name in frozen}
    as_read = {name: form for name, form in read.items() if form is not None and form.form is frozen[name]}
    return as_read if len(as_read) == len(frozen) else {name: WRITTEN[form] for name, form in frozen.items() if form}


def activations_of(model: BlockDiffusionModel, forms: Mapping[str, FileForm]) -> dict[str, Stored]:
    """The tensors with which other programs round activations, for weights that are written as they were read."""
    carried, names = model.carried, model.config.names
    if carried is None or not forms or not forms.items() <= carried.forms.items():
        return {}
    gone = carried.forms.keys() - forms.keys()
    found = {}
    for hub, place in carried.activations.items():
        whole = hub.rpartition(".")[0] + WEIGHT
        piece = names.piece(whole)
        if names.to_ours(whole if piece is None else piece[0]) not in gone:
            found[hub] = place
    return found


def stored_as(model: BlockDiffusionModel) -> str | None:
    """The `quantize` that stores a model's weights as they are; None if no word does, or nothing is stored so."""
    forms = {name: module.stored for name, module in stored_layers(model).items()}
    words = [word for word in QUANTIZE if forms and forms.items() >= layers_of(model, word).items()]
    return words[0] if words else None


def form_below(directory: str | Path) -> str | None:
    """The form of the weights that the adapter in a directory was trained over; None where it says nothing: as they are
    stored, or it is not ours. Raises CheckpointError.
    """
    file = Path(directory).expanduser() / ADAPTER_WEIGHTS
    form = metadata_in(file).get(FORM) if file.exists() else None
    form = "fp8" if form == "fp8-dynamic" else form  # weights of the same codes, whose inputs were rounded
    check_quantize(form)
    return form


def parts_in_files(
    model: BlockDiffusionModel, sources: dict[str, TensorSource], forms: Mapping[str, FileForm]
) -> list[tuple[str, Part, TensorSource]]:
    """Take the tensors of stored weights out of `sources`: name of the weight, part in its form in files, tensor."""
    found = []
    for name, (module, _) in frozen_weights(model).items():
        assert module.stored is not None
        for end, part in zip(module.stored.SUFFIXES, forms[name].parts, strict=True):
            found.append((name, part, sources.pop(name + end)))
    return found
