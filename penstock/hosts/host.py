"""What runs an engine's stages on several hosts."""

from __future__ import annotations

from penstock.hosts.fleet import Fleet
from penstock.pipeline.launching import Elsewhere
from penstock.pipeline.processes import OnLoading, ProcessHost


class FleetHost(ProcessHost):
    """The stages of a fleet's hosts, and of this one; the fleet is closed with it."""

    def __init__(self, fleet: Fleet, stage_timeout: float | None = None, on_loading: OnLoading | None = None) -> None:
        self.fleet = fleet
        elsewhere = Elsewhere(fleet.hosts, fleet.reached_at, fleet.private_network)
        super().__init__("tcp", stage_timeout, fleet.security, on_loading, elsewhere)

    def close(self) -> None:
        super().close()
        self.fleet.close()
