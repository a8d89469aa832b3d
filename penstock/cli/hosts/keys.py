"""``penstock keys``: the members of a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from penstock.cli.command import command, new_app
from penstock.engine.options import KEYS
from penstock.options import OUTPUT, SERVER, Option

app = new_app()


@dataclass(frozen=True, kw_only=True)
class KeysFolder:
    keys: Annotated[str | None, Option("Where the keys are kept.", OUTPUT, metavar="FOLDER", default=KEYS)] = None


@dataclass(frozen=True, kw_only=True)
class AddOptions:
    """The new member, and where it fetches its keys."""

    host: Annotated[str, Option("What the new host calls itself, as `hostname` prints there.", positional=True)]
    listen: Annotated[
        str,
        Option("Address of this host, to which the new one comes for its keys.", SERVER, metavar="HOST[:PORT]"),
    ]
    minutes: Annotated[float, Option("How long to wait for the new host.", SERVER)] = 15.0


@app.command()
@command
def new(*, folder: KeysFolder) -> None:
    """Make a cluster: its authority, and this host's keys."""
    from penstock.hosts.membership import new_cluster

    new_cluster(folder.keys)


@app.command()
@command
def add(*, options: AddOptions, folder: KeysFolder) -> None:
    """Print a token with which one HOST can become a member, and wait until it has."""
    from penstock.hosts.membership import add_host

    add_host(options.host, options.listen, options.minutes, folder.keys)
