"""Announced workers are found, on loopback here; strangers' words are not repeated."""

from __future__ import annotations

import pytest

pytest.importorskip("zeroconf", reason="zeroconf is not installed")

from zeroconf import ServiceInfo

from penstock.core import ConfigError
from penstock.hosts import listing
from penstock.hosts.listing import SERVICE, Announcement, addresses_of, announced
from penstock.hosts.worker import run_worker
from tests.agents import soon


def test_an_announced_worker_is_found() -> None:
    with Announcement("127.0.0.1:7719"):
        soon(lambda: "127.0.0.1:7719" in announced(2.0, interfaces=["127.0.0.1"]))


def test_addresses_are_made_of_numbers() -> None:
    info = ServiceInfo(SERVICE, f"a stranger's words.{SERVICE}", parsed_addresses=["10.0.0.2", "fd00::2"], port=7700)
    assert addresses_of(info) == ["10.0.0.2:7700", "[fd00::2]:7700"]


def test_what_is_found_is_only_suggested(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(listing, "announced", lambda: ["10.0.0.2:7700", "10.0.0.3:7700"])
    listing.suggest_hosts(as_json=False)
    assert "  penstock hosts 10.0.0.2:7700,10.0.0.3:7700" in capsys.readouterr().out
    listing.suggest_hosts(as_json=True)
    assert capsys.readouterr().out == '["10.0.0.2:7700","10.0.0.3:7700"]\n'
    monkeypatch.setattr(listing, "announced", list)
    listing.suggest_hosts(as_json=False)
    assert "Nobody announces a worker" in capsys.readouterr().out


@pytest.mark.parametrize("listen", [None, "0.0.0.0:7700"])
def test_an_address_that_others_cannot_use_is_not_announced(listen: str | None) -> None:
    with pytest.raises(ConfigError, match="announce needs the address at which others reach this host"):
        run_worker(listen, None, None, None, True, None, 1.0, True)
