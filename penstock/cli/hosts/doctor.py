"""``penstock doctor``: the capabilities of hosts and links, and what to change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from penstock.cli.command import command, new_app
from penstock.engine.options import KEYS
from penstock.options import OUTPUT, SERVER, Option

app = new_app()


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """The hosts, and how they are reached."""

    hosts: Annotated[
        str | None,
        Option(
            "Hosts on which `penstock worker` runs, beside this one.",
            metavar="HOST[:PORT],...",
            default="this one alone",
        ),
    ] = None
    cluster: Annotated[str | None, Option("A file ending in .toml whose devices name the hosts.", default="")] = None
    keys: Annotated[
        str | None,
        Option("This host's keys, which `penstock keys` makes.", SERVER, metavar="FOLDER", default=KEYS),
    ] = None
    insecure: Annotated[bool, Option("Talk without keys or encryption: for a network that is private.", SERVER)] = False
    as_json: Annotated[bool, Option("Print JSON instead.", OUTPUT, names=("--json",))] = False


@app.command()
@command
def doctor(*, options: DoctorOptions) -> None:
    from penstock.hosts.doctor.command import run_doctor

    run_doctor(options.hosts, options.cluster, options.keys, options.insecure, options.as_json)
