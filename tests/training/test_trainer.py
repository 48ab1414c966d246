"""Training from Python: `blockdiff.train` and `Trainer` give what the command gives, and take parts of one's own."""

from __future__ import annotations

import functools
import json
import warnings
from dataclasses import dataclass
from datetime import date
from typing import Any

import pytest
import torch
from torch import Tensor

import blockdiff
from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.diffusion.corruption import MaskCorruption
from blockdiff.errors import BlockdiffError, DataError, RecipeError, RunError
from blockdiff.metrics import METRICS, Metric, reproducible
from blockdiff.models.diffusion_gemma import DiffusionGemmaFamily
from blockdiff.objective import Objective
from blockdiff.plots.curves import draw_curves
from blockdiff.recipes.sudoku import alphabet, make_splits
from blockdiff.training import data as training_data
from blockdiff.training import export
from blockdiff.training.checkpoint_content import steps_saved
from tests.support import forked, trainings_in_turn
from tests.support.little_model import LITTLE, save_preset

STEPS = 4


@dataclass(frozen=True)
class Squared:
    """A schedule of one's own: alpha(t) = (1 - t)^2 to a power."""

    power: float = 2.0

    def alpha(self, t: Tensor) -> Tensor:
        return (1 - t) ** self.power

    def noise(self, t: Tensor) -> Tensor:
        return 1 - self.alpha(t)

    def derivative(self, t: Tensor) -> Tensor:
        return -self.power * (1 - t) ** (self.power - 1)


class HarderLast:
    """A weight that sees tokens and noise: corrupted positions count twice."""

    def weigh(self, schedule: Any, t_BC: Tensor, tokens_BCL: Tensor, is_corrupted_BCL: Tensor) -> Tensor:
        return 1.0 + is_corrupted_BCL.float()


class MostlyCanvas(Objective):
    """The usual objective with a tenth of its next-token loss."""

    def forward(self, batch):
        losses = super().forward(batch)
        return losses | {"ar": losses["ar"] / 10}


class Rising(Squared):
    """More noise keeps more tokens in its second half."""

    def alpha(self, t: Tensor) -> Tensor:
        return (1 - 2 * t).abs()


class OneNumber(Squared):
    def alpha(self, t: Tensor) -> Any:
        return 0.5


@dataclass(frozen=True)
class Noise:
    """A corruption that gives whatever `make` makes of a canvas."""

    make: Any

    def corrupt(self, canvas_BCL: Tensor, alpha_BC: Tensor, address_BC3: Tensor, seed: int) -> Any:
        return self.make(canvas_BCL)


class TooMany:
    def weigh(self, schedule: Any, t_BC: Tensor, tokens_BCL: Tensor, is_corrupted_BCL: Tensor) -> Tensor:
        return torch.ones(*t_BC.shape, 7)


class OneLoss(Objective):
    def forward(self, batch):
        return super().forward(batch)["canvas"]


class LossesByPosition(Objective):
    def forward(self, batch):
        losses = super().forward(batch)
        return losses | {"canvas": losses["canvas"].expand(2)}


class SameName(Objective):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.vocabulary = torch.nn.Module()
        self.vocabulary.table = torch.nn.Parameter(torch.zeros(3))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """The recipe of a little run as a mapping, with its rows in memory."""
    folder = tmp_path_factory.mktemp("inputs")
    character_tokenizer(alphabet(4)).save_pretrained(folder / "tokenizer")
    save_preset(folder / "little.json", LITTLE)
    rows = make_splits(4, {"train": 24, "test": 6}, seed=0)
    return {
        "seed": 1,
        "model": {"preset": str(folder / "little.json"), "tokenizer": str(folder / "tokenizer")},
        "data": {"train": rows["train"], "heldout": rows["test"], "cache": str(folder / "cache")},
        "optim": {"lr": 1e-3, "schedule": "constant", "warmup_steps": 1},
        "train": {"steps": STEPS, "batch_size": 6, "log_every": 1, "eval_every": 2, "save_every": 2},
    }


@pytest.mark.quick
def test_a_run_is_made_of_a_directory_that_is_there(tmp_path):
    with pytest.raises(RunError, match=r"nowhere: .*directory"):
        blockdiff.Run(tmp_path / "nowhere")


def weights_of(run: blockdiff.Run) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in run.model().state_dict().values()])


@pytest.fixture(scope="module")
def plain(inputs, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "draw_curves", draw_curves)
        return blockdiff.train(inputs, output=tmp_path_factory.mktemp("plain") / "run")


