"""A tokenizer whose normaliser or decoder makes endless texts is refused before it is read."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from tokenizers import Regex, decoders, normalizers

from blockdiff.checkpoint.tokenizer import load_tokenizer
from blockdiff.errors import CheckpointError
from tests.support.chat_tokenizer import chat_tokenizer

pytestmark = pytest.mark.quick

THOUSAND = [normalizers.Replace("a", "a" * 1000)] * 3
CHARSMAP = (4).to_bytes(4, "little") + bytes(4) + b"short\0" + "ü".encode() * 200 + b"\0"
REFUSED = {
    "three times": (normalizers.Sequence(THOUSAND), "normalizer: .* 1,000,000,000 times as long, and the most is 100"),
    "nested": (normalizers.Sequence([normalizers.NFC(), normalizers.Sequence(THOUSAND[:1])]), " 1,000 times"),
    "a regular expression": (normalizers.Replace(Regex("b*"), "c" * 100), " 101 times"),
    "in front": (normalizers.Prepend("d" * 400), " 401 times"),
    "several": (normalizers.Sequence([normalizers.Replace(Regex("x"), "yyyy")] * 4), " 625 times"),
}
RELEASED = [
    None,
    normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),  # Llama 2
    normalizers.Sequence(
        [
            normalizers.Replace("``", '"'),
            *(normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    ),
    normalizers.BertNormalizer(),
]


def saved(folder: Path, normalizer=None, decoder=None) -> Path:
    tokenizer = chat_tokenizer()
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    for key, value in (("normalizer", normalizer), ("decoder", decoder)):
        if value is not None:
            content[key] = json.loads(value.__getstate__())
    file.write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("name", REFUSED)
def test_a_normaliser_that_makes_texts_much_longer_is_refused_by_file_and_key(tmp_path, name):
    normalizer, words = REFUSED[name]
    with pytest.raises(CheckpointError, match=rf"tokenizer\.json: .*{words}"):
        load_tokenizer(saved(tmp_path, normalizer))


def test_a_decoder_and_a_compiled_table_are_bounded_and_a_key_may_be_spelt_with_escapes(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: decoder: .* 1,000 times"):
        load_tokenizer(saved(tmp_path, decoder=decoders.Replace("a", "b" * 1000)))
    file = saved(tmp_path) / "tokenizer.json"
    content = json.loads(file.read_text())
    content["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(CHARSMAP).decode()}
    file.write_text(json.dumps(content).replace('"normalizer"', '"norm\\u0061li\\u007Aer"'))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: normalizer: .* 200 times"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("normalizer", RELEASED)
def test_normalisers_of_released_models_are_read(tmp_path, normalizer):
    texts = load_tokenizer(saved(tmp_path, normalizer, decoders.Replace("▁", " ")))
    assert texts("a", add_special_tokens=False)["input_ids"]
