"""The launches of a layer of a denoising step and what they cost the host, counted in the interpreter; none is made."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from tests.support import forked
from tests.support.launches import Commit, DenoisingStep, copied_bytes, counted, python_calls


def test_a_layer_of_a_denoising_step_and_of_a_commit_is_twelve_launches_and_six_operations():
    """At batch 1 over pages, with splits; torch's own operations are its products."""
    expected = Counter(
        ["rms_norms_forward", "attention_heads", "span_attention_forward", "span_attention_combine", "residual_norms",
         "router_scores", "routed_tokens", "expert_mlp_sort_slots", "expert_mlp_gate_up", "expert_mlp_product",
         "gated_product", "layer_end"]
    )  # fmt: skip
    for kind in ("sliding", "full"):
        for work in (DenoisingStep, Commit):
            launched, operations = counted(kind, work)
            assert launched == expected and sum(launched.values()) == 12
            assert set(operations) == {"aten.mm.default"} and sum(operations.values()) <= 6, operations


def test_a_layer_of_a_denoising_step_makes_few_calls_of_python_functions(tmp_path):
    """Each costs the host a tenth of a microsecond or more, whatever it does; 262 and 256 in Python 3.11.

    A process of its own counts: among the threads of others a profiled call of Python 3.11 did not end once.
    """
    forked.run(_write_python_calls, tmp_path / "calls.json", log=tmp_path / "log")
    assert all(100 < calls <= 273 for calls in json.loads((tmp_path / "calls.json").read_text()))


def _write_python_calls(file: Path) -> None:
    file.write_text(json.dumps([python_calls(kind) for kind in ("sliding", "full")]))


def test_a_layer_in_fp8_launches_as_much_as_one_in_bf16():
    """One of our launches replaces torch's product in bf16."""
    (plain, products), (in_fp8, operations) = (counted("sliding", quantize=form) for form in (None, "fp8"))
    assert sum(in_fp8.values()) + sum(operations.values()) == sum(plain.values()) + sum(products.values())
    assert in_fp8 - plain == Counter(fp8_product=5) and not plain - in_fp8 and not operations


def test_a_layer_of_a_commit_copies_no_keys_and_values():
    """At the released model's sizes; they are written into their pages where they are normed and turned."""
    assert [copied_bytes(kind) for kind in ("sliding", "full")] == [0, 0]
