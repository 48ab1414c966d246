"""Trackers: what reaches them, that TensorBoard's files hold it, and how a name that cannot work is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from accelerate import tracking
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from blockdiff.errors import RunError
from blockdiff.training.trackers import IDENTITY, Trackers, check, numbers

pytestmark = pytest.mark.quick

LEVELS = [
    {"t_from": 0.0, "t_to": 0.2, "kept_count": 3, "kept_loss": 0.5},
    {"t_from": 0.2, "t_to": 0.4, "kept_count": 0},
]


def curves(run_dir):
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return {tag: [(e.step, round(e.value, 4)) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_files_hold_every_number_of_a_record_at_its_step(tmp_path):
    trackers = Trackers(["tensorboard"], tmp_path, {"seed": 1, "optim": {"lr": 0.1, "freeze": ["a"], "ema": None}})
    trackers.log({"step": 10, "loss": 2.5, "lr": 0.1})
    trackers.log({"step": 10, "heldout_canvas_loss": 3.25, "heldout_levels": LEVELS})
    trackers.log({"step": 20, "loss": 1.5, "lr": 0.05})
    trackers.close()
    assert curves(tmp_path) == {
        "loss": [(10, 2.5), (20, 1.5)],
        "lr": [(10, 0.1), (20, 0.05)],
        "heldout_canvas_loss": [(10, 3.25)],
        "heldout_kept_count/0.1": [(10, 3.0)],
        "heldout_kept_loss/0.1": [(10, 0.5)],
        "heldout_kept_count/0.3": [(10, 0.0)],
    }
    settings = next((tmp_path / "tensorboard").rglob("hparams.yml")).read_text()
    assert "optim.lr: 0.1" in settings and "seed: 1" in settings and "ema" not in settings


def test_a_resumed_run_replaces_what_a_killed_one_wrote_after_its_last_checkpoint(tmp_path):
    killed = Trackers(["tensorboard"], tmp_path, {})
    for step in (10, 20, 30):
        killed.log({"step": step, "loss": float(step)})
    resumed = Trackers(["tensorboard"], tmp_path, {}, start=20)
    resumed.log({"step": 30, "loss": 31.0})
    for each in (killed, resumed):
        each.close()
    assert curves(tmp_path)["loss"] == [(10, 10.0), (20, 20.0), (30, 31.0)]


def test_only_finite_numbers_are_handed_over():
    record = {"step": 3, "kind": "train", "loss": float("nan"), "is_best": True, "texts": ["a"], "grad_norm": 2}
    assert numbers(record) == {"grad_norm": 2}
    named = {"step": 3, "heldout_places": [0.5, 0.25], "rewards": {"sudoku": 1.0}}
    assert numbers(named) == {"heldout_place/1": 0.5, "heldout_place/2": 0.25, "reward/sudoku": 1.0}


def test_without_trackers_nothing_is_made(tmp_path):
    trackers = Trackers([], tmp_path, {"seed": 1})
    trackers.log({"step": 1, "loss": 1.0})
    trackers.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tensorbord", r"^train\.trackers: .*'tensorbord'.*tensorboard"),
        ("excel", r"^train\.trackers: .*'excel'.*aim, clearml, .*, wandb"),
    ],
)
def test_an_unknown_tracker_is_refused_by_name(name, message):
    with pytest.raises(RunError, match=message):
        check(["tensorboard", name])


def test_a_tracker_that_is_not_installed_is_refused_with_the_command_that_installs_it(monkeypatch, tmp_path):
    monkeypatch.setattr(tracking, "_available_trackers", [])
    with pytest.raises(RunError, match=r"comet_ml .*comet-ml"):
        Trackers(["comet_ml"], tmp_path, {})


class Broken(tracking.TensorBoardTracker):
    """Starts, then fails at every record."""

    def log(self, values, step=None, **extra):
        raise ConnectionError("the server is gone\nand more")


def test_a_tracker_that_fails_during_the_run_is_left_out_and_the_others_go_on(monkeypatch, tmp_path):
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "aim", Broken)
    monkeypatch.setattr(tracking, "_available_trackers", ["aim", "tensorboard"])
    trackers = Trackers(["aim", "tensorboard"], tmp_path, {})
    with pytest.warns(UserWarning, match="aim gets no more metrics .the server is gone."):
        trackers.log({"step": 1, "loss": 1.0})
    trackers.log({"step": 2, "loss": 0.5})
    trackers.close()
    assert curves(tmp_path)["loss"] == [(1, 1.0), (2, 0.5)]


def test_a_tracker_that_does_not_start_ends_the_run_in_one_line(monkeypatch, tmp_path):
    (tmp_path / "tensorboard").write_text("in the way")
    with pytest.raises(RunError, match=r"^train\.trackers: tensorboard "):
        Trackers(["tensorboard"], tmp_path, {})


@pytest.fixture
def opened(monkeypatch):
    """The projects and settings of what was opened on a server."""
    opened = []

    class Server(tracking.GeneralTracker):
        name, requires_logging_directory, tracker = "wandb", False, None

        def __init__(self, project, **settings):
            opened.append((project, settings))

    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "wandb", Server)
    monkeypatch.setattr(tracking, "_available_trackers", ["wandb"])
    return opened


def test_a_resumed_run_is_the_same_run_on_a_server(opened, tmp_path):
    run = tmp_path / "chat"
    run.mkdir()
    for start in (0, 40):
        Trackers(["wandb"], run, {}, start)
    (project, first), (_, second) = opened
    assert project == "blockdiff" and first["name"] == "chat" and first["resume"] == "allow"
    assert first["id"] == second["id"]


def test_a_kill_while_the_identity_is_written_leaves_no_half_of_it(opened, monkeypatch, tmp_path):
    def half(self, text, **settings):
        self.write_bytes(text[: len(text) // 2].encode())
        raise KeyboardInterrupt

    with monkeypatch.context() as dying:
        dying.setattr(Path, "write_text", half)
        with pytest.raises(KeyboardInterrupt):
            Trackers(["wandb"], tmp_path, {})
    for _ in range(2):
        Trackers(["wandb"], tmp_path, {})
    (_, first), (_, second) = opened
    assert first["id"] == second["id"]
    assert [path.name for path in tmp_path.iterdir()] == [IDENTITY]


def test_every_tracker_is_finished_once_even_if_the_first_try_is_broken_off(monkeypatch, tmp_path):
    finished = []

    def server(called):
        class Server(tracking.GeneralTracker):
            name, requires_logging_directory, tracker = called, False, None

            def __init__(self, *_, **settings):
                pass

            def finish(self):
                finished.append(called)
                if len(finished) == 1:
                    raise KeyboardInterrupt

        return Server

    for name in ("aim", "swanlab"):
        monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, name, server(name))
    monkeypatch.setattr(tracking, "_available_trackers", ["aim", "swanlab"])
    trackers = Trackers(["aim", "swanlab"], tmp_path, {})
    with pytest.raises(KeyboardInterrupt):
        trackers.close()
    trackers.close()
    trackers.close()
    assert sorted(finished) == ["aim", "swanlab"]
