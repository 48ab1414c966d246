"""The user's own functions, by the name "module:function" that commands and recipes accept."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from blockdiff.errors import BlockdiffError


def imported(name: str) -> Any:
    """Return the object named by "module:name". Modules in the working directory are found, too.

    Raises BlockdiffError if it cannot be imported.
    """
    module, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        return getattr(import_module(module), attribute)
    except Exception as error:  # importing a module may raise anything
        raise BlockdiffError(f"{name} cannot be imported ({type(error).__name__}: {error})") from None
