"""Workers on a LAN, found by multicast DNS: addresses to try, on which nothing relies. Needs the extra ``lan``.

Anybody on the network can announce anything. The addresses are shown to a person, who names the hosts.
"""

from __future__ import annotations

import ipaddress
import time
from typing import Any, Final

from zeroconf import ServiceBrowser, ServiceInfo, ServiceStateChange, Zeroconf

SERVICE: Final = "_penstock._tcp.local."
LOOK_S: Final = 3.0
"""Seconds to wait for announcements, long enough for workers on a LAN to answer."""


class Announcement:
    """Announces on the network that a worker listens at ``address``, HOST:PORT in numbers, until ``close``."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        self._zeroconf = Zeroconf(interfaces=[host])
        name = f"penstock-{host}-{port}".replace(".", "-").replace(":", "-")
        info = ServiceInfo(SERVICE, f"{name}.{SERVICE}", parsed_addresses=[host], port=int(port))
        self._zeroconf.register_service(info, cooperating_responders=True)

    def close(self) -> None:
        self._zeroconf.close()

    def __enter__(self) -> Announcement:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def announced(seconds: float = LOOK_S, **interfaces: Any) -> list[str]:
    """The addresses (HOST:PORT) that are announced within ``seconds``, sorted."""
    found: set[str] = set()

    def heard(zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
        if state_change is not ServiceStateChange.Removed:
            info = zeroconf.get_service_info(service_type, name, timeout=round(1e3 * seconds))
            found.update(addresses_of(info) if info is not None else ())

    zeroconf = Zeroconf(**interfaces)
    try:
        ServiceBrowser(zeroconf, SERVICE, handlers=[heard])
        time.sleep(seconds)
    finally:
        zeroconf.close()
    return sorted(found)


def addresses_of(info: ServiceInfo) -> list[str]:
    """The addresses HOST:PORT of a service, rebuilt from its numbers: a stranger's text is never shown."""
    addresses = (ipaddress.ip_address(one) for one in info.parsed_addresses())
    return [f"[{one}]:{info.port}" if one.version == 6 else f"{one}:{info.port}" for one in addresses]
