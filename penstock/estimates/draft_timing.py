"""How long a drafter's round takes, in its parts."""

from __future__ import annotations

from typing import NamedTuple

from penstock.messages import DeviceReserved


class DraftTiming(NamedTuple):
    """What a drafter's round has spent its time on, in seconds: of the one under way, or the last one.

    It waited for ``features`` and for its ``device``, perhaps at once, and computed. The last features had arrived at
    ``features_at`` (the clock's seconds, 0 where no link is modelled). ``turn`` is when the drafter had the device
    that it shares with a stage.
    """

    features: float = 0.0
    features_at: float = 0.0
    device: float = 0.0
    computing: float = 0.0
    turn: DeviceReserved | None = None
