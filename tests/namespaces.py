"""Hosts that are network namespaces on a bridge, each with a monotonic clock of its own. The tests' own is the head."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import pytest

BRIDGE: Final = "penstock-br"
NETWORK: Final = "10.213.47"
"""Its first three bytes; the head has address 1."""


class Namespace:
    """The host with address ``number`` of the network, its clock so many seconds ahead."""

    def __init__(self, number: int, ahead: float = 0.0) -> None:
        self.address = f"{NETWORK}.{number}"
        self._name = f"penstock-{number}"
        self._ahead = ahead
        veth = f"penstock-v{number}"
        ip("netns", "add", self._name)
        ip("link", "add", veth, "type", "veth", "peer", "name", "eth0", "netns", self._name)
        ip("link", "set", veth, "master", BRIDGE, "up")
        self.inside("ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        self.link("up")
        self.inside("ip", "link", "set", "lo", "up")

    @property
    def before(self) -> list[str]:
        """What is put in front of a command that is to run there."""
        clock = ["unshare", "--time", f"--monotonic={round(self._ahead)}", "--fork", "--kill-child"]
        return ["ip", "netns", "exec", self._name, *clock]

    def inside(self, *command: str) -> None:
        ip("netns", "exec", self._name, *command)

    def link(self, state: str) -> None:
        """Plug the host's cable in ("up") or pull it ("down")."""
        self.inside("ip", "link", "set", "eth0", state)

    def close(self) -> None:
        ip("netns", "del", self._name)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@contextmanager
def network(*ahead: float) -> Iterator[list[Namespace]]:
    """A host for each number of seconds by which its clock is ahead."""
    if os.geteuid() or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("network namespaces need root, iproute2 and util-linux")
    made: list[Namespace] = []
    try:
        ip("link", "add", BRIDGE, "type", "bridge")
        ip("addr", "add", f"{NETWORK}.1/24", "dev", BRIDGE)
        ip("link", "set", BRIDGE, "up")
        made += [Namespace(number, seconds) for number, seconds in enumerate(ahead, start=2)]
        yield made
    finally:
        for one in made:
            one.close()
        ip("link", "del", BRIDGE)
