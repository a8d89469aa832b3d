"""``penstock chat``: a conversation with a server."""

from __future__ import annotations

from penstock.cli.command import command, new_app
from penstock.clients.chat import ChatOptions, run_chat

app = new_app()


@app.command()
@command
def chat(*, options: ChatOptions) -> None:
    run_chat(options)
