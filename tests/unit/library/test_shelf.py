"""Models that are kept on this host are listed, and removed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.core import ConfigError
from penstock.library.shelf import list_models, place_of, pull_models, remove_models, removed, stored_models
from tests.model_hub import Hub, files_in

REPO = "some-one/tiny-GGUF"
Q4, Q8 = b"GGUF" + bytes(1000), b"GGUF" + bytes(2000)


@pytest.fixture
def full(hub: Hub, target: Path) -> Hub:
    """A hub of which three models are here, beside one from an address."""
    hub.repos[REPO] = {"tiny-Q4_K_M.gguf": Q4, "tiny-Q8_0.gguf": Q8}
    hub.repos["some-one/tiny"] = files_in(target)
    hub.repos["files"] = {"mine.gguf": Q4}
    for name in (f"{REPO}:Q4_K_M", f"{REPO}:Q8_0", "some-one/tiny", address_of(hub)):
        place_of(name)
    return hub


def address_of(hub: Hub) -> str:
    return f"{hub.address.replace('127.0.0.1', 'localhost')}/files/mine.gguf"


def names() -> list[str]:
    return [one.name for one in stored_models()]


def test_all_that_is_here_is_listed_with_its_size(full: Hub, capsys: pytest.CaptureFixture[str], target: Path) -> None:
    list_models(as_json=True, names=False)
    found = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    assert list(found) == [address_of(full), "some-one/tiny", f"{REPO}:Q4_K_M", f"{REPO}:Q8_0"]
    assert [one["size"] for one in found.values()] == [1004, sum(map(len, files_in(target).values())), 1004, 2004]
    assert [one["kind"] for one in found.values()] == ["GGUF", "safetensors", "GGUF", "GGUF"]
    for one in found.values():
        assert place_of(one["place"]) == one["place"], "it may be given for MODEL"
    list_models(as_json=False, names=False)
    said = capsys.readouterr().out
    assert "some-one/tiny-GGUF:Q8_0" in said
    assert "2.0 kB" in said
    assert "4 models, " in said


def test_nothing_is_here(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    list_models(as_json=False, names=False)
    assert capsys.readouterr().out.startswith("No model is kept here. penstock pull NAME fetches one")


def test_short_names_are_listed(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    list_models(as_json=False, names=True)
    assert "qwen3:8b           Qwen/Qwen3-8B-GGUF:Q4_K_M\n" in capsys.readouterr().out
    list_models(as_json=True, names=True)
    assert json.loads(capsys.readouterr().out)[0]["name"] == "smollm2"


def test_one_of_two_files_is_removed(full: Hub, cache: Path) -> None:
    assert removed(f"{REPO}:q8_0") == 2004
    assert f"{REPO}:Q8_0" not in names()
    full.is_down = True
    assert Path(place_of(f"{REPO}:Q4_K_M")).read_bytes() == Q4
    blobs = cache / "models--some-one--tiny-GGUF" / "blobs"
    assert [file.stat().st_size for file in blobs.iterdir()] == [1004]


def test_folders_and_addresses_are_removed_whole(full: Hub, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    remove_models(["some-one/tiny", address_of(full)])
    assert capsys.readouterr().out.endswith(f"Removed {address_of(full)}: 1.0 kB are free.\n")
    assert names() == [f"{REPO}:Q4_K_M", f"{REPO}:Q8_0"]
    assert not (cache / "models--some-one--tiny").exists()


def test_what_is_not_here(full: Hub, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"'{REPO}' is not kept on this host; there are {REPO}:Q4_K_M, {REPO}:Q8_0$"):
        removed(REPO)
    with pytest.raises(ConfigError, match="'some-one/tinny' is not kept on this host; did you mean 'some-one/tiny'"):
        removed("some-one/tinny")
    with pytest.raises(ConfigError, match="is a place on this host, which is yours: remove it yourself"):
        remove_models([str(tmp_path)])


def test_what_was_broken_off_is_listed_and_removed(full: Hub) -> None:
    full.repos["some-one/big"] = {"big-Q4_0.gguf": b"GGUF" + bytes(50_000)}
    full.cuts, full.dies = [30_000], True
    with pytest.raises(Exception, match="the connection ended"):
        place_of("some-one/big:Q4_0")
    (broken,) = [one for one in stored_models() if one.kind == "incomplete"]
    assert (broken.name, broken.size) == ("some-one/big", 30_000)
    assert removed("some-one/big") == 30_000
    assert "some-one/big" not in names()


def test_an_address_that_was_broken_off_is_listed_once(full: Hub) -> None:
    address = address_of(full)
    remove_models([address])
    full.repos["files"] = {"mine.gguf": b"GGUF" + bytes(50_000)}
    full.cuts, full.dies = [30_000], True
    with pytest.raises(Exception, match="the connection ended"):
        place_of(address)
    assert [(one.kind, one.size) for one in stored_models() if one.name == address] == [("incomplete", 30_000)]


def test_the_pair_is_always_here(cache: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pull_models(["demo", str(tmp_path)])
    said = capsys.readouterr().err
    assert "demo comes with the package: there is nothing to pull." in said
    assert f"{tmp_path} is a place on this host: there is nothing to pull." in said
    with pytest.raises(ConfigError, match="there is no folder 'a/b/c'"):
        pull_models(["a/b/c"])


def test_places_are_printed_for_scripts(full: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    pull_models([f"{REPO}:Q4_K_M"])
    assert Path(capsys.readouterr().out.strip()).read_bytes() == Q4
