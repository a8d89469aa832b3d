"""The work of ``penstock serve`` after its flags are parsed."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import sys
import time
from dataclasses import replace
from functools import partial

import typer

import penstock
from penstock.api_keys import API_KEY_VARIABLE, check_api_key_variable, read_api_keys
from penstock.dtypes import PROMISES
from penstock.engine.async_llm import AsyncLLM
from penstock.engine.options import EngineOptions
from penstock.engine.places.starting import watched
from penstock.server.app import make_app
from penstock.server.http.listen import Listening
from penstock.server.http.logs import configure_logs
from penstock.server.http.server import BACKLOG, Server
from penstock.server.loading_log import LoadingLog
from penstock.server.settings import ServerSettings
from penstock.text.conversation_files import read_template

log = logging.getLogger("penstock.server")


def run_serve(options: EngineOptions, settings: ServerSettings, listening: Listening) -> None:
    """Bind the port, start the stages, serve until a signal.

    Raises ConfigError before anything starts, PipelineError when a stage cannot be started.
    """
    check_api_key_variable(os.environ)
    listening.allow_open_files()
    template = None if settings.chat_template is None else read_template(settings.chat_template)
    if settings.api_key_file is not None:
        settings = replace(settings, api_keys=settings.api_keys + read_api_keys(settings.api_key_file))
    listening.check_certificate()
    with listening.bind() as bound:
        configure_logs(settings.log_level)
        warn(settings, listening)
        log.info("starting", extra={"fields": {"model": options.model, "version": penstock.__version__}})
        asyncio.run(serve(options, settings, listening, bound, template))


async def serve(
    options: EngineOptions,
    settings: ServerSettings,
    listening: Listening,
    bound: socket.socket,
    template: str | None,
) -> None:
    began = time.monotonic()
    llm, _ = watched(partial(AsyncLLM, max_queue=settings.max_queue), options, LoadingLog())
    try:
        if template is not None:
            llm.get_tokenizer().use_chat_template(template)
        app = make_app(llm, settings, listening)
        # Closing the engine also ends the live views.
        server = Server(app, listening, app.state.gate, settings.drain_timeout, stop=llm.close)
        gc.collect()
        gc.freeze()  # imported objects stay: no collection while serving has to look through them
        bound.listen(BACKLOG)  # before the announcement: whoever reads that may connect at once
        announce(llm, settings, url_of(bound, listening.scheme), time.monotonic() - began)
        await server.serve([bound])
    finally:
        llm.close()
    log.info("ended")


def announce(llm: AsyncLLM, settings: ServerSettings, url: str, seconds: float) -> None:
    """Announce the server: a line for people on stdout, one for programs in the log."""
    names = ", ".join(settings.served_model_name)
    tell(f"Penstock serves {names} at {url}" + (" (open it in a browser)" if settings.web else ""))
    tell(f"Numerics are {llm.numerics}: {PROMISES[llm.numerics]}")
    fields = {
        "url": url,
        "model": names,
        "stages": llm.setup.stages,
        "numerics": llm.numerics,
        "seconds": round(seconds, 3),
    }
    log.info("serving", extra={"fields": fields})


def tell(line: str) -> None:
    """Print a line on stdout. If that is full or closed, the server goes on without it."""
    try:
        typer.echo(line)
    except OSError as error:
        log.warning(f"standard output cannot be written ({error.strerror}); nothing more is said there")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is buffered is written at exit


def url_of(bound: socket.socket, scheme: str) -> str:
    host, port = bound.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def warn(settings: ServerSettings, listening: Listening) -> None:
    if not listening.is_local and not settings.api_keys:
        reach = f"whoever reaches {listening.host} port {listening.port} can use this server"
        log.warning(f"{reach}: give it a key with --api-key-file or {API_KEY_VARIABLE}")
    if any(word.partition("=")[0] == "--api-key" for word in sys.argv):
        log.warning(f"other users of this machine see the key of --api-key: use --api-key-file or {API_KEY_VARIABLE}")
