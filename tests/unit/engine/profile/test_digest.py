"""Digests of checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.engine.profile.store import PIECE, PIECES, digest_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(2 * PIECE * PIECES + 7))
    return tmp_path


def test_the_same_files_elsewhere_are_the_same(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("copy")
    for file in folder.iterdir():
        (elsewhere / file.name).write_bytes(file.read_bytes())
    assert digest_of(elsewhere) == digest_of(folder)


@pytest.mark.parametrize("place", [0, PIECE * PIECES, 2 * PIECE * PIECES])
def test_other_weights_are_others(folder: Path, place: int) -> None:
    before = digest_of(folder)
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(place)
        file.write(b"\1" * 2 * PIECE)  # as far as from one piece that is read to the next
        file.truncate(2 * PIECE * PIECES + 7)
    assert digest_of(folder) != before


def test_names_sizes_and_configuration_count_and_notes_do_not(folder: Path) -> None:
    before = digest_of(folder)
    (folder / "README.md").write_text("notes")
    assert digest_of(folder) == before
    (folder / "config.json").write_text("[]")
    changed = digest_of(folder)
    (folder / "config.json").rename(folder / "other.json")
    assert len({before, changed, digest_of(folder)}) == 3


def test_a_file_alone(folder: Path) -> None:
    file = folder / "model.safetensors"
    assert digest_of(file) == digest_of(file) != digest_of(folder)
