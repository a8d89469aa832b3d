"""What runs an engine's stages on several hosts."""

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
        self._offer: Offer | None = None
        """The checkpoint that hosts are to hold, as it was when it was first asked for."""
        fleet.on_news = self.wake
        if on_loading is not None:
            fleet.on_fetched = partial(tell_fetched, on_loading)

    def offer(self, source: Path, layers: int) -> Offer:
        """The checkpoint there, of so many layers, every byte of which has been hashed, once.

        Raises OSError, ConfigError, and CheckpointChanged where it is another one than it was.
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
