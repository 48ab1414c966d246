"""The settings of `blockdiff serve`: a YAML file, which options of the command line override."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from blockdiff import plain_yaml
from blockdiff.errors import BlockdiffError
from blockdiff.files import read_text
from blockdiff.serving.limits import LOOPBACK, Access, Limits
from blockdiff.stored_forms import Quantize

MODEL_KEYS = ("adapter", "draft_model", "quantize")


class ServeSettings(BaseModel):
    """The keys of serve.yaml, with their defaults.

    name: the model's name in requests (None: the name of its directory); hosts: further names allowed in the Host
    header (`"*"`: any; if it is empty and other machines reach `host`, also any); origins: sites whose pages may ask
    (`"*"`: any); adapters: directories of adapters by the names that requests use; max_rows, max_waiting,
    tokens_per_step: of the engine, or of each engine if there are adapters; limits: of a request; drain_seconds: how
    long answers may continue after SIGTERM.
    """

    model_config = ConfigDict(extra="forbid")

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    api_key_file: str | None = None
    name: str | None = None
    hosts: list[str] = []
    origins: list[str] = []
    adapter: str | None = None
    adapters: dict[str, str] = {}
    draft_model: str | None = None
    quantize: Quantize | None = None
    max_rows: int = Field(32, ge=1)
    max_waiting: int = Field(256, ge=0)
    tokens_per_step: int | None = Field(None, ge=1)
    limits: Limits = Limits()
    drain_seconds: int = Field(120, ge=0)

    @model_validator(mode="after")
    def _agrees(self) -> ServeSettings:
        if self.adapters and (self.adapter or self.draft_model):
            raise ValueError("adapters: each is over the model alone; leave out adapter and draft_model")
        return self

    @property
    def is_local(self) -> bool:
        """True if only programs of this machine can reach the server."""
        return self.host in LOOPBACK

    def access(self) -> Access:
        """Return who may ask: with which keys, under which names in the Host header, and from which origins.

        Raises BlockdiffError if `api_key_file` cannot be read or has no key.
        """
        is_any = "*" in self.hosts or not (self.is_local or self.hosts)
        hosts = None if is_any else (*LOOPBACK, self.host, *self.hosts)
        return Access(self._keys(), hosts, tuple(self.origins))

    def names(self, model: str) -> tuple[str, ...]:
        """Return the names by which requests may call the model: `name` (or its directory's), then `model` itself.

        Raises BlockdiffError if an adapter has one of these names, or the name "".
        """
        names = tuple(dict.fromkeys((self.name or Path(model).resolve().name, model)))
        if taken := {"", *names} & {*self.adapters}:
            raise BlockdiffError(
                f"adapters: {taken.pop()!r} is no name of an adapter, or that of the model; choose another"
            )
        return names

    def model_options(self) -> dict[str, Any]:
        """Return the arguments of `Sampler.from_pretrained` that the settings have."""
        return {name: getattr(self, name) for name in MODEL_KEYS}

    def engine_options(self) -> dict[str, Any]:
        """Return the arguments of `AsyncEngine` that the settings have; warms_up is true."""
        names = ("max_rows", "max_waiting", "tokens_per_step")
        return {name: getattr(self, name) for name in names} | {"warms_up": True}

    def _keys(self) -> tuple[str, ...]:
        if self.api_key_file is None:
            return ()
        try:
            text = Path(self.api_key_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "not UTF-8"
            raise BlockdiffError(f"{self.api_key_file}: cannot be read ({why})") from None
        lines = (line.strip() for line in text.splitlines())
        keys = tuple(line for line in lines if line and not line.startswith("#"))
        if not keys:
            raise BlockdiffError(f"{self.api_key_file}: has no key; write one a line, without # before it")
        return keys


def _nearest(key: str) -> str:
    """Return words for an error about an unknown key: the nearest key of serve.yaml, or all keys if none is near."""
    keys = [*ServeSettings.model_fields, *(f"limits.{each.name}" for each in fields(Limits))]
    words = {each.rpartition(".")[2]: each for each in reversed(keys)}
    near = difflib.get_close_matches(key.rpartition(".")[2], words, 1)
    return f"did you mean {words[near[0]]}?" if near else f"there are {', '.join(keys)}"


def read_settings(path: Path | None, given: Mapping[str, Any]) -> ServeSettings:
    """Read the settings of a file (None: no file), overridden by the values of `given` that are not None.

    Raises BlockdiffError for a file that cannot be read, an unknown key or a bad value.
    """
    values: Any = {}
    if path is not None:
        try:
            values = plain_yaml.parse(read_text(path, plain_yaml.LARGEST_FILE)) or {}
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            why = getattr(error, "strerror", None) or " ".join(str(error).split())[:160]
            raise BlockdiffError(f"{path}: cannot be read ({why})") from None
        if not isinstance(values, dict):
            raise BlockdiffError(f"{path}: write keys with values, such as `port: 8000`")
    values |= {
        name: str(value) if isinstance(value, Path) else value for name, value in given.items() if value is not None
    }
    try:
        return ServeSettings.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key, words = ".".join(map(str, first["loc"])), first["msg"]
        if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            words = f"is not a key; {_nearest(key)}"
        raise BlockdiffError(f"{path or 'the command line'}: {key}: {words[:1].lower()}{words[1:]}") from None
