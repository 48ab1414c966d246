"""The bytes that each token of a tokenizer stands for, so that a text is the bytes of its tokens joined."""

from __future__ import annotations

import functools
import json
import re
from typing import TYPE_CHECKING, Any

from blockdiff.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@functools.lru_cache(maxsize=4)
def token_bytes(tokenizer: PreTrainedTokenizerBase) -> list[bytes]:
    """The bytes of every token id; empty for special tokens and for ids that the tokenizer does not use.

    Decoders that join tokens are understood: byte level (GPT-2), byte fallback with replacements (Gemma), and plain
    joining. RequestError for others, whose texts are not their tokens joined.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise RequestError("constraints need a tokenizer of the tokenizers library (a tokenizer.json)")
    steps = _steps(json.loads(backend.to_str()).get("decoder"))
    is_byte_level = any(step["type"] == "ByteLevel" for step in steps)
    has_byte_tokens = any(step["type"] == "ByteFallback" for step in steps)
    replaced = [(step["pattern"]["String"], step["content"]) for step in steps if step["type"] == "Replace"]
    to_byte = _byte_level_alphabet() if is_byte_level else {}
    special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    special.update(tokenizer.all_special_ids)
    found = [b""] * len(tokenizer)
    for token, id in tokenizer.get_vocab().items():
        if id in special or id >= len(found):
            continue
        byte = _BYTE_TOKEN.fullmatch(token) if has_byte_tokens else None
        if byte is not None:
            found[id] = bytes([int(byte[1], 16)])
        elif is_byte_level and all(character in to_byte for character in token):
            found[id] = bytes(to_byte[character] for character in token)
        else:
            for old, new in replaced:
                token = token.replace(old, new)
            found[id] = token.encode("utf-8", "surrogatepass")
    return found


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The steps of a decoder; RequestError for one that does more than joining tokens."""
    if decoder is None:
        decoder = {"type": "none"}
    steps: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    for step in steps:
        is_joining = step["type"] in ("Fuse", "ByteFallback", "ByteLevel")
        if not is_joining and not (step["type"] == "Replace" and "String" in step["pattern"]):
            raise RequestError(
                f"the tokenizer's decoder ({step['type']}) does more than join the texts of tokens, so no constraint "
                "can be put on the text; use a tokenizer with the decoder ByteLevel, ByteFallback or Fuse"
            )
    return steps


def _byte_level_alphabet() -> dict[str, int]:
    """The character that GPT-2's byte-level alphabet writes for each byte, the other way round.

    Printable characters of Latin-1 stand for themselves; the other bytes, in their order, are characters from 256 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
