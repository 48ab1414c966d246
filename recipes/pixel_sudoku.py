"""4x4 sudokus as images: the puzzles of `sudoku`, drawn at random places and sizes, in two sets of digits and noise.

A row names its image; its response is the puzzle as it reads (`.` for a blank), `=`, and the solved cells.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from blockdiff.files import write_text
from blockdiff.recipes import sudoku
from blockdiff.seeding import Stream, integers
from blockdiff.terminal import counted

if TYPE_CHECKING:
    from PIL.Image import Image

SIDE = 64  # pixels of an image
CELL = (13, 15)  # pixels of a cell, fewest and most
MARGIN = 3  # least pixels of a cell that its digit leaves free
PAPER, INK = (150, 255), (0, 90)  # grey values
NOISE = 24  # a pixel's grey value changes by this at most
ADDRESS = 200  # n + ADDRESS keys the draws of split n; different from the addresses of the puzzles
CHOICES = 40  # random numbers of an image besides its noise: 8 of the board, 2 of each cell

IMAGE_TOKENS = ("<|image>", "<|image|>", "<image|>")  # around an image, and in its place
# Images go to the tower as they are, in patches of 8 pixels of which each 2 x 2 become one token.
PROCESSOR = {
    "image_processor_type": "Gemma4ImageProcessor",
    "patch_size": 8,
    "pooling_kernel_size": 2,
    "max_soft_tokens": 70,
    "do_resize": False,
}

# Two sets of the digits 1 to 4, five pixels wide and seven high; a row's bits are read from the left.
DIGITS = (
    (
        (0b00100, 0b01100, 0b00100, 0b00100, 0b00100, 0b00100, 0b01110),
        (0b01110, 0b10001, 0b00001, 0b00110, 0b01000, 0b10000, 0b11111),
        (0b11111, 0b00010, 0b00100, 0b00010, 0b00001, 0b10001, 0b01110),
        (0b00010, 0b00110, 0b01010, 0b10010, 0b11111, 0b00010, 0b00010),
    ),
    (
        (0b00010, 0b00110, 0b01010, 0b00010, 0b00010, 0b00010, 0b00010),
        (0b11110, 0b00001, 0b00001, 0b01110, 0b10000, 0b10000, 0b11111),
        (0b11110, 0b00001, 0b00001, 0b01110, 0b00001, 0b00001, 0b11110),
        (0b10001, 0b10001, 0b10001, 0b11111, 0b00001, 0b00001, 0b00001),
    ),
)


def draw(puzzle: str, seed: int, split: int, number: int) -> Image:
    """Return the grey image, SIDE x SIDE pixels, of a 4x4 puzzle (`.` for a blank).

    seed, split and number (of the puzzle in its split) key the position, size and look of board and digits.
    """
    import torch
    from PIL import Image, ImageChops

    address = (ADDRESS + split, number)
    numbers = integers(seed, Stream.DATA, address, CHOICES, 1 << 16).tolist()
    noise = integers(seed, Stream.DATA, (*address, 1), SIDE * SIDE, 256).to(torch.uint8)

    def between(number: int, bounds: tuple[int, int]) -> int:
        return bounds[0] + (number * (bounds[1] - bounds[0] + 1) >> 16)

    cell = between(numbers[0], CELL)
    room = (0, SIDE - 4 * cell - 1)
    left, top = between(numbers[1], room), between(numbers[2], room)
    height = between(numbers[3], (8, cell - MARGIN))
    paper, ink = between(numbers[4], PAPER), between(numbers[5], INK)
    digits = DIGITS[numbers[6] & 1]
    picture = Image.new("L", (SIDE, SIDE), paper)
    for line in range(5):
        grey = ink if line % 2 == 0 else (paper + ink) // 2  # lines around boxes are darker
        picture.paste(grey, (left, top + line * cell, left + 4 * cell + 1, top + line * cell + 1))
        picture.paste(grey, (left + line * cell, top, left + line * cell + 1, top + 4 * cell + 1))
    width = max(5, height * 5 // 7)
    for place, character in enumerate(puzzle):
        if character != ".":
            pixels = bytes(255 * (row >> 4 - x & 1) for row in digits[int(character) - 1] for x in range(5))
            digit = Image.frombytes("L", (5, 7), pixels).resize((width, height), Image.Resampling.BILINEAR)
            x = left + place % 4 * cell + 1 + between(numbers[8 + 2 * place], (0, cell - 1 - width))
            y = top + place // 4 * cell + 1 + between(numbers[9 + 2 * place], (0, cell - 1 - height))
            picture.paste(ink, (x, y), digit)
    grain = Image.frombytes("L", (SIDE, SIDE), noise.numpy().tobytes()).point(lambda value: value * 2 * NOISE // 255)
    return ImageChops.add(picture, grain, offset=-NOISE)


def is_solved(puzzle: str, text: str) -> bool:
    """Return whether the part of `text` after `=` solves the puzzle (16 cells, `.` for a blank).

    Raises DataError if `puzzle` is not a puzzle.
    """
    return sudoku.is_solved(puzzle, text.partition("=")[2])


def is_read(puzzle: str, text: str) -> bool:
    """Return whether the part of `text` before `=` is the puzzle."""
    return text.partition("=")[0].strip() == puzzle


def write_splits(directory: str | Path, counts: Mapping[str, int], seed: int = 0) -> list[str]:
    """Write NAME.jsonl and the images NAME/*.png of every split, and the tokenizer with its image processor.

    As in `sudoku.make_splits`, which raises the DataErrors, no solved grid is in two splits. Returns a line per split
    that describes its rows.
    """
    from blockdiff.data.tokenizer import character_tokenizer, write_tokenizer

    splits = sudoku.make_splits(4, counts, seed)
    directory = Path(directory)
    tokenizer = character_tokenizer(sudoku.alphabet(4))
    tokenizer.add_special_tokens({"additional_special_tokens": list(IMAGE_TOKENS)})
    write_tokenizer(tokenizer, directory / "tokenizer")
    write_text(directory / "tokenizer" / "preprocessor_config.json", json.dumps(PROCESSOR, indent=2) + "\n")
    lines = []
    for split, (name, rows) in enumerate(splits.items()):
        (directory / name).mkdir(parents=True, exist_ok=True)
        texts = []
        for number, row in enumerate(rows):
            puzzle, file = row["prompt"].rstrip("="), f"{name}/{number:05}.png"
            draw(puzzle, seed, split, number).save(directory / file)
            texts.append(json.dumps({"image": file, "prompt": "", "response": f"{puzzle}={row['response']}"}) + "\n")
        write_text(directory / f"{name}.jsonl", "".join(texts))
        lines.append(
            f"{name}: {counted(len(rows), 'image')} of puzzles from "
            + counted(len({row["response"] for row in rows}), "solved grid")
        )
    return lines
