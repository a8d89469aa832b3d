"""``penstock worker``: the process and its systemd unit."""

from __future__ import annotations

import getpass
import ipaddress
import logging
import platform
import signal
import sys
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from penstock.config import FieldError, check
from penstock.core import ConfigError
from penstock.extras import LAN, require
from penstock.hosts.agent import HostAgent, Joining
from penstock.hosts.fetching import WeightCache, default_cache
from penstock.hosts.fleet import address_toward
from penstock.hosts.keys import default_folder, join, security_for
from penstock.hosts.messages import DEFAULT_PORT
from penstock.hosts.remote import places_of
from penstock.transport.addresses import Place, listener_at, place_of

# -------------------------------------------------------------------------------------------------------------- systemd
# A systemd unit for a worker, which starts it with the host, and again whenever it ends.

UNIT: Final = """\
# Install as /etc/systemd/system/penstock-worker.service, then:
#   systemctl daemon-reload && systemctl enable --now penstock-worker
[Unit]
Description=Penstock worker
Wants=network-online.target
After=network-online.target
StartLimitIntervalSec=0

[Service]
ExecStart={command}
User={user}
Restart=always
RestartSec=3
KillMode=mixed
NoNewPrivileges=yes
ProtectSystem=full
PrivateTmp=yes

[Install]
WantedBy=multi-user.target
"""


def unit_of(options: Iterable[str]) -> str:
    """The unit file of a worker with these options, run by the current user with this Python."""
    command = [sys.executable, "-m", "penstock.cli", "worker", *options]
    return UNIT.format(command=" ".join(map(quoted, command)), user=getpass.getuser())


def quoted(word: str) -> str:
    """The word, escaped so that systemd takes every character of it literally."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"' if escaped != word or any(character.isspace() for character in word) else word


# -------------------------------------------------------------------------------------------------------------- workers
# The command ``penstock worker``: runs a host agent until somebody ends it.

log = logging.getLogger(__name__)


def run_worker(
    listen: str | None,
    head: str | None,
    keys: str | None,
    token: str | None,
    insecure: bool,
    cache: str | None,
    cache_gb: float,
    announce: bool,
) -> None:
    """Serve engines until Ctrl-C or SIGTERM. With ``head``, offer the host to the engine at that address.

    Raises ConfigError for an address on which it cannot listen, or which cannot be announced.
    """
    check(cache_gb >= 0, "cache_gb", cache_gb, "0 or above")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    if insecure and token is not None:
        raise FieldError("insecure", "takes no keys; remove it, or the token")
    if announce:
        require([LAN])
    listen = listen or default_address(head)
    address, place = own_place(listen)
    if announce and (place.on_this_host or ipaddress.ip_address(place.where[0]).is_unspecified):
        raise FieldError("announce", f"needs the address at which others reach this host (--listen), not {listen}")
    check_free(listen, place)
    if insecure:
        log.warning("insecure: whoever reaches %s can use this host, and the network sees what is said", listen)
    if token is not None:  # last of the checks, since a token works only once
        join(default_folder() if keys is None else Path(keys).expanduser(), token, platform.node())
    security = security_for(keys, insecure)
    kept = WeightCache(default_cache() if cache is None else Path(cache).expanduser(), round(1e9 * cache_gb))
    try:
        agent = HostAgent(address, security, insecure, kept)
    except OSError as error:
        raise not_own(listen, error) from error
    signal.signal(signal.SIGTERM, lambda *_: agent.stop())
    signal.signal(signal.SIGINT, lambda *_: agent.stop())
    with agent, ExitStack() as coming:
        name = agent.address.removeprefix("tcp://")
        log.info("listening at %s", name)
        if head is not None:
            coming.enter_context(Joining(head, name, security, insecure))
        if announce:
            from penstock.hosts.discovery import Announcement

            coming.enter_context(Announcement(name))
        agent.serve()


def own_place(listen: str) -> tuple[str, Place]:
    """The address in numbers, and as a socket needs it. Raises FieldError for an unknown one."""
    try:
        _, address = places_of(listen, "listen")
    except FieldError:
        raise
    except ConfigError as error:
        raise not_own(listen, OSError("there is no such address")) from error
    return address, place_of(address)


def check_free(listen: str, place: Place) -> None:
    """Raise FieldError for an address that is not this host's, or is taken."""
    try:
        listener_at(place).close()
    except OSError as error:
        raise not_own(listen, error) from error


def not_own(listen: str, error: OSError) -> FieldError:
    reason = error.strerror or error
    return FieldError("listen", f"is {listen!r}: {reason}; it has to be a free ADDRESS:PORT of this host")


def default_address(head: str | None) -> str:
    """The default address of a worker: on loopback or, if it joins a head, where that head reaches it."""
    own = "127.0.0.1" if head is None else address_toward(head, "join")
    return f"{own}:{DEFAULT_PORT}"


def print_unit(options: Mapping[str, object]) -> None:
    """Print a systemd unit for a worker with these options, by their fields' names. Raises FieldError for a token."""
    if options["token"] is not None:
        raise FieldError("token", "works once: start the worker with it by hand, then install the unit without it")
    words = []
    for name, value in options.items():
        if value is not None and value is not False:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    print(unit_of(words), end="")
