"""The output of training: the lines for each kind of record, the table of what trains, the bar on a terminal."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from blockdiff.training.freeze import PartCounts
from blockdiff.training.progress import Progress

pytestmark = pytest.mark.quick

TRAINED = {
    "step": 20,
    "kind": "train",
    "loss": 4.5,
    "canvas_loss": 3.25,
    "ar_loss": 1.25,
    "grad_norm": 0.5,
    "lr": 1.5e-4,
    "tokens_per_second": 12345.6,
    "scored_tokens_per_second": 2345.6,
    "memory_gib": 3.21,
}


def test_rows_are_counted_while_they_are_read(monkeypatch):
    show, out = Progress(100, is_shown=True), io.StringIO()
    show.console = Console(file=out, width=200)
    monkeypatch.setattr("time.perf_counter", iter(0.6 * n for n in range(9)).__next__)
    rows = list("abcdefgh")
    assert list(show.reading(iter(rows))) == rows
    assert out.getvalue() == "data      1 row read in 1 s\ndata      3 rows read in 2 s\ndata      7 rows read in 5 s\n"


def test_a_wait_is_said_at_longer_and_longer_intervals(monkeypatch):
    monkeypatch.setattr("blockdiff.terminal.FIRST_SECONDS", 0.02)
    show, out = Progress(100, is_shown=True), io.StringIO()
    show.console = Console(file=out, width=200)
    with show.waiting("model     reading a"):
        until = time.monotonic() + 60
        while out.getvalue().count("\n") < 2 and time.monotonic() < until:
            time.sleep(0.01)
    said = out.getvalue()
    assert said.count("\n") > 1 and said.startswith("model     reading a, 0 s so far\n")
    time.sleep(0.2)
    assert out.getvalue() == said


def shown(*records, is_shown=True, is_terminal=False, rows=None, **changes):
    show = Progress(100, is_shown)
    out = io.StringIO()
    show.console = Console(file=out, width=200, force_terminal=is_terminal, highlight=False, soft_wrap=True)
    if rows is not None:
        show.parts(rows)
    with show.running(0):
        for record in records:
            show.step(record["step"])
            show.record(record | changes)
    return out.getvalue()


def test_a_line_has_the_loss_and_its_parts_the_rate_both_speeds_the_memory_and_the_time_left():
    assert shown(TRAINED).startswith(
        "step  20/100  loss 4.5000  canvas loss 3.2500  next-token loss 1.2500  gradient norm 0.50  "
        "learning rate 1.5e-04  12,346 tokens/s  2,346 scored tokens/s  3.2 GiB  left 0:00:0"
    )


def test_without_an_ar_loss_the_canvas_loss_stands_alone():
    without = {key: value for key, value in TRAINED.items() if key != "ar_loss"}
    assert "20/100  canvas loss 3.2500  gradient" in shown(without)


def test_skipped_steps_are_counted_where_there_are_any():
    assert "2 optimiser steps skipped" in shown(TRAINED, skipped=2)
    assert "skipped" not in shown(TRAINED, skipped=0)


def test_a_skipped_step_is_told_with_its_part_and_samples():
    record = {"step": 7, "kind": "skipped", "skipped": 2, "not_finite": "AR loss", "not_finite_ids": [5, 12]}
    assert shown(record) == "step   7/100  2 optimiser steps skipped  the AR loss is not finite (sample ids 5, 12)\n"


def test_held_out_losses_come_with_their_accuracies():
    record = {
        "step": 50,
        "kind": "heldout",
        "heldout_canvas_loss": 2.0,
        "heldout_canvas_accuracy": 0.5,
        "heldout_ar_loss": 3.0,
    }
    record |= {"heldout_corrupted_loss": 4.0, "heldout_corrupted_accuracy": 0.125}
    assert shown(record) == (
        "step  50/100  held-out canvas loss 2.0000  50.0% right  held-out corrupted loss 4.0000  12.5% right"
        "  held-out next-token loss 3.0000\n"
    )


def test_sampled_prompts_show_accuracy_and_steps_per_canvas():
    record = {
        "step": 50,
        "kind": "sample",
        "sample_accuracy": 0.25,
        "sample_count": 32,
        "sample_steps_per_canvas": 6.04,
    }
    assert shown(record | {"sample_tokens_per_forward": 2.46}) == (
        "step  50/100  25.0% of sampled prompts right  32 prompts  6.0 steps per canvas  2.5 tokens per forward\n"
    )
    for most, words in ((7, ""), (6, " (the limit: no canvas converged)")):
        assert shown(record | {"sample_max_steps": most}).endswith(f"  6.0 steps per canvas{words}\n")
    nothing = shown(record | {"sample_tokens_per_forward": None, "sample_steps_per_canvas": None})
    assert nothing == "step  50/100  25.0% of sampled prompts right  32 prompts\n"


def test_a_trainer_may_log_what_it_likes():
    record = {"step": 5, "kind": "train", "mine": 1.0, "its_words": "a", "its_parts": {"b": 1}}
    assert shown(record).startswith("step   5/100  mine 1.0000  left 0:00:0")
    assert "5/100" in shown({"step": 5, "kind": "train", "mine": 1.0}, is_terminal=True)


def test_the_table_of_what_trains_adds_up():
    table = shown(rows=[PartCounts("vocabulary", 1, 0, 24576), PartCounts("layers: mlp", 12, 1000, 24)])
    assert [line.split() for line in table.splitlines()] == [
        ["part", "tensors", "trains", "frozen"],
        ["vocabulary", "1", "-", "24,576"],
        ["layers:", "mlp", "12", "1,000", "24"],
        ["total", "13", "1,000", "24,600"],
    ]


def test_other_ranks_show_nothing():
    assert shown(TRAINED, is_shown=False, is_terminal=True, rows=[PartCounts("norm", 1, 1, 0)]) == ""


def test_on_a_terminal_a_bar_has_the_loss_and_the_speed():
    drawn = shown(TRAINED, is_terminal=True)
    bar = drawn[drawn.rindex("loss 4.5000") :]
    assert "━" in bar and "20/100" in bar and "12,346 tokens/s  3.2 GiB" in bar and "left" in bar


def test_in_a_notebook_the_bar_is_redrawn_in_its_place_without_further_packages(monkeypatch, capsys):
    pictures = []

    class Place:
        def update(self, bar):
            pictures.append(bar._repr_mimebundle_(include=[], exclude=[])["text/html"])

    monkeypatch.setattr("IPython.display.display", lambda bar, display_id: Place())
    show = Progress(100, is_shown=True)
    show.console = Console(force_jupyter=True, width=200)
    with show.running(0):
        show.step(20)
        show.record(TRAINED)
    assert all(part in pictures[-1] for part in ("loss 4.5000", "━", "20/100", "12,346 tokens/s  3.2 GiB", "left"))
    assert capsys.readouterr().out.startswith("step  20/100  loss 4.5000")
