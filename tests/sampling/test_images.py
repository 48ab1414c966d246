"""Images in prompts: answers equal transformers' in fp64, and those of the same request alone whatever else runs."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import blockdiff
from blockdiff.checkpoint.generation import Generation
from blockdiff.errors import RequestError
from blockdiff.images import PlacedImage
from blockdiff.models.pages import Pages
from blockdiff.sampling import Engine, Request, Result, Sampler
from blockdiff.sampling.prepare import prepare_sequences
from tests.sampling.test_parity import SameDraws, their_config
from tests.support.families import m3_config, small_model
from tests.support.pictures import Row, gemma_config, image_row, minimax_config, pair, picture
from tests.support.seeing import png

pytestmark = pytest.mark.quick
# Settings under which a random model stops early now and then, and meets an eos now and then.
LIVELY = Generation(max_steps=5, max_new_tokens=12, stability=0, confidence=0.8, entropy_bound=1.0, eos_ids=(1, 2, 3))


def asked(id: int, row: Row, **options: Any) -> Request:
    return Request(id, tokens=row.tokens, images=[placed.image for placed in row.images], seed=id, **options)


def theirs_of(row: Row) -> dict[str, Tensor]:
    """The arguments with which transformers' models see a row."""
    row_1S = torch.tensor([row.tokens])
    values = [placed.image.values for placed in row.images]
    if "image_grid_thw" in values[0]:
        pixels = torch.cat([each["pixel_values"] for each in values])
        grids = torch.stack([each["image_grid_thw"] for each in values])
        return {"input_ids": row_1S, "pixel_values": pixels.double(), "image_grid_thw": grids}
    pad, is_image_1S = torch.nn.utils.rnn.pad_sequence, torch.zeros_like(row_1S)
    for placed in row.images:
        is_image_1S[0, placed.column : placed.end] = 1
    pixels = pad([each["pixel_values"] for each in values], batch_first=True)
    places = pad([each["image_position_ids"] for each in values], batch_first=True, padding_value=-1)
    kinds = {"mm_token_type_ids": is_image_1S, "image_position_ids": places}
    return {"input_ids": row_1S, "pixel_values": pixels.double(), **kinds}


@pytest.mark.parametrize("seed", range(4))
def test_sampled_tokens_equal_those_of_transformers(seed, tmp_path):
    draw = random.Random(seed)
    config = gemma_config(draw)
    theirs, model = pair(config, seed, tmp_path)
    row = image_row(config, draw, parts=1 + seed % 3)
    length, vocabulary = config.canvas_length, config.text_config.vocab_size
    generation = replace(LIVELY, max_new_tokens=3 * length, pad_id=0)
    draws = SameDraws([seed], length, vocabulary)
    with draws.patched():
        output = theirs.generate(**theirs_of(row), generation_config=their_config(generation))
    pages = Pages(model, page_tokens=4, capacity=400)
    [result] = Sampler(model, None, generation, pages=pages).generate([asked(seed, row)])
    new_tokens = output.sequences[0, len(row.tokens) :].tolist()
    assert result.tokens == new_tokens[: len(result.tokens)] and not any(new_tokens[len(result.tokens) :])


@pytest.mark.parametrize("seed", range(2))
def test_next_tokens_of_minimax_equal_those_of_transformers(seed, tmp_path):
    draw = random.Random(seed)
    config = minimax_config(draw)
    theirs, model = pair(config, seed, tmp_path)
    row = image_row(config, draw, parts=2)
    greedy = dict(max_new_tokens=8, do_sample=False, eos_token_id=2, pad_token_id=0)
    truth = theirs.generate(**theirs_of(row), **greedy)[0, len(row.tokens) :]
    sampler = Sampler(model, None, Generation(max_new_tokens=8, eos_ids=(2,), pad_id=0))
    [result] = sampler.generate([asked(seed, row)])
    assert result.tokens == truth.tolist()


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    """A model in fp64 whose window is shorter than its images, which see one another whole."""
    config = gemma_config(random.Random(1), sliding_window=3, use_bidirectional_attention="vision")
    _, model = pair(config, 3, tmp_path_factory.mktemp("gemma"))
    return model


def rows_of(config: Any) -> list[Row]:
    """Rows of which some have pictures in common, at their beginnings and elsewhere."""
    draw = random.Random(5)
    first = image_row(config, draw, parts=2)
    again = Row([*first.tokens, 7, 8, 9], first.images)
    tokens, other = list(first.tokens), picture(config, draw)
    while other.tokens != first.images[0].image.tokens:
        other = picture(config, draw)
    changed = Row(tokens, [PlacedImage(other, first.images[0].column), *first.images[1:]])
    shifted = Row([5, *tokens], [replace(each, column=each.column + 1) for each in first.images])
    text = Row([draw.randrange(3, 90) for _ in range(20)], [])
    return [first, again, changed, shifted, text, image_row(config, draw, parts=3)]


@pytest.fixture(scope="module")
def rows(gemma):
    return rows_of(gemma.config)


def answers(engine: Engine, requests: list[Request]) -> dict[Any, Result]:
    for request in requests:
        engine.submit(request)
    found = {}
    while engine.step() or engine.unfinished:
        found |= {event.id: event for event in engine.events() if isinstance(event, Result)}
    found |= {event.id: event for event in engine.events() if isinstance(event, Result)}
    engine.pages.check()
    assert not any(engine.pages.statistics.pages.values())
    return found


