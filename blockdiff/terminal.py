"""The terminal that commands and training print on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def console(stderr: bool = False) -> Console:
    """A terminal that neither guesses at markup nor colours numbers of its own accord."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, markup=False, soft_wrap=True)


def quiet() -> None:
    """Keep libraries from drawing bars and warnings between our lines."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    hub_logging.set_verbosity(hub_logging.CRITICAL)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
