"""Pictures in rows: read, cut as transformers cuts them, put in their places, and refused in one line."""

from __future__ import annotations

import base64
import io
import json
import logging
import struct
import zlib
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from threading import Event

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from PIL import Image, ImageOps

from blockdiff.canvas import Batch
from blockdiff.data import image_file
from blockdiff.data import images as images_file
from blockdiff.data.chat import Encoder
from blockdiff.data.collate import Collator
from blockdiff.data.dataset import Dataset, load_dataset
from blockdiff.data.example import Example
from blockdiff.data.images import ImageReader
from blockdiff.data.order import Order, StreamOrder
from blockdiff.data.sources import Source, read_rows
from blockdiff.data.step_batches import begin_images, heldout_batches, micro_batches
from blockdiff.data.stream import StreamedExamples
from blockdiff.data.template import packaged_template
from blockdiff.data.tokenise import chat_prompt, raw_prompt
from blockdiff.diffusion.schedule import StratifiedTime
from blockdiff.errors import DataError
from blockdiff.models.family import families
from tests.support.chat_tokenizer import chat_tokenizer

GEMMA = {
    "image_processor_type": "Gemma4ImageProcessor",
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "max_soft_tokens": 70,
}
M3 = {"image_processor_type": "MiniMaxM3VLImageProcessorFast", "size": [672, 672], "patch_size": 14}
TOKENIZER = chat_tokenizer(packaged_template())
TOKENIZER.add_special_tokens({"additional_special_tokens": ["<|image>", "<|image|>", "<image|>"]})
BEFORE, PLACEHOLDER, AFTER = AROUND = tuple(TOKENIZER.convert_tokens_to_ids(["<|image>", "<|image|>", "<image|>"]))
SIZES = {"a.png": (64, 64), "b.png": (100, 30), "c.png": (37, 200)}


def picture(width: int, height: int) -> Image.Image:
    noise = torch.randint(0, 256, (height, width, 3), generator=torch.Generator().manual_seed(width), dtype=torch.uint8)
    return Image.fromarray(noise.numpy())


