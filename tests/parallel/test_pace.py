"""Ranks that work long, fail, are told to stop or meet a bad row: the others wait, or end with the same line."""

from __future__ import annotations

import json

import pytest
import torch

from blockdiff.errors import RunError
from blockdiff.parallel.ranks import Ranks
from tests.support import pace_ranks
from tests.support.forked import run_ranks


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """For each scenario of `pace_ranks` what both ranks say of it, and the steps that are saved."""
    directory = tmp_path_factory.mktemp("ranks")
    run_ranks(2, pace_ranks.everything, directory)
    ours, theirs = (json.loads((directory / f"said-{rank}.json").read_text()) for rank in (0, 1))
    return {name: (ours[name][0], theirs[name][0], ours[name][1]) for name in ours}


def test_a_rank_that_works_longer_than_the_timeout_is_waited_for(said):
    assert said["long"][:2] == (3, 0)


def test_the_others_do_not_wait_for_a_rank_whose_work_failed(said):
    line = "RunError: another rank failed during measuring; its message says why"
    assert said["failed"][:2] == ("RunError: the held-out loss is not finite", line)


def test_a_signal_to_a_rank_that_waits_makes_the_one_that_works_leave(said):
    assert said["stopped"][:2] == ("Interrupted: ", "Interrupted: ")


def test_the_others_read_what_the_main_process_has_written_and_do_not_wait_for_one_that_failed(said):
    assert said["first"][:2] == (True, True)
    line = "RunError: another rank failed during reading the data; its message says why"
    assert said["failed_first"][:2] == ("RunError: a bad row", line)


def test_a_signal_to_one_rank_saves_and_ends_both_after_the_same_step(said):
    assert said["told_to_stop"] == (*["Stopped: stopped by SIGTERM after step 4"] * 2, [3, 4])


@pytest.mark.parametrize(("name", "line"), [("bad_row", 7), ("bad_row_on_one_rank", 8)])
def test_a_bad_row_in_the_middle_of_a_run_saves_the_steps_before_it_whichever_ranks_meet_it(said, name, line):
    ours, theirs, saved = said[name]
    assert ours == theirs and ours.startswith(f"DataError: rows.jsonl:{line}: not valid JSON; the run is saved at step")
    assert saved == [3, 4]


@pytest.mark.quick
def test_other_errors_are_not_taken_for_a_lost_rank():
    with (
        pytest.raises(RuntimeError, match="shapes do not match"),
        Ranks(torch.device("cpu"), 0, 2).guarded("step 1"),
    ):
        raise RuntimeError("shapes do not match")


@pytest.mark.quick
def test_alone_no_error_is_a_lost_rank():
    with (
        pytest.raises(RuntimeError, match="Connection closed by peer"),
        Ranks(torch.device("cpu")).guarded("step 1"),
    ):
        raise RuntimeError("Connection closed by peer")


@pytest.mark.quick
def test_a_lost_rank_is_known_by_what_gloo_says():
    lost = pytest.raises(RunError, match=r"rank 0: .*step 1")
    with lost, Ranks(torch.device("cpu"), 0, 2).guarded("step 1"):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1234")
