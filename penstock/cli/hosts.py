"""The commands about other hosts: worker, keys, hosts, doctor, rebalance and profile."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from penstock.cli.options import AsJson, command, new_app
from penstock.clients.api import Server
from penstock.config import OUTPUT, SERVER, Option
from penstock.engine.options import KEYS
from penstock.lab.profile import ProfileOptions

# --------------------------------------------------------------------------------------------------------------- worker
# ``penstock worker``: lend this host to engines on others.

worker_app = new_app()


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
            "Come to the engine at that address, started with --hosts join://HOST:PORT, now and whenever it is back.",
            SERVER,
            metavar="HOST:PORT",
            default="none: engines name this host",
        ),
    ] = None
    keys: Annotated[
        str | None,
        Option("Folder of this host's keys, which `penstock keys` makes.", SERVER, metavar="FOLDER", default=KEYS),
    ] = None
    token: Annotated[
        str | None,
        Option(
            "Token that `penstock keys add` has printed, with which this host gets its keys first.",
            SERVER,
            default="none",
        ),
    ] = None
    announce: Annotated[
        bool, Option("Tell whoever asks on this network where the worker listens: `penstock hosts` asks.", SERVER)
    ] = False
    cache: Annotated[
        str | None,
        Option(
            "Folder for layers that engines send, because this host has no such checkpoint.",
            SERVER,
            metavar="FOLDER",
            default="~/.cache/penstock/weights",
        ),
    ] = None
    cache_gb: Annotated[
        float, Option("Most gigabytes, of 1e9 bytes, that are kept of checkpoints not in use.", SERVER)
    ] = 50.0
    insecure: Annotated[
        bool,
        Option("Serve anybody who reaches the address, without encryption, for private networks only.", SERVER),
    ] = False


Unit = Annotated[
    bool,
    Option("Print a unit for systemd that runs this worker, and end.", OUTPUT),
]


@worker_app.command()
@command
def worker(*, options: WorkerOptions, unit: Unit = False) -> None:
    from penstock.hosts.worker import print_unit, run_worker

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


# ----------------------------------------------------------------------------------------------------------------- keys
# ``penstock keys``: the members of a cluster.

keys_app = new_app()


@dataclass(frozen=True, kw_only=True)
class KeysFolder:
    """The folder of this host's keys."""

    keys: Annotated[str | None, Option("Folder where the keys are kept.", OUTPUT, metavar="FOLDER", default=KEYS)] = (
        None
    )


@dataclass(frozen=True, kw_only=True)
class AddOptions:
    """The new member, and where it fetches its keys."""

    host: Annotated[str, Option("What the new host calls itself, as `hostname` prints there.", positional=True)]
    listen: Annotated[
        str,
        Option("Address of this host, to which the new one comes for its keys.", SERVER, metavar="HOST[:PORT]"),
    ]
    minutes: Annotated[float, Option("Minutes to wait for the new host.", SERVER)] = 15.0


@keys_app.command()
@command
def new(*, folder: KeysFolder) -> None:
    """Make a cluster: its authority, and this host's keys."""
    from penstock.hosts.keys import new_cluster

    new_cluster(folder.keys)


@keys_app.command()
@command
def add(*, options: AddOptions, folder: KeysFolder) -> None:
    """Print a token with which one HOST can become a member, and wait until it has."""
    from penstock.hosts.keys import add_host

    add_host(options.host, options.listen, options.minutes, folder.keys)


@keys_app.command()
@command
def request(*, folder: KeysFolder) -> None:
    """On a new host: make its key, and print a request for `penstock keys sign`. The key stays where it is."""
    from penstock.hosts.keys import request_membership

    request_membership(folder.keys)


@keys_app.command()
@command
def sign(*, folder: KeysFolder) -> None:
    """Where the cluster was made: read a new host's request, and print the answer for `penstock keys accept`.

    The host is a member then, so the request has to come from one that is to be.
    """
    from penstock.hosts.keys import membership_for

    print(membership_for(sys.stdin.buffer.read(), folder.keys).decode(), end="")


@keys_app.command()
@command
def accept(*, folder: KeysFolder) -> None:
    """On a new host: read the answer to its request, and keep it, which makes the host a member."""
    from penstock.hosts.keys import accept_membership

    accept_membership(sys.stdin.buffer.read(), folder.keys)


# ---------------------------------------------------------------------------------------------------------------- hosts
# ``penstock hosts``: the hosts that answer, and their devices, memory and cores; ``setup`` installs Penstock on some.

hosts_app = new_app()


