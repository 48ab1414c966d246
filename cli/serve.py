"""`blockdiff serve`: a model behind OpenAI's protocol on one machine."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from blockdiff.cli import options
from blockdiff.cli.model import ModelOptions, with_groups
from blockdiff.errors import BlockdiffError

SERVER = "Server"  # the group of options in --help


@with_groups
def serve(
    host: Annotated[str | None, options.option(SERVER, "HOST", "Address to listen on (127.0.0.1).")] = None,
    port: Annotated[
        int | None, options.option(SERVER, "N", "Port to listen on (8000; 0: any).", min=0, max=65535)
    ] = None,
    api_key_file: Annotated[
        Path | None, options.option(SERVER, "FILE", "File of the keys that may ask, one a line.")
    ] = None,
    no_key: Annotated[bool, options.flag(SERVER, "--no-key", "Let everybody ask who reaches HOST.")] = False,
    max_rows: Annotated[int | None, options.option(SERVER, "N", "Answers denoised at the same time.", min=1)] = None,
    config: Annotated[Path | None, options.option(SERVER, "FILE", "YAML with these options, limits and more.")] = None,
    strategy: options.Strategy = None,
    *,
    opened: ModelOptions,
) -> None:
    """Serve a model by OpenAI's protocol, and with a page.

    SIGTERM and Ctrl-C let the answers under way end, and the command then
    exits with 0. docs/serving.md lists the fields and the limits.
    """
    try:
        from sse_starlette.sse import AppStatus

        from blockdiff.serving.process import Process, listener, log_to_stderr
        from blockdiff.serving.settings import MODEL_KEYS, read_settings
    except ImportError as error:
        raise BlockdiffError(
            f"blockdiff serve needs the package {error.name}; pip install 'blockdiff[serve]'"
        ) from None
    if no_key and api_key_file is not None:
        raise typer.BadParameter("--api-key-file asks for a key; leave one of the two out", param_hint="--no-key")
    overrides = dict(host=host, port=port, api_key_file=api_key_file, max_rows=max_rows)
    overrides |= {name: getattr(opened, name) for name in MODEL_KEYS}
    settings = read_settings(config, overrides)
    access = settings.access()
    if not settings.is_local and not access.keys and not no_key:
        raise typer.BadParameter(
            f"{settings.host} lets other machines ask; give --api-key-file FILE, or --no-key if they may",
            param_hint="--host",
        )
    listening = listener(settings.host, settings.port)  # before the weights are read
    from blockdiff.serving import app
    from blockdiff.terminal import quiet, say

    quiet()
    names = settings.names(opened.model)
    opened = replace(opened, **settings.model_options())
    opened.require_as_written(*settings.adapters.values())
    sampler = opened.open(strategy)
    adapters = {
        name: replace(opened, adapter=directory).open(strategy, over=sampler.model)
        for name, directory in settings.adapters.items()
    }
    if sampler.tokenizer is not None and not sampler.tokenizer.chat_template:
        say("blockdiff: the tokenizer has no chat template, so only /v1/completions is answered")
    asgi = app(
        sampler, names=names, adapters=adapters, limits=settings.limits, access=access, **settings.engine_options()
    )
    log_to_stderr()
    engine = asgi.state.server.engine.start()  # now, so that threads that cannot start are one line
    address = f"[{settings.host}]" if ":" in settings.host else settings.host
    port = listening.getsockname()[1]
    say(f"blockdiff: serving {', '.join(asgi.state.server.served)} on http://{address}:{port}")
    AppStatus.disable_automatic_graceful_drain()  # streams go on to their end
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises them again when everything has ended
        signal.signal(number, lambda *_: None)
    Process(asgi, engine, settings.drain_seconds).run(sockets=[listening])