@pytest.mark.quick
def test_a_mapping_with_rows_in_memory_trains_a_whole_run(plain):
    assert [record["step"] for record in plain.records if record["kind"] == "train"] == [1, 2, 3, 4]
    assert [record["step"] for record in plain.records if record["kind"] == "heldout"] == [0, 2, 4]
    for name in ("recipe.yaml", "metrics.jsonl", "curves.png", "report.json", "data.json", "model"):
        assert (plain.directory / name).exists(), name
    assert plain.best is None
    assert plain.model().vocab_size == 9


@pytest.mark.quick
def test_a_loss_that_has_nothing_to_score_is_in_no_record(inputs, tmp_path):
    run = blockdiff.train(inputs, ("train.steps=1", "objective.ar_loss=none"), tmp_path / "run")
    assert [key for record in run.records for key in record if "ar_loss" in key] == []
    [record] = [record for record in run.records if record["kind"] == "train"]
    assert record["loss"] == record["canvas_loss"] > 0


@pytest.mark.quick
def test_overrides_and_the_metric_that_decides(inputs, tmp_path):
    run = blockdiff.train(inputs, ("train.steps=2", "evaluation.best=heldout_canvas_loss"), tmp_path / "run")
    step, value = run.best
    assert (step, value) == (2, run.records[-1]["heldout_canvas_loss"])
    (run.directory / "report.json").unlink()  # as in a run that goes on or was stopped
    assert run.best == (step, value)
    with pytest.raises(RunError, match=r"report\.json: "):
        _ = run.report


@pytest.mark.quick
def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(inputs, plain, tmp_path):
    blockdiff.train(inputs, ("train.steps=2",), tmp_path / "run")
    run = blockdiff.train(inputs, (), tmp_path / "run", resume=True)
    assert torch.equal(weights_of(run), weights_of(plain))
    assert reproducible(run.records) == reproducible(plain.records)


@pytest.mark.quick
def test_a_disk_without_room_for_the_model_is_a_line_with_what_is_saved_and_the_run_goes_on(
    inputs, plain, tmp_path, monkeypatch
):
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("blockdiff.checkpoint.write._write", full)
        words = r"model: cannot be written \(No space left .*; make room, .*; the run is saved at step 4, go on with "
        with pytest.raises(RunError, match=words):
            blockdiff.train(inputs, (), tmp_path / "run")
    run = blockdiff.train(inputs, (), tmp_path / "run", resume=True)
    assert torch.equal(weights_of(run), weights_of(plain))


@pytest.mark.quick
def test_a_model_that_is_not_what_the_run_wrote_at_its_end_is_one_line_and_no_done(
    inputs, tmp_path, monkeypatch, capsys
):
    file = tmp_path / "run" / "model" / "model.safetensors"
    for spoil, said in (
        (lambda *_, **__: file.write_bytes(file.read_bytes()[:-1] + b"\0"), "is not as it was written"),
        (lambda *_, **__: file.unlink(), "cannot be read"),
    ):
        monkeypatch.setattr(export, "draw_curves", spoil)
        with pytest.raises(RunError, match=rf"model\.safetensors: {said}.*step 2"):
            blockdiff.train(inputs, ["train.steps=2", "train.eval_every=0"], tmp_path / "run", resume=True)
    assert "done" not in capsys.readouterr().out


def test_epochs_say_how_long_a_run_is(inputs, plain, tmp_path, capsys):
    # 24 examples in batches of 6: four steps are an epoch
    run = blockdiff.train(inputs, ("train.epochs=1",), tmp_path / "run")
    assert torch.equal(weights_of(run), weights_of(plain))
    assert reproducible(run.records) == reproducible(plain.records)
    assert "4 optimiser steps of 6 examples, 1 canvas of each, 1.0 epochs" in capsys.readouterr().out
    longer = blockdiff.train(inputs, ("train.epochs=1.2",), run.directory, resume=True)
    assert longer.records[-1]["step"] == 5  # 4.8 of them
    with pytest.raises(RunError, match=r"step 5.*train\.epochs = 1"):
        blockdiff.train(inputs, ("train.epochs=1",), run.directory, resume=True)


