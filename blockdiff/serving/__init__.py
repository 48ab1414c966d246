"""Answers for many clients at once: an engine for asynchronous programs, and a server for OpenAI's protocol.

The server needs `pip install 'blockdiff[serve]'`; `AsyncEngine` does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blockdiff.serving.async_engine import AsyncEngine
from blockdiff.serving.limits import Access, Limits

if TYPE_CHECKING:
    from blockdiff.serving.application import app

__all__ = ["Access", "AsyncEngine", "Limits", "app"]


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module 'blockdiff.serving' has no attribute {name!r}")
    from blockdiff.serving.application import app

    return app
