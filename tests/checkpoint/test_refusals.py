"""Checkpoints that are damaged or none: each is refused in one line that names what is wrong."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from blockdiff import devices
from blockdiff.checkpoint import (
    files,
    load,
)
from blockdiff.checkpoint.files import INDEX, WEIGHTS
from blockdiff.errors import CheckpointError
from tests.support.hub_files import PROJECTION, drop, edit


def index(weight_map: object) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        (directory / WEIGHTS).rename(directory / "part.safetensors")
        (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    return change


def put(name: str, tensor: Tensor) -> Callable[[Path], None]:
    return lambda d: edit(d, lambda tensors: tensors.update({name: tensor}))


def configure(**values: object) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        file = directory / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return change


def truncate(directory: Path) -> None:
    weights = (directory / WEIGHTS).read_bytes()
    (directory / WEIGHTS).write_bytes(weights[: len(weights) // 2])


DAMAGE: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "missing": (drop(PROJECTION), [PROJECTION, "is missing"]),
    "extra": (put("model.decoder.layers.9.mystery", torch.ones(1)), ["layers.9.mystery", "not part of"]),
    "misshapen": (put(PROJECTION, torch.ones(3, 64)), [WEIGHTS, PROJECTION, "[3, 64]", "[64, 64]"]),
    "misshapen tie": (put("lm_head.weight", torch.ones(2, 64)), ["lm_head.weight", "[2, 64]", "[384, 64]"]),
    "quantized": (put(PROJECTION, torch.ones(64, 64, dtype=torch.int8)), [PROJECTION, "I8"]),
    "integers": (put(PROJECTION, torch.ones(64, 64, dtype=torch.int64)), [WEIGHTS, PROJECTION, "I64", "real numbers"]),
    "too many": (
        lambda d: edit(d, lambda tensors: tensors.update({f"{n}": torch.empty(0) for n in range(1000)})),
        [WEIGHTS, "tensors; at most 1,000 are read"],
    ),
    "long metadata": (
        lambda d: save_file({}, d / WEIGHTS, {f"{n}": "" for n in range(2000)}),
        [WEIGHTS, "metadata has more than 1,000 entries"],
    ),
    "a long header": (
        lambda d: (d / WEIGHTS).write_bytes((2**26).to_bytes(8, "little") + bytes(2**26)),
        [WEIGHTS, "header has 67,108,864 bytes"],
    ),
    "a long config": (
        lambda d: (d / "config.json").write_text("[" + " " * 2**22 + "]"),
        ["config.json", "longer than 4,194,304 bytes"],
    ),
    "truncated": (truncate, [WEIGHTS, "truncated"]),
    "empty file": (lambda d: (d / WEIGHTS).write_bytes(b""), [WEIGHTS, "truncated"]),
    "no config": (lambda d: (d / "config.json").unlink(), ["no config.json"]),
    "bad json": (lambda d: (d / "config.json").write_text('{"model_type": '), ["config.json", "JSON"]),
    "endless json": (lambda d: (d / "config.json").write_text("[" * 10**5), ["config.json", "JSON"]),
    "a number without end": (lambda d: (d / "config.json").write_text("9" * 5000), ["config.json", "JSON"]),
    "json list": (lambda d: (d / "config.json").write_text("[]"), ["config.json", "list"]),
    "model type": (configure(model_type="gpt2"), ["config.json", "'gpt2'", "'diffusion_gemma'"]),
    "no text config": (configure(text_config=None), ["config.json", "text_config"]),
    "bad value": (configure(text_config={"hidden_size": "wide"}), ["config.json", "hidden_size"]),
    "untied": (configure(tie_word_embeddings=False), ["config.json", "tie_word_embeddings"]),
    "endless layers": (configure(text_config={"num_hidden_layers": 10**9}), ["num_hidden_layers is 1000000000"]),
    "an endless head": (configure(text_config={"head_dim": 10**9}), ["head_dim is 1000000000"]),
    "an endless vocabulary": (configure(text_config={"vocab_size": 10**20}), ["vocab_size is 1"]),
    "a pipe": (lambda d: ((d / "config.json").unlink(), os.mkfifo(d / "config.json")), ["config.json: not a regular"]),
    "a pipe beside": (lambda d: os.mkfifo(d / "tokenizer_config.json"), ["tokenizer_config.json", "not a regular"]),
    "a pipe as shard": (
        lambda d: (index({PROJECTION: "p.safetensors"})(d), os.mkfifo(d / "p.safetensors")),
        ["not a regular"],
    ),
    "no weights": (lambda d: (d / WEIGHTS).rename(d / "pytorch_model.bin"), [WEIGHTS, "pytorch_model.bin"]),
    "bad index": (index(["part.safetensors"]), [INDEX, "weight_map"]),
    "shard gone": (index({PROJECTION: "gone.safetensors"}), [INDEX, "gone.safetensors"]),
    "not in shard": (index({"a.b": "part.safetensors"}), ["part.safetensors", "a.b", "missing"]),
    "outside": (index({PROJECTION: "../part.safetensors"}), [INDEX, "../part.safetensors"]),
}


@pytest.mark.quick
@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_refused_in_one_line_that_names_it(damaged, monkeypatch, what):
    damage, words = DAMAGE[what]
    monkeypatch.setattr(files, "MOST_TENSORS", 1000)
    monkeypatch.setattr(files, "MOST_METADATA", 1000)
    damage(damaged)
    with pytest.raises(CheckpointError) as refusal:
        load(damaged, "float32", "cpu")
    message = str(refusal.value)
    assert "\n" not in message and str(damaged) in message
    assert all(word in message for word in words), message


def test_a_checkpoint_that_its_run_removes_while_it_is_read_is_told_from_a_broken_one(tmp_path):
    with pytest.raises(CheckpointError, match="step-3: was removed while it was read"):
        files.tensors_in(tmp_path / "step-3" / WEIGHTS)


def test_a_place_that_is_no_checkpoint_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for place, word in [
        (tmp_path / "file", "is a file"),
        (tmp_path / "nowhere", "no such directory"),
        ("nobody/no-such-model", "Hub"),
    ]:
        with pytest.raises(CheckpointError, match=word) as refusal:
            load(place, device="cpu")
        assert "\n" not in str(refusal.value) and str(place) in str(refusal.value)


@pytest.mark.parametrize(
    ("cuda", "hidden", "reason"),
    [
        (None, None, "without CUDA"),
        ("12.8", "", "CUDA_VISIBLE_DEVICES=''"),
        ("12.8", None, "CUDA.*: The driver is too old"),
    ],
)
def test_a_gpu_that_torch_does_not_use_is_said_and_its_absence_is_not(monkeypatch, tmp_path, cuda, hidden, reason):
    def init():
        raise RuntimeError("The driver is too old (found version 11040).\nUpdate it.")

    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    monkeypatch.setattr(devices, "GPUS", tmp_path)
    with warnings.catch_warnings(action="error"):
        assert devices.resolve_device("auto").type == "cpu"
    (tmp_path / "0000:01:00.0").mkdir()
    with pytest.warns(UserWarning, match=f"this machine has 1 GPU, but the CPU is used: .*{reason}") as said:
        assert devices.resolve_device("auto").type == "cpu"
    assert len(said) == 1 and "\n" not in str(said[0].message)
    with pytest.raises(CheckpointError, match=f"'cuda:1'.*{reason}"):
        devices.resolve_device("cuda:1")


def test_an_unknown_device_or_dtype_is_refused(written_by_transformers):
    with pytest.raises(CheckpointError, match="abacus"):
        load(written_by_transformers, device="abacus")
    for dtype in ("float12", "int8", torch.int64):
        with pytest.raises(CheckpointError, match=str(dtype)):
            load(written_by_transformers, dtype, "cpu")
