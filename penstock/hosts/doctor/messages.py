"""The messages between the head and the probes of a doctor. A header carries the secret of their session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec

from penstock.hosts.control import lease_of
from penstock.hosts.doctor.report import DeviceRates
from penstock.messages import (
    UNDECODABLE,
    Address,
    ForeignFrame,
    Frame,
    Index,
    Label,
    MalformedMessage,
    Seconds,
    Words,
)

FEW: Final = msgspec.Meta(max_length=256)
Devices = Annotated[list[Label], FEW]


class ProbeReady(msgspec.Struct, tag="probe_ready", kw_only=True, frozen=True):
    """The probe called ``name`` listens at ``address``."""

    name: Label
    address: Address


class MeasureDevices(msgspec.Struct, tag="measure_devices", kw_only=True, frozen=True):
    """Measure these devices of the probe's host, by torch's names."""

    devices: Devices


class DevicesMeasured(msgspec.Struct, tag="devices_measured", kw_only=True, frozen=True):
    name: Label
    rates: Annotated[list[DeviceRates], FEW]
    problem: Words = ""


class MeasureLink(msgspec.Struct, tag="measure_link", kw_only=True, frozen=True):
    """Measure the link from the probe that gets this to the one at ``address``."""

    address: Address


class LinkMeasured(msgspec.Struct, tag="link_measured", kw_only=True, frozen=True):
    name: Label
    round_trip_s: Seconds = 0.0
    bytes_per_s: Seconds = 0.0
    problem: Words = ""


class Burden(msgspec.Struct, tag="burden", kw_only=True, frozen=True):
    """A message whose second frame has the size to be measured. It is answered to ``back`` once all of it is there."""

    number: Index
    back: Address


class Taken(msgspec.Struct, tag="taken", kw_only=True, frozen=True):
    number: Index


ProbeMessage = ProbeReady | MeasureDevices | DevicesMeasured | MeasureLink | LinkMeasured | Burden | Taken

_decoder = msgspec.msgpack.Decoder(ProbeMessage)


def message_of(frames: Sequence[Frame], session: str) -> ProbeMessage:
    """Decode a message. Raises ForeignFrame for one of another session, and MalformedMessage."""
    found, raw = lease_of(frames)
    if found != session:
        raise ForeignFrame("it is of another session")
    try:
        message: ProbeMessage = _decoder.decode(raw)
    except UNDECODABLE as error:
        raise MalformedMessage(f"message does not decode: {error}") from error
    return message
