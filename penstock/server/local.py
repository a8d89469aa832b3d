"""A server for its own process alone, on a Unix socket in a folder that only this user can open."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

from penstock.engine.async_llm import AsyncLLM
from penstock.server.app import make_app
from penstock.server.http.listen import Listening
from penstock.server.http.server import BACKLOG, Server
from penstock.server.settings import ServerSettings


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
        events.call_soon_threadsafe(app.state.gate.hurry)
        server.should_exit = True

    begun.set_result(stop)
    await server.serve([bound])
