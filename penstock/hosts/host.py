"""What runs an engine's stages on several hosts."""

from __future__ import annotations

from functools import partial
from typing import Protocol

from penstock.hosts.fleet import Fleet
from penstock.messages import Loading
from penstock.pipeline.launching import Elsewhere
from penstock.pipeline.loading import FETCH
from penstock.pipeline.processes import OnLoading, ProcessHost


def tell_fetched(on_loading: OnLoading, host: str, held: int, needed: int) -> None:
    on_loading(host, FETCH, Loading(stage=0, read=held, total=needed))


class Closing(Protocol):
    def close(self) -> None: ...


class FleetHost(ProcessHost):
    """The stages of a fleet's hosts, and of this one. The fleet is closed with it, then what has started its hosts."""

    def __init__(
        self,
        fleet: Fleet,
        stage_timeout: float | None = None,
        on_loading: OnLoading | None = None,
        started_by: Closing | None = None,
    ) -> None:
        self.fleet = fleet
        self._started_by = started_by
        elsewhere = Elsewhere(fleet.hosts, fleet.reached_at, fleet.cut_off, fleet.private_network)
        super().__init__("tcp", stage_timeout, fleet.security, on_loading, elsewhere)
        fleet.on_return = self.wake
        if on_loading is not None:
            fleet.on_fetched = partial(tell_fetched, on_loading)

    def close(self) -> None:
        super().close()
        self.fleet.close()
        if self._started_by is not None:
            self._started_by.close()
