"""The report of a run: figures from its records, and a line that leaves out what was not measured."""

from __future__ import annotations

import json

import pytest
import torch

from blockdiff.training import report as module
from blockdiff.training.report import diverging, report_line, run_report

pytestmark = pytest.mark.quick

CPU = torch.device("cpu")


def trained(step, seconds, speed, loss):
    rates = {"grad_norm": 1.0, "lr": 0.1, "tokens_per_second": speed, "scored_tokens_per_second": speed / 2}
    return {
        "step": step,
        "kind": "train",
        "loss": loss + 1,
        "canvas_loss": loss,
        "ar_loss": 1.0,
        "seconds": seconds,
        **rates,
    }


RECORDS = [
    {"step": 0, "kind": "heldout", "heldout_canvas_loss": 5.0, "heldout_ar_loss": 6.0},
    trained(10, 10.0, 1000.0, 3.0) | {"memory_gib": 2.0},
    {"step": 10, "kind": "heldout", "heldout_canvas_loss": 2.5, "heldout_ar_loss": 3.0},
    {"step": 10, "kind": "sample", "sample_accuracy": 0.5},
    {"step": 12, "kind": "skipped", "skipped": 1, "not_finite": "canvas loss", "not_finite_ids": [4]},
    {"step": 13, "kind": "skipped", "skipped": 2, "not_finite": "canvas loss", "not_finite_ids": [4]},
    trained(20, 110.0, 100.0, 2.0) | {"memory_gib": 2.5, "skipped": 2},
    {"step": 20, "kind": "heldout", "heldout_canvas_loss": 2.75, "heldout_ar_loss": 2.5},
    {
        "step": 20,
        "kind": "sample",
        "sample_accuracy": 0.25,
        "sample_steps_per_canvas": 6.04,
        "sample_tokens_per_forward": 2.0,
    },
]


def reported(records=RECORDS, **changes):
    given = {"run": "chat", "batch_size": 8, "examples": 64, "device": CPU, "world": 2, **changes}
    return run_report(records, **given)


def test_a_loss_that_rises_far_above_its_first_values_is_told_and_one_bad_batch_is_not():
    losses = [7.6, 7.5, 7.7, 7.6, 7.4, 5.0, 20.0, 5.1, 5.0, 4.9]
    records = [trained(step, 1.0, 1.0, loss) for step, loss in enumerate(losses)]
    assert diverging(records) is None and diverging(records[:4]) is None
    records += [trained(10 + step, 1.0, 1.0, 16.0) for step in range(5)]
    assert diverging(records).startswith("canvas loss is 16 over the last 5 records and was 7.56 over the first")


def test_the_report_counts_examples_and_keeps_last_and_best_figures():
    report = reported()
    assert (report["steps"], report["examples_seen"], report["epochs"], report["skipped"]) == (20, 160, 2.5, 2)
    assert (report["loss"], report["canvas_loss"], report["ar_loss"]) == (3.0, 2.0, 1.0)
    assert [
        report[f"{part}heldout_canvas_loss{end}"] for part, end in (("", ""), ("best_", ""), ("best_", "_step"))
    ] == [
        *(2.75, 2.5, 10),
    ]
    assert (report["heldout_ar_loss"], report["best_heldout_ar_loss"], report["best_heldout_ar_loss_step"]) == (
        2.5,
        2.5,
        20,
    )
    assert (report["sample_accuracy"], report["best_sample_accuracy"], report["sample_steps_per_canvas"]) == (
        0.25,
        0.5,
        6.04,
    )
    assert json.loads(json.dumps(report, allow_nan=False)) == report


def test_the_speed_is_over_the_whole_run_not_a_mean_of_means():
    report = reported()
    assert report["tokens_per_second"] == pytest.approx((10 * 1000 + 100 * 100) / 110, abs=0.1)
    assert report["scored_tokens_per_second"] == pytest.approx(report["tokens_per_second"] / 2, abs=0.1)
    assert (report["seconds"], report["memory_gib"]) == (110.0, 2.5)


def test_the_line_has_everything_that_quotes_a_run():
    line = report_line(reported() | {"device": "Some CPU", "versions": {"torch": "2.13"}, "commit": "abc"})
    assert line == (
        "chat, 20 optimiser steps, 160 examples, 2.5 epochs, 2 optimiser steps skipped, "
        "canvas loss 2.0000, next-token loss 1.0000, "
        "held-out canvas loss 2.7500 (best 2.5000 at step 10), held-out next-token loss 2.5000, "
        "25.0% of sampled prompts right (best 50.0% at step 10), 6.0 steps per canvas, 182 tokens/s, 2.5 GiB, "
        "0:01:50 of training, 2 x Some CPU, torch 2.13, commit abc"
    )


def test_what_was_not_measured_is_left_out():
    record = trained(10, 4000.0, 10.0, 3.0)
    del record["ar_loss"]
    line = report_line(reported([record], examples=None) | {"commit": None})
    assert line.startswith("chat, 10 optimiser steps, 80 examples, canvas loss 3.0000, 10 tokens/s, 1:06:40 of tr")
    assert "None" not in line and "commit" not in line and "next-token" not in line
    assert report_line(reported([])).startswith("chat, 0 optimiser steps, 0 examples, 0 epochs, 2 x ")


def test_a_trainer_may_log_what_it_likes():
    report = reported([{"step": 5, "kind": "train", "mine": 1.0}])
    assert (report["steps"], report["seconds"], report["tokens_per_second"]) == (5, None, None)
    assert report_line(report).startswith("chat, 5 optimiser steps, 40 examples, 0.6 epochs, 2 x ")


def test_the_commit_is_that_of_the_checkout_and_of_no_other_repository(tmp_path, monkeypatch):
    import subprocess

    def git(*words):
        mail = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *mail, *words], check=True, capture_output=True)

    file = tmp_path / "report.py"
    file.write_text("1")
    monkeypatch.setattr(module, "__file__", str(file))
    assert reported([])["commit"] is None
    git("init")
    (tmp_path / "other").write_text("1")
    git("add", "other")
    git("commit", "-m", "one")
    assert reported([])["commit"] is None  # an installed copy inside somebody's repository
    git("add", "report.py")
    git("commit", "-m", "two")
    clean = reported([])["commit"]
    assert clean is not None and len(clean) == 10
    file.write_text("2")
    assert reported([])["commit"] == f"{clean}+changes"


def test_reinforcement_learning_has_seen_answers_and_says_its_last_reward():
    report = reported([trained(n, 1.0, 2.0, 0.0) | {"reward": n / 4} for n in (1, 2)], examples=None)
    assert report["reward"] == 0.5 and ", 16 answers, " in report_line(report) and "reward 0.500" in report_line(report)
