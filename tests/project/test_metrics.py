"""metrics.jsonl: whole lines, cut back on resume; the clock that gives tokens per second."""

from __future__ import annotations

import json

import pytest
import torch

from blockdiff.errors import RunError
from blockdiff.metrics import METRICS, MetricsLog, read, reproducible
from blockdiff.training.report import Clock

pytestmark = pytest.mark.quick


def test_records_come_back_as_they_were_written(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    records = [
        {"step": 1, "kind": "train", "loss": 0.1 + 0.2},
        {"step": 1, "kind": "heldout", "heldout_ar_loss": 1e-30},
    ]
    for record in records:
        log.append(record)
    assert read(log.path) == records
    assert [json.loads(line) for line in log.path.read_text().splitlines()] == records


def test_cutting_back_keeps_what_the_checkpoint_had_seen(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step in (2, 4, 6, 8):
        log.append({"step": step, "loss": 1.0 / step})
    assert [record["step"] for record in log.cut(5)] == [2, 4]
    log.append({"step": 6, "loss": 0.5})
    assert [record["step"] for record in read(log.path)] == [2, 4, 6]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_line_cut_short_by_a_kill_is_left_out_and_the_next_one_is_whole(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append({"step": 1, "loss": 1.0})
    log.append({"step": 2, "loss": 12345.0})
    # Cut inside the number: what is left would still be valid JSON with a brace, and a wrong value without.
    log.path.write_bytes(log.path.read_bytes()[:-4])
    assert [record["step"] for record in read(log.path)] == [1]
    assert [record["step"] for record in log.cut(2)] == [1]
    log.append({"step": 2, "loss": 0.5})
    assert read(log.path)[-1] == {"step": 2, "loss": 0.5}


def test_cutting_back_a_run_that_never_logged_is_fine(tmp_path):
    assert MetricsLog(tmp_path / "metrics.jsonl").cut(0) == []


@pytest.mark.parametrize("line", ["not json", "[1]", '{"loss": 1.0}', "3", '{"step": 1, "loss": NaN}', "\udcff"])
def test_a_line_that_is_no_record_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line.encode("utf-8", "surrogateescape") + b"\n")
    with pytest.raises(RunError, match=r"metrics\.jsonl:2: "):
        read(path)


def test_a_number_that_json_cannot_hold_is_refused(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        MetricsLog(tmp_path / "metrics.jsonl").append({"step": 1, "loss": float("nan")})


def test_what_clocks_and_machines_say_is_not_reproducible():
    rates = {"tokens_per_second": 1.0, "scored_tokens_per_second": 1.0, "seconds": 1.0, "memory_gib": 1.0}
    records = [{"step": 1, "loss": 1.0, **rates}, {"step": 1, "sample_accuracy": 0.5, "sample_seconds": 3.0}]
    assert reproducible(records) == [{"step": 1, "loss": 1.0}, {"step": 1, "sample_accuracy": 0.5}]


def test_a_value_in_words_has_its_unit_or_its_name():
    words = {"canvas_loss": 3.25, "sample_accuracy": 0.5, "sample_steps_per_canvas": 6.04, "tokens_per_second": 12345.6}
    assert [METRICS[key].text(value) for key, value in words.items()] == [
        *("canvas loss 3.2500", "50.0% of sampled prompts right", "6.0 steps per canvas", "12,346 tokens/s"),
    ]


def test_the_clock_leaves_evaluation_out_and_goes_on_from_earlier_seconds(monkeypatch):
    now = 7.0
    monkeypatch.setattr("blockdiff.training.report.time.perf_counter", lambda: now)
    clock = Clock(torch.device("cpu"), seconds=100.0)
    clock.count(torch.tensor([500, 100]))
    now += 2.0
    with clock.stopped():
        now += 30.0
    assert clock.read() == {"tokens_per_second": 250.0, "scored_tokens_per_second": 50.0, "seconds": 102.0}
    clock.count(torch.tensor([7, 1]))
    now += 0.5
    assert clock.read() == {"tokens_per_second": 14.0, "scored_tokens_per_second": 2.0, "seconds": 102.5}
