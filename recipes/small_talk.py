"""Small talk as data: short conversations made from a few facts, so that a model small enough for a CPU can chat.

Greetings, names that are remembered, sums, capitals, opposites, spelling, counting, days and months. Any other question
is answered with "I do not know that.". A system message may request capital letters.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random

from blockdiff.errors import DataError
from blockdiff.files import write_text
from blockdiff.terminal import counted

Message = dict[str, str]
SYSTEM = "Answer in capital letters."
UNKNOWN = "I do not know that."
VOCABULARY = 1024  # tokens of the tokenizer, which is trained on the conversations

CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin", "Japan": "Tokyo", "Egypt": "Cairo",
    "Kenya": "Nairobi", "Peru": "Lima", "Cuba": "Havana", "Norway": "Oslo", "Greece": "Athens", "China": "Beijing",
    "India": "New Delhi", "Canada": "Ottawa", "Poland": "Warsaw", "Austria": "Vienna", "Ghana": "Accra",
    "Chile": "Santiago",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "up": "down", "left": "right", "day": "night", "old": "new", "fast": "slow",
    "full": "empty", "wet": "dry", "open": "closed", "early": "late", "high": "low", "light": "dark", "happy": "sad",
}  # fmt: skip
SOUNDS = {"dog": "woof", "cat": "meow", "cow": "moo", "duck": "quack", "sheep": "baa", "frog": "croak", "lion": "roar"}
COLOURS = {"the sky": "blue", "grass": "green", "snow": "white", "a lemon": "yellow", "blood": "red", "coal": "black"}
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
NAMES = ("Ada", "Alan", "Grace", "Emmy", "Carl", "Sofia", "Leon", "Mary", "Omar", "Wei", "Ines", "Noor", "Paul", "Lise")
WORDS = ("cat", "dog", "sun", "moon", "tree", "book", "rain", "noise", "paper", "house", "green", "river", "bread")
STRANGE = (
    "Who won the cup?", "Write a poem.", "What is love?", "How do planes fly?", "What did I eat today?", "Prove it.",
    "Who is the king?", "Tell me a secret.", "What is the news?", "How old is the moon?", "Where are my keys?",
)  # fmt: skip


def exchange(draw: Random, name: str | None) -> tuple[str, str, str | None]:
    """Draw a question and its answer; also return the user's name, as far as it is known afterwards.

    name: the user's name so far, None if unknown.
    """
    kind = "recall" if name and draw.random() < 0.3 else draw.choice(tuple(_KINDS))
    if kind == "name":
        name = draw.choice(NAMES)
        return draw.choice((f"My name is {name}.", f"I am {name}.")), f"Nice to meet you, {name}.", name
    if kind == "recall":
        answer = f"Your name is {name}." if name else "You have not told me your name."
        return draw.choice(("What is my name?", "Who am I?")), answer, name
    return *_KINDS[kind](draw), name


def conversation(draw: Random) -> list[Message]:
    """Draw one to three exchanges, with or without a system message."""
    messages, name = [], None
    is_loud = draw.random() < 0.15
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        question, answer, name = exchange(draw, name)
        question = draw.choice((question, question, question.lower(), question.rstrip("?.!")))
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer.upper() if is_loud else answer})
    return [{"role": "system", "content": SYSTEM}] * is_loud + messages


def make_conversations(counts: Mapping[str, int], seed: int = 0) -> dict[str, list[dict[str, list[Message]]]]:
    """Return conversations for every split, by name; none is in two splits, and the same seed gives the same rows.

    Raises DataError if a split asks for none, or for more than can be made.
    """
    taken: set[str] = set()
    splits = {}
    for split, count in counts.items():
        if count < 1:
            raise DataError(f"split {split!r} asks for {count} conversations; ask for at least 1")
        rows = []
        draw = Random(f"{seed} {split}")
        for _ in range(50 * count + 1000):
            row = {"messages": conversation(draw)}
            text = json.dumps(row)
            if text not in taken:
                taken.add(text)
                rows.append(row)
            if len(rows) == count:
                break
        else:
            raise DataError(f"split {split!r}: only {len(rows)} different conversations of {count}; ask for fewer")
        splits[split] = rows
    return splits


def write_conversations(directory: str | Path, counts: Mapping[str, int], seed: int = 0) -> list[str]:
    """Write NAME.jsonl for every split, and a byte-level BPE tokenizer into `directory`/tokenizer.

    Returns a line per split that describes its rows. Raises DataError as `make_conversations` does.
    """
    from blockdiff.data.tokenizer import byte_level_bpe, write_tokenizer

    splits, directory = make_conversations(counts, seed), Path(directory)
    texts = (message["content"] for rows in splits.values() for row in rows for message in row["messages"])
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(byte_level_bpe(texts, VOCABULARY), directory / "tokenizer")
    lines = []
    for name, rows in splits.items():
        write_text(directory / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        answers = sum(message["role"] == "assistant" for row in rows for message in row["messages"])
        lines.append(f"{name}: {counted(len(rows), 'conversation')} with {counted(answers, 'answer')}")
    return lines


def _of(pairs: Mapping[str, str], questions: Sequence[str], answer: str) -> Callable[[Random], tuple[str, str]]:
    def make(draw: Random) -> tuple[str, str]:
        key = draw.choice(tuple(pairs))
        text = answer.format(key=key, value=pairs[key])
        return draw.choice(questions).format(key=key), text[0].upper() + text[1:]

    return make


def _said(questions: Sequence[str], answer: str) -> Callable[[Random], tuple[str, str]]:
    return lambda draw: (draw.choice(questions), answer)


def _sum(draw: Random) -> tuple[str, str]:
    a, b = draw.randrange(10), draw.randrange(10)
    if draw.random() < 0.3:
        return f"What is {a + b} - {b}?", f"{a + b} - {b} = {a}."
    return draw.choice((f"What is {a} + {b}?", f"{a} + {b}")), f"{a} + {b} = {a + b}."


def _next(draw: Random) -> tuple[str, str]:
    names = draw.choice((DAYS, MONTHS))
    place = draw.randrange(len(names))
    return f"What comes after {names[place]}?", f"{names[(place + 1) % len(names)]} comes after {names[place]}."


def _count(draw: Random) -> tuple[str, str]:
    last = draw.randrange(2, 8)
    return f"Count to {last}.", ", ".join(map(str, range(1, last + 1))) + "."


def _spell(draw: Random) -> tuple[str, str]:
    word = draw.choice(WORDS)
    return draw.choice((f"Spell {word}.", f"How do you spell {word}?")), "-".join(word) + "."


_KINDS: dict[str, Callable[[Random], tuple[str, str]]] = {
    "name": lambda draw: ("", ""),  # these two depend on earlier exchanges: see `exchange`
    "recall": lambda draw: ("", ""),
    "greeting": _said(("Hi!", "Hello!", "Good morning!", "Hey."), "Hello! How can I help you?"),
    "mood": _said(("How are you?", "How do you do?"), "I am fine, thank you."),
    "self": _said(("Who are you?", "What are you?"), "I am a small model that fills in canvases."),
    "ability": _said(("What can you do?", "Help!"), "I know capitals, sums, opposites, sounds, days and spelling."),
    "thanks": _said(("Thank you!", "Thanks."), "You are welcome."),
    "end": _said(("Bye!", "Goodbye."), "Goodbye!"),
    "capital": _of(
        CAPITALS, ("What is the capital of {key}?", "Capital of {key}?"), "the capital of {key} is {value}."
    ),
    "opposite": _of(
        OPPOSITES, ("What is the opposite of {key}?", "Opposite of {key}?"), "the opposite of {key} is {value}."
    ),
    "sound": _of(SOUNDS, ("What does the {key} say?", "How does a {key} sound?"), "the {key} says {value}."),
    "colour": _of(COLOURS, ("What colour is {key}?",), "{key} is {value}."),
    "sum": _sum,
    "next": _next,
    "count": _count,
    "spell": _spell,
    "strange": lambda draw: (draw.choice(STRANGE), UNKNOWN),
}
