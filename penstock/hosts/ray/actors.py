"""The Ray actors on a cluster's nodes: an authority for keys, one for each engine, and an agent on each node.

A node's key never leaves it. The authority signs every request that Ray lets through: Ray's own authentication decides
who may ask.
"""

from __future__ import annotations

import ipaddress
import threading
from pathlib import Path
from typing import Final

import ray

from penstock.hosts import keys
from penstock.hosts.agent import HostAgent
from penstock.hosts.enrolment import pem
from penstock.hosts.joining import Joining
from penstock.hosts.weights.cache import WeightCache, default_cache
from penstock.scratch import lasting_scratch
from penstock.transport.security import LinkSecurity

CACHE_BYTES: Final = 50 * 10**9
"""Bytes of checkpoints that are kept while they are not in use, as many as with `penstock worker`."""


class Authority:
    """The key authority of one engine's hosts. Its own key is made in this process and never leaves it."""

    def __init__(self) -> None:
        self._folder = lasting_scratch("penstock-authority-")
        keys.make_cluster(self._folder / "keys", "penstock on ray")

    def sign(self, request: bytes) -> tuple[bytes, bytes]:
        """See ``keys.sign``."""
        return keys.sign(self._folder / "keys", request)


def enrolled(authority: str, folder: Path) -> LinkSecurity | None:
    """Keys for this process, signed by the ``Authority`` of that name and kept in ``folder``."""
    key = keys.new_key()
    request = pem(keys.request_of(key, "ray node"))
    keys.keep(folder, key, *ray.get(ray.get_actor(authority).sign.remote(request)))
    return keys.link_security(folder)


class NodeAgent:
    """A host agent that comes to the engine's ``door`` (HOST:PORT), also when Ray has started it again.

    ``authority`` is an ``Authority``'s name; without one the network has to be private.
    """

    def __init__(self, authority: str | None, door: str) -> None:
        self._folder = lasting_scratch("penstock-node-")
        security = None if authority is None else enrolled(authority, self._folder / "keys")
        insecure = security is None
        address = ray.util.get_node_ip_address()
        self._agent = HostAgent(f"tcp://{address}:*", security, insecure, WeightCache(default_cache(), CACHE_BYTES))
        threading.Thread(target=self._agent.serve, name="penstock agent", daemon=True).start()
        self._joining = Joining(door, self._agent.address.removeprefix("tcp://"), security, insecure)

    def open_to_anybody(self) -> str:
        """The node's address if Ray there takes commands from anybody on another host; else an empty string."""
        from ray._private.authentication.authentication_utils import is_token_auth_enabled

        address = ray.util.get_node_ip_address()
        guarded = is_token_auth_enabled() or ipaddress.ip_address(address).is_loopback
        return "" if guarded else str(address)
