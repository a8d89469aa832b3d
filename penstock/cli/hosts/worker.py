"""``penstock worker``: lend this host to engines on others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from penstock.cli.command import command, new_app
from penstock.engine.options import KEYS
from penstock.options import OUTPUT, SERVER, Option

app = new_app()


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """The worker's address, and how it knows who may use it."""

    listen: Annotated[
        str | None,
        Option(
            "Address of this host, at which engines on others reach it.",
            SERVER,
            metavar="HOST:PORT",
            default="127.0.0.1:7700, or port 7700 where --join's reaches it",
        ),
    ] = None
    join: Annotated[
        str | None,
        Option(
            "Come to the engine at that address, which has --hosts join://HOST:PORT, now and whenever it is back.",
            SERVER,
            metavar="HOST:PORT",
            default="none: engines name this host",
        ),
    ] = None
    keys: Annotated[
        str | None,
        Option("This host's keys, which `penstock keys` makes.", SERVER, metavar="FOLDER", default=KEYS),
    ] = None
    token: Annotated[
        str | None,
        Option("Get the keys first, with what `penstock keys add` has printed.", SERVER, default="none"),
    ] = None
    announce: Annotated[
        bool, Option("Tell whoever asks on this network where the worker listens: `penstock hosts` asks.", SERVER)
    ] = False
    cache: Annotated[
        str | None,
        Option(
            "Where layers are kept that engines send, because this host has no such checkpoint.",
            SERVER,
            metavar="FOLDER",
            default="~/.cache/penstock/weights",
        ),
    ] = None
    cache_gb: Annotated[float, Option("Most that is kept of checkpoints that are not in use.", SERVER)] = 50.0
    insecure: Annotated[
        bool,
        Option("Serve anybody who reaches the address, without encryption: for a network that is private.", SERVER),
    ] = False


Unit = Annotated[
    bool,
    Option("Print a unit for systemd that runs this worker, and end.", OUTPUT),
]


@app.command()
@command
def worker(*, options: WorkerOptions, unit: Unit = False) -> None:
    from penstock.hosts.workers import print_unit, run_worker

    if unit:
        print_unit(vars(options))
        return
    run_worker(
        options.listen,
        options.join,
        options.keys,
        options.token,
        options.insecure,
        options.cache,
        options.cache_gb,
        options.announce,
    )
