"""The work of ``penstock rebalance``."""

from __future__ import annotations

import httpx

from penstock.clients.api import Server, refused


def rebalance(server: Server) -> None:
    """Have the server move stages back to their hosts, and print whether any moves. Raises ServerError."""
    try:
        with httpx.Client(**server.client_options) as client:
            answer = client.post(f"{server.root}/rebalance", json={})
    except httpx.HTTPError as error:
        raise server.lost(error) from error
    if not answer.is_success:
        raise refused(answer)
    if answer.json()["moving"]:
        print("Stages move to hosts that are back; requests go on once they have.")
    else:
        print("No stage moves: each is where it belongs, or its host is not back.")