def bytes_of(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder for rows with three pictures in it."""
    inner = tmp_path / "data"
    (inner / "pictures").mkdir(parents=True)
    for name, size in SIZES.items():
        picture(*size).save(inner / "pictures" / name)
    return inner


def reader(**options: object) -> ImageReader:
    return ImageReader(GEMMA, AROUND, **options)


def encoder(**options: object) -> Encoder:
    return Encoder(TOKENIZER, eos_id=1, canvas_length=8, **{"reader": reader(), **options})


def written(folder: Path, *rows: dict) -> Source:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Source(str(path))


def encoded(folder: Path, *rows: dict, **options: object) -> list[Example]:
    return encoder(**options).encode(list(read_rows(written(folder, *rows))))[0]


def asked(*parts: object, answer: str = "ok") -> dict:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]}


def image(name: object) -> dict:
    return {"type": "image", "image": name}


def text_of(example: Example) -> str:
    """The example as text, its runs of placeholders as their lengths; they are where the images say."""
    tokens = [*example.tokens]
    for each in reversed(example.images):
        end = each.column + each.tokens
        assert tokens[each.column : end] == [PLACEHOLDER] * each.tokens
        assert (tokens[each.column - 1], tokens[end]) == (BEFORE, AFTER)
        tokens[each.column - 1 : end + 1] = TOKENIZER.encode(f"({each.tokens})", add_special_tokens=False)
    assert PLACEHOLDER not in tokens
    return TOKENIZER.decode(tokens)


ROWS = [
    {"prompt": "what?", "response": "red", "image": "pictures/a.png"},
    {"prompt": "1<image>2<image>", "response": "red", "images": ["pictures/a.png", "pictures/b.png"]},
    asked(image("pictures/c.png"), " a <|image|> b "),
    {
        "conversations": [{"from": "human", "value": "<image>\nlook"}, {"from": "gpt", "value": "fine"}],
        "image": "pictures/b.png",
    },
    {"instruction": "look", "output": "fine", "images": ["pictures/a.png"]},
    {"prompt": "no picture", "response": "none"},
]


def test_images_of_every_form_of_row_stand_in_their_places_and_literal_markers_stay_text(folder):
    found = encoded(folder, *ROWS)
    assert [text_of(example) for example in found] == [
        "<bos>(64)what?red<eos>",
        "<bos>1(64)2(60)red<eos>",
        "<bos><|turn>user\n(57)a <|image|> b<turn|>\n<|turn>model\nok<turn|>\n",
        "<bos><|turn>user\n(60)look<turn|>\n<|turn>model\nfine<turn|>\n",
        "<bos><|turn>user\n(64)look<turn|>\n<|turn>model\nfine<turn|>\n",
        "<bos>no picture" + "none<eos>",
    ]
    assert [TOKENIZER.decode(e.tokens[slice(*e.responses[0])]) for e in found[1:3]] == ["red<eos>", "ok<turn|>\n"]
    source = replace(
        written(folder, {"prompt": "?", "response": "!", "pics": ["pictures/a.png"]}), columns={"images": "pics"}
    )
    assert [row.sources for row in read_rows(source)] == [["pictures/a.png"]]
    as_turns = encoded(folder, ROWS[1], chat=True)
    assert text_of(as_turns[0]) == "<bos><|turn>user\n1(64)2(60)<turn|>\n<|turn>model\nred<turn|>\n"


@pytest.mark.parametrize("settings", [GEMMA, M3], ids=["gemma", "m3"])
def test_a_picture_is_cut_as_transformers_cuts_it(settings):
    path_free = bytes_of(picture(100, 60))
    family = families()["minimax_m3_vl" if settings is M3 else "diffusion_gemma"]
    reader = ImageReader(settings, AROUND, adapt=family.image_processor)
    found = reader.read(path_free)
    largest = picture(1000, 700) if settings is GEMMA else picture(672, 672)
    assert reader.read(bytes_of(largest)).tokens == reader.processor.most_tokens
    if settings is GEMMA:
        theirs = transformers.Gemma4ImageProcessorPil.from_dict(settings)(
            images=[picture(100, 60)], return_tensors="pt"
        )
        count = 4 * int(theirs["num_soft_tokens_per_image"][0])
        assert found.tokens == count // 4 and (theirs["image_position_ids"][0, count:] == -1).all()
        for name, values in found.values.items():
            assert torch.equal(values, theirs[name][0, :count])
    else:
        # 60 x 100 becomes 56 x 112, in patches of 14 of which 4 are a token; the pixels of the first, twice in time.
        assert found.values["image_grid_thw"].tolist() == [1, 4, 8] and found.tokens == 8
        small = torch.from_numpy(np.array(picture(100, 60).resize((112, 56), Image.Resampling.BICUBIC)))
        mean, std = (torch.tensor(getattr(transformers.image_utils, f"OPENAI_CLIP_{word}")) for word in ("MEAN", "STD"))
        first = ((small[:14, :14] / 255 - mean) / std).permute(2, 0, 1)[:, None].expand(3, 2, 14, 14)
        torch.testing.assert_close(found.values["pixel_values"][0].view(3, 2, 14, 14), first, atol=1e-5, rtol=0)


def test_every_kind_of_source_of_the_same_picture_is_the_same_image(folder):
    path, content = folder / "pictures" / "a.png", (folder / "pictures" / "a.png").read_bytes()
    uri = "data:image/png;base64," + base64.b64encode(content).decode()
    upright = Image.open(path)
    turned = Image.Exif()
    turned[0x0112] = 6  # to be turned by a quarter
    lying = upright.rotate(90, expand=True)
    sources = [str(path), path, content, uri, upright, {"bytes": content, "path": None}, {"path": str(path)}]
    sources += [bytes_of(lying, exif=turned.tobytes()), reader().read(content)]
    parts = [*map(image, sources), {"type": "image_url", "image_url": {"url": uri}}]
    talks = [[{"role": "user", "content": [part]}] for part in parts]
    whole = [chat_prompt(talk, None, TOKENIZER, reader=reader()) for talk in talks]
    assert {prompt.images[0].image.digest for prompt in whole} == {reader().read(content).digest}
    assert all(prompt.tokens == whole[0].tokens and prompt.text == whole[0].text for prompt in whole)
    other = ImageReader({**GEMMA, "rescale_factor": 0.5}, AROUND).read(content)
    assert other.digest != reader().read(content).digest


@pytest.mark.parametrize("size", [(1, 1), (3, 3)])
def test_an_image_of_a_few_pixels_is_one_of_any_other_and_nothing_is_guessed(size, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    assert reader().read(bytes_of(picture(*size))).tokens > 0
    assert not caplog.messages


def test_a_prompt_to_answer_has_the_tokens_of_training(folder):
    (raw, talk) = encoded(folder, ROWS[1], ROWS[2])
    sources = [str(folder / "pictures" / name) for name in ("a.png", "b.png", "c.png")]
    prompt = raw_prompt("1<image>2<image>", TOKENIZER, images=sources[:2], reader=reader())
    assert prompt.tokens == raw.tokens[: raw.responses[0][0]] and prompt.text == "1[image]2[image]"
    assert [(placed.column, placed.image.tokens) for placed in prompt.images] == [
        (i.column, i.tokens) for i in raw.images
    ]
    messages = [{"role": "user", "content": [image(sources[2]), {"type": "text", "text": " a <|image|> b "}]}]
    prompt = chat_prompt(messages, None, TOKENIZER, reader=reader())
    assert prompt.tokens == talk.tokens[: talk.responses[0][0]]
    assert prompt.text == "<bos><|turn>user\n[image]a <|image|> b<turn|>\n<|turn>model\n"
    with pytest.raises(DataError, match="no images"):
        chat_prompt(messages, None, TOKENIZER)
    with pytest.raises(DataError, match="token of an image"):
        raw_prompt("<|image|>", TOKENIZER, "allow", reader=reader())


def collator(read: ImageReader, **options: object) -> Collator:
    return Collator(8, 0, 1, seed=0, time=StratifiedTime(), reader=read, **options)


def pictures(batch: Batch, row: int) -> list[torch.Tensor]:
    """The pixels of a row's placeholders by their columns, each picture found by its first."""
    assert batch.images is not None
    starts = [0, *torch.tensor([image.tokens for image in batch.images.inputs]).cumsum(0).tolist()]
    at = {start: image.values["pixel_values"] for start, image in zip(starts, batch.images.inputs, strict=False)}
    firsts = batch.images.source_N[batch.images.row_N == row].tolist()
    return [at[source] for source in firsts if source in at]


def test_batches_have_the_images_of_their_rows_packed_or_not_whatever_was_begun(folder):
    examples, read = encoded(folder, *ROWS), reader()
    order, make = Order(6, 6, seed=1), collator(read)
    (batch,) = micro_batches(examples, order, make, 1)
    for row, (_, index) in enumerate(order(1)):
        of_row = pictures(batch, row)
        names = [each.source for each in examples[index].images]
        expected = [reader().read(str(folder / name)).values["pixel_values"] for name in names]
        assert len(of_row) == len(expected) and all(map(torch.equal, of_row, expected))
    assert batch.images is not None and len(batch.images.inputs) == 3  # each picture once
    is_placeholder_BS = batch.tokens_BS == PLACEHOLDER
    assert is_placeholder_BS[batch.images.row_N, batch.images.column_N].all()
    assert is_placeholder_BS.sum() == len(batch.images.row_N) == sum(i.tokens for e in examples for i in e.images)
    assert not (batch.is_ar_scored_BS[:, :-1] & is_placeholder_BS[:, 1:]).any()
    begin_images(examples, order, make, 1, 0, 1, None)
    (again,) = micro_batches(examples, order, make, 1)
    (packed,) = micro_batches(examples, order, make, 1, pack=1000)
    assert again.images is not None and packed.images is not None
    assert torch.equal(again.images.source_N, batch.images.source_N)
    assert packed.tokens_BS[packed.images.row_N, packed.images.column_N].eq(PLACEHOLDER).all()
    assert packed.ar_count() == batch.ar_count() > 0
    moved = packed.to("meta").images
    assert moved is not None and moved.inputs[0].values["pixel_values"].is_meta
    held_out = list(heldout_batches(examples, make, 4))
    assert [len(each.images.inputs) for each in held_out if each.images] == [3, 1]


def test_a_stream_gives_the_same_images_and_reads_the_next_ones_beside_the_step(folder):
    stream = StreamedExamples([written(folder, *ROWS)], encoder(), shuffle_buffer=6, seed=0)
    make, order = collator(reader()), StreamOrder(6)
    (batch,) = micro_batches(stream, order, make, 1)
    assert batch.images is not None and len(batch.images.inputs) == 3
    begin_images(stream, order, make, 2, 0, 1, None)
    wait(make.reader._begun.values())
    (folder / "pictures" / "a.png").unlink()
    (second,) = micro_batches(stream, order, make, 2)
    assert second.images is not None and len(second.images.inputs) == 3


def test_without_next_tokens_images_behind_the_last_canvas_are_left_out(folder):
    talk = asked(image("pictures/a.png"), "?")["messages"]
    (example,) = encoded(folder, {"messages": [*talk, *asked(image("pictures/b.png"), "?")["messages"]]})
    short = replace(example, responses=example.responses[:1])
    (batch,) = micro_batches([short], Order(1, 1, seed=0), collator(reader(), scores_ar=False), 1)
    assert batch.images is not None and len(batch.images.inputs) == 1
    (cut_off,) = encoded(folder, {"messages": [*talk, *talk]}, max_length=100)
    assert len(cut_off.images) == 1 and cut_off.is_truncated


def test_images_that_one_thread_waits_for_come_whatever_another_begins(monkeypatch):
    """Held-out batches are made beside those of the next step, by the same reader."""
    found, may_go = reader(), Event()
    monkeypatch.setattr(found, "read", lambda source: may_go.wait() and source)
    outcome, sources = images_file._outcome, [f"{n}.png" for n in range(20)]  # more than there are workers

    def first(future):
        monkeypatch.setattr(images_file, "_outcome", outcome)
        found.begin(["other.png"])
        may_go.set()
        return outcome(future)

    monkeypatch.setattr(images_file, "_outcome", first)
    found.begin(sources)
    assert found.read_all(sources) == sources


def test_the_token_cache_has_sources_and_digests_but_no_pixels(folder, tmp_path, monkeypatch):
    content = (folder / "pictures" / "c.png").read_bytes()
    table = [{"prompt": "?", "response": "!", "image": {"bytes": content, "path": None}}]
    pq.write_table(pa.Table.from_pylist(table), folder / "more.parquet")
    sources = [written(folder, *ROWS), Source(str(folder / "more.parquet"))]

    def load() -> Dataset:
        return load_dataset(sources, encoder(), cache=tmp_path / "cache")

    first = load()
    assert sum(file.stat().st_size for file in (tmp_path / "cache").rglob("*")) < 2 * len(content) + 40_000
    monkeypatch.setattr(ImageReader, "facts", None)  # a second start reads no picture
    second = load()
    assert list(second.examples) == list(first.examples) and second.total == first.total
    assert second.total.images == 7 and "7 images of" in str(second.total)
    assert second.examples[-1].images[0].source == content
    assert second.examples[0].images[0].source == "pictures/a.png"
    picture(64, 65).save(folder / "pictures" / "a.png")
    with pytest.raises(DataError, match=r"rows\.jsonl:1: .*a\.png.*changed"):
        collator(reader()).rows([second.examples[0]], epoch=0, step=1, slots=[0], total_slots=1)


def bomb() -> bytes:
    """A picture that says it has 20,000 x 20,000 pixels; 60 bytes."""
    return b"BM" + struct.pack("<IIIIiiHHIIiiII", 60, 0, 54, 40, 20_000, 20_000, 1, 24, 0, 0, 0, 0, 0, 0) + bytes(6)


def film() -> bytes:
    return bytes_of(picture(8, 8), "GIF", save_all=True, append_images=[picture(9, 9).resize((8, 8))])


BAD = {
    "cut off": (lambda: bytes_of(picture(64, 64))[:3000], "not a whole image"),
    "bytes turned": (lambda: bytes_of(picture(64, 64))[:2000] + bytes(12_000), "not a whole image"),
    "a text": (lambda: b"hello", "not an image in any of PNG"),
    "nothing in it": (lambda: b"", "not an image"),
    "a program for a printer": (lambda: bytes_of(picture(8, 8), "EPS"), "not an image in any of PNG"),
    "a bomb": (bomb, "has more than 67,108,864 pixels"),
    "a film": (film, "has several frames"),
    "a thread": (lambda: bytes_of(picture(9000, 1)), "of 9000 x 1 pixels"),
    "too many bytes": (lambda: bytes(100_001), "has more than 0 MiB"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.filterwarnings("error")
def test_a_bad_picture_is_one_line_with_file_and_row(folder, name, monkeypatch):
    make, reason = BAD[name]
    monkeypatch.setattr(image_file, "MOST_BYTES", 100_000)
    (folder / "pictures" / "bad.png").write_bytes(make())
    rows = [ROWS[0], {"prompt": "?", "response": "!", "image": "pictures/bad.png"}]
    settings = families()["minimax_m3_vl"].image_processor(M3) if name == "a thread" else GEMMA
    with pytest.raises(DataError) as caught:
        encoded(folder, *rows, reader=ImageReader(settings, AROUND))
    said = str(caught.value)
    assert said.startswith(f"{folder}/rows.jsonl:2: {folder}/pictures/bad.png: ") and reason in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("pictures/none.png", "no such image"),
        ("pictures", "no such image"),
        ("../outside.png", "outside"),
        ("{folder}/../outside.png", "outside"),
        ("pictures/link.png", "outside"),
        ("pictures/\0.png", "no path"),
    ],
)
def test_a_path_stays_in_the_folder_of_the_data_unless_the_recipe_says_otherwise(folder, path, reason):
    outside = folder.parent / "outside.png"
    picture(64, 64).save(outside)
    (folder / "pictures" / "link.png").symlink_to(outside)
    row = {"prompt": "?", "response": "!", "image": path.format(folder=folder)}
    with pytest.raises(DataError, match=reason) as caught:
        encoded(folder, row)
    assert str(caught.value).startswith(f"{folder}/rows.jsonl:1: ")
    if reason == "lies outside of":
        assert encoded(folder, row, reader=reader(anywhere=True))[0].images[0].tokens == 64
    assert encoded(folder, {**row, "image": "outside.png"}, reader=reader(root=str(folder.parent)))[0].images


def test_bad_pictures_are_left_out_where_bad_rows_are(folder):
    rows = [ROWS[0], {"prompt": "?", "response": "!", "image": "none.png"}, ROWS[5]]
    dataset = load_dataset([written(folder, *rows)], encoder(skips_bad_rows=True), cache=None)
    assert len(dataset) == 2 and dataset.total.bad == 1 and "none.png: no such image" in dataset.total.bad_rows


def test_a_model_a_template_or_a_checkpoint_that_knows_no_images_is_named(folder, tmp_path):
    with pytest.raises(DataError, match=r"rows\.jsonl:1: .*image.*reads"):
        encoded(folder, ROWS[0], reader=None)
    turn = "{% generation %}{{ m.content ~ eos_token if m.role == 'assistant' }}{% endgeneration %}"
    blind = chat_tokenizer("{{ bos_token }}{% for m in messages %}" + turn + "{% endfor %}")
    with pytest.raises(DataError, match=r"rows\.jsonl:1: .*template.*0 of 1 images"):
        replace(encoder(), tokenizer=blind).encode(list(read_rows(written(folder, ROWS[2]))))
    with pytest.raises(DataError, match=r"no preprocessor_config\.json"):
        encoded(folder, ROWS[0], reader=ImageReader(tmp_path, AROUND))
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": GEMMA}))
    assert encoded(folder, ROWS[0], reader=ImageReader(tmp_path, AROUND)) == encoded(folder, ROWS[0])
    bare, given = ImageReader({}, AROUND), reader().read(str(folder / "pictures" / "a.png"))
    with pytest.raises(DataError, match=r"image processor"):
        bare.read_all([str(folder / "pictures" / "a.png")])
    assert raw_prompt("?", TOKENIZER, images=[given], reader=bare).images[0].image is given
    with pytest.raises(DataError, match=r"']<\]start"):
        encoded(folder, ROWS[0], reader=ImageReader(GEMMA, ("]<]start of image[>[", PLACEHOLDER, AFTER)))


def test_the_last_pictures_stay_in_memory_by_content(monkeypatch):
    read = reader()
    first, second = bytes_of(picture(64, 64)), bytes_of(picture(60, 64))
    assert read.read(first) is read.read(bytes(bytearray(first)))
    monkeypatch.setattr(images_file, "CACHE_BYTES", 1)
    small = reader()
    kept = small.read(first)
    small.read(second)
    assert small.read(first) is not kept and small.read(first).digest == kept.digest


def segment(code: int, content: bytes) -> bytes:
    return bytes([0xFF, code]) + struct.pack(">H", len(content) + 2) + content


def tags(count: int, kind: int, numbers: int, size: int) -> bytes:
    """A TIFF of tags that all name the same bytes."""
    entries = b"".join(struct.pack("<HHLL", 0x9000 + n, kind, numbers, 8) for n in range(count))
    return (b"II*\0" + struct.pack("<LH", 8, count) + entries).ljust(size, b"\0")


def progressive(scans: int) -> bytes:
    """A JPEG whose last scan comes again and again."""
    file = bytes_of(Image.new("L", (64, 64), 128), "JPEG", progressive=True)
    first = file.rindex(b"\xff\xda")
    return file[:-2] + file[first:-2] * (scans - file.count(b"\xff\xda")) + file[-2:]


def chunks(count: int) -> bytes:
    """A PNG with many empty chunks before its pixels."""
    file = bytes_of(picture(8, 8))
    return file[:33] + (bytes(4) + b"abCd" + struct.pack(">L", zlib.crc32(b"abCd"))) * count + file[33:]


def with_segments(*segments: bytes) -> bytes:
    file = bytes_of(picture(8, 8), "JPEG")
    return file[:2] + b"".join(segments) + file[2:]


EXIF = tags(200, 1, 60_000, 60_100)
BOMBS = {
    "scans": lambda: progressive(65),
    "segments": lambda: with_segments(segment(0xE0, b"") * 30_000),
    "exif": lambda: with_segments(segment(0xE1, b"Exif\0\0" + EXIF)),
    "exif in parts": lambda: with_segments(
        *(segment(0xE1, b"Exif\0\0" + EXIF[n : n + 9999]) for n in range(0, 60_100, 9999))
    ),
    "previews": lambda: with_segments(segment(0xE2, b"MPF\0" + EXIF)),
    "chunks": lambda: chunks(30_000),
    "exif of a PNG": lambda: bytes_of(picture(8, 8), exif=b"Exif\0\0" + EXIF),
    "tags of a TIFF": lambda: EXIF,
    "strips": lambda: tags(1, 4, 70_000, 300_000),
    "a large form": lambda: b"II\x2b\0" + bytes(100),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_file_that_takes_long_or_much_memory_is_refused_before_it_is_decoded(name):
    with pytest.raises(DataError, match=r"a picture: .*more scans, pieces or tags"):
        image_file.opened(BOMBS[name](), "a picture").load()


def test_scans_that_programs_write_and_tags_of_cameras_are_read():
    assert image_file.decoded(progressive(64), "a picture").size == (64, 64)
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112], exif[0x010F], exif.get_ifd(0x8769)[0x9286] = orientation, "maker" * 20, b"c" * 500
        for kind, options in (("JPEG", {}), ("MPO", {}), ("PNG", {}), ("TIFF", {"compression": "tiff_lzw"})):
            file = bytes_of(picture(8, 4), kind, exif=exif, **options)
            upright = ImageOps.exif_transpose(Image.open(io.BytesIO(file)))
            assert image_file.decoded(file, "a picture").tobytes() == upright.tobytes()
