"""Damage to a file of a run or of a model, and its outcome: refused, noticed, healed, or none of these.

`python -m benchmarks.kills` does this after its kills. A damaged run directory, cache or input is resumed to its end; a
damaged model is sampled from. Refused means one line that names the file and an exit code; noticed a warning that names
it; healed that nothing differs from the run without damage. Whatever else happens is called silent.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Change = Callable[[Path], object]  # of one file
SILENT = "silent"
PROMPT = "4.2332.423..1..2="


@dataclass(frozen=True)
class Damage:
    """One file and what is done to it.

    part: what the table calls the file; file: a pattern below the copy of everything; says: what a line has to say
    where that is not the name of the file; is_model: whether the file is that of the trained model.
    """

    part: str
    file: str
    what: str
    change: Change
    says: str = ""
    is_model: bool = False


def bytes_of(change: Callable[[bytes], bytes]) -> Change:
    """A change of a file's content."""
    return lambda file: file.write_bytes(change(file.read_bytes()))


def flip(content: bytes) -> bytes:
    """One bit of the last byte: in a safetensors file a number, in a text its end."""
    return content[:-1] + bytes([content[-1] ^ 1])


def middle_flip(content: bytes) -> bytes:
    """One bit in the middle."""
    half = len(content) // 2
    return content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :]


def json_of(change: Callable[[Any], object]) -> Change:
    """A change of the values in a JSON file, which stays JSON."""

    def apply(file: Path) -> None:
        values = json.loads(file.read_text(encoding="utf-8"))
        change(values)
        file.write_text(json.dumps(values), encoding="utf-8")

    return apply


def tensors_of(change: Callable[[dict[str, Tensor]], object]) -> Change:
    """A change of the tensors in a safetensors file, which stays one; the first float matrix has the key ""."""

    def apply(file: Path) -> None:
        tensors = load_file(file)
        name = next(name for name, each in tensors.items() if each.is_floating_point() and each.dim() > 1)
        changed = {"": tensors.pop(name)}
        change(changed)
        rest = {name: changed.pop("")} if "" in changed else {}
        save_file({**tensors, **rest, **changed}, file, metadata={"format": "pt"})

    return apply


def to_pipe(file: Path) -> None:
    """Something that can be opened and never ends."""
    file.unlink()
    os.mkfifo(file)


def lines_of(change: Callable[[list[str]], object]) -> Change:
    """A change of the list of lines in a text file."""

    def apply(file: Path) -> None:
        lines = file.read_text(encoding="utf-8").splitlines()
        change(lines)
        file.write_text("".join(line + "\n" for line in lines), encoding="utf-8")

    return apply


