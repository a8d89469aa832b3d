"""The ``Host`` that runs an engine's stages on several hosts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Protocol

from penstock.hosts.fleet import Fleet
from penstock.hosts.weights.offering import Offer
from penstock.messages import Loading
from penstock.pipeline.launching import Elsewhere
from penstock.pipeline.loading import FETCH
from penstock.pipeline.processes import OnLoading, ProcessHost


def tell_fetched(on_loading: OnLoading, host: str, held: int, needed: int) -> None:
    on_loading(host, FETCH, Loading(stage=0, read=held, total=needed))


class Closing(Protocol):
    def close(self) -> None: ...


class FleetHost(ProcessHost):
    """Runs stages on a fleet's hosts and on this one. ``close`` also closes the fleet, then ``started_by``."""

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
        self._offer: Offer | None = None
        """The checkpoint that hosts are to hold, as it was when first asked for; None before."""
        fleet.on_news = self.wake
        if on_loading is not None:
            fleet.on_fetched = partial(tell_fetched, on_loading)

    def offer(self, source: Path, layers: int) -> Offer:
        """The checkpoint at ``source``, of ``layers`` layers, for other hosts; its bytes are hashed only once.

        Raises OSError, ConfigError, and CheckpointChanged if its files have changed since.
        """
        if self._offer is None or self._offer.path != str(source):
            self._offer = Offer(source, layers)
        self._offer.check()
        return self._offer

    def close(self) -> None:
        super().close()
        self.fleet.close()
        if self._started_by is not None:
            self._started_by.close()