@pytest.mark.quick
def test_a_run_goes_on_with_smaller_micro_batches_and_says_that_sums_are_rounded_otherwise(inputs, plain, tmp_path):
    blockdiff.train(inputs, ("train.steps=2",), tmp_path / "run")
    smaller = ("train.micro_batch_size=4", "train.activation_checkpointing=true")
    with pytest.warns(UserWarning, match="saved with train.micro_batch_size null, resumed with 4"):
        run = blockdiff.train(inputs, smaller, tmp_path / "run", resume=True)
    torch.testing.assert_close(weights_of(run), weights_of(plain), atol=1e-5, rtol=1e-4)


def test_a_run_goes_on_with_other_passes_and_says_that_sums_are_rounded_otherwise(inputs, plain, tmp_path):
    sweep = ("objective.sweep=true",)
    blockdiff.train(inputs, (*sweep, "train.steps=2"), tmp_path / "run")
    with pytest.warns(UserWarning, match="saved with objective.sweep true, resumed with false"):
        run = blockdiff.train(inputs, (), tmp_path / "run", resume=True)
    assert not torch.equal(weights_of(run), weights_of(plain))  # rounded differently
    torch.testing.assert_close(weights_of(run), weights_of(plain), atol=1e-5, rtol=1e-4)


def test_a_run_is_not_resumed_with_other_rows_and_the_refusal_has_words_and_no_hashes(inputs, plain):
    data = {**inputs["data"], "train": inputs["data"]["train"][1:]}
    with pytest.raises(RunError, match=r"\(data\.train\)"):
        blockdiff.train({**inputs, "data": data}, ("train.steps=5",), plain.directory, resume=True)


