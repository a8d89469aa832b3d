"""``penstock rebalance``: move a server's stages back to hosts that are available again."""

from __future__ import annotations

from penstock.cli.command import command, new_app
from penstock.clients.api import Server

app = new_app()


@app.command()
@command
def rebalance(*, options: Server) -> None:
    from penstock.clients.rebalance import rebalance

    rebalance(options)
