"""Imports peers' packages that may not be installed."""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any


@functools.cache
def installed(package: str, name: str) -> Any:
    """Import a peer's module; None, with one printed line of the reason, if it is missing or fails to import."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        missing = error.name in (package, package.partition(".")[0])
        print(f"{name}: {'not installed' if missing else f'needs {error.name}'}", file=sys.stderr)
    except Exception as error:  # any error of a package built for another machine
        print(f"{name}: does not import here: {type(error).__name__}: {str(error)[:100]}", file=sys.stderr)
    return None
