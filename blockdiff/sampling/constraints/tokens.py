"""The tokens of a vocabulary as texts: the bytes of each token, and all of them as a tree."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from blockdiff.errors import RequestError
from blockdiff.sampling.constraints.byte_automaton import ByteAutomaton, byte_classes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokens:
    """The texts of a vocabulary as a tree of bytes, so that an automaton reads a shared beginning of tokens once."""

    def __init__(self, texts: Sequence[bytes], vocab_size: int):
        self.vocab_size = vocab_size
        self.texts = [*texts[:vocab_size], *[b""] * (vocab_size - len(texts))]
        order = sorted((id for id, text in enumerate(self.texts) if text), key=self.texts.__getitem__)
        self.ids = torch.tensor(order, dtype=torch.int64)
        lengths = torch.tensor([len(self.texts[id]) for id in order], dtype=torch.int64)
        deepest = int(lengths.max()) if order else 0
        padded = b"".join(self.texts[id].ljust(deepest, b"\0") for id in order)
        bytes_NJ = torch.frombuffer(bytearray(padded), dtype=torch.uint8).view(-1, deepest) if order else None
        # for each level the parents of its nodes, at the level above, and their bytes; then for each token the node at
        # which it ends, counted over all levels
        self.levels: list[tuple[Tensor, Tensor]] = []
        self.node = torch.zeros(len(order), dtype=torch.int64)
        first, is_new = 0, torch.zeros(max(len(order) - 1, 0), dtype=torch.bool)
        above = torch.zeros(len(order), dtype=torch.int64)  # each token's node at the level above; first the root
        for level in range(deepest):
            assert bytes_NJ is not None
            bytes_N = bytes_NJ[:, level]
            is_long = lengths > level
            # The tokens are sorted. One begins a node if it differs from the token before it, or if that is too short.
            is_new |= bytes_N[1:] != bytes_N[:-1]
            begins = torch.cat((torch.ones(1, dtype=torch.bool), is_new | ~is_long[:-1])) & is_long
            node = begins.cumsum(0) - 1
            self.levels.append((above[begins], bytes_N[begins].long()))
            self.node[lengths == level + 1] = node[lengths == level + 1] + first
            first, above = first + int(begins.sum()), node

    def read_by(self, automaton: ByteAutomaton) -> TextTree:
        """Prune the tree to texts that an automaton can accept, and merge bytes that it does not distinguish."""
        class_B, first_C = byte_classes(automaton.next_SB)
        is_dead_C = (automaton.next_SB[:, first_C] == automaton.states).all(0)
        C, levels, seen = len(first_C), [], 0
        above, node_of = torch.zeros(1, dtype=torch.int64), []
        for parent, byte in self.levels:
            key = above[parent] * C + class_B[byte]
            is_dead = (above[parent] < 0) | is_dead_C[class_B[byte]]
            keys, index = key[~is_dead].unique(return_inverse=True)
            above = torch.full_like(key, -1).masked_scatter_(~is_dead, index)
            levels.append((keys // C, first_C[keys % C]))
            node_of.append(torch.where(is_dead, -1, above + seen))
            seen += len(keys)
        node_N = torch.cat([*node_of, torch.empty(0, dtype=torch.int64)])[self.node]
        nodes, leaf_N = node_N.unique(return_inverse=True)
        if len(nodes) and nodes[0] < 0:  # the dead ones come last, with the leaf that is after all others
            nodes, leaf_N = nodes[1:], torch.where(leaf_N == 0, len(nodes) - 1, leaf_N - 1)
        return TextTree(levels, nodes, leaf_N)


@dataclass(frozen=True, eq=False)
class TextTree:
    """Texts that an automaton may tell apart, as a tree of bytes.

    levels: for each level the parents of its nodes, at the level above, and their bytes. node_M: the node, among the
    nodes of all levels, at which each text ends; leaf_N: the index of each token's text, M if no state accepts it.
    """

    levels: list[tuple[Tensor, Tensor]]
    node_M: Tensor
    leaf_N: Tensor

    def after(self, automaton: ByteAutomaton, states_K: Tensor) -> Tensor:
        """Return the state after each text from each of `states_K`, then a column of dead states: int64 [K, M + 1]."""
        parts, current = [], states_K[:, None]
        for parent, byte in self.levels:
            current = automaton.next_SB[current[:, parent].long(), byte]
            parts.append(current)
        dead_K1 = torch.full((len(states_K), 1), automaton.states)
        return torch.cat((torch.cat(parts, -1)[:, self.node_M], dead_K1), -1).long() if parts else dead_K1


@functools.lru_cache(maxsize=4)
def token_texts(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> Tokens:
    """Return the tokens of a tokenizer, padded with tokens without text to the size of the model's vocabulary."""
    return Tokens(token_bytes(tokenizer), vocab_size)


@functools.lru_cache(maxsize=4)
def token_bytes(tokenizer: PreTrainedTokenizerBase) -> list[bytes]:
    """Return the bytes of every token id; empty for special tokens and for ids that the tokenizer does not use.

    Supports decoders that join the texts of tokens: byte level (GPT-2), byte fallback with replacements (Gemma), and
    plain joining. Raises RequestError for other decoders.
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
    texts = [b""] * len(tokenizer)
    for token, id in tokenizer.get_vocab().items():
        if id in special or id >= len(texts):
            continue
        byte = _BYTE_TOKEN.fullmatch(token) if has_byte_tokens else None
        if byte is not None:
            texts[id] = bytes([int(byte[1], 16)])
        elif is_byte_level and all(character in to_byte for character in token):
            texts[id] = bytes(to_byte[character] for character in token)
        else:
            for old, new in replaced:
                token = token.replace(old, new)
            texts[id] = token.encode("utf-8", "surrogatepass")
    return texts


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the steps of a decoder; RequestError if it does more than join the texts of tokens."""
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
    """Return the byte of each character of GPT-2's byte-level alphabet.

    Printable characters of Latin-1 have their own code; the other bytes, in order, belong to characters from 256 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
