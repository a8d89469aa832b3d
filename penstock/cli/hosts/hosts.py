"""``penstock hosts``: the hosts that answer, and their devices, memory and cores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from penstock.cli.command import command, new_app
from penstock.engine.options import KEYS
from penstock.options import OUTPUT, SERVER, Option

app = new_app()


@dataclass(frozen=True, kw_only=True)
class ListingOptions:
    """The hosts, and how they are reached."""

    hosts: Annotated[
        str | None,
        Option(
            "Hosts on which `penstock worker` runs, with commas between. Without any, addresses that workers on this "
            "network announce.",
            positional=True,
        ),
    ] = None
    keys: Annotated[
        str | None,
        Option("This host's keys, which `penstock keys` makes.", SERVER, metavar="FOLDER", default=KEYS),
    ] = None
    insecure: Annotated[bool, Option("Ask without keys or encryption: for a network that is private.", SERVER)] = False
    links: Annotated[
        bool, Option("Also measure the rate of each host's link with this one, both ways. Takes seconds.", OUTPUT)
    ] = False
    as_json: Annotated[bool, Option("Print JSON instead.", OUTPUT, names=("--json",))] = False


@app.command()
@command
def hosts(*, options: ListingOptions) -> None:
    from penstock.hosts.listing import list_hosts, suggest_hosts

    if options.hosts is None:
        suggest_hosts(options.as_json)
        return
    list_hosts(options.hosts, options.keys, options.insecure, options.links, options.as_json)
