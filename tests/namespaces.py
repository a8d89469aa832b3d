"""Hosts that are network namespaces on a bridge, each with a monotonic clock of its own. The tests' own is the head.

Names bear the number of the process that made them, so that runs beside each other have networks of their own, and what
a run has left that was killed is removed by the next one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import psutil
import pytest

from tests.warm import Place

NETWORKS: Final = "10.213"
"""The first two bytes of every network's addresses."""
NAMESPACE: Final = re.compile(r"penstock-(\d+)-\d+")
LINK: Final = re.compile(r"ps(\d+)-(?:br|v\d+)")


class Namespace:
    """The host with address ``number`` of a network ("10.213.7"), its clock so many seconds ahead."""

    def __init__(self, network: str, number: int, ahead: float = 0.0) -> None:
        self.address = f"{network}.{number}"
        self._name = f"penstock-{os.getpid()}-{number}"
        self._ahead = ahead
        self._cable = f"ps{os.getpid()}-v{number}"
        ip("netns", "add", self._name)
        ip("link", "add", self._cable, "type", "veth", "peer", "name", "eth0", "netns", self._name)
        ip("link", "set", self._cable, "master", own_bridge(), "up")
        self.inside("ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        self.link("up")
        self.inside("ip", "link", "set", "lo", "up")

    @property
    def number(self) -> int:
        """The namespace's own, as /proc tells it of a process."""
        return os.stat(f"/run/netns/{self._name}").st_ino

    @property
    def enter(self) -> list[str]:
        """The words before a command that make it run in the namespace, with this host's clock."""
        return ["ip", "netns", "exec", self._name]

    @property
    def before(self) -> list[str]:
        """The same by the host's own clock."""
        clock = ["unshare", "--time", f"--monotonic={round(self._ahead)}", "--fork", "--kill-child"]
        return [*self.enter, *clock]

    @property
    def place(self) -> Place:
        """The same for a command that begins as a fork of the warm process."""
        return Place(self._name, self._ahead)

    def inside(self, *command: str) -> None:
        subprocess.run([*self.enter, *command], check=True)

    def link(self, state: str) -> None:
        """Plug the host's cable in ("up") or pull it ("down")."""
        self.inside("ip", "link", "set", "eth0", state)

    def largest_packet(self, size: int) -> None:
        """Let no packet that the host sends or takes be larger, in bytes."""
        self.inside("ip", "link", "set", "eth0", "mtu", str(size))

    @contextmanager
    def without_way_to(self, other: Namespace) -> Iterator[None]:
        """Nothing that this host sends to the other one arrives, not even an acknowledgement; all else does."""
        where = f"{other.address}/32"
        self.inside("ip", "route", "add", "blackhole", where)
        try:
            yield
        finally:
            self.inside("ip", "route", "del", "blackhole", where)

    def send_at(self, rate: str) -> None:
        """Let no more leave the host in a second ("20mbit")."""
        self.inside(
            "tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "16kb", "limit", "4mb"
        )

    def receive_at(self, rate: str) -> None:
        """Let no more come to the host in a second ("20mbit")."""
        qdisc = ("root", "tbf", "rate", rate, "burst", "16kb", "limit", "1mb")
        subprocess.run(["tc", "qdisc", "replace", "dev", self._cable, *qdisc], check=True)

    def receives_unlimited(self) -> None:
        subprocess.run(["tc", "qdisc", "del", "dev", self._cable, "root"], check=True)

    def unlimited(self) -> None:
        self.inside("tc", "qdisc", "del", "dev", "eth0", "root")

    def received(self) -> int:
        """Bytes that the host's cable has brought it."""
        return self._carried("rx")

    def sent(self) -> int:
        """Bytes that have left the host by its cable."""
        return self._carried("tx")

    def _carried(self, way: str) -> int:
        (link,) = listed("-stats", "-netns", self._name, "link", "show", "eth0")
        return int(link["stats64"][way]["bytes"])

    def close(self) -> None:
        # The kernel removes a namespace's own links some time after its name, and its name is free at once.
        ip("link", "del", self._cable)
        ip("netns", "del", self._name)


def own_bridge() -> str:
    return f"ps{os.getpid()}-br"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def listed(*arguments: str) -> list[dict[str, Any]]:
    """Return the objects that ``ip`` lists."""
    told = subprocess.run(["ip", "-json", *arguments], capture_output=True, text=True, check=True).stdout
    return json.loads(told or "[]")  # type: ignore[no-any-return]


def remove_leftovers() -> None:
    """Remove links and namespaces of processes that have ended."""
    for one in (*listed("link", "show", "type", "veth"), *listed("link", "show", "type", "bridge")):
        if one and left_behind(LINK, one["ifname"]):
            ip("link", "del", one["ifname"])
    for one in listed("netns", "list"):
        if left_behind(NAMESPACE, one["name"]):
            ip("netns", "del", one["name"])


def left_behind(names: re.Pattern[str], name: str) -> bool:
    made_by = names.fullmatch(name)
    return made_by is not None and not psutil.pid_exists(int(made_by[1]))


def free_network() -> str:
    """The first three bytes of a network that no bridge here has."""
    taken = {address["local"].rpartition(".")[0] for one in listed("-4", "addr") for address in one["addr_info"]}
    return next(name for i in range(256) if (name := f"{NETWORKS}.{(os.getpid() + i) % 256}") not in taken)


@contextmanager
def network(*ahead: float) -> Iterator[list[Namespace]]:
    """A host for each number of seconds by which its clock is ahead. The head has address 1."""
    if os.geteuid() or not all(shutil.which(program) for program in ("ip", "tc")):
        pytest.skip("network namespaces need root and iproute2")
    remove_leftovers()
    addresses = free_network()
    made: list[Namespace] = []
    try:
        ip("link", "add", own_bridge(), "type", "bridge")
        ip("addr", "add", f"{addresses}.1/24", "dev", own_bridge())
        ip("link", "set", own_bridge(), "up")
        made += [Namespace(addresses, number, seconds) for number, seconds in enumerate(ahead, start=2)]
        yield made
    finally:
        for one in made:
            one.close()
        ip("link", "del", own_bridge())
