"""Pictures in requests of the protocol: as data URIs they are seen, and nothing else of the kind is read."""

from __future__ import annotations

import asyncio
import base64
import re
from typing import Any

import pytest

from blockdiff.errors import Full, RequestError
from blockdiff.sampling import Request, Sampler
from blockdiff.serving import AsyncEngine, Limits
from tests.support.asking import served
from tests.support.seeing import png, seeing_checkpoint

pytestmark = pytest.mark.quick
URI = "data:image/png;base64," + base64.b64encode(png()).decode()


@pytest.fixture(scope="module")
def seeing(tmp_path_factory) -> Sampler:
    return Sampler.from_pretrained(seeing_checkpoint(tmp_path_factory.mktemp("seeing") / "model"), device="cpu")


def asked(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}], "seed": 5}


def shown(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}


TEXT = {"type": "text", "text": "the total?"}


def test_a_picture_is_seen_in_a_whole_answer_a_stream_and_a_read(seeing):
    body = asked(shown(URI), TEXT)

    async def use(asking):
        whole = await asking.openai.chat.completions.create(model="blockdiff", **body)
        stream = await asking.openai.chat.completions.create(model="blockdiff", stream=True, **body)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        read = {**body, "template": "<?a:1>", "draws": 1}
        blue = {**read, **asked(shown("data:image/png;base64," + base64.b64encode(png("blue")).decode()), TEXT)}
        parts = [
            {"type": "input_image", "image_url": URI, "detail": "auto"},
            {"type": "input_text", "text": TEXT["text"]},
        ]
        item = {"role": "user", "content": parts}
        other = await asking.openai.responses.create(model="blockdiff", input=[item], extra_body={"seed": 5})
        return (
            (whole, other),
            text,
            [(await asking.http.post("/v1/read", json=each)).json() for each in (read, read, blue)],
        )

    (whole, other), text, (first, same, blue) = served(seeing, use)
    message = {"role": "user", "content": [{"type": "image", "image": png()}, TEXT]}
    [expected] = seeing.generate([Request(0, messages=[message], seed=5)])
    assert whole.choices[0].message.content == text == other.output_text == expected.text
    assert whole.usage.prompt_tokens == expected.prompt_tokens > 20
    assert first["holes"] == same["holes"] != blue["holes"]


def test_the_images_of_all_unanswered_requests_are_bounded_together(seeing):
    def request(colour: str) -> Request:
        return Request(colour, messages=asked({"type": "image", "image": png(colour)}, TEXT)["messages"])

    async def use() -> None:
        async with AsyncEngine(seeing, max_image_bytes=3 * size // 2) as engine:
            first = engine.generate(request("red"))
            await anext(first)
            for _ in range(2):  # a refused one is not counted
                with pytest.raises(Full, match="images"):
                    await anext(engine.generate(request("blue")))
            await first.aclose()
            assert await anext(engine.generate(request("blue")))
        async with AsyncEngine(seeing, max_image_bytes=1) as engine:
            with pytest.raises(RequestError, match=f"images take {size} bytes"):
                await anext(engine.generate(request("red")))

    size = seeing.settings.image_reader.read(png()).nbytes
    asyncio.run(use())
    status, _ = served(seeing, lambda asking: asking.refusal(**asked(shown(URI))), limits=Limits(images_bytes=1))
    assert status == 400


@pytest.mark.parametrize(
    "part, words",
    [
        (
            shown("https://example.com/a.png"),
            r"content\[1\]\.image_url is no data URI, and URLs are not fetched",
        ),
        (shown("/etc/passwd"), "is no data URI"),
        (shown("data:image/png;base64,AAAA"), "not an image"),
        (shown("data:text/plain;base64,AAAA"), "not an image's"),
        ({"type": "image", "image": "/etc/passwd"}, "takes parts of the types text and image_url"),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, r"content\[1\] is 'input_audio'"),
        ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,"}}, "is 'video_url'"),
        ("words", "is 'None'"),
    ],
)
def test_everything_else_is_refused_by_name(seeing, part, words):
    body = asked(TEXT, part)

    async def use(asking):
        return [await asking.refusal(**body), await asking.refusal("/v1/read", **{**body, "template": "<?a:1>"})]

    for status, error in served(seeing, use):
        assert status == 400 and re.search(words, error["message"])


def test_a_conversation_with_too_many_pictures_is_refused(seeing):
    async def use(asking):
        return await asking.refusal(**asked(shown(URI), shown(URI), TEXT))

    status, error = served(seeing, use, limits=Limits(images=1))
    assert status == 400 and "the images of messages: 2 is more than the 1" in error["message"]
