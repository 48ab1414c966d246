"""The work of the host for a request apart from the model: it does not grow with the number of the model's tensors."""

from __future__ import annotations

import json

from benchmarks import step_operations, variants
from tests.support.launches import RequestPath, calls_within


def test_a_request_more_costs_as_many_calls_of_python_functions_in_a_model_of_many_tensors() -> None:
    """A step that opens rows walks the weights once, for one request and for eight."""
    # the first engine of a process fills caches, whose keys the later ones are compared with
    _, few, many = (RequestPath(tensors).counted(calls_within, repeats=2) for tensors in (40, 40, 2000))
    one, eight = "admitting one request in a step", "admitting eight requests in a step"
    for part in few.keys() - {one, eight}:
        assert few[part] == many[part] <= 400, part
    assert few[eight] - few[one] == many[eight] - many[one] <= 7 * 120
    assert 0 < many[one] - few[one] <= 3 * (2000 - 40)


def test_a_constrained_step_has_few_operations_though_its_canvas_has_256_places():
    """The walks over them are two launches."""
    plain, constrained = (step_operations.counted(kind) for kind in ("plain", "JSON"))
    assert constrained["automaton_look_ahead"] == constrained["automaton_reach"] == 1
    assert constrained["vocabulary_classes"] == 1 and 50 < sum(plain.values()) < 100
    assert sum(count for name, count in constrained.items() if name.startswith("torch ")) <= 300


def test_every_variant_that_a_gpu_is_to_judge_runs(capsys):
    variants.main(["experts", "--device", "cpu", "--preset", "tiny"])
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {line["part"] for line in found} == {"experts"}
