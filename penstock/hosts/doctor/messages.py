"""What the head and the probes of a doctor say to each other. A header carries the secret of their session."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.hosts.control import lease_of
from penstock.hosts.doctor.report import DeviceRates
from penstock.messages import UNDECODABLE, ForeignFrame, Frame, MalformedMessage


class ProbeReady(msgspec.Struct, tag="probe_ready", kw_only=True, frozen=True):
    """The probe called ``name`` listens at ``address``."""

    name: str
    address: str


class MeasureDevices(msgspec.Struct, tag="measure_devices", kw_only=True, frozen=True):
    """Of this host, by torch's names."""

    devices: list[str]


class DevicesMeasured(msgspec.Struct, tag="devices_measured", kw_only=True, frozen=True):
    name: str
    rates: list[DeviceRates]
    problem: str = ""


class MeasureLink(msgspec.Struct, tag="measure_link", kw_only=True, frozen=True):
    """From here to the probe at ``address``."""

    address: str


class LinkMeasured(msgspec.Struct, tag="link_measured", kw_only=True, frozen=True):
    name: str
    round_trip_s: float = 0.0
    bytes_per_s: float = 0.0
    problem: str = ""


class Burden(msgspec.Struct, tag="burden", kw_only=True, frozen=True):
    """A message that weighs as much as its second frame. Answered to ``back`` once all of it is there."""

    number: int
    back: str


class Taken(msgspec.Struct, tag="taken", kw_only=True, frozen=True):
    number: int


ProbeMessage = ProbeReady | MeasureDevices | DevicesMeasured | MeasureLink | LinkMeasured | Burden | Taken

_decoder = msgspec.msgpack.Decoder(ProbeMessage)


def message_of(frames: Sequence[Frame], session: str) -> ProbeMessage:
    """Raises ForeignFrame for another session's, and MalformedMessage."""
    found, raw = lease_of(frames)
    if found != session:
        raise ForeignFrame("it is of another session")
    try:
        message: ProbeMessage = _decoder.decode(raw)
    except UNDECODABLE as error:
        raise MalformedMessage(f"message does not decode: {error}") from error
    return message
