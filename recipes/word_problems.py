"""Word problems of a few steps with their working in sentences: data that a causal model learns in minutes.

A problem is a chain of events that change a number of things; the answer states each step with its sum, as the answers
of GSM8K do. Names, things, events and numbers are drawn anew for every row.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path

from blockdiff.errors import DataError
from blockdiff.files import write_text
from blockdiff.terminal import counted

TOKENISED, VOCABULARY = 4000, 768  # rows from which the tokenizer is learnt, and the largest number of its tokens

NAMES = """
Ann Ben Clara Dan Eva Finn Greta Hugo Ida Jonas Kira Leo Mia Nils Olga Paul Rosa Sam Tina Vera
""".split()  # noqa: SIM905 (a list would take ten lines)
THINGS = """
apples pears books stamps marbles shells coins cards pencils stickers tickets cookies eggs beads stones flowers bottles
candles ribbons buttons
""".split()  # noqa: SIM905
PLACES = (
    *("at the market", "from a friend", "in the garden", "at school", "from an aunt", "in the attic", "at the fair"),
    "in a shop",
)
GAINS = ("buys", "finds", "gets", "wins", "collects", "picks up")
LOSSES = ("sells", "loses", "gives away", "breaks", "drops", "hands out")
OPENINGS = (
    "{name} has {n} {thing}.",
    "At first there are {n} {thing} in the box of {name}.",
    "{name} starts the week with {n} {thing}.",
    "On Monday {name} counts {n} {thing}.",
)
WORKED = (
    "{name} {verb} {k} {thing} {place}, which makes {a} {sign} {b} = {total}.",
    "After {name} {verb} {k} of them there are {a} {sign} {b} = {total} {thing}.",
    "Then {name} {verb} {k} {thing}, so {a} {sign} {b} = {total} are left.",
    "Because {name} {verb} {k} {place}, we have {a} {sign} {b} = {total} {thing} now.",
)
TIMES = (
    "Each of the {a} {thing} becomes {k}, that is {a} * {k} = {total}.",
    "{name} makes {k} out of every one: {a} * {k} = {total} {thing}.",
)


def row(rng: random.Random) -> dict[str, str]:
    """Draw a row: the prompt is a problem, the response its working and answer."""
    name, thing, total = rng.choice(NAMES), rng.choice(THINGS), rng.randint(11, 60)
    said, worked = [rng.choice(OPENINGS).format(name=name, n=total, thing=thing)], []
    for _ in range(rng.randint(4, 5)):
        place, kind = rng.choice(PLACES), rng.random()
        if kind < 0.2 and total < 50:
            k = rng.randint(2, 3)
            said.append(f"Then every one becomes {k}.")
            worked.append(rng.choice(TIMES).format(name=name, thing=thing, a=total, k=k, total=total * k))
            total *= k
            continue
        gains = kind < 0.6 or total < 12
        k, verb = rng.randint(2, 40 if gains else total - 2), rng.choice(GAINS if gains else LOSSES)
        said.append(f"{name} {verb} {k} {place}.")
        after = total + k if gains else total - k
        filled = {"a": total, "sign": "+" if gains else "-", "b": k, "k": k, "total": after}
        worked.append(rng.choice(WORKED).format(name=name, thing=thing, verb=verb, place=place, **filled))
        total = after
    prompt = f"{' '.join(said)} How many {thing} are there in the end?\n"
    return {"prompt": prompt, "response": f"{' '.join(worked)} #### {total}"}


def rows(count: int, seed: int | str) -> list[dict[str, str]]:
    """Return `count` rows; the same seed gives the same ones."""
    rng = random.Random(seed)
    return [row(rng) for _ in range(count)]


def write_splits(directory: str | Path, counts: Mapping[str, int], seed: int = 0) -> list[str]:
    """Write NAME.jsonl for every split, and a tokenizer learnt from the first one into `directory`/tokenizer.

    Returns a line per split with its number of rows. Raises DataError if there is no split.
    """
    from blockdiff.data.tokenizer import byte_level_bpe, write_tokenizer

    if not counts:
        raise DataError("no split was asked for; name at least one, such as train=1000")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    splits = {name: rows(count, f"{seed} {name}") for name, count in counts.items()}
    texts = (each["prompt"] + each["response"] for each in next(iter(splits.values()))[:TOKENISED])
    write_tokenizer(byte_level_bpe(texts, VOCABULARY), directory / "tokenizer")
    for name, some in splits.items():
        write_text(directory / f"{name}.jsonl", "".join(json.dumps(each) + "\n" for each in some))
    return [f"{name}: {counted(len(some), 'word problem')}" for name, some in splits.items()]
