"""The report of ``penstock doctor``, as its ``--json`` prints it. ``read_report`` reads it, for the planner for one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from penstock.core import ConfigError
from penstock.hosts.facts import HostFacts
from penstock.hosts.offsets import ClockOffset
from penstock.messages import Index, Label, Seconds


class DeviceRates(msgspec.Struct, frozen=True, kw_only=True):
    """A device's measured rates, named as in a cluster file, with its ``threads`` if it is a "cpu".

    The matrices of one decoder layer were multiplied (``rates.py``): ``weight_bandwidth_gb_s`` is the rate at which one
    row reads them, in 1e9 bytes/s, ``compute_tflops`` that of many rows, in 1e12 operations/s, and ``rows_per_second``
    is by the number of rows in a batch.
    """

    device: Label
    threads: Index
    dtype: Label
    weight_bandwidth_gb_s: Seconds
    compute_tflops: Seconds
    rows_per_second: Annotated[dict[Index, Seconds], msgspec.Meta(max_length=256)]


class ExaminedHost(msgspec.Struct, frozen=True, kw_only=True):
    """A host by its name, with its facts and measured rates, or else the ``problem``.

    ``clock``: seconds to add to a moment of this host's monotonic clock for the other's, and the largest error of that.
    """

    host: str
    problem: str = ""
    facts: HostFacts | None = None
    clock: ClockOffset | None = None
    rates: list[DeviceRates] = []


class LinkRates(msgspec.Struct, frozen=True, kw_only=True):
    """The link from one host to another, measured as stages' messages travel: with TLS, if there are keys.

    ``bandwidth_gbit_s`` is in 1e9 bits/s of payload. ``latency_ms`` is half the round trip of a small message. Both are
    None if there is a ``problem``.
    """

    source: str = msgspec.field(name="from")
    to: str
    latency_ms: float | None = None
    bandwidth_gbit_s: float | None = None
    problem: str = ""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A whole report. ``hosts`` begin with "localhost". Two hosts that answer have two links, one in each direction."""

    version: int = 1
    hosts: list[ExaminedHost]
    links: list[LinkRates]
    advice: list[str] = []


def read_report(path: Path) -> Report:
    """Read a file with the output of ``penstock doctor --json``. Raises ConfigError for anything else."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Report)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is not what `penstock doctor --json` prints: {error}") from error
