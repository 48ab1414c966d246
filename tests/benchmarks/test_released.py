"""The command that checks the released checkpoint, on a small model that is drawn and on files that are not right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks import released

WORDS = ["--preset", "tiny", "--vocabulary", "384", "--layers", "3", "--dtype", "float32", "--device", "cpu"]


def test_a_drawn_model_passes_all_checks(capsys: pytest.CaptureFixture[str]) -> None:
    assert released.main(WORDS) == 0
    table = capsys.readouterr().out
    assert table.startswith("tiny with 3 layers, drawn, float32") and "FAILED" not in table
    assert table.count(" ok") >= 6 and "logits: same argmax                100.0%" in table


def test_a_checkpoint_that_lacks_a_tensor_and_has_another_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = released.drawn(tmp_path, "tiny", 2, 384, 4, torch.float32)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensors["stranger"] = tensors.pop("model.decoder.layers.0.input_layernorm.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    assert released.main([str(directory), "--dtype", "float32", "--device", "cpu"]) == 1
    said = capsys.readouterr()
    assert "model.decoder.layers.0.input_layernorm.weight" in said.out + said.err
    assert released.main([str(tmp_path / "nothing")]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_logits_that_are_apart_fail() -> None:
    theirs = torch.randn(1, 4, 50, generator=torch.Generator().manual_seed(0))
    near, far = (released.of_logits(theirs * factor, theirs, torch.float32)[0] for factor in (1.0001, 1.01))
    assert near.is_met and not far.is_met
