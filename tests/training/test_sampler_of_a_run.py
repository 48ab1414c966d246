"""The evaluations of a run sample with one sampler, which goes on with the steps that it has captured."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.metrics import SAMPLES, read
from blockdiff.recipes.sudoku import alphabet, make_splits
from blockdiff.sampling import engine as engines
from blockdiff.training import export
from blockdiff.training.recipe import Recipe
from blockdiff.training.samples import sample_prompts
from blockdiff.training.trainer import Trainer
from tests.support.little_model import LITTLE, save_preset
from tests.support.recorder import Recorder
from tests.training.test_samples import ALONE, EXACT

pytestmark = pytest.mark.quick


class Counting(Trainer):
    """A trainer that notes, of every evaluation, how many steps ran, were captured and were replayed."""

    makes_anew = False

    def sample(self, step: int) -> Any:
        if self.makes_anew:
            self.sampler = None
        found = super().sample(step)
        self.is_kept.append(self.sampler._engine is not None)
        self.counts.append((self.recorder.runs, self.recorder.captures, self.recorder.replays))
        return found


class Anew(Counting):
    makes_anew = True


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A little run that samples after every step, with averaged weights."""
    monkeypatch.setattr(export, "write_results", lambda *_: None)
    monkeypatch.setattr("blockdiff.kernels.span_attention.torch.SMALL_SCORES", -1)
    character_tokenizer(alphabet(4)).save_pretrained(tmp_path / "tokenizer")
    save_preset(tmp_path / "little.json", LITTLE)
    rows = make_splits(4, {"train": 8, "test": 1}, seed=0)
    model = {"preset": str(tmp_path / "little.json"), "tokenizer": str(tmp_path / "tokenizer"), "kernels": "torch"}
    return {
        "seed": 1,
        "model": model,
        "data": {"train": rows["train"], "cache": str(tmp_path / "cache")},
        "optim": {"lr": 1e-2, "schedule": "constant", "warmup_steps": 1, "ema": 0.5},
        "train": {"steps": 2, "batch_size": 4, "log_every": 1},
        "evaluation": {"prompts": rows["test"], "prompts_every": 1},
        "generation": {"max_steps": 16},
    }


def test_evaluations_capture_once_and_sample_with_the_weights_of_their_step(recipe, tmp_path, monkeypatch):
    texts = []
    for kind in (Counting, Anew):
        recorder = Recorder()
        monkeypatch.setattr(engines, "step_capture", lambda model, recorder=recorder: recorder)
        trainer = kind(Recipe.model_validate(recipe), output=tmp_path / kind.__name__)
        trainer.recorder, trainer.counts, trainer.is_kept = recorder, [], []
        trainer.fit()
        texts.append([{**text, "seconds": 0} for text in read(tmp_path / kind.__name__ / SAMPLES)])
        assert trainer.is_kept == [False, True, True]  # the first optimiser step may take memory that nobody counted
        runs, captures, replays = (b - a for a, b in zip(*trainer.counts[1:], strict=True))
        assert replays > 5 and ((runs, captures) == (0, 0)) == (kind is Counting)
    assert texts[0] == texts[1] and len({text["text"] for text in texts[0]}) == 3


@pytest.mark.parametrize(("free", "is_kept"), [(124, False), (125, True)])
def test_a_sampler_keeps_no_memory_that_a_training_step_needs(free, is_kept, monkeypatch):
    released = []
    sampler = SimpleNamespace(generation=SimpleNamespace(max_steps=4), release=lambda: released.append(True))
    found = {"solved_share": 0.0, "steps_per_canvas": 1.0, "tokens_per_forward": 1.0, "count": 1, "errors": 0}
    monkeypatch.setattr(
        "blockdiff.training.samples.evaluate", lambda *_, **__: {**found, "seconds": 0.0, "records": []}
    )
    answers = dict(max_memory_allocated=300, memory_allocated=200, empty_cache=None, mem_get_info=(free, 1000))
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    sample_prompts(sampler, [], EXACT, SimpleNamespace(device=torch.device("cuda")))
    assert bool(released) != is_kept
    sample_prompts(sampler, [], EXACT, ALONE)
    assert len(released) == (not is_kept)
