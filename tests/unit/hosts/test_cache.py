"""The cache of pieces from other hosts: kept over restarts, checked, bounded in size."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.config import FieldError
from penstock.core import ConfigError
from penstock.hosts import fetching as caches
from penstock.hosts.fetching import PartialCopy, WeightCache, cache_for, digest_of_zeros, has_hole
from penstock.hosts.weights import PIECE, Cancelled, digest_of, split_digests
from penstock.hosts.worker import run_worker
from tests.unit.hosts.parts import part_of, parts_of

WHOLE = {"config.json": b"{}", "w": random.Random(1).randbytes(8 * PIECE + 9)}
"""The needed pieces of w are the first, the fourth, the fifth, and the last, which is short."""
FILES, DIGESTS = parts_of(
    part_of("config.json", WHOLE["config.json"], [(0, 1)]), part_of("w", WHOLE["w"], [(0, 1), (3, 5), (8, 9)])
)
NEEDED = [("config.json", 0), ("w", 0), ("w", 3), ("w", 4), ("w", 8)]
DIGEST = digest_of(FILES)
ONE, OTHER, THIRD = ("1" * 64, "2" * 64, "3" * 64)


def content_of(name: str, piece: int) -> bytes:
    return WHOLE[name][piece * PIECE : (piece + 1) * PIECE]


def opened(folder: Path) -> PartialCopy:
    return PartialCopy(folder, FILES, split_digests(FILES, DIGESTS))


def missing(copy: PartialCopy) -> list[tuple[str, int]]:
    held: list[int] = []
    found = copy.missing(lambda: False, held.append)
    assert sum(held) == sum(copy.length(*one) for one in NEEDED if one not in found)
    return found


def fill(copy: PartialCopy) -> None:
    with copy:
        for name, piece in missing(copy):
            assert copy.write(name, piece, content_of(name, piece))


def test_what_was_written_is_there_after_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path / ONE) as copy:
        assert missing(copy) == NEEDED
    fill(opened(tmp_path / ONE))
    with opened(tmp_path / ONE) as copy:
        assert missing(copy) == []
    assert (tmp_path / ONE / "w").stat().st_size == len(WHOLE["w"])
    assert 512 * (tmp_path / ONE / "w").stat().st_blocks < 5 * PIECE  # the rest are holes
    assert sorted(os.listdir(tmp_path / ONE)) == ["config.json", "w"]


@pytest.mark.parametrize(("name", "piece"), NEEDED)
def test_a_hole_is_never_taken_for_content(tmp_path: Path, name: str, piece: int) -> None:
    fill(opened(tmp_path / ONE))
    with (tmp_path / ONE / name).open("r+b") as file:
        content = file.read()
        file.seek(0)
        file.truncate()
        for start in range(0, len(content), PIECE):
            if start != piece * PIECE:
                file.seek(start)
                file.write(content[start : start + PIECE])
        file.truncate(len(content))
    with opened(tmp_path / ONE) as copy:
        assert missing(copy) == [(name, piece)]


def test_zeros_that_belong_there_may_be_a_hole(tmp_path: Path) -> None:
    files, digests = parts_of(part_of("z", bytes(2 * PIECE), [(0, 2)]))
    with PartialCopy(tmp_path / ONE, files, split_digests(files, digests)) as copy:
        assert copy.missing(lambda: False, lambda count: None) == []
    assert digest_of_zeros(2) != digest_of_zeros(3)


def test_where_a_file_system_tells_no_holes_zeros_are_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "has_hole", lambda *_: False)
    with opened(tmp_path / ONE) as copy:
        assert missing(copy) == NEEDED
    monkeypatch.undo()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(-1)
    assert not has_hole(-1, 0, 1)


@pytest.mark.parametrize(("name", "piece"), NEEDED)
def test_a_flipped_byte_is_noticed(tmp_path: Path, name: str, piece: int) -> None:
    fill(opened(tmp_path / ONE))
    with (tmp_path / ONE / name).open("r+b") as file:
        file.seek(piece * PIECE + 1)
        byte = file.read(1)
        file.seek(piece * PIECE + 1)
        file.write(bytes([byte[0] ^ 1]))
    with opened(tmp_path / ONE) as copy:
        assert missing(copy) == [(name, piece)]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        content_of("w", 0),
        content_of("w", 4)[:-1],
        content_of("w", 4) + b"\0",
        bytes(PIECE),
        content_of("w", 4)[:-1] + b"\xff",
    ],
)
def test_a_piece_with_other_bytes_is_refused(tmp_path: Path, content: bytes) -> None:
    with opened(tmp_path / ONE) as copy:
        assert not copy.write("w", 4, content)
        assert missing(copy) == NEEDED


def linked(folder: Path) -> None:
    (folder.parent / "victim").write_text("precious")
    (folder / "w").symlink_to(folder.parent / "victim")


def hard_linked(folder: Path) -> None:
    (folder.parent / "victim").write_text("precious")
    os.link(folder.parent / "victim", folder / "w")


@pytest.mark.parametrize(
    "put", [linked, hard_linked, lambda folder: os.mkfifo(folder / "w"), lambda folder: (folder / "w").mkdir()]
)
def test_nothing_is_written_beyond_the_cache(tmp_path: Path, put: Callable[[Path], None]) -> None:
    (tmp_path / ONE).mkdir()
    put(tmp_path / ONE)
    with pytest.raises(OSError, match="w"):
        opened(tmp_path / ONE)
    if (victim := tmp_path / "victim").exists():
        assert victim.read_text() == "precious"


def test_a_copys_folder_is_no_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ONE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=r"Not a directory|[Ss]ymbolic|Too many levels"):
        opened(tmp_path / ONE)
    assert os.listdir(tmp_path / "elsewhere") == []


def test_checking_can_be_stopped(tmp_path: Path) -> None:
    with opened(tmp_path / ONE) as copy, pytest.raises(Cancelled):
        copy.missing(lambda: True, lambda count: None)


def filled(cache: WeightCache, digest: str) -> None:
    fill(cache.copy(digest, FILES, split_digests(FILES, DIGESTS)))


def test_what_was_used_longest_ago_makes_room(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path, most_bytes=6 * PIECE)  # each takes a little more than three pieces
    for age, digest in enumerate((ONE, OTHER, THIRD)):
        filled(cache, digest)
        os.utime(tmp_path / digest, (1000 + age, 1000 + age))
    cache.make_room(0, in_use=(THIRD,))
    assert sorted(os.listdir(tmp_path)) == [OTHER, THIRD]
    cache.make_room(0, in_use=(OTHER, THIRD))
    assert sorted(os.listdir(tmp_path)) == [OTHER, THIRD]


def test_what_is_only_announced_removes_nothing(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path, most_bytes=1 << 40)
    filled(cache, ONE)
    with pytest.raises(ConfigError, match=r"have to be sent, and the disk of .* has .* free"):
        cache.check_room(1 << 60, ())
    cache.check_room(1, ())
    assert os.listdir(tmp_path) == [ONE]
    cache.make_room(1 << 60, in_use=())  # that much is about to be written
    assert os.listdir(tmp_path) == []


def test_what_is_no_copy_stays(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / ONE).symlink_to(tmp_path / "notes")
    WeightCache(tmp_path, most_bytes=0).make_room(0, ())
    assert sorted(os.listdir(tmp_path)) == [ONE, "notes"]


@pytest.mark.parametrize("place", ["/dev/null", "/dev/null/below", "/proc/below"])
def test_a_named_folder_in_which_nothing_can_be_kept_is_refused_before_the_worker_listens(place: str) -> None:
    with pytest.raises(FieldError, match=f"cache is '{place}', where no layers can be kept: .*; name another folder"):
        run_worker("127.0.0.1:0", None, None, None, True, place, 50.0, False)


def test_without_the_default_folder_a_worker_lends_what_this_host_holds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert cache_for(None) == Path("/dev/null/penstock/weights")
    assert "only checkpoints that are on this host can be run; name a folder with --cache" in caplog.text


def test_a_cache_may_grow_without_end(tmp_path: Path) -> None:
    WeightCache(cache_for(str(tmp_path / "new")), 1e9 * math.inf).make_room(0, ())
    assert (tmp_path / "new").is_dir()
