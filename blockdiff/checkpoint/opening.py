"""`load`: open a model with its weights, and optionally an adapter, rounding to fewer bits and a draft model.

`ModelFiles` says in which directories the files are, so tokenizer and settings can be found without the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from blockdiff.checkpoint.adapter_base import warn_of_other_weights
from blockdiff.checkpoint.adapters import adapted_checkpoint, fill_adapters, has_adapter, read_adapter
from blockdiff.checkpoint.config import read_config
from blockdiff.checkpoint.diffusion import DiffusionSettings
from blockdiff.checkpoint.digests import compare
from blockdiff.checkpoint.files import DIFFUSION, GENERATION, VOCABULARY_FILES, find
from blockdiff.checkpoint.generation import Generation
from blockdiff.checkpoint.quantization_config import warn_of_activations
from blockdiff.checkpoint.read import empty, load_weights, weights_dtype
from blockdiff.checkpoint.stored import chosen_layers, form_below, stored_as
from blockdiff.checkpoint.tokenizer import load_tokenizer, require_same_tokens
from blockdiff.errors import CheckpointError
from blockdiff.models.adapters import adapt
from blockdiff.models.drafted import Drafted
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.models.stored import store


@dataclass(frozen=True)
class ModelFiles:
    """The directory of a model's weights, and the directory of the adapter over them (None: no adapter).

    A tokenizer and settings in the adapter's directory have priority over those beside the weights.
    """

    weights: Path
    adapter: Path | None = None

    def holding(self, *names: str) -> Path:
        """Return the adapter's directory if it has one of these files, else the directory of the weights."""
        if self.adapter is not None and any((self.adapter / name).is_file() for name in names):
            return self.adapter
        return self.weights

    def tokenizer(self) -> Any:
        """Load the tokenizer; CheckpointError if there is none."""
        return load_tokenizer(self.holding(*VOCABULARY_FILES))

    def generation(self) -> Generation:
        """Return the settings of generation."""
        return Generation.from_pretrained(self.holding(GENERATION), read_config(self.weights))

    def diffusion(self) -> DiffusionSettings:
        """Return the settings of training that sampling follows."""
        return DiffusionSettings.from_pretrained(self.holding(DIFFUSION), read_config(self.weights))


def model_files(path_or_hub_id: str | Path, adapter: str | Path | None = None, with_weights: bool = True) -> ModelFiles:
    """Return the directories of a model and adapter as `load` accepts them; CheckpointError if one is missing.

    with_weights: if False, only the small files beside the weights are fetched from the Hub.
    """
    directory = find(path_or_hub_id, with_weights)
    if not has_adapter(directory):
        return ModelFiles(directory, None if adapter is None else find(adapter, with_weights))
    if adapter is not None:
        raise CheckpointError(f"{path_or_hub_id}: is an adapter itself; name the model that {adapter} adapts")
    return ModelFiles(find(adapted_checkpoint(directory), with_weights), directory)


def require_as_written(path_or_hub_id: str | Path, *others: str | Path | None) -> None:
    """Compare the weights of a model, and of `others` (models or adapters, None: skipped), with their digests.

    Raises CheckpointError if weights differ. A directory without digests is not compared.
    """
    files = model_files(path_or_hub_id)
    compare(dict.fromkeys([files.weights, files.adapter, *(find(each) for each in others if each is not None)]))


def load(
    path_or_hub_id: str | Path,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    kernels: str = "auto",
    model: type[BlockDiffusionModel] | None = None,
    adapter: str | Path | None = None,
    quantize: str | None = None,
    draft_model: str | Path | None = None,
) -> BlockDiffusionModel:
    """Load a model from a Hub-layout directory or a Hub id, in evaluation mode: see `empty` and `load_weights`.

    dtype: "auto" is the stored dtype. adapter: a directory in PEFT's format, or a Hub id, whose adapters the model
    gets. If `path_or_hub_id` is itself an adapter, the model that it names is loaded with it. Settings and tokenizer
    beside the adapter have priority over the model's.

    quantize: "fp8" rounds the weights of linear layers and experts to fp8, one tensor after the other, and freezes
    them. "none" decodes weights that are stored in fewer bits. None leaves each as it is stored; below an adapter, as
    it was when the adapter was trained.

    draft_model: a canvas model with the same tokenizer, or a drafter; the result is then a `Drafted` model, for
    verified canvases. The draft model has the same dtype, device and kernels, but neither the adapter nor the rounding.
    """
    files = model_files(path_or_hub_id, adapter)
    if draft_model is None:
        return load_files(files, dtype, device, kernels, model, quantize)
    config = read_config(draft_model)
    if not config.is_drafter:  # a drafter has no tokens of its own
        require_same_tokens(draft_model, files.holding(*VOCABULARY_FILES))
    drafter = load(draft_model, dtype, device, kernels)
    drafter.drafts_for(empty(read_config(files.weights), kernels, model))  # before the weights are read
    return Drafted(load_files(files, dtype, device, kernels, model, quantize), drafter).eval()


def load_files(
    files: ModelFiles,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    kernels: str = "auto",
    model: type[BlockDiffusionModel] | None = None,
    quantize: str | None = None,
    spread: Callable[[BlockDiffusionModel, torch.dtype], object] | None = None,
    warns: bool = True,
) -> BlockDiffusionModel:
    """Load the model in the directories `files`, as `load` does.

    spread: called with the model, which has its adapter and no weights yet, and with the dtype that these will have, so
    that a rank can allocate its own pieces. warns: whether this process warns, for example if the adapter was trained
    on other weights.
    """
    opened = empty(read_config(files.weights), kernels, model)
    if quantize is None and files.adapter is not None:
        quantize = form_below(files.adapter)
    store(opened, chosen_layers(opened, files.weights, quantize))
    if quantize is None and warns:
        warn_of_activations(opened.config, files.weights)
    adapter = None if files.adapter is None else read_adapter(files.adapter, opened)
    if adapter is not None:
        adapt(opened, adapter.modules, adapter.tokens)
    if files.adapter is not None and warns:
        warn_of_other_weights(files.adapter, files.weights)
    if spread is not None:
        spread(opened, weights_dtype(str(dtype), str(files.weights)))
    load_weights(opened, files.weights, dtype, device)
    if files.adapter is not None and adapter is not None:
        fill_adapters(opened, adapter.parts, str(files.adapter))
        opened.carried = opened.carried.over(files.adapter)
    return opened


def with_adapter(model: BlockDiffusionModel, adapter: str | Path) -> BlockDiffusionModel:
    """Return a copy of `model` with an adapter from a directory or a Hub id; both share the memory of the weights.

    Neither may train then. Raises CheckpointError if the adapter does not fit the model, or was trained over weights in
    another form.
    """
    directory = find(adapter)
    if (form := form_below(directory)) is not None and form != (stored_as(model) or "none"):
        raise CheckpointError(
            f"{directory}: was trained over weights in the form {form!r}; open the model with quantize"
        )
    origin = getattr(model.carried, "origin", None)
    if origin is not None and origin.is_dir():  # if it is gone, the weights cannot be compared
        warn_of_other_weights(directory, origin)
    tensors = [*model.parameters(), *model.buffers()]
    other = deepcopy(model, {id(tensor): tensor for tensor in tensors})
    read = read_adapter(directory, other)
    adapt(other, read.modules, read.tokens)
    fill_adapters(other, read.parts, str(directory))
    return other.eval()
