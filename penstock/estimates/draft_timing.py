"""The parts of the time that a drafter's round takes."""

from __future__ import annotations

from typing import NamedTuple

from penstock.messages import DeviceReserved


class DraftTiming(NamedTuple):
    """Seconds of a drafter's round by cause, for the round under way or else the last one.

    The round waited for ``features`` and for its ``device``, perhaps at the same time, and computed. ``features_at`` is
    the clock's time at which the last features had arrived, 0 where no link is modelled. ``turn`` is when the drafter
    had the device that it shares with a stage.
    """

    features: float = 0.0
    features_at: float = 0.0
    device: float = 0.0
    computing: float = 0.0
    turn: DeviceReserved | None = None
