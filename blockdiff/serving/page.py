"""`GET /`: a page to ask the model from, which shows canvases as they denoise.

It is one file that loads no others, with the player of trace pages (blockdiff/plots/player.js) in it. It calls the
server's own routes, with the key that its reader types.
"""

from __future__ import annotations

import base64
import hashlib
import html
from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from blockdiff.plots.denoising import filled, part
from blockdiff.sampling.strategies import NAMES
from blockdiff.serving.answering import Server
from blockdiff.terminal import printable


def router(server: Server) -> APIRouter:
    """Return the routes of the page: it is served at `/`, with headers that restrict what it may load."""
    routes = APIRouter()
    tokenizer = server.engine.settings.tokenizer
    text, policy = page_of(server.names[0], is_chat=getattr(tokenizer, "chat_template", None) is not None)
    headers = {"content-security-policy": policy, "referrer-policy": "no-referrer", "x-content-type-options": "nosniff"}

    @routes.api_route("/", methods=["GET", "HEAD"])
    async def page() -> HTMLResponse:
        return HTMLResponse(text, headers=headers)

    return routes


def page_of(model: str, is_chat: bool) -> tuple[str, str]:
    """Return the HTML of the page for `model`, and its content security policy: its own script and style, no others.

    is_chat: prompts are messages of a chat by default, else raw texts; the reader can choose.
    """
    folder = files("blockdiff.serving")
    sources = {kind: (folder / f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js")}
    style, script = part("denoising.css") + sources["css"], part("player.js") + sources["js"]
    values = {
        "title": html.escape(printable(model)),
        "path": "chat/completions" if is_chat else "completions",
        "strategies": "".join(f'<option value="{name}">' for name in NAMES),
        **{name: part(f"{name}.html") for name in ("player", "legend")},
        "style": style,
        "script": script,
    }
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return filled(sources["html"], values), policy


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
