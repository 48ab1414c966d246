"""Answering many people at once: an engine for asynchronous programs, and a server that speaks OpenAI's protocol."""

from blockdiff.serving.async_engine import AsyncEngine

__all__ = ["AsyncEngine"]