def test_a_streamed_run_goes_on_with_rows_that_have_changed_and_says_so(inputs, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in inputs["data"]["train"]))
    streamed = inputs | {"data": {"train": str(file), "streaming": {"shuffle_buffer": 8}}}
    streamed["train"] = {**inputs["train"], "eval_every": 0}

    def go_on(steps: int) -> None:
        blockdiff.train(streamed, [f"train.steps={steps}"], tmp_path / "run", resume=True)

    go_on(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        go_on(2)
    file.write_text(file.read_text().replace("1", "2", 1))
    with pytest.warns(UserWarning, match=r"rows of data\.train have changed"):
        go_on(3)


def test_a_run_is_replaced_when_that_is_asked_for_and_the_new_one_can_begin(inputs, tmp_path):
    short = ("train.steps=2", "train.save_every=1", "train.eval_every=0")
    run = blockdiff.train(inputs, short, tmp_path / "run")
    (run.directory / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match="one of them"):
        blockdiff.train(inputs, short, run.directory, resume=True, overwrite=True)
    with pytest.raises(RunError, match=r"^model\.path: .*--overwrite"):
        of_itself = {**inputs, "model": {"path": str(run.directory / "model")}, "lora": "none"}
        blockdiff.train(of_itself, short, run.directory, overwrite=True)
    with pytest.raises(BlockdiffError):
        blockdiff.train(inputs, (*short, "model.tokenizer=/nowhere"), run.directory, overwrite=True)
    assert [*steps_saved(run.directory)] == [1, 2]
    again = blockdiff.train(inputs, (*short, "train.steps=1", "seed=5"), run.directory, overwrite=True)
    assert [*steps_saved(again.directory)] == [1] and {record["step"] for record in again.records} == {1}
    assert (run.directory / "notes.txt").read_text() == "mine"


def test_a_run_that_failed_before_its_first_record_is_gone_on_with(inputs, tmp_path, monkeypatch):
    with monkeypatch.context() as failing:
        failing.setattr(blockdiff.Trainer, "evaluate", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            blockdiff.train(inputs, output=tmp_path / "run")
    assert blockdiff.train(inputs, output=tmp_path / "run", resume=True).records


@pytest.mark.quick
def test_a_run_is_not_started_over_and_an_unknown_key_is_refused(inputs, plain):
    with pytest.raises(RunError, match=r"already.*run"):
        blockdiff.train(inputs, output=plain.directory)
    with pytest.raises(RecipeError, match="did you mean"):
        blockdiff.Trainer({**inputs, "trian": {}}, output="run")
    with pytest.raises(RecipeError, match="output: missing"):
        blockdiff.Trainer(inputs)
    with pytest.raises(TypeError, match="schedul"):
        blockdiff.train(inputs, output="run", schedul=Squared())


PARTS = {
    "schedule": Squared(3.0),
    "weight": HarderLast(),
    "objective": MostlyCanvas,
    "optimiser": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.5),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_of_ones_own_trains_is_recorded_and_resumes_with_it_alone(name, inputs, plain, tmp_path):
    part = {name: PARTS[name]}
    two = ("train.steps=2",)
    run = blockdiff.train(inputs, two, tmp_path / "run", **part)
    with pytest.raises(RunError, match=rf"(objective|given)\.{name} .*\S+\.\S+.*, not "):
        blockdiff.train(inputs, (), run.directory, resume=True)
    resumed = blockdiff.train(inputs, (), run.directory, resume=True, **part)
    whole = blockdiff.train(inputs, (), tmp_path / "whole", **part)
    assert torch.equal(weights_of(resumed), weights_of(whole))
    assert not torch.equal(weights_of(whole), weights_of(plain))
    with pytest.raises(RunError, match=rf"(objective|given)\.{name} "):
        blockdiff.train(inputs, ("train.steps=5",), plain.directory, resume=True, **part)


def test_other_values_of_a_part_are_another_part(inputs, tmp_path):
    blockdiff.train(inputs, ("train.steps=2",), tmp_path / "run", schedule=Squared(3.0))
    with pytest.raises(RunError, match=r"schedule .*Squared.*3\.0.*, not .*Squared.*2\.0"):
        blockdiff.train(inputs, (), tmp_path / "run", resume=True, schedule=Squared(2.0))


def test_what_the_sampler_has_to_know_comes_from_the_objects(inputs, tmp_path):
    run = blockdiff.train(inputs, ("train.steps=1",), tmp_path / "run", schedule=Squared(3.0))
    written = (run.directory / "model" / "blockdiff.json").read_text()
    assert "Squared" in written and "3.0" in written
    assert json.loads(written)["prompts"] == "raw"


def test_a_run_that_is_resumed_a_day_later_trains_on_the_tokens_of_its_first_day(inputs, tmp_path, monkeypatch):
    class Days(date):
        now = 3

        @classmethod
        def today(cls):
            return date(2026, 3, cls.now)

    monkeypatch.setattr(training_data, "date", Days)
    turn = "{% generation %}{{ messages[1].content ~ eos_token }}{% endgeneration %}"
    path = tmp_path / "dated.jinja"
    path.write_text("{{ strftime_now('%-d') ~ messages[0].content }}{% if messages[1] %}" + turn + "{% endif %}")
    dated = inputs | {"data": inputs["data"] | {"chat": True, "template": str(path)}}
    part = blockdiff.train(dated, ("train.steps=2",), tmp_path / "run")
    Days.now = 4
    resumed = blockdiff.train(dated, (), part.directory, resume=True)
    later = blockdiff.train(dated, (), tmp_path / "later")
    Days.now = 3
    whole = blockdiff.train(dated, (), tmp_path / "whole")
    assert torch.equal(weights_of(resumed), weights_of(whole)) and not torch.equal(weights_of(whole), weights_of(later))
    assert json.loads((resumed.directory / "data.json").read_text())["day"] == "2026-03-03"
    assert json.loads((resumed.directory / "model" / "blockdiff.json").read_text())["prompts"] == "chat"


def test_the_schedule_scales_the_rates_of_every_parameter_group_of_ones_own_optimiser(inputs, tmp_path):
    def make(parameters):
        first, *others = parameters
        return torch.optim.SGD([{"params": [first], "lr": 0.5}, {"params": others}], lr=0.1)

    rates: list[list[float]] = []

    class Seeing(blockdiff.Callback):
        def on_step(self, trainer):
            rates.append([group["lr"] for group in trainer.built.optimiser.param_groups])

    settings = ("optim.schedule=linear", "optim.warmup_steps=0", "train.steps=2")
    blockdiff.train(inputs, settings, tmp_path / "run", optimiser=make, callbacks=[Seeing()])
    first, second = rates
    assert first == pytest.approx([5 * first[1], first[1]]) and second == pytest.approx([5 * second[1], second[1]])
    assert second == pytest.approx([0.05, 0.01])  # down to a tenth at the last step


@pytest.mark.quick
def test_callbacks_hear_of_steps_records_and_checkpoints(inputs, tmp_path):
    heard: list[Any] = []

    class Watching(blockdiff.Callback):
        def on_start(self, trainer):
            heard.append(("start", trainer.step))

        def on_step(self, trainer):
            heard.append(("step", trainer.step))

        def on_record(self, trainer, record):
            heard.append((record["kind"], record["step"]))

        def on_save(self, trainer):
            assert (trainer.directory / "checkpoints" / f"step-{trainer.step}").is_dir()
            heard.append(("save", trainer.step))

        def on_end(self, trainer):
            assert (trainer.directory / "model").is_dir()
            heard.append(("end", trainer.step))

    blockdiff.train(inputs, ("train.steps=2",), tmp_path / "run", callbacks=[Watching()])
    steps = [("train", 1), ("step", 1), ("train", 2), ("step", 2), ("save", 2), ("heldout", 2)]
    assert heard == [("start", 0), ("heldout", 0), *steps, ("end", 2)]


@pytest.mark.quick
def test_a_method_that_is_overridden_is_called_and_the_rest_stays(inputs, plain, tmp_path):
    class Watching(blockdiff.Trainer):
        def evaluate(self, step):
            return {**super().evaluate(step), "heldout_mood": 1.0}

    run = Watching(inputs, output=tmp_path / "run").fit()
    assert [record["heldout_mood"] for record in run.records if record["kind"] == "heldout"] == [1.0] * 3
    assert torch.equal(weights_of(run), weights_of(plain))
    with pytest.raises(RunError, match=r"given\.trainer .*Watching.*null"):
        blockdiff.train(inputs, ("train.steps=5",), run.directory, resume=True)


def test_rows_in_memory_are_checked_and_named_like_those_of_a_file(inputs, tmp_path):
    rows = [*inputs["data"]["train"][:3], {"prompt": "1"}]
    with pytest.raises(DataError, match=r"rows:4: response"):
        blockdiff.train({**inputs, "data": {**inputs["data"], "train": rows}}, output=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_with_rows_in_memory_is_not_resumed_by_the_command(plain):
    with pytest.raises(RecipeError, match=r"data\.train"):
        blockdiff.train(plain.directory / "recipe.yaml", output=plain.directory, resume=True)


def test_a_run_that_is_past_its_last_step_is_refused(inputs, plain):
    with pytest.raises(RunError, match=r"step 4.*train\.steps = 3"):
        blockdiff.train(inputs, ("train.steps=3",), plain.directory, resume=True)


@pytest.mark.quick
def test_a_model_that_does_not_fit_is_refused_before_its_data_are_read(inputs, tmp_path, monkeypatch):
    monkeypatch.setattr("blockdiff.memory.total_bytes", lambda device: 55_000)
    recipe = {**inputs, "data": {"train": [{"prompt": "no response"}], "cache": "off"}}
    with pytest.raises(BlockdiffError, match=r"weights .*gradients .*optimiser "):
        blockdiff.train(recipe, output=tmp_path / "run")


def test_what_a_family_does_not_support_is_refused_before_its_data_are_read(inputs, tmp_path, monkeypatch):
    monkeypatch.setattr(DiffusionGemmaFamily, "predictions", ("posterior",))
    monkeypatch.setattr(DiffusionGemmaFamily, "corruptions", ("uniform",))
    recipe = {**inputs, "data": {"train": [{"prompt": "no response"}], "cache": "off"}}
    with pytest.raises(BlockdiffError, match=r"diffusion_gemma .*leave_one_out"):
        blockdiff.train(recipe, ("objective.prediction=leave_one_out",), tmp_path / "run")
    with pytest.raises(BlockdiffError, match=r"diffusion_gemma .*mask"):
        blockdiff.train(recipe, (), tmp_path / "run", corruption=MaskCorruption(3))


def test_two_trainings_of_one_program_on_two_ranks(inputs, tmp_path):
    recipe = {**inputs, "train": {"steps": 1, "batch_size": 4}}
    forked.run_ranks(2, trainings_in_turn.two_trainings_and_a_failure, tmp_path, recipe)
    for rank in (0, 1):
        first, second, third, late = (tmp_path / f"said-{rank}").read_text().splitlines()
        assert (first, second) == ("first: trained", "second: trained")
        assert "already holds a run saved up to step 1" in third
        assert late == "late: the processes of this program have parted after an error; start the program again"


WRONG_PARTS = {
    "no optimiser": ({"optimiser": lambda parameters: None}, "optimiser: .*NoneType"),
    "a closure": ({"optimiser": torch.optim.LBFGS}, "optimiser: LBFGS computes the loss several times in a step"),
    "one callback": ({"callbacks": blockdiff.Callback()}, "callbacks: a Callback"),
    "a class of callbacks": ({"callbacks": [blockdiff.Callback]}, "callbacks: the class Callback"),
    "a rising schedule": ({"schedule": Rising()}, r"objective\.schedule: Rising: alpha\(t\) rises after t = 0\.5"),
    "a schedule of one number": ({"schedule": OneNumber()}, r"alpha\(t\) and noise\(t\) must be tensors of the shape"),
    "a corruption of one tensor": (
        {"corruption": Noise(lambda x: x)},
        r"Noise.*torch\.int64 \[6, 1, 9\];",
    ),
    "a corruption of other tokens": (
        {"corruption": Noise(lambda x: (x.float(), x > 0))},
        r"torch\.float32 \[6, 1, 9\] and torch\.bool \[6, 1, 9\]; .* torch\.int64 \[6, 1, 9\]",
    ),
    "a corruption of tokens that there are none of": (
        {"corruption": Noise(lambda x: (x + 100_000, x >= 0))},
        r"objective\.corruption: Noise\.corrupt\(\) returned token 100\d{3}; it should return tokens of the model",
    ),
    "a corruption of negative tokens": (
        {"corruption": Noise(lambda x: (x * 0 - 1, x >= 0))},
        r"Noise\.corrupt\(\) returned token -1;",
    ),
    "a weight of another shape": (
        {"weight": TooMany()},
        r"TooMany\.weigh\(\) returned weights \[6, 1, 7\]; .* \[6, 1, 9\]",
    ),
    "one loss": ({"objective": OneLoss}, "objective: its forward gave a Tensor; return a dict"),
    "losses by position": ({"objective": LossesByPosition}, r"its forward gave \[2\] for the loss canvas; return"),
    "a name of the model": ({"objective": SameName}, r"objective: its tensor vocabulary\.table has the name of a"),
}


@pytest.mark.quick
@pytest.mark.parametrize("name", WRONG_PARTS)
def test_a_part_that_cannot_work_is_one_line(name, inputs, tmp_path):
    parts, said = WRONG_PARTS[name]
    with pytest.raises(BlockdiffError, match=said):
        blockdiff.train(inputs, output=tmp_path / "run", **parts)


@pytest.mark.quick
def test_an_output_that_can_be_no_directory_is_one_line(inputs, tmp_path):
    (tmp_path / "file").write_text("")
    for where in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(RunError, match=r"file.*output"):
            blockdiff.train(inputs, output=where)


@pytest.mark.quick
def test_a_recipe_that_is_built_directly_is_refused_in_one_line(inputs):
    with pytest.raises(RecipeError, match=r"^Recipe: .*train\.stepz.*train\.steps\?$"):
        blockdiff.Recipe(**{**inputs, "train": {"stepz": 1}})
    with pytest.raises(RecipeError, match=r"^Recipe: model: "):
        blockdiff.Recipe(data={"train": "rows.jsonl"}, train={"steps": 1, "batch_size": 1})


def test_a_metric_of_ones_own_decides_which_weights_are_the_best(inputs, tmp_path, monkeypatch, capsys):
    class Moody(blockdiff.Trainer):
        def evaluate(self, step):
            return {**super().evaluate(step), "heldout_mood": 1.0 - step}

    decides = ("evaluation.best=heldout_mood",)
    with pytest.raises(RunError, match=r"'heldout_mood'.*blockdiff\.metrics\.METRICS"):
        Moody(inputs, decides, tmp_path / "run").fit()
    monkeypatch.setitem(METRICS, "heldout_mood", Metric("heldout", "mood", "higher"))
    run = Moody(inputs, decides, tmp_path / "run").fit()
    assert run.best == (2, -1.0)
    assert "the weights of step 2, best heldout_mood -1" in capsys.readouterr().out
    blockdiff.train(inputs, (*decides, "train.steps=1"), tmp_path / "other")
    assert "evaluation.best: this evaluation has no heldout_mood" in capsys.readouterr().out


def test_what_an_objective_has_beside_its_model_goes_to_the_device_and_trains(inputs, tmp_path):
    moved = []

    class Scaled(MostlyCanvas):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.scale = torch.nn.Parameter(torch.ones(()))

        def to(self, device):
            moved.append(device)
            return super().to(device)

        def forward(self, batch):
            losses = super().forward(batch)
            return losses | {"canvas": losses["canvas"] * self.scale}

    class Watching(blockdiff.Callback):
        def on_end(self, trainer):
            assert moved == [trainer.ranks.device] and trainer.built.objective.scale.item() < 1

    blockdiff.train(inputs, ("train.steps=1",), tmp_path / "run", objective=Scaled, callbacks=[Watching()])
    assert len(moved) == 1
