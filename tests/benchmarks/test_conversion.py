"""The demonstration of a conversion: it runs from end to end, and its table says what was found."""

from __future__ import annotations

import json

from benchmarks.conversion import measure, options, table
from blockdiff.training import export


def test_a_causal_model_is_trained_converted_and_trained_as_a_denoiser(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "draw_curves", lambda *_, **__: None)
    words = ["--causal-steps", "3", "--steps", "2", "--batch-size", "8", "--count", "4", "--train-count", "64"]
    o = options(["--output", str(tmp_path), *words])
    figures = measure(tmp_path, o)
    assert all(figures["converted_equal"].values())
    assert figures["answers"]["causal"]["solved"] == figures["answers"]["converted"]["solved"]
    assert all(0 < seconds for seconds in figures["training_seconds"].values())
    assert figures["answers"]["denoiser"]["steps"] > 1
    assert json.loads((tmp_path / "conversion.json").read_text()) == figures
    assert "hidden states to the bit, answers" in table(figures)
    figures["converted_equal"]["answers"] = False
    assert "hidden states to the bit, answers" not in table(figures)
