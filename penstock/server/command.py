"""``penstock serve``: starts the server, and logs the progress of loading."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import typer

import penstock
from penstock.engine.async_llm import AsyncLLM
from penstock.engine.front import AsyncEngine
from penstock.engine.opening import watched
from penstock.engine.options import EngineOptions
from penstock.engine.replicas.replicas import Replicas
from penstock.environment import API_KEY_VARIABLE, read_api_keys
from penstock.files import PROMISES
from penstock.pipeline.stage_process import LoadingCount
from penstock.server.app import make_app
from penstock.server.http.middleware import configure_logs
from penstock.server.http.serving import BACKLOG, Server
from penstock.server.settings import Listening, ServerSettings
from penstock.terminal import LINE_EVERY
from penstock.text.chat import read_template

# ---------------------------------------------------------------------------------------------------------- loading log
# Progress of loading, as lines in a server's log.

log = logging.getLogger("penstock.server")


class LoadingLog(LoadingCount):
    """A progress that logs a line every few seconds while weights are read."""

    def __init__(self) -> None:
        super().__init__()
        self._logged_at = time.monotonic()

    def show(self, host: str, does: str, done: int, total: int) -> None:
        if time.monotonic() - self._logged_at >= LINE_EVERY:
            self._logged_at = time.monotonic()
            where = {"host": host} if host else {}
            log.info(does, extra={"fields": where | {"percent": round(100 * done / max(1, total))}})


# -------------------------------------------------------------------------------------------------------------- command
# The work of ``penstock serve`` after its flags are parsed.


def run_serve(options: EngineOptions, settings: ServerSettings, listening: Listening, bound: socket.socket) -> None:
    """Start the stages, serve at the port that is ``bound`` until a signal.

    Raises ConfigError before anything starts, PipelineError when a stage cannot be started.
    """
    template = None if settings.chat_template is None else read_template(settings.chat_template)
    if settings.api_key_file is not None:
        settings = replace(settings, api_keys=settings.api_keys + read_api_keys(settings.api_key_file))
    listening.check_certificate()
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
    llm = engine_of(options, settings)
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


def engine_of(options: EngineOptions, settings: ServerSettings) -> AsyncEngine:
    """One engine, or as many as are asked for. Raises ConfigError, and PipelineError when a stage cannot be started."""
    limits = {"max_queue": settings.max_queue, "idle_timeout": settings.idle_timeout}
    kind: type[AsyncEngine] = AsyncLLM if options.data_parallel_size == 1 else Replicas
    return watched(partial(kind, **limits), options, LoadingLog())[0]  # type: ignore[arg-type]


def announce(llm: AsyncEngine, settings: ServerSettings, url: str, seconds: float) -> None:
    """Announce the server: a line for people on stdout, one for programs in the log."""
    names = ", ".join(settings.served_model_name)
    tell(f"Penstock serves {names} at {url}" + (" (open it in a browser)" if settings.web else ""))
    tell(f"Numerics are {llm.numerics}: {PROMISES[llm.numerics]}")
    fields = {
        "url": url,
        "model": names,
        "stages": llm.setup.stages,
        "engines": len(llm.replicas()),
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
    """The URL of a listening socket; an IPv6 address is in brackets."""
    host, port = bound.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def warn(settings: ServerSettings, listening: Listening) -> None:
    """Warn of a server that anybody can use, and of a key that other users of the host can see."""
    if not listening.is_local and not settings.api_keys:
        reach = f"whoever reaches {listening.host} port {listening.port} can use this server"
        log.warning(f"{reach}: give it a key with --api-key-file or {API_KEY_VARIABLE}")
    if any(word.partition("=")[0] == "--api-key" for word in sys.argv):
        log.warning(f"other users of this machine see the key of --api-key: use --api-key-file or {API_KEY_VARIABLE}")


# ---------------------------------------------------------------------------------------------------------------- local
# A server for its own process alone, on a Unix socket in a folder that only this user can open.


@contextmanager
def served_at(path: Path, llm: AsyncLLM, settings: ServerSettings) -> Iterator[None]:
    """Serve ``llm`` at ``path`` on another thread while the block runs. At the block's end ``llm`` is closed, too."""
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))
        bound.listen(BACKLOG)
        begun: Future[Callable[[], None]] = Future()
        thread = threading.Thread(target=_run, args=(llm, settings, bound, begun), name="penstock-http", daemon=True)
        thread.start()
        try:
            stop = begun.result()
            try:
                yield
            finally:
                stop()
                thread.join()
        finally:
            path.unlink(missing_ok=True)


def _run(llm: AsyncLLM, settings: ServerSettings, bound: socket.socket, begun: Future[Callable[[], None]]) -> None:
    """Run the server; ``begun`` is set to a function that ends it, or to the error that kept it from starting."""
    try:
        asyncio.run(_serve(llm, settings, bound, begun))
    except BaseException as error:
        if begun.done():
            raise
        begun.set_exception(error)


async def _serve(
    llm: AsyncLLM, settings: ServerSettings, bound: socket.socket, begun: Future[Callable[[], None]]
) -> None:
    app = make_app(llm, settings)
    server = Server(app, Listening(), app.state.gate, settings.drain_timeout, stop=llm.close)
    events = asyncio.get_running_loop()

    def stop() -> None:
        """End the server without waiting for running requests."""
        # Called by another thread: the gate belongs to the event loop's.
        events.call_soon_threadsafe(app.state.gate.hurry)
        server.should_exit = True

    begun.set_result(stop)
    await server.serve([bound])
