"""Stored profiles: each is found by all that it depends on, and never for another device, model or version."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from penstock.cluster.spec import Link
from penstock.engine.profile.hosts import link_key, slower_ways, stored_links
from penstock.engine.profile.store import DeviceKey, DeviceProfile, LinkProfile, ProfileStore
from penstock.hosts.probe import LinkRates
from tests.unit.cluster.test_measured import TIMES

KEY = DeviceKey(
    host="a",
    node="a.lan",
    device="cpu",
    device_model="x86_64",
    threads=2,
    model="0" * 64,
    dtype="float32",
    quantization="none",
    numerics="auto",
    penstock="1",
    torch="2",
)


def test_a_profile_is_of_one_device_model_and_version(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path / "profiles")
    assert store.times(KEY) is None
    store.keep(DeviceProfile(key=KEY, times=TIMES))
    assert ProfileStore(tmp_path / "profiles").times(KEY) == TIMES
    for name, other in {"threads": 1, "quantization": "int4", "torch": "3", "host": "b", "model": "1" * 64}.items():
        assert store.times(msgspec.structs.replace(KEY, **{name: other})) is None


def test_only_a_file_whose_content_is_wrong_is_called_damaged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("no folder")
    assert ProfileStore(tmp_path / "file" / "profiles").times(KEY) is None
    assert ProfileStore(tmp_path / "none").times(KEY) is None
    assert caplog.text == ""
    store = ProfileStore(tmp_path / "profiles")
    store.keep(DeviceProfile(key=KEY, times=TIMES))
    (file,) = (tmp_path / "profiles").iterdir()
    file.unlink()
    file.mkdir()
    assert store.times(KEY) is None
    assert "cannot be read, so it counts as none: Is a directory" in caplog.text
    file.rmdir()
    file.write_text("{")
    assert store.times(KEY) is None
    assert f"{file} is damaged, and made anew" in caplog.text


def test_a_damaged_file_counts_as_none(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path)
    store.keep(DeviceProfile(key=KEY, times=TIMES))
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    for damaged in (b"", whole[:-9], whole.replace(b'"rows":[1,4]', b'"rows":[4,1]'), whole.replace(b'"a"', b'"b"')):
        file.write_bytes(damaged)
        assert store.times(KEY) is None


@pytest.mark.parametrize("name", ["file", "file/below", "profiles"])
def test_a_measurement_that_cannot_be_written_is_not_lost_but_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    (tmp_path / "file").write_text("")
    store = ProfileStore(tmp_path / name)
    for profile in (
        DeviceProfile(key=KEY, times=TIMES),
        LinkProfile(key=link_key("a", "b", encrypted=True), link=Link(bandwidth_gbit_s=1.0, latency_ms=2.0)),
    ):
        if name == "profiles":
            store._place(profile.key).mkdir(parents=True)
        store.keep(profile)
        (record,) = caplog.records
        assert record.levelname == "WARNING"
        assert re.search(f"{tmp_path / name}.* cannot be written .*; XDG_CACHE_HOME names another", record.message)
        caplog.clear()


def test_links_are_known_both_ways_by_the_worse_figures_and_only_all_together(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path)
    there, back = ("b", "localhost", 0.5, 3.0), ("localhost", "b", 0.9, 1.0)
    (found,) = slower_ways(
        LinkRates(source=one, to=other, bandwidth_gbit_s=rate, latency_ms=ms) for one, other, rate, ms in (there, back)
    )
    assert (found.ends, found.bandwidth_gbit_s, found.latency_ms) == (("b", "localhost"), 0.5, 3.0)
    key = link_key("localhost", "b", encrypted=True)
    store.keep(LinkProfile(key=key, link=Link(bandwidth_gbit_s=0.5, latency_ms=3.0)))
    assert stored_links(["localhost", "b"], store, encrypted=True) == [found]
    assert stored_links(["localhost", "b"], store, encrypted=False) is None
    assert stored_links(["localhost", "b", "c"], store, encrypted=True) is None
    assert stored_links(["localhost"], store, encrypted=True) == []
