"""A report is read as it was printed, and shown."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from penstock.core import ConfigError
from penstock.hosts.listing import show_report
from penstock.hosts.probe import DoctorReport, ExaminedHost, LinkRates, read_report
from penstock.hosts.remote import ClockOffset
from tests.unit.hosts.test_advice import host, links

REPORT = DoctorReport(
    hosts=[
        host("localhost"),
        msgspec.structs.replace(host("b:7700"), clock=ClockOffset(864_000.0, 0.0002)),
        ExaminedHost(host="c", problem="host c: Connection refused"),
    ],
    links=[*links(), LinkRates(source="a", to="c", problem="no answer")],
    advice=["use another cable"],
)


def test_a_report_is_read_as_it_was_printed(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    file.write_bytes(msgspec.json.encode(REPORT))
    assert read_report(file) == REPORT
    assert b'"from":"a","to":"b","latency_ms":0.2,"bandwidth_gbit_s":0.94' in file.read_bytes()


@pytest.mark.parametrize("content", [b"", b"[]", b'{"hosts": 1}'])
def test_what_is_no_report_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(ConfigError, match="is not what `penstock doctor --json` prints"):
        read_report(tmp_path / "x")
    with pytest.raises(ConfigError, match="No such file"):
        read_report(tmp_path / "y")


def test_a_person_sees_all_of_it() -> None:
    screen = io.StringIO()
    show_report(REPORT, Console(file=screen, width=80))
    said = screen.getvalue()
    for words in (
        "+864000.0000 s, ±0.20 ms",
        "6.0 of 8.0 GB",
        "10.0 GB/s",
        "100 GFLOPS",
        "50, 800",
        "0.20 ms",
        "940 Mbit/s",
        "4.7 ms",
        "host c: Connection refused",
        "- use another cable.",
    ):
        assert words in said
