"""The work of ``penstock run`` after its flags are parsed: load a model and chat with it in this terminal.

Engine, server and chat are one process. The chat is that of ``penstock chat``, over a socket that only this user can
open: nothing listens on the network.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Final

import httpx

from penstock.clients.api import Server
from penstock.clients.chat import ChatOptions, chat_over
from penstock.config import FieldError
from penstock.engine.opening import loaded, watched
from penstock.engine.options import EngineOptions, model_folder
from penstock.engine.resolve import check_options
from penstock.pipeline.forkserver import fork_from_here, shared_fork_server
from penstock.server.settings import ServerSettings
from penstock.text.tokenizer import Tokenizer, load_tokenizer

LONGEST_ANSWER: Final = 86_400.0
"""Seconds an answer may take: a day, because the person ends it with Ctrl-C."""
HERE: Final = "http://penstock"
"""The server's URL on its Unix socket, where any host name would do."""
CONTINUES: Final = "is no chat model: it goes on with what you type. 'penstock run NAME' takes another model"


def run(options: EngineOptions, name: str, system_prompt: str = "", template: str | None = None) -> None:
    """Chat with the model, called ``name``, until the input ends; no process of it is left then.

    ``template`` is Jinja text in place of the checkpoint's own. Raises ConfigError before anything starts.
    """
    check_options(options)
    fork_from_here(model_folder(options.model, "target"))
    words = introduction_of(options, name, template)
    from penstock.engine.async_llm import AsyncLLM
    from penstock.server.command import served_at

    llm, start = watched(AsyncLLM, options)
    with closing(llm):
        if template is not None:
            llm.get_tokenizer().use_chat_template(template)
        settings = ServerSettings(served_model_name=(name,), web=False, request_timeout=LONGEST_ANSWER)
        socket = Path(shared_fork_server().folder) / "http"  # a folder that is removed even if this process is killed
        server = Server(url=HERE)
        with (
            served_at(socket, llm, settings),
            httpx.Client(**server.client_options, transport=httpx.HTTPTransport(uds=str(socket))) as client,
        ):
            chat = ChatOptions(server=server, model=name, system=system_prompt)
            chat_over(client, chat, "\n".join([*words, loaded(llm.setup, start, llm.numerics)]))


def introduction_of(options: EngineOptions, name: str, template: str | None) -> list[str]:
    """Lines that introduce a model that is no chat model, else none. Raises FieldError where it has no template."""
    if template is not None:
        return []
    tokenizer = tokenizer_of(options)
    if tokenizer.tool_template is None:
        problem = "has no chat template: continue texts with penstock generate, or give one with --chat-template"
        raise FieldError("model", f"is {name!r}, which {problem}")
    return [] if tokenizer.is_of_chat else [f"{name} {CONTINUES}"]


def tokenizer_of(options: EngineOptions) -> Tokenizer:
    from penstock.checkpoint.checkpoint import open_checkpoint

    return load_tokenizer(open_checkpoint(model_folder(options.model, "target")).path)
