"""An emulated stage: the driver of every stage, on a modelled device and between modelled links."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from penstock.cluster.timing import LinkTiming, StageTiming
from penstock.emulation.background import BackgroundCore
from penstock.emulation.device import ModelledDevice
from penstock.emulation.link import link_of
from penstock.emulation.priority import STAGE, keep_time, sleep_precisely
from penstock.stage.device import Link, Links
from penstock.stage.driver import Core, StageDriver


class StageEmulation(msgspec.Struct, frozen=True, kw_only=True):
    """The modelled times of one stage; None is real. ``up`` and ``down`` are its links against and along the stream.

    A drafter has its times from ``EmulatedDrafter``; nothing of its process is modelled, but it shares the host.
    """

    timing: StageTiming | None = None
    up: LinkTiming | None = None
    down: LinkTiming | None = None
    to_drafter: LinkTiming | None = None
    shared: bool = False
    """Whether a drafter's passes take turns with the stage's batches on its device."""
    real_time: bool = False
    """Whether its process goes before all that keep no modelled times, if the system permits it."""
    apart: bool = False
    """Whether stages, engine and drafter are on several hosts, whose clocks differ."""


def emulated_driver(
    index: int, core: Core, clock: Callable[[], float], emulation: StageEmulation, down: Link | None = None
) -> StageDriver:
    """The driver of stage ``index`` with modelled times. ``down`` replaces its own link where several share one."""
    along = link_of(emulation.down) if down is None else down
    links = Links(along, link_of(emulation.up), link_of(emulation.to_drafter))
    timing = emulation.timing
    device = None if timing is None else ModelledDevice(index, clock, timing, shared=emulation.shared)
    return StageDriver(index, core, clock, device, links)


def share_host(core: Core, emulation: StageEmulation) -> Core:
    """Let this thread keep the stage's times on a host that plays many devices; the core computes at idle priority.

    Returns the core to use.
    """
    if emulation.real_time:
        keep_time(STAGE)
    else:
        sleep_precisely()
    return BackgroundCore(core)
