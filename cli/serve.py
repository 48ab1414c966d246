"""`blockdiff serve`: a model behind OpenAI's protocol on one machine."""

from __future__ import annotations

import logging
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockdiff.cli import options
from blockdiff.cli.model import ModelOptions, with_groups
from blockdiff.errors import BlockdiffError

if TYPE_CHECKING:
    from blockdiff.serving.settings import ServeSettings

SERVER = "Server"  # the group of options in --help


@with_groups
def serve(
    host: Annotated[
        str | None, typer.Option(metavar="HOST", rich_help_panel=SERVER, help="Address to listen on (127.0.0.1).")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, metavar="N", rich_help_panel=SERVER, help="Port to listen on (8000; 0: any)."),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", rich_help_panel=SERVER, help="File of the keys that may ask, one a line."),
    ] = None,
    no_key: Annotated[
        bool, typer.Option("--no-key", metavar="", rich_help_panel=SERVER, help="Let everybody ask who reaches HOST.")
    ] = False,
    max_rows: Annotated[
        int | None, typer.Option(min=1, metavar="N", rich_help_panel=SERVER, help="Answers denoised at the same time.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", rich_help_panel=SERVER, help="YAML with these options, limits and more."),
    ] = None,
    strategy: options.Strategy = None,
    *,
    opened: ModelOptions,
) -> None:
    """Answer OpenAI's protocol, and a page, with a model.

    SIGTERM and Ctrl-C let the answers under way end, and the command then
    exits with 0. docs/serving.md lists the fields and the limits.
    """
    try:
        import uvicorn
        from sse_starlette.sse import AppStatus

        from blockdiff.serving.settings import MODEL_KEYS, read_settings
    except ImportError as error:
        raise BlockdiffError(
            f"blockdiff serve needs the package {error.name}; pip install 'blockdiff[serve]'"
        ) from None
    given = dict(host=host, port=port, api_key_file=api_key_file, max_rows=max_rows)
    given |= {name: getattr(opened, name) for name in MODEL_KEYS}
    settings = read_settings(config, given)
    access = settings.access()
    if not settings.is_local and not access.keys and not no_key:
        raise typer.BadParameter(
            f"{settings.host} lets other machines ask; give --api-key-file FILE, or --no-key if they may",
            param_hint="--host",
        )
    listener = _listener(settings)  # before the weights are read
    from blockdiff.serving import app
    from blockdiff.terminal import quiet

    quiet()
    sampler = replace(opened, **settings.model_options()).open(strategy)
    if sampler.tokenizer is not None and not sampler.tokenizer.chat_template:
        print("blockdiff: the tokenizer has no chat template, so only /v1/completions is answered", file=sys.stderr)
    names = tuple(dict.fromkeys((settings.name or Path(opened.model).resolve().name, opened.model)))
    asgi = app(sampler, names=names, limits=settings.limits, access=access, **settings.engine_options())
    _log_to_stderr()
    server = uvicorn.Server(
        uvicorn.Config(
            asgi, log_level="warning", access_log=False, timeout_graceful_shutdown=settings.drain_seconds, lifespan="on"
        )
    )
    address = f"[{settings.host}]" if ":" in settings.host else settings.host
    print(f"blockdiff: serving {names[0]} on http://{address}:{listener.getsockname()[1]}", file=sys.stderr, flush=True)
    AppStatus.disable_automatic_graceful_drain()  # streams go on to their end
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises them again when everything has ended
        signal.signal(number, lambda *_: None)
    server.run(sockets=[listener])


def _listener(settings: ServeSettings) -> socket.socket:
    """A socket bound to the address; BlockdiffError where that is taken, or is none of this machine's."""
    place = f"{settings.host}:{settings.port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[
            0
        ]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise BlockdiffError(
            f"{place}: cannot be listened on ({error.strerror}); choose another --port or --host"
        ) from None
    return listener


def _log_to_stderr() -> None:
    handler: Any = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log = logging.getLogger("blockdiff.serving")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
