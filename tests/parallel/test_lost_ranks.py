"""Ranks of which one dies, hangs, is told to stop or takes long: the others end in time with one clear line."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from blockdiff.errors import RESUME, RunError
from blockdiff.parallel.ranks import Ranks
from tests import losing_ranks
from tests.forked import run
from tests.losing_ranks import ENDLESS, TIMEOUT

KILLED = -9


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The outcome of every scenario of `losing_ranks`."""
    directory = tmp_path_factory.mktemp("runs")
    run(losing_ranks.everything, directory, log=directory / "log")
    return {path.stem: json.loads(path.read_text()) for path in directory.glob("*.json")}


@pytest.mark.parametrize(
    ("name", "codes", "words", "saved"),
    [
        ("killed", [1, KILLED], f"rank 0: another rank was lost during step 5; {RESUME}", [3]),
        ("main_killed", [KILLED, 1], f"rank 1: another rank was lost during step 5; {RESUME}", [3]),
        (
            *("killed_while_saving", [1, KILLED]),
            *(f"rank 0: another rank was lost during saving step 6; {RESUME}", [3, 6]),
        ),
        (
            *("main_killed_while_saving", [KILLED, 1]),
            *(f"rank 1: another rank was lost during saving step 6; {RESUME}", [3]),
        ),
        ("main_killed_while_meeting", [KILLED, 1], f"rank 1: another rank was lost during the start; {RESUME}", []),
        ("killed_in_backward", [1, KILLED], f"rank 0: another rank was lost during step 1; {RESUME}", []),
    ],
)
def test_a_killed_rank_ends_the_other_at_once_with_a_line_that_says_when(found, name, codes, words, saved):
    outcome = found[name]
    assert outcome["codes"] == codes
    assert [said for said in outcome["words"] if said] == [words]
    assert outcome["saved"] == saved


def test_a_hung_rank_ends_the_other_after_the_timeout(found):
    outcome = found["hung"]
    assert outcome["codes"] == [1, KILLED]  # the one that hangs is the test's to kill
    assert outcome["words"][0] == f"rank 0: another rank hung for {TIMEOUT:g} s during step 5; {RESUME}"
    assert outcome["seconds"] > TIMEOUT


@pytest.mark.parametrize("name", ["told_to_stop", "left_by_torchrun"])
def test_a_signal_to_one_rank_or_the_loss_of_the_launcher_saves_and_ends_both_after_the_same_step(found, name):
    outcome = found[name]
    assert outcome["codes"] == [143, 143]
    assert outcome["words"] == ["stopped by SIGTERM after step 4"] * 2
    assert outcome["saved"] == [3, 4]


def test_work_of_the_main_process_may_take_longer_than_the_timeout(found):
    assert found["long_work"]["codes"] == [0, 0]
    assert found["long_work"]["saved"] == [6, 9]


def test_the_others_do_not_wait_for_a_main_process_that_failed(found):
    outcome = found["failed_work"]
    assert outcome["codes"] == [1, 1]
    assert outcome["words"][0] == "a bad row"
    assert outcome["words"][1].startswith("another rank failed during reading the data")


def test_a_rank_that_measures_longer_than_the_timeout_is_waited_for(found):
    outcome = found["long_measuring"]
    assert outcome["codes"] == [0, 0] and outcome["pieces"] == 4
    assert outcome["seconds"] > 2 * TIMEOUT


@pytest.mark.parametrize(
    ("name", "codes", "words", "pieces"),
    [
        ("killed_measuring", [KILLED, 1], "rank 1: another rank was lost", 1),
        ("killed_while_waiting", [1, KILLED], "rank 0: another rank was lost", None),
        ("hung_measuring", [KILLED, 1], f"rank 1: another rank hung for {TIMEOUT:g} s", 1),
    ],
)
def test_a_rank_lost_while_it_measures_or_waits_ends_the_other(found, name, codes, words, pieces):
    outcome = found[name]
    assert outcome["codes"] == codes
    assert outcome["pieces"] == pieces or (pieces is None and 0 < outcome["pieces"] < ENDLESS)
    said = f"{words} during the evaluation after step 5; {RESUME}"
    assert [line for line in outcome["words"] if line] == [said]


def test_the_others_do_not_wait_for_a_rank_whose_measuring_failed(found):
    outcome = found["failed_measuring"]
    assert outcome["codes"] == [1, 1]
    assert outcome["words"][0] == "the held-out loss is not finite"
    assert outcome["words"][1] == "another rank failed during measuring; its message says why"