class HostsOrCommand(TyperGroup):
    """A group whose own argument, HOSTS, may stand where a command's name does."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        names_command = bool(args) and args[0] in self.commands
        # After HOSTS there may be options of the group; after a command's name all options are the command's.
        ctx.allow_interspersed_args = not names_command
        return super().parse_args(ctx, ["", *args] if names_command else args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.commands:
            ctx.fail(f"Got unexpected extra argument ({args[0]}); HOSTS have commas between")
        return super().resolve_command(ctx, args)


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
        Option("Folder of this host's keys, which `penstock keys` makes.", SERVER, metavar="FOLDER", default=KEYS),
    ] = None
    insecure: Annotated[bool, Option("Ask without keys or encryption, for private networks only.", SERVER)] = False
    links: Annotated[
        bool, Option("Also measure the rate of each host's link with this one, both ways. Takes seconds.", OUTPUT)
    ] = False
    as_json: Annotated[bool, Option("Print JSON instead.", OUTPUT, names=("--json",))] = False


@hosts_app.callback(cls=HostsOrCommand, invoke_without_command=True)
@command
def hosts(*, context: typer.Context, options: ListingOptions) -> None:
    if context.invoked_subcommand is not None:
        return
    from penstock.hosts.listing import list_hosts, suggest_hosts

    if options.hosts is None:
        suggest_hosts(options.as_json)
        return
    list_hosts(options.hosts, options.keys, options.insecure, options.links, options.as_json)


@dataclass(frozen=True, kw_only=True)
class SetupOptions:
    """The hosts as ssh knows them, and what they get."""

    hosts: Annotated[
        tuple[str, ...],
        Option("Hosts as ssh takes them, NAME or USER@NAME.", metavar="HOST...", positional=True),
    ]
    keys: Annotated[
        str | None,
        Option("The keys of this host, where the cluster was made.", SERVER, metavar="FOLDER", default=KEYS),
    ] = None
    insecure: Annotated[bool, Option("Give the hosts no keys, for private networks only.", SERVER)] = False
    ssh_config: Annotated[
        Path | None,
        Option("Configuration for ssh and scp: ports, users, keys.", SERVER, metavar="FILE", default="ssh's own"),
    ] = None
    wheel: Annotated[
        Path | None,
        Option("The wheel to install.", metavar="FILE", default="one of the Penstock that runs here"),
    ] = None
    python: Annotated[str, Option("Python of the hosts, 3.11 or newer, which makes the environment.")] = "python3"
    pip_args: Annotated[
        str,
        Option("Options for pip there, such as the index that has torch for the hosts' devices.", default=""),
    ] = ""
    only_print: Annotated[bool, Option("Print the commands, and run none of them.", OUTPUT, names=("--print",))] = False


@hosts_app.command("setup")
@command
def setup(*, options: SetupOptions) -> None:
    """Install this Penstock on HOSTS over ssh, give them keys of this cluster, and print what starts their workers.

    Each gets an environment of its own, ~/.local/share/penstock/venv, from a wheel that is copied there. It needs
    Python 3.11 with venv, and a package index.
    """
    from penstock.hosts.installing import Setup, set_up

    given = dict(vars(options))
    hosts, only_print = given.pop("hosts"), given.pop("only_print")
    set_up(hosts, Setup(**given), only_print)


# --------------------------------------------------------------------------------------------------------------- doctor
# ``penstock doctor``: the capabilities of hosts and links, and what to change.

doctor_app = new_app()


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
        Option("Folder of this host's keys, which `penstock keys` makes.", SERVER, metavar="FOLDER", default=KEYS),
    ] = None
    insecure: Annotated[bool, Option("Talk without keys or encryption, for private networks only.", SERVER)] = False
    as_json: Annotated[bool, Option("Print JSON instead.", OUTPUT, names=("--json",))] = False


@doctor_app.command()
@command
def doctor(*, options: DoctorOptions) -> None:
    from penstock.hosts.listing import run_doctor

    run_doctor(options.hosts, options.cluster, options.keys, options.insecure, options.as_json)


# ------------------------------------------------------------------------------------------------------------ rebalance
# ``penstock rebalance``: move a server's stages back to hosts that are available again.

rebalance_app = new_app()


@rebalance_app.command()
@command
def rebalance(*, options: Server) -> None:
    from penstock.clients.api import rebalance

    rebalance(options)


# ------------------------------------------------------------------------------------------------------------- replicas
# ``penstock replicas``: the engines behind a server with --data-parallel-size.

replicas_app = new_app()


@replicas_app.command()
@command
def replicas(
    *,
    options: Server,
    drain: Annotated[
        int | None,
        Option("Have this engine take no more requests; those that it has go on elsewhere.", SERVER, default=""),
    ] = None,
    restart: Annotated[int | None, Option("Drain this engine, and start it again.", SERVER, default="")] = None,
    roll: Annotated[bool, Option("Restart every engine, one after the other.", SERVER)] = False,
) -> None:
    from penstock.clients.api import replicas

    replicas(options, drain, restart, roll)


# -------------------------------------------------------------------------------------------------------------- profile
# ``penstock profile``: the time that a model's layers take on the devices at hand.

profile_app = new_app()


@profile_app.command()
@command
def profile(*, options: ProfileOptions, as_json: AsJson = False) -> None:
    from penstock.lab.profile import run_profile

    run_profile(options, as_json=as_json)
