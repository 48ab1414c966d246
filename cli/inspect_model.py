"""The lines that `blockdiff inspect` prints about a model: its shape, sizes by part, trained parts, and memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blockdiff import checkpoint
from blockdiff.checkpoint.adapters import adapted_checkpoint
from blockdiff.checkpoint.added import added_in
from blockdiff.checkpoint.digests import compare
from blockdiff.checkpoint.file_forms import Quantised, joined
from blockdiff.checkpoint.files import ADDED, Stored, first_line, stored_tensors
from blockdiff.checkpoint.opening import model_files
from blockdiff.errors import CheckpointError
from blockdiff.memory import of_training, size
from blockdiff.models.adapters import adapt, is_adapted
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.models.stored import rounded_bytes
from blockdiff.training.freeze import count_parts, freeze
from blockdiff.training.progress import Progress


def show_model(target: str, show: Progress) -> dict[str, Any]:
    """Print the contents of a checkpoint directory or hub id, and the parts that fine-tuning trains.

    Returns the same as JSON values. For an adapter the model under it is shown, too.
    """
    files = model_files(target, with_weights=False)
    directory, adapter = files.weights, files.adapter
    model = checkpoint.empty(checkpoint.read_config(directory))
    if adapter is None:
        freeze(model, (), trains_routers=False)
        shape = show_shape(model, target, show)
        if model.parameters_of("router"):
            show.line("frozen    as fine-tuning does by default: the routers, which train only from random weights")
    else:
        contents = checkpoint.read_adapter(adapter, model)
        adapt(model, contents.modules, contents.tokens)
        shape = show_shape(model, f"{target}, an adapter of {adapted_checkpoint(adapter)}", show)
        show.line("frozen    all but the adapter")
    tensors = _headers(directory, target if adapter is None else adapted_checkpoint(adapter))
    names = model.config.names
    sizes = {name: math.prod(size_of) for name, (size_of, _) in tensors.items()}
    carried = [size for name, size in sizes.items() if names.is_carried(name, has_images=True)]
    images = [size for name, size in sizes.items() if names.is_carried(name) and not names.is_carried(name, True)]
    dtypes = ", ".join(sorted({dtype for _, dtype in tensors.values()}))
    matrices = Counter(
        tensor.form.name
        for tensor in joined({name: Stored(directory, *each, 0) for name, each in tensors.items()}).values()
        if isinstance(tensor, Quantised) and tensor.form is not None
    )
    forms = "".join(f", {count:,} matrices of them in {form}" for form, count in matrices.items())
    show.line(f"stored    {len(tensors):,} tensors as {dtypes}{forms}")
    for some, what in (
        (images, "see images"),
        (carried, "are copied to new checkpoints and neither run nor trained"),
    ):
        if some:
            show.line(f"          {len(some):,} of them, {sum(some):,} numbers, {what}")
    stored: dict[str, Any] = {"tensors": len(tensors), "dtypes": dtypes.split(", "), "matrices": dict(matrices)}
    stored |= {"image_tensors": len(images), "image_numbers": sum(images)}
    stored |= {"carried_tensors": len(carried), "carried_numbers": sum(carried)}
    if (directory / ADDED).is_file():
        name, shapes = added_in(directory)
        count = sum(map(math.prod, shapes.values()))
        show.line(
            f"added     {ADDED}: {len(shapes):,} tensors of the model class {name}, {count:,} numbers: "
            f"{', '.join(f'{each} {list(size_of)}' for each, size_of in shapes.items()) or 'code alone'}"
        )
        stored["added"] = {each: list(size_of) for each, size_of in shapes.items()}
    if compared := compare([directory, adapter]):
        show.line("digests   the weights are as they were written")
    return {**shape, "stored": {**stored, "digests_compared": compared}}


def show_shape(
    model: BlockDiffusionModel, origin: str, show: Progress, needs: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """Print the shape of a model, its parameters by part, and their memory. Returns the same as JSON values.

    origin: the model's name, for the first line; needs: bytes that a recipe's training takes, by purpose (None: the
    bytes for AdamW in fp32 on all parameters that are not frozen).
    """
    config = model.config
    for line in (origin, *config.lines):
        show.line(line)
    parts = count_parts(model)
    show.parts(parts)
    trained = sum(row.trained for row in parts)
    experts = sum(row.trained + row.frozen for row in parts if row.part == "experts")
    count = trained + sum(row.frozen for row in parts)
    active = count - experts + experts * config.experts_per_token // max(1, config.experts)
    show.line(f"a token meets {active:,} of {count:,} parameters")
    what = "training the adapter" if is_adapted(model) else "full training"
    what = f"{what} in fp32 with AdamW" if needs is None else "training as the recipe says"
    needs = of_training(count, trained) if needs is None else needs
    parts_of_it = ", ".join(f"{name} {size(bytes_)}" for name, bytes_ in needs.items())
    rounded = "".join(f"{word} {size(taken)}, " for word, taken in rounded_bytes(model, 2).items())
    show.line(
        f"memory    weights {rounded}bf16 {size(2 * count)}, fp32 {size(4 * count)}; "
        f"{what} {size(sum(needs.values()))} ({parts_of_it}) and activations; "
        f"prefix in bf16 {size(2 * 1024 * config.cached_per_token)} for 1,024 tokens of one row"
    )
    return {
        "model": origin,
        "parts": [row._asdict() for row in parts],
        "parameters": count,
        "trained": trained,
        "met_by_a_token": active,
        "training_bytes": dict(needs),
    }


def _headers(directory: Path, target: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and dtype of every tensor by its Hub name. From the Hub only the files' headers are fetched.

    Raises CheckpointError if the Hub does not list the tensors.
    """
    if Path(target).expanduser().is_dir():
        return {name: (tensor.shape, tensor.dtype) for name, tensor in stored_tensors(directory).items()}
    from huggingface_hub import get_safetensors_metadata

    try:
        files: Any = get_safetensors_metadata(target).files_metadata
    except Exception as error:  # offline, gated, no safetensors: the Hub's client has many kinds of errors
        raise CheckpointError(f"{target}: its tensors cannot be listed ({first_line(error)})") from error
    return {
        name: (tuple(info.shape), str(info.dtype))
        for headers in files.values()
        for name, info in headers.tensors.items()
    }
