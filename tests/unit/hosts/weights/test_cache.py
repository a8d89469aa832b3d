"""What other hosts have sent: kept, checked, bounded."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.core import ConfigError
from penstock.hosts.weights.cache import PIECES, PartialCopy, WeightCache
from penstock.hosts.weights.ranges import PIECE, FilePart

ONE, OTHER, THIRD = ("1" * 64, "2" * 64, "3" * 64)
FILES = [FilePart("config.json", 2, [(0, 2)]), FilePart("w", 9 * PIECE, [(0, 100), (3 * PIECE, 5 * PIECE)])]


def fill(copy: PartialCopy) -> None:
    for name, (start, end) in copy.missing():
        copy.write(name, (start, end), os.urandom(end - start))
    copy.keep()


def test_what_was_written_is_there_after_a_restart(tmp_path: Path) -> None:
    copy = PartialCopy(tmp_path / ONE, FILES)
    assert copy.missing() == [
        ("config.json", (0, 2)),
        ("w", (0, 100)),
        ("w", (3 * PIECE, 4 * PIECE)),
        ("w", (4 * PIECE, 5 * PIECE)),
    ]
    fill(copy)
    assert PartialCopy(tmp_path / ONE, FILES).missing() == []
    more = [FilePart("w", 9 * PIECE, [(3 * PIECE, 6 * PIECE)])]
    assert PartialCopy(tmp_path / ONE, more).missing() == [("w", (5 * PIECE, 6 * PIECE))]
    assert (tmp_path / ONE / "w").stat().st_size == 9 * PIECE
    assert 512 * (tmp_path / ONE / "w").stat().st_blocks < 3 * PIECE  # the rest are holes


def test_a_flipped_byte_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill(PartialCopy(tmp_path / ONE, FILES))
    with (tmp_path / ONE / "w").open("r+b") as file:
        file.seek(4 * PIECE + 7)
        byte = file.read(1)
        file.seek(4 * PIECE + 7)
        file.write(bytes([byte[0] ^ 1]))
    assert PartialCopy(tmp_path / ONE, FILES).missing() == [("w", (4 * PIECE, 5 * PIECE))]
    assert "are damaged" in caplog.text


@pytest.mark.parametrize("notes", ["", "[]", '{"w:0-100'])
def test_without_its_notes_all_is_sent_anew(tmp_path: Path, notes: str) -> None:
    fill(PartialCopy(tmp_path / ONE, FILES))
    (tmp_path / ONE / PIECES).write_text(notes)
    assert len(PartialCopy(tmp_path / ONE, FILES).missing()) == 4


@pytest.mark.parametrize("name", ["", "..", "a/b", "/etc/passwd", PIECES])
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="is no file of a checkpoint"):
        PartialCopy(tmp_path / ONE, [FilePart(name, 1, [(0, 1)])])
    with pytest.raises(ConfigError, match="64 hexadecimal digits"):
        WeightCache(tmp_path, 1).copy(f"../{ONE[3:]}", FILES, ())


def test_pieces_of_another_length_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="2 bytes came of 100"):
        PartialCopy(tmp_path / ONE, FILES).write("w", (0, 100), b"ab")


def test_what_was_used_longest_ago_makes_room(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path, most_bytes=5 * PIECE)  # each takes a little more than two pieces
    for age, digest in enumerate((ONE, OTHER)):
        fill(cache.copy(digest, FILES, ()))
        os.utime(tmp_path / digest, (1000 + age, 1000 + age))
    fill(cache.copy(THIRD, FILES, in_use=()))
    assert sorted(os.listdir(tmp_path)) == [OTHER, THIRD]
    fill(cache.copy(ONE, FILES, in_use=(OTHER, THIRD)))
    assert sorted(os.listdir(tmp_path)) == [ONE, OTHER, THIRD]