BYTES: dict[str, Change] = {
    "a bit flipped": bytes_of(flip),
    "512 bytes zeroed": bytes_of(lambda content: content[:-512] + bytes(512)),
    "cut in half": bytes_of(lambda content: content[: len(content) // 2]),
    "emptied": bytes_of(lambda content: b""),
    "removed": Path.unlink,
}
TENSORS: dict[str, Change] = {
    "a tensor as fp16": tensors_of(lambda tensors: tensors.update({"": tensors[""].half()})),
    "a tensor of another shape": tensors_of(lambda tensors: tensors.update({"": tensors[""][:-1].clone()})),
    "a tensor missing": tensors_of(lambda tensors: tensors.pop("")),
    "a tensor of NaN": tensors_of(lambda tensors: tensors[""].fill_(torch.nan)),
}
TEXT: dict[str, Change] = {
    "{}": bytes_of(lambda content: b"{}"),
    "[]": bytes_of(lambda content: b"[]"),
    "not UTF-8": bytes_of(lambda content: b"\xff\xfe" + content),
    "cut in half": BYTES["cut in half"],
    "removed": Path.unlink,
}
TRAINER: dict[str, Change] = {
    "another step": json_of(lambda values: values.update(step=3)),
    "no facts": json_of(lambda values: values.pop("facts")),
    "digests of another type": json_of(lambda values: values.update(digests=7)),
    "another weight decay": json_of(lambda values: values["optimiser"]["groups"][0].update(weight_decay=0.5)),
    "another seed": json_of(lambda values: values["facts"].update(seed=9)),
}
LOG: dict[str, Change] = {
    "removed": Path.unlink,
    "a digit changed": bytes_of(lambda content: content.replace(b"0.1", b"0.7", 1).replace(b"1", b"2", 1)),
    "a line missing": lines_of(lambda lines: lines.pop(1)),
    "two lines swapped": lines_of(lambda lines: lines.insert(0, lines.pop(2))),
    "not UTF-8": TEXT["not UTF-8"],
    "NaN": bytes_of(lambda content: re.sub(rb'"loss": [\d.]+', b'"loss": NaN', content, count=1)),
}
CACHE: dict[str, Change] = {
    "a bit flipped": bytes_of(middle_flip),
    "cut in half": BYTES["cut in half"],
    "removed": Path.unlink,
}
ROWS: dict[str, Change] = {
    "a row missing": lines_of(lambda lines: lines.pop()),
    "a row that is no JSON": lines_of(lambda lines: lines.append("{")),
}
UNKNOWABLE = ("a bit flipped", "512 bytes zeroed", "a tensor as fp16")
STEP = "run/checkpoints/step-6/"


def all_damages() -> Iterator[Damage]:
    """Every case, in the order of the table."""

    def of(part: str, file: str, changes: dict[str, Change], says: str = "", is_model: bool = False) -> list[Damage]:
        return [Damage(part, file, what, change, says, is_model) for what, change in changes.items()]

    yield from of("checkpoint: weights", STEP + "model.safetensors", BYTES | TENSORS)
    yield from of("checkpoint: optimiser", STEP + "optimiser.safetensors", BYTES | TENSORS)
    yield from of("checkpoint: average", STEP + "ema.safetensors", BYTES)
    yield from of("checkpoint: trainer.json", STEP + "trainer.json", TEXT | TRAINER, says="step-6")
    yield Damage("checkpoint: names", "run/checkpoints", "step-9 is a file", lambda d: (d / "step-9").touch(), "step-9")
    yield Damage("checkpoint: names", "run/checkpoints", "an unfinished one", lambda d: (d / ".step-9.1.tmp").mkdir())
    yield from of("metrics.jsonl", "run/metrics.jsonl", LOG)
    yield from of("samples.jsonl", "run/samples.jsonl", {"removed": Path.unlink, "emptied": BYTES["emptied"]})
    yield from of("recipe.yaml of the run", "run/recipe.yaml", {"emptied": BYTES["emptied"], "removed": Path.unlink})
    yield from of("token cache: tokens", "run.cache/*/tokens.arrow", CACHE)
    rows = json_of(lambda values: values["statistics"].update(rows=7))
    yield from of("token cache: facts", "run.cache/*/facts.json", TEXT | {"another number of rows": rows})
    yield from of("config", "preset.json", TEXT)
    wider = json_of(lambda values: values["text_config"].update(sliding_window=4))
    yield Damage("config", "preset.json", "another window", wider, "model")
    yield from of("tokenizer", "puzzles/tokenizer/tokenizer.json", TEXT, says="tokenizer")
    swapped = bytes_of(lambda content: content.replace(b'"1": 5', b'"1": 99').replace(b'"2": 6', b'"2": 5'))
    yield Damage("tokenizer", "puzzles/tokenizer/tokenizer.json", "other ids", swapped, "tokenizer")
    yield from of("rows", "puzzles/train.jsonl", ROWS, says="train")
    files = {"cut in half": BYTES["cut in half"], "removed": Path.unlink, "a pipe": to_pipe}
    yield from of("model: config", "run/model/config.json", TEXT | files, is_model=True)
    yield from of("model: tokenizer", "run/model/tokenizer.json", TEXT | files, "tokenizer", is_model=True)
    # The Hub's layout has no digests: numbers that changed, and other dtypes, are weights like any others.
    changes = {name: change for name, change in (BYTES | TENSORS).items() if name not in UNKNOWABLE}
    yield from of("model: weights", "run/model/model.safetensors", changes | {"a pipe": to_pipe}, "run/model", True)


def outcome(damage: Damage, code: int, said: str, differing: list[str]) -> str:
    """The one word for what became of it."""
    named = damage.says or Path(damage.file).name
    lines = [line for line in said.splitlines() if line.startswith("blockdiff: ")]
    is_named = any(named in line for line in lines)
    if code:
        is_one = sum("blockdiff: error" in line for line in lines) == 1 and "--debug" not in said
        return "refused" if is_one and is_named and "Traceback" not in said else SILENT
    if is_named and all(name.endswith(".jsonl") for name in differing):
        return "noticed"
    return SILENT if differing else "healed"


def copy_to(folder: Path, whole: Path, to: Path) -> None:
    """Everything a run needs, with the run as a kill after step 6 left it."""
    for name in ("puzzles", "preset.json"):
        source = folder / name
        (shutil.copytree if source.is_dir() else shutil.copyfile)(source, to / name)
    shutil.copytree(whole, to / "run")
    shutil.copytree(whole.with_name(f"{whole.name}.cache"), to / "run.cache")