def test_a_signal_to_a_rank_that_waits_makes_the_one_that_measures_leave(found):
    outcome = found["told_to_stop_measuring"]
    assert outcome["codes"] == [143, 143] and outcome["pieces"] < ENDLESS
    assert outcome["words"] == ["stopped by SIGTERM after step 5"] * 2


@pytest.mark.parametrize(("name", "line"), [("bad_row", 7), ("bad_row_on_one_rank", 8)])
def test_a_bad_row_in_the_middle_of_a_run_saves_the_steps_before_it_whichever_ranks_meet_it(found, name, line):
    outcome = found[name]
    assert outcome["codes"] == [1, 1]
    assert outcome["saved"] == [3, 4]
    said = f"rows.jsonl:{line}: not valid JSON; the run is saved at step 4, {RESUME}"
    assert outcome["words"] == [said] * 2


def test_a_killed_rank_of_a_mesh_ends_all_others_with_a_line_each(found):
    outcome = found["killed_of_two_by_two"]
    assert outcome["codes"] == [1, 1, 1, KILLED]
    said = f"another rank was lost during step 5; {RESUME}"
    assert outcome["words"] == [*[f"rank {rank}: {said}" for rank in range(3)], ""]
    assert outcome["saved"] == [3]


def test_a_hung_rank_of_a_mesh_ends_all_others_after_the_timeout(found):
    outcome = found["hung_of_two_by_two"]
    assert outcome["codes"] == [1, 1, 1, KILLED] and outcome["saved"] == [3]
    # the first to give up ends those that still wait for it
    hung, lost = (f"another rank {what} during step 5; {RESUME}" for what in (f"hung for {TIMEOUT:g} s", "was lost"))
    assert {line.partition(": ")[2] for line in outcome["words"][:3]} <= {hung, lost}
    assert any(hung in line for line in outcome["words"])


def test_nan_on_one_rank_of_a_mesh_stops_all_with_the_same_line_and_nothing_is_lost(found):
    outcome = found["poisoned_of_one_by_two"]
    assert outcome["codes"] == [1] * 2 and outcome["saved"] == [3]
    assert len(set(outcome["words"])) == 1
    assert "step 5: the canvas loss is not finite" in outcome["words"][0]


@pytest.mark.parametrize(
    ("name", "lost", "what"),
    [
        ("killed_elsewhere_of_two_by_two", 2, "was lost"),
        ("main_killed_elsewhere_of_two_by_two", 0, "was lost"),
        ("hung_elsewhere", 1, f"hung for {TIMEOUT:g} s"),
    ],
)
def test_ranks_that_wait_where_nothing_fails_end_with_a_line_each_when_another_one_is_lost(found, name, lost, what):
    outcome = found[name]
    ranks = range(len(outcome["codes"]))
    assert outcome["codes"] == [KILLED if rank == lost else 1 for rank in ranks]
    said = "blockdiff: error: rank {}: another rank {} during step 5; {}\n"
    assert outcome["words"] == ["" if rank == lost else said.format(rank, what, RESUME) for rank in ranks]
    assert name != "hung_elsewhere" or outcome["seconds"] < 30 * TIMEOUT


def test_ranks_that_wait_where_nothing_fails_end_when_another_one_leaves_with_an_error(found):
    outcome = found["failed_elsewhere"]
    assert outcome["codes"] == [1, 1]
    said = f"blockdiff: error: rank 0: another rank was lost during step 5; {RESUME}\n"
    assert outcome["words"] == [said, "a bad row"]


def test_ranks_that_are_busy_for_long_or_leave_early_are_not_lost(found):
    outcome = found["busy_and_early_of_two_by_two"]
    assert outcome["codes"] == [0] * 4 and outcome["words"] == ["finished"] * 4
    assert outcome["seconds"] > TIMEOUT


def test_work_of_the_main_process_is_done_although_another_rank_is_lost(found):
    outcome = found["work_worth_its_end"]
    assert outcome["codes"] == [1, KILLED] and outcome["pieces"] == 1
    assert outcome["words"] == [f"rank 0: another rank was lost during saving step 5; {RESUME}", ""]


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
    lost = pytest.raises(RunError, match="rank 0: another rank was lost during step 1")
    with lost, Ranks(torch.device("cpu"), 0, 2).guarded("step 1"):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1234")
