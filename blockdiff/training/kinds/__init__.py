"""The kinds of run: a file of this folder for each, with its keys and its verbs (`kind.Kind`), found by its name."""

from __future__ import annotations

import functools
import pkgutil
from importlib import import_module
from typing import Any


@functools.cache
def kinds() -> dict[str, type[Any]]:
    """Every kind of run by its name: the class `KIND` of each module of this folder that has one."""
    modules = [import_module(f"{__name__}.{each.name}") for each in pkgutil.iter_modules(__path__)]
    return {each.__name__.rpartition(".")[2]: each.KIND for each in modules if hasattr(each, "KIND")}
