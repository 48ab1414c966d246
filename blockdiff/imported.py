"""Functions of one's own, by the name "module:function" under which commands and recipes ask for them."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from blockdiff.errors import BlockdiffError


def imported(name: str) -> Any:
    """The object that "module:name" names; modules in the working directory are found, too.

    BlockdiffError if there is none.
    """
    module, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        return getattr(import_module(module), attribute)
    except Exception as error:  # whatever the module raises when it is imported
        raise BlockdiffError(f"{name} cannot be imported ({type(error).__name__}: {error})") from None
