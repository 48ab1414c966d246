"""Members of a module that every call reads: finding one as nn.Module does, in Python, takes half a microsecond."""

from __future__ import annotations

from typing import Any

from torch import nn


class Member:
    """A parameter, buffer or submodule, read straight from the module's table `kind` where nn.Module keeps it.

    A class attribute of the same name as the member, which is assigned and registered as ever. Where the table has no
    such name (a parametrised weight, None in place of a submodule), nn.Module searches as it does without this.
    """

    def __init__(self, kind: str):
        self.kind = kind

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, module: nn.Module | None, owner: type) -> Any:
        if module is None:
            return self
        try:
            return module.__dict__[self.kind][self.name]
        except KeyError:
            raise AttributeError(self.name) from None


def parameter() -> Any:
    """A parameter that every call reads."""
    return Member("_parameters")


def buffer() -> Any:
    """A buffer that every call reads."""
    return Member("_buffers")


def submodule() -> Any:
    """A submodule that every call reads."""
    return Member("_modules")


class _Searched:
    """In place of a Member: nn.Module searches for it."""

    def __get__(self, module: nn.Module | None, owner: type) -> Any:
        raise AttributeError


def searched(kind: type[nn.Module]) -> dict[str, Any]:
    """Attributes for a subclass of a kind of module that has a `__getattr__` with a say in what members are."""
    return {name: _Searched() for each in kind.__mro__ for name, x in vars(each).items() if isinstance(x, Member)}
