"""The count of answers with a held digit: it is there in all of them, whatever the model."""

from __future__ import annotations

import json

import blockdiff
from benchmarks.controls import Counts, ambiguous, counted
from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.recipes import sudoku
from blockdiff.sampling import Generation, Sampler
from tests.little_model import LITTLE


def test_a_held_digit_is_in_every_answer_and_the_two_solutions_are_told_apart(tmp_path) -> None:
    preset = tmp_path / "preset.json"
    preset.write_text(json.dumps(LITTLE))
    puzzles = ambiguous(["14.332....3.431.=", "1234341221434321="])
    assert [(puzzle.prompt, puzzle.cell) for puzzle in puzzles] == [("14.332....3..31.=", 8)]
    wanted = puzzles[0].wanted
    assert sudoku.is_solved(puzzles[0].prompt, wanted)
    generation = Generation(max_new_tokens=18, max_steps=3, eos_ids=(1,))
    sampler = Sampler(blockdiff.init(preset, seed=0), character_tokenizer(sudoku.alphabet(4)), generation)
    free, *held = counted(sampler, puzzles * 5)
    assert held == [Counts("template", 5, 0, 5), Counts("regex", 5, 0, 5)] and free.held < 5