@pytest.mark.parametrize(
    "options, more",
    [
        (dict(page_tokens=3, chunk_tokens=5), {}),
        (dict(page_tokens=2, chunk_tokens=3, max_rows=3, capacity=72), {}),  # some are sent back and encoded again
        (dict(page_tokens=4, chunk_tokens=7), dict(best_of=2, scores=True)),
    ],
)
def test_company_chunks_and_pages_change_no_answer_to_images(gemma, rows, options, more):
    requests = [asked(number, row, **more) for number, row in enumerate(rows)]
    engine = Engine(gemma, None, LIVELY, **options)
    found = answers(engine, requests)
    assert bool(engine._scheduler.preemptions) == ("capacity" in options)
    alone = {each.id: answers(Engine(gemma, None, LIVELY), [each])[each.id] for each in requests}
    for id, result in alone.items():
        assert replace(found[id], logprobs=None) == replace(result, logprobs=None)
        assert (found[id].logprobs or []) == pytest.approx(result.logprobs or [], rel=1e-9)
    assert len({tuple(result.tokens) for result in alone.values()}) == len(rows)  # the pictures count


@pytest.mark.parametrize("canvas_length", [None, 8])
def test_company_chunks_and_pages_change_no_answer_of_minimax(canvas_length):
    model = blockdiff.init(m3_config(canvas_length=canvas_length), dtype="float64", device="cpu", kernels="torch")
    requests = [asked(number, row, max_new_tokens=24) for number, row in enumerate(rows_of(model.config))]
    engine = Engine(model, None, LIVELY, page_tokens=4, chunk_tokens=4, max_rows=3, capacity=64)
    found = answers(engine, requests)
    assert engine._scheduler.preemptions
    alone = {each.id: answers(Engine(model, None, LIVELY), [each])[each.id] for each in requests}
    assert found == alone and len({tuple(result.tokens) for result in alone.values()}) == len(requests)


def test_a_picture_is_encoded_once_for_all_requests_that_have_it(gemma, rows, monkeypatch):
    seen: list[bytes] = []
    whole = gemma.image_features
    monkeypatch.setattr(gemma, "image_features", lambda inputs: seen.extend(x.digest for x in inputs) or whole(inputs))
    requests = [asked(number, row, best_of=2) for number, row in enumerate(rows)]
    answers(Engine(gemma, None, LIVELY, page_tokens=3, chunk_tokens=5), requests)
    assert sorted(seen) == sorted({each.image.digest for row in rows for each in row.images})


def test_a_long_stream_holds_the_pictures_of_a_part_of_its_prompts(gemma, rows, monkeypatch):
    taken = []
    monkeypatch.setattr("blockdiff.sampling.sampler.TOGETHER", 2)
    monkeypatch.setattr(
        "blockdiff.sampling.sampler.prepare_sequences",
        lambda request, *others: taken.append(request.id) or prepare_sequences(request, *others),
    )
    stream = Sampler(gemma, None, LIVELY).stream([asked(n, rows[n % 6], max_steps=1) for n in range(36)], batch_size=1)
    first = next(stream)
    assert len(taken) == 32
    found = dict([first, *stream])
    assert [found[n].id for n in range(36)] == list(range(36))


def test_requests_whose_images_cannot_be_seen_are_refused(gemma, rows):
    placeholder, image = gemma.config.image_token_id, rows[0].images[0].image
    sampler = Sampler(gemma, None, LIVELY)
    row = [placeholder] * image.tokens
    for wrong, words in [
        (Request(1, tokens=[5], images=[image]), "the tokens have 0 placeholders of images"),
        (Request(1, tokens=[*row, 5, placeholder], images=[image, image]), "have .* placeholders of images, but"),
        (Request(1, tokens=[*row[1:], 5, placeholder], images=[image]), r"of images\[0\] do not stand side by side"),
        (Request(1, tokens=row, images=["http://a/b.png"]), r"images\[0\] is the URL"),
        (Request(1, tokens=row, images="a.png"), "images must be a list"),
        (Request(1, messages=[{"role": "user", "content": "a"}], images=[image]), "messages have theirs as parts"),
    ]:
        with pytest.raises(RequestError, match=words):
            sampler.generate([wrong])
    with pytest.raises(RequestError, match="no images"):
        Sampler(small_model("llama"), None, LIVELY).generate([Request(1, tokens=[5], images=[image])])


def test_a_checkpoint_without_image_tensors_is_the_error_of_the_requests_with_images_alone(gemma, rows):
    blind = blockdiff.init(gemma.config, device="cpu", kernels="torch")
    blind.carried = None
    found = Sampler(blind, None, LIVELY).generate([asked(0, rows[0]), asked(4, rows[4])])
    assert "has no image tensors" in found[0].error and found[1].error is None and found[1].tokens


def test_a_samplers_pictures_are_cut_as_the_models_family_says(tmp_path):
    config = minimax_config(random.Random(0))
    blockdiff.save(blockdiff.init(config, seed=1, device="cpu"), tmp_path)
    vision = config.vision_config
    sizes = {"patch_size": vision.patch_size, "merge_size": 2, "temporal_patch_size": vision.temporal_patch_size}
    values = {"image_processor_type": "MiniMaxM3VLImageProcessorFast", **sizes}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(values))
    sampler = Sampler(blockdiff.load(tmp_path, device="cpu"), generation=replace(LIVELY, max_new_tokens=4))
    tokens = [5, *[config.image_token_index] * sampler.settings.image_reader.read(png()).tokens, 6]
    assert len(sampler.generate([Request("a", tokens=tokens, images=[png()])])[0].tokens) == 4
