"""The hosts that the pages for users speak of and that nobody has: a hub, a server with a certificate, and a judge.

``main`` prints the hub's address, and serves what the folder holds until it is ended.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import uvicorn

from tests.judges import judge_server
from tests.model_hub import Hub, served

REPOS: Final = {"Qwen/Qwen3-8B-GGUF": ("Qwen3-8B-Q4_K_M.gguf", "Qwen3-8B-Q5_K_M.gguf")}
"""Repositories of the hub and their files, each with the bytes of the folder's ``model.gguf``."""
NAMES: Final = ("host", "judge.example")
"""Names of the server and of the judge, which are the same one."""
CERTIFICATE: Final = "server.pem"

ADDRESSES: Final = {"first": ("10.0.0.1", "a"), "second": ("10.0.0.2", "b"), "third": ("10.0.0.3", "c")}
"""Address and short name of each host that somebody types on."""
OTHERS: Final = "10.0.0.4"
"""The address of hub, server and judge."""
HOST: Final = """
hostname {host}
ip link set lo up
mount --bind {names} /etc/hosts
echo ready
exec cat
"""
"""Makes a host, which is there until its standard input ends."""
PROGRAMS: Final = ("ip", "unshare", "nsenter", "curl")


def entering(process: int) -> list[str]:
    """The words before a command that have it run on the host that a process holds."""
    return ["nsenter", f"--target={process}", "--net", "--mount", "--uts"]


@contextmanager
def network(names: Path) -> Iterator[Mapping[str, int]]:
    """Hosts on one switch, each with the process that holds it; ``names`` is a file for /etc/hosts."""
    names.write_text(
        "\n".join(
            [
                "127.0.0.1 localhost",
                *(f"{address} {host} {short}" for host, (address, short) in ADDRESSES.items()),
                f"{OTHERS} {' '.join(NAMES)}\n",
            ]
        )
    )
    with ExitStack() as stack:
        held = {host: stack.enter_context(made(host, names)) for host in ADDRESSES}
        first = entering(held["first"])
        called([*first, "ip", "link", "add", "switch", "type", "bridge"])
        called([*first, "ip", "link", "set", "switch", "up"])
        for host, (address, _) in ADDRESSES.items():
            cable = "switch"
            if host != "first":
                ends = [
                    "link",
                    "add",
                    host,
                    "type",
                    "veth",
                    "peer",
                    "name",
                    (cable := "eth0"),
                    "netns",
                    str(held[host]),
                ]
                called([*first, "ip", *ends])
                called([*first, "ip", "link", "set", host, "master", "switch", "up"])
            called([*entering(held[host]), "ip", "address", "add", f"{address}/24", "dev", cable])
            called([*entering(held[host]), "ip", "link", "set", cable, "up"])
        called([*first, "ip", "address", "add", f"{OTHERS}/24", "dev", "switch"])
        yield held


@contextmanager
def made(host: str, names: Path) -> Iterator[int]:
    holds = ["unshare", "--net", "--mount", "--uts", "sh", "-ec", HOST.format(host=host, names=names)]
    with subprocess.Popen(holds, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process.pid


def called(command: list[str]) -> None:
    subprocess.run(command, check=True)


def can_be_made() -> bool:
    return not os.geteuid() and all(map(shutil.which, PROGRAMS))


def main(folder: Path) -> None:
    model = (folder / "model.gguf").read_bytes()
    server = judge_server("points")
    server.card = {"id": "NAME", "object": "model"}
    config = uvicorn.Config(server.app, ssl_certfile=folder / CERTIFICATE, log_level="error", lifespan="off")
    with (
        served(Hub({repo: dict.fromkeys(files, model) for repo, files in REPOS.items()})) as hub,
        # asyncio switches Nagle's delay off only where the socket says that it is TCP.
        socket.socket(proto=socket.IPPROTO_TCP) as listening,
    ):
        listening.bind(("", 443))
        listening.listen()
        print(hub.address, flush=True)
        uvicorn.Server(config).run(sockets=[listening])
