"""The page of a trace: what its data hold, that hostile text does no harm, and how it behaves in a real browser."""

from __future__ import annotations

import base64
import json
import random
import re
import zlib
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from blockdiff.plots.denoising import draw_page, page
from blockdiff.sampling.trace import CommittedCanvas, Step, Trace, Verification
from tests.plots.browser import Browser

WORDS = ["<eos>", " a", "1", "2", "3", "4", "\n", "x</script><script>boom()</script>", "\x1b[2J", "\u202e<b>", " word"]
PUZZLE = "1..4.41.2...4..1="
SOLUTION = "1234341221434321"


def decode(token: int) -> str:
    return WORDS[token] if token < len(WORDS) else f"w{token}"


def traced(
    id: str | int, final: list[int], steps: int, canvases: int = 1, vocabulary: int = len(WORDS), **more: Any
) -> Trace:
    """Canvases of the same tokens, each after so many steps in which one position more is kept every time."""
    noise, length = random.Random(0), len(final)
    trace = Trace(id, more.pop("prompt", "Say <b>it</b>"), more.pop("text", "it </script>"), **more)
    for number in range(canvases):
        guess = [noise.randrange(vocabulary) for _ in final]
        for step in range(steps):
            seen = [noise.randrange(vocabulary) for _ in final]
            guess = [*final[: step * length // steps], *guess[step * length // steps :]]
            guess = final if step == steps - 1 else guess
            is_kept = [place <= step for place in range(length)]
            is_pinned = [place == length - 1 for place in range(length)]
            entropy = [0.0 if place <= step else 1.5 - step / steps for place in range(length)]
            said = (0.8, seen, guess, guess, entropy, is_kept, is_pinned)
            trace.steps.append(Step(id, number, step, *said))
        end = "eos" if number == canvases - 1 else None
        trace.canvases.append(CommittedCanvas(id, number, trace.prompt, final, length, trace.text, steps, end, 4))
    return trace


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="text/plain" id="data">([^<]*)</script>', text)
    assert found is not None
    return json.loads(zlib.decompress(base64.b64decode(found[1])))


@pytest.fixture
def hostile() -> Trace:
    return traced("<i>", [7, 8, 9, 1, 6, 10], steps=4, prompt="</script><b>\0", text="</script><script>boom()</script>")


@pytest.mark.quick
def test_a_page_is_one_file_that_asks_for_nothing_else(hostile: Trace, tmp_path: Path) -> None:
    draw_page([hostile], tmp_path / "page.html", decode, "<u>t</u> {{data}}")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|<link|<iframe|<img|@import|url\(|\bsrc=|href=|fetch\(|import\(", text)
    assert "default-src 'none'" in text and "prefers-color-scheme: dark" in text
    # Nothing of the data is markup, and no placeholder of a title is filled in.
    assert not re.search(r"boom\(\)</script>|<b>\0|<i>|<u>|\0|\x1b|\u202e", text)
    assert "&lt;u&gt;t&lt;/u&gt; {{data}}" in text
    assert text.count("<script") == text.count("</script>") == 2


def png(width: int, height: int, orientation: int = 1) -> bytes:
    file, exif = BytesIO(), Image.Exif()
    exif[0x0112] = orientation
    pixels = random.Random(0).randbytes(3 * width * height)
    Image.frombytes("RGB", (width, height), pixels).save(file, "PNG", exif=exif)
    return file.getvalue()


@pytest.mark.quick
def test_a_page_has_small_upright_copies_of_the_pictures_of_its_prompts() -> None:
    traces, large = [traced("a", [2], steps=1), traced("b", [3], steps=1)], png(600, 600)
    data = data_of(page(traces, decode, "t", pictures={"a": [large, png(8, 4, orientation=6)], "elsewhere": [large]}))
    assert [len(request.get("pictures", ())) for request in data["requests"]] == [2, 0] and not data["left_out"]
    sizes = []
    for uri in data["requests"][0]["pictures"]:
        kind, _, content = uri.partition(",")
        assert kind == "data:image/jpeg;base64" and len(content) < 80_000
        sizes.append(Image.open(BytesIO(base64.b64decode(content))).size)
    assert sizes == [(256, 256), (4, 8)]
    data = data_of(page(traces, decode, "t", limit=20_000, pictures={"a": [large]}))
    assert "pictures" not in data["requests"][0] and data["left_out"] == "the texts of the noise, the pictures"


@pytest.mark.quick
def test_a_page_holds_every_moment_with_what_was_kept_renewed_and_pinned() -> None:
    data = data_of(page([traced("a", [2, 3, 4, 5], steps=4)], decode, "t"))
    (request,) = data["requests"]
    (view,) = request["views"]
    assert (request["id"], request["finish"]) == ("a", "eos")
    assert (view["name"], view["steps"], view["limit"]) == ("canvas 1", 4, 4)
    assert [moment["name"] for moment in view["moments"]] == ["noise", *(f"step {n}" for n in range(1, 5)), "committed"]
    second = view["moments"][2]
    kept, renewed, pinned, guess = 4, 128, 32, 1
    assert [flags & ~8 for flags in second["flags"]] == [guess | kept, guess | kept, guess | renewed, guess | pinned]
    assert second["entropy"] == [0, 0, 1250, 1250]
    assert [data["texts"][index] for index in view["moments"][-1]["text"]] == ["1", "2", "3", "4"]
    assert all(flags & 3 == 2 for flags in view["moments"][-1]["flags"])
    assert data["left_out"] == "" and data["most"] == 1.5


def verified() -> Trace:
    """A canvas of two rounds: of the first draft the head accepts two tokens, writes the third, rejects two."""
    trace = traced("a", [2, 3, 4, 5, 10], steps=3)
    rounds = ((1, [2, 3, 1, 3, 10], 0, 2, 4), (2, [2, 3, 4, 5, 10], 3, 5, 6))
    for step, draft, given, accepted, own in rounds:
        trace.verifications.append(Verification("a", 0, step, draft, given, accepted, own))
    return trace


@pytest.mark.quick
def test_a_page_holds_the_drafts_of_a_verified_canvas_and_what_became_of_them() -> None:
    (request,) = data_of(page([verified()], decode, "t"))["requests"]
    moments = request["views"][0]["moments"]
    assert [moment["name"] for moment in moments[2:]] == ["step 2", "verified", "step 3", "verified", "committed"]
    guess, pinned, accepted, rejected, own = 1, 32, 256, 512, 1024
    first, second = (moment for moment in moments if moment["name"] == "verified")
    assert first["flags"] == [guess | accepted] * 2 + [guess | own] + [guess | rejected] * 2
    assert second["flags"] == [guess | pinned] * 3 + [guess | accepted] * 2
    assert first["text"][2] == second["text"][2] != first["seen"][2]  # the head's token, and the drafted one
    assert first["detail"] == "drafted 5, accepted 2, rejected 3, of which the head wrote the first anew"
    assert second["detail"] == "drafted 2, accepted 2, rejected 0"


@pytest.mark.quick
def test_a_cancelled_request_shows_the_canvas_that_it_did_not_finish() -> None:
    cancelled = replace(traced("a", [2, 3, 4, 5], steps=2), canvases=[])
    (request,) = data_of(page([cancelled, Trace("none")], decode, "t"))["requests"]
    assert [view["name"] for view in request["views"]] == ["canvas 1, not finished"]
    assert [moment["name"] for moment in request["views"][0]["moments"]] == ["noise", "step 1", "step 2"]


def test_a_page_of_long_traces_keeps_within_its_bound_and_says_what_it_leaves_out() -> None:
    traces = [traced(n, list(range(10, 74)), steps=40, canvases=2, vocabulary=100_000) for n in range(4)]
    whole = page(traces, decode, "t")
    sizes = {}
    for limit in (50_000, 8_000, 900):
        text = page(traces, decode, "t", limit)
        found = re.search(r'id="data">([^<]*)<', text)
        assert found is not None and len(found[1]) <= limit
        data = data_of(text)
        moments = data["requests"][0]["views"][0]["moments"]
        assert (moments[0]["name"], moments[-2]["name"], moments[-1]["name"]) == ("noise", "step 40", "committed")
        sizes[limit] = data["left_out"]
    assert data_of(whole)["left_out"] == ""
    first, second, third = sizes.values()
    assert first == "the texts of the noise"
    assert "all steps but one of every 2" in second and "requests after the first" in third


TEXT_OF = "return document.querySelector(`.${arguments[0]}`).textContent"


def shown(browser: Browser, name: str = "where") -> str:
    return browser.run(TEXT_OF, name)


def cells(browser: Browser) -> list[str]:
    return browser.run("return [...document.querySelectorAll('.stage button')].map((cell) => cell.textContent)")


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Browser:
    """A page with a text of two canvases and a sudoku."""
    text = traced("a", [2, 3, 4, 10, 6, 5], steps=4, canvases=2, control="regex '[0-9]+'")
    ids = [WORDS.index(digit) for digit in SOLUTION]
    sudoku = traced("b", [*ids, 0], steps=3, prompt=PUZZLE, text=SOLUTION)
    for step in sudoku.steps:
        step.is_pinned[:] = [False] * 17  # type: ignore[index]
    draw_page([text, sudoku], tmp_path / "page.html", decode, "t")
    browser.open(tmp_path / "page.html")
    return browser


def test_keys_step_through_a_canvas(opened: Browser) -> None:
    assert shown(opened) == "noise"
    opened.press("right", "right")
    assert shown(opened) == "step 2"
    assert "2 of 6 kept · 3 renewed · 1 pinned" in shown(opened, "numbers")
    opened.press("left")
    assert shown(opened) == "step 1"
    opened.press("end")
    assert shown(opened) == "committed" and cells(opened) == ["1", "2", "3", "·word", "⏎", "4"]
    opened.press("home", "left")
    assert shown(opened) == "noise"
    opened.press("page down", "right")
    assert opened.run("return document.querySelector('.views [aria-pressed=true]').textContent").startswith("canvas 2")
    assert "the limit: it did not converge" in shown(opened, "views")
    assert shown(opened, "control") == "regex '[0-9]+'"


def test_the_arrow_keys_go_through_the_positions_once_the_canvas_has_the_focus(opened: Browser) -> None:
    opened.press("right")
    opened.run("document.querySelector('.seen').focus()")
    opened.press("tab", "right", "right")
    focused = "return [document.activeElement.dataset.place, document.activeElement.getAttribute('aria-label')]"
    place, label = opened.run(focused)
    assert place == "2" and label.startswith("position 3: the guess is “") and "entropy 1.500 nats" in label
    assert label.endswith("renewed") and shown(opened, "note") == label
    assert shown(opened) == "step 1"
    outline = "return getComputedStyle(document.activeElement).outlineStyle"
    assert opened.run(outline) == "solid"  # the focus can be seen
    opened.press("escape", "right")
    assert shown(opened) == "step 2"
    assert opened.run("return document.querySelector('.slider').getAttribute('aria-valuetext')") == "step 2, 3 of 6"


def test_play_runs_to_the_end_and_space_pauses_it(opened: Browser) -> None:
    opened.run("document.body.focus(); window.setInterval = (tick) => { window.tick = tick; return 1; }")
    opened.press("space")
    assert "pause" in shown(opened, "play")
    opened.press("space")
    assert "play" in shown(opened, "play")
    opened.press("end", "left")
    opened.click(".play")
    opened.run("window.tick()")
    assert "pause" in shown(opened, "play") and shown(opened) == "committed"
    opened.run("window.tick()")
    assert "play" in shown(opened, "play") and shown(opened) == "committed"


def test_a_page_begins_to_move_unless_its_reader_wants_little_motion(opened: Browser, tmp_path: Path) -> None:
    assert "play" in shown(opened, "play")
    opened.prefer(motion="no-preference")
    opened.open(tmp_path / "page.html")
    assert "pause" in shown(opened, "play")
    opened.press("home")
    assert "play" in shown(opened, "play") and shown(opened) == "noise"
    opened.prefer()


def test_what_the_step_saw_and_other_requests_can_be_chosen(opened: Browser) -> None:
    opened.press("right", "right", "right")
    guessed = cells(opened)
    opened.click(".seen")
    assert cells(opened) != guessed
    opened.click(".guess")
    assert cells(opened) == guessed
    opened.click("#requests button:last-child")
    assert shown(opened, "prompt") == PUZZLE
    assert opened.run("return document.querySelector('.stage').className") == "stage square"
    opened.press("end")
    assert "".join(cells(opened)) == SOLUTION
    opened.run("document.querySelector('.all').open = true")
    opened.press("home")
    strip = "return document.querySelectorAll('.strip figure').length"
    for _ in range(40):
        if opened.run(strip):
            break
    assert opened.run(strip) == 5
    opened.click(".map")  # its middle
    assert shown(opened) == "step 2"


def test_a_verification_says_of_every_position_what_the_head_made_of_it(browser: Browser, tmp_path: Path) -> None:
    draw_page([verified()], tmp_path / "page.html", decode, "t")
    browser.open(tmp_path / "page.html")
    browser.press("home", "right", "right", "right")
    assert shown(browser) == "verified" and "drafted 5, accepted 2, rejected 3" in shown(browser, "numbers")
    notes = browser.run("return [...document.querySelectorAll('.stage button')].map((cell) => cell.title)")
    assert notes[0] == "position 1: the draft is “1”, accepted" and notes[4].endswith("the draft is “·word”, rejected")
    assert notes[2] == "position 3: the head wrote “3”, in place of the drafted “·a”"
    assert not browser.run("return document.getElementById('legend-verified').hidden")


def light_of(colour: str) -> float:
    """The relative luminance of "#rrggbb" or "r, g, b" (WCAG 2.1)."""
    values = [int(colour[at : at + 2], 16) for at in (1, 3, 5)] if colour[0] == "#" else map(int, colour.split(","))
    shares = [value / 255 for value in values]
    red, green, blue = (s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_both_colour_schemes_can_be_read(opened: Browser) -> None:
    """Text stands out from its background by at least 4.5 to 1 (WCAG AA), also on the hottest cell."""
    script = """
    const styles = getComputedStyle(document.documentElement);
    return Object.fromEntries(["page", "ink", "soft", "wrong", "given", "hot", "cell"].map((name) =>
      [name, styles.getPropertyValue("--" + name).trim()]));
    """
    pages = []
    for scheme in ("light", "dark"):
        opened.prefer(scheme)
        found = {name: light_of(colour) for name, colour in opened.run(script).items()}
        pairs = [("ink", ground) for ground in ("page", "cell", "given", "hot")]
        for text, ground in [*pairs, ("soft", "page"), ("wrong", "page")]:
            darker, lighter = sorted((found[text], found[ground]))
            assert (lighter + 0.05) / (darker + 0.05) >= 4.5, (scheme, text, ground)
        pages.append(opened.run("return getComputedStyle(document.body).backgroundColor"))
    opened.prefer()
    assert pages == ["rgb(255, 255, 255)", "rgb(20, 23, 28)"]


def test_hostile_text_is_drawn_and_does_nothing(browser: Browser, hostile: Trace, tmp_path: Path) -> None:
    draw_page([hostile], tmp_path / "page.html", decode, "</title><script>boom()</script>")
    browser.open(tmp_path / "page.html")
    browser.press("end")
    drawn = cells(browser)
    assert drawn[0] == "x</script><script>boom()</script>" and drawn[1] == "\\u001b[2J" and drawn[2] == "\\u202e<b>"
    assert shown(browser, "prompt") == "</script><b>\\u0000"
    assert shown(browser, "text") == "</script><script>boom()</script>"
    assert browser.run("return document.querySelectorAll('script').length") == 2
    assert browser.run("return document.querySelectorAll('main b, main i').length") == 0
    assert browser.log() == []
