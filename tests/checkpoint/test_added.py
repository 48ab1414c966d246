"""A tweaked model class is made, saved with what it adds, and read back; what could not be loaded is not saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import DiffusionGemmaForBlockDiffusion

import blockdiff
from blockdiff.checkpoint.files import ADDED
from blockdiff.errors import CheckpointError
from blockdiff.models.diffusion_gemma.model import DiffusionGemma, Layer
from tests.support.oracle import TWO_LAYERS, tiny_config

pytestmark = pytest.mark.quick


class GatedLayer(Layer):
    """Adds a gate (1 at first) on the output of a layer, and a projection."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.gate = nn.Parameter(torch.empty(1))
        self.mixer = nn.Linear(64, 64)
        self.register_buffer("calls", torch.zeros(1, dtype=torch.int64))

    def reset_parameters(self) -> None:
        self.gate.fill_(1.0)

    def forward(self, *args: Any) -> tuple[Tensor, Any]:
        x, kv = super().forward(*args)
        return self.gate * x + self.mixer(x), kv


class Gated(DiffusionGemma):
    layer_class = GatedLayer


class Loud(DiffusionGemma):
    """Adds no tensor."""

    def forward(self, *args: Any, **named: Any) -> Any:
        hidden, kv = super().forward(*args, **named)
        return 2 * hidden, kv


def small() -> Any:
    return tiny_config(**TWO_LAYERS)


def made(model: type[DiffusionGemma] | None = None, seed: int = 3) -> Any:
    return blockdiff.init(small(), seed=seed, device="cpu", kernels="torch", model=model)


def read(directory: Path, model: type[DiffusionGemma] | None = None) -> Any:
    return blockdiff.load(directory, dtype="auto", device="cpu", kernels="torch", model=model)


def hidden_of(model: DiffusionGemma) -> Tensor:
    with torch.no_grad():
        prompt, canvas = torch.arange(3, 13).view(2, 5), torch.arange(20, 52).view(2, 16)
        return model.denoise(canvas, model.encode(prompt))


def refusal(call: Any) -> str:
    with pytest.raises(CheckpointError) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_a_class_adds_is_drawn_beside_the_same_weights_saved_and_read_back(tmp_path):
    model, plain = made(Gated), made()
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in plain.state_dict().items())
    layer = model.layers[0]
    assert type(layer) is GatedLayer and layer.gate.item() == 1.0 and layer.mixer.weight.std() > 0.01
    assert layer.calls.dtype == torch.int64
    assert torch.equal(layer.mixer.weight, made(Gated).layers[0].mixer.weight)
    assert not torch.equal(layer.mixer.weight, made(Gated, seed=4).layers[0].mixer.weight)
    with torch.no_grad():
        layer.gate.fill_(0.5)
    out = blockdiff.save(model, tmp_path / "out")
    assert load_file(out / ADDED).keys() == {
        f"layers.{n}.{name}" for n in range(2) for name in ("gate", "mixer.weight", "mixer.bias", "calls")
    }
    again = read(out, Gated)
    assert type(again) is Gated
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in again.state_dict().items())
    assert torch.equal(hidden_of(again), hidden_of(model)) and not torch.equal(hidden_of(model), hidden_of(plain))
    in_half = blockdiff.load(out, "bfloat16", "cpu", kernels="torch", model=Gated).state_dict()
    assert in_half["layers.0.gate"].dtype == torch.bfloat16 and in_half["layers.0.calls"].dtype == torch.int64


def test_transformers_loads_the_rest_complete(tmp_path):
    out = blockdiff.save(made(Gated), tmp_path / "out")
    _, report = DiffusionGemmaForBlockDiffusion.from_pretrained(out, output_loading_info=True)
    assert not any(report.values()), report


def test_a_class_starts_from_a_checkpoint_that_has_nothing_of_it(tmp_path):
    plain = made()
    model = read(blockdiff.save(plain, tmp_path / "plain"), Gated)
    assert model.layers[1].gate.item() == 1.0 and model.layers[1].mixer.bias.isfinite().all()
    assert torch.equal(model.vocabulary.table, plain.vocabulary.table)


@pytest.mark.parametrize("model", [Gated, Loud])
def test_without_its_class_a_checkpoint_is_refused_by_name(model, tmp_path):
    out = blockdiff.save(made(model), tmp_path / "out")
    assert torch.equal(hidden_of(read(out, model)), hidden_of(made(model)))
    message = refusal(lambda: read(out))
    assert ADDED in message and model.__name__ in message and "model=" in message
    assert "model=" in refusal(lambda: read(out, Loud if model is Gated else Gated))


def test_a_class_of_another_kind_is_refused():
    assert "Linear is no subclass of DiffusionGemma" in refusal(lambda: made(nn.Linear))


def test_a_module_that_cannot_set_what_it_adds_is_named():
    class Bare(DiffusionGemma):
        def __init__(self, *args: Any, **named: Any):
            super().__init__(*args, **named)
            self.extra = nn.Module()
            self.extra.weight = nn.Parameter(torch.zeros(3))

    assert "Module adds (extra), and it has no reset_parameters()" in refusal(lambda: made(Bare))


def widen(model: Any) -> None:
    model.layers[0].mlp.up_proj = nn.Linear(64, 96, bias=False)


def add(model: Any) -> None:
    model.layers[0].adapter = nn.Linear(64, 4)


def drop(model: Any) -> None:
    model.layers[1].mlp = nn.Identity()


@pytest.mark.parametrize(
    "change, words",
    [
        (widen, ["layers.0.mlp.up_proj.weight", "[96, 64]", "[128, 64]"]),
        (add, ["layers.0.adapter.weight", "subclass", "model=..."]),
        (drop, ["no layers.1.mlp.gate_proj.weight"]),
    ],
)
def test_a_model_that_could_not_be_loaded_is_not_saved(change, words, tmp_path):
    model = made()
    change(model)
    message = refusal(lambda: blockdiff.save(model, tmp_path / "out"))
    assert all(word in message for word in words), message
    assert not (tmp_path / "out").exists()


def test_a_file_of_added_tensors_that_is_damaged_is_named(tmp_path):
    out = blockdiff.save(made(Gated), tmp_path / "out")
    save_file({"layers.0.gate": torch.ones(2)}, out / ADDED)
    assert "layers.0.gate" in refusal(lambda: read(out, Gated))
    (out / ADDED).write_bytes(b"x")
    assert f"{ADDED}: truncated" in refusal(lambda: read(out, Gated))
