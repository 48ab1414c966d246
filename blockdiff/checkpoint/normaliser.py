"""A bound on how much a tokenizer's normaliser and decoder lengthen a text, computed from tokenizer.json."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from blockdiff.errors import CheckpointError

MOST_GROWTH = 100  # times as long; Unicode decomposes a character to at most 18
FILE = "tokenizer.json"
KEYS = ("normalizer", "decoder")


def require_bounded(directory: Path) -> None:
    """Raise CheckpointError if tokenizer.json has a normaliser or decoder that makes texts more than 100 times as long.

    Unicode's normal forms do not count: they lengthen no character more than 18 times, and only once.
    """
    file = directory / FILE
    if not file.is_file():
        return
    text = file.read_text(encoding="utf-8", errors="replace")
    for key in KEYS:
        for value in _values(text, key):
            growth = _growth(value)
            if growth > MOST_GROWTH:
                raise CheckpointError(
                    f"{file}: {key}: it makes a text up to {growth:,.0f} times as long, and the most is {MOST_GROWTH}; "
                    "correct it, or take another tokenizer"
                )


def _values(text: str, key: str) -> Iterator[Any]:
    """Yield the objects with this key anywhere in a JSON text.

    The text is searched, not parsed: most of its 20 MB are tokens.
    """
    letters = "".join(rf"(?:{letter}|\\u00{ord(letter):02x})" for letter in key)
    for match in re.finditer(rf'"{letters}"\s*:\s*(?=\{{)', text, re.IGNORECASE):
        try:
            yield json.JSONDecoder().raw_decode(text, match.end())[0]
        except (ValueError, RecursionError):  # the tokenizers package reports it when it reads the file
            continue


def _growth(value: Any) -> float:
    """Return the most characters that a normaliser or decoder `value` makes of one character."""
    if not isinstance(value, Mapping):
        return 1.0
    parts = [each for name in ("normalizers", "decoders") if isinstance(value.get(name), list) for each in value[name]]
    content = value.get("content")
    factor = 1.0
    if isinstance(content, str) and isinstance(value.get("pattern"), Mapping):
        replaced = value["pattern"].get("String")
        # a regular expression may match between any two characters
        factor = max(1.0, len(content) / max(1, len(replaced))) if isinstance(replaced, str) else 1.0 + len(content)
        factor = 1.0 if not content else factor
    elif isinstance(value.get("prepend"), str):
        factor = 1.0 + len(value["prepend"])
    elif isinstance(value.get("precompiled_charsmap"), str):
        factor = _longest(value["precompiled_charsmap"])
    return factor * prod(map(_growth, parts))


def _longest(charsmap: str) -> float:
    """Return the length of the longest text by which a compiled table of SentencePiece replaces a character.

    The table has the size of a trie in four bytes, the trie, and the texts, each ended by a zero.
    """
    try:
        table = base64.b64decode(charsmap)
    except (binascii.Error, ValueError):
        return 1.0
    texts = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
    return float(max([1, *(len(text.decode("utf-8", "replace")) for text in texts)]))
