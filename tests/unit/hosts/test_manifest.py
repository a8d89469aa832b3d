"""A checkpoint's bytes by their digests, and which of them a host needs."""

from __future__ import annotations

import os
import threading
from collections import Counter
from pathlib import Path

import msgspec
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from safetensors import safe_open

from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.checkpoint.gguf_header import read_header
from penstock.checkpoint.tensors import layer_of
from penstock.core import ConfigError
from penstock.hosts.fetching import Offer
from penstock.hosts.weights import (
    PIECE,
    Cancelled,
    FilePart,
    HashedFile,
    Held,
    bounds_of,
    check_parts,
    count_of,
    digest_of,
    files_of,
    hashed,
    hashed_file,
    open_regular,
    pieces_of,
    ranges_of,
    split_digests,
)
from penstock.messages import MalformedMessage
from penstock.models.loader import load_module
from tests.checkpoints import make_checkpoint
from tests.gguf_files import make_gguf, split_gguf
from tests.unit.hosts.parts import part_of, parts_of

LAYERS = 5
HEADER = 16_384
"""Bytes of a safetensors header here, at most."""


def test_every_byte_counts(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    whole = bytearray(os.urandom(3 * PIECE + 5))
    file.write_bytes(whole)
    root = hashed_file(file).root
    for place in (0, PIECE - 1, PIECE, 2 * PIECE + 77, len(whole) - 1):
        changed = bytearray(whole)
        changed[place] ^= 1
        file.write_bytes(changed)
        assert hashed_file(file).root != root
    file.write_bytes(whole + b"\0")
    assert hashed_file(file).size == len(whole) + 1
    file.write_bytes(whole)
    assert hashed_file(file).root == root


def test_a_file_of_more_pieces_than_one_task_hashes(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(os.urandom(130 * PIECE + 1))
    found = hashed_file(file)
    assert len(found.digests) == 32 * 131
    assert found == hashed_file(file)


def test_hashing_can_be_stopped(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(3 * PIECE))
    with pytest.raises(Cancelled):
        hashed(tmp_path, lambda: True)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_what_is_no_regular_file_is_never_waited_for(tmp_path: Path, make: object) -> None:
    make(tmp_path / "x.json")  # type: ignore[operator]
    with pytest.raises(OSError, match=r"not a regular file|Is a directory"):
        hashed(tmp_path)
    with pytest.raises(OSError, match=r"not a regular file|Is a directory"):
        open_regular(tmp_path / "x.json")


def test_a_folder_of_too_many_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.hosts.weights.MOST_LISTED", 3)
    for i in range(5):
        (tmp_path / f"{i}.json").touch()
    with pytest.raises(ConfigError, match="more than 3 files"):
        files_of(tmp_path)


def test_names_sizes_and_content_make_the_digest_and_notes_do_not(tmp_path: Path) -> None:
    def digest() -> str:
        return digest_of([FilePart(one.name, one.size, one.root) for one in hashed(tmp_path)])

    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.model").write_bytes(b"\1\2")
    before = digest()
    (tmp_path / "README.md").write_text("notes")
    assert digest() == before
    (tmp_path / "config.json").write_text("[]")
    changed = digest()
    (tmp_path / "config.json").rename(tmp_path / "other.json")
    assert len({before, changed, digest()}) == 3


ONE = part_of("a.safetensors", bytes(2 * PIECE + 1), [(0, 3)])
OTHER = part_of("config.json", b"{}", [])


def test_a_question_that_is_consistent_is_taken() -> None:
    files, digests = parts_of(ONE, OTHER)
    check_parts(digest_of(files), files, True, digests)
    assert list(split_digests(files, digests)) == ["a.safetensors"]


@pytest.mark.parametrize(
    "files",
    [
        [],
        [ONE[0], ONE[0]],
        [replace(ONE[0], size=ONE[0].size + PIECE)],
        [replace(ONE[0], root="0" * 64)],
        [replace(ONE[0], pieces=[(0, 4)])],
        [replace(ONE[0], pieces=[(1, 1)])],
        [replace(ONE[0], pieces=[(2, 3), (0, 1)])],
        [replace(ONE[0], pieces=[(0, 2), (1, 3)])],
        [replace(OTHER[0], pieces=[(0, 1)])],
    ],
)
def test_a_question_that_contradicts_itself_is_refused(files: list[FilePart]) -> None:
    _, digests = parts_of(ONE, OTHER)
    with pytest.raises(MalformedMessage):
        check_parts(digest_of(files), files, True, digests)


@given(st.binary(max_size=200), st.booleans())
def test_digests_that_are_not_the_roots_are_refused(digests: bytes, is_folder: bool) -> None:
    files, right = parts_of(ONE)
    if digests != right:
        with pytest.raises(MalformedMessage):
            check_parts(digest_of(files), files, is_folder, digests)
    with pytest.raises(MalformedMessage, match="not that of its files"):
        check_parts("0" * 64, files, is_folder, right)


@given(st.lists(st.tuples(st.integers(0, 9 * PIECE), st.integers(0, 9 * PIECE))), st.integers(1, 9 * PIECE))
def test_pieces_cover_the_ranges_and_nothing_far(ranges: list[tuple[int, int]], size: int) -> None:
    inside = [(start, min(end, size)) for start, end in ranges if start < min(end, size)]
    pieces = pieces_of(inside, size)
    edges = [edge for one in pieces for edge in one]
    assert edges == sorted(set(edges))
    covered = {piece for first, last in pieces for piece in range(first, last)}
    assert all(piece < count_of(size) for piece in covered)
    for piece in range(count_of(size)):
        begin, end = bounds_of(size, piece)
        assert (piece in covered) == any(start < end and begin < stop for start, stop in inside)


@pytest.mark.parametrize("layers", [(0, 2), (2, 4), (4, 5), (0, 5)])
def test_a_part_holds_the_layers_and_little_else(target: Path, layers: tuple[int, int]) -> None:
    ranges = ranges_of(target, [Held(*layers)], LAYERS)
    assert ranges["config.json"] == [(0, (target / "config.json").stat().st_size)]
    sent = sum(end - start for start, end in ranges["model.safetensors"])
    at_an_end = layers[0] == 0 or layers[1] == LAYERS
    with safe_open(target / "model.safetensors", framework="pt") as file:
        own = sum(
            4 * file.get_tensor(name).numel()
            for name in open_checkpoint(str(target)).weights.names()
            if (at_an_end if (layer := layer_of(name)) is None else layers[0] <= layer < layers[1])
        )
    assert own <= sent <= own + HEADER


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_the_rows_of_their_layers(tmp_path: Path, ranks: int) -> None:
    """Each byte of a middle layer's products is one rank's; norms are every rank's."""
    folder = make_checkpoint(tmp_path, "llama", hidden_size=96, num_attention_heads=6, num_key_value_heads=3)
    whole = ranges_of(folder, [Held(1, 2)], LAYERS)["model.safetensors"]
    parts = [ranges_of(folder, [Held(1, 2, rank, ranks, 3)], LAYERS)["model.safetensors"] for rank in range(ranks)]
    counts = Counter(byte for part in parts for start, end in part for byte in range(start, end))
    assert counts.keys() == {byte for start, end in whole for byte in range(start, end)}
    shared = sum(1 for count in counts.values() if count == 1)
    assert shared > 0.95 * sum(end - start for start, end in whole[1:])
    assert {*counts.values()} == {1, ranks}


def test_a_host_with_two_ranks_holds_the_rows_of_both(target: Path) -> None:
    both = [Held(1, 2, rank, 2, 2) for rank in range(2)]
    pieces = [pieces_of(ranges_of(target, held, LAYERS)["model.safetensors"], 1 << 30) for held in (both, [Held(1, 2)])]
    assert pieces[0] == pieces[1]


def test_nothing_of_the_weights_is_needed_for_no_layer(target: Path) -> None:
    ranges = ranges_of(target, [], LAYERS)["model.safetensors"]
    assert len(ranges) == 1
    assert ranges[0][1] < (target / "model.safetensors").stat().st_size / 2


def test_a_damaged_header_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\x05\0\0\0\0\0\0\0{]}")
    with pytest.raises(ConfigError, match=r"model\.safetensors is damaged"):
        ranges_of(tmp_path, [Held(0, 1)], 1)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gguf(tmp_path_factory.mktemp("gguf"), kind=Kind.Q8_0, num_hidden_layers=3)


@pytest.fixture(scope="module", params=[1, 3])
def first_file(gguf: Path, request: pytest.FixtureRequest) -> Path:
    """Path of the first file, for a model in one file or in several."""
    return gguf if request.param == 1 else split_gguf(gguf, gguf.parent, request.param)[0]


@pytest.mark.parametrize("layers", [(0, 1), (1, 2), (2, 3), (0, 3)])
def test_a_stage_loads_from_its_part_of_a_gguf_model_alone(
    first_file: Path, tmp_path: Path, layers: tuple[int, int]
) -> None:
    """Byte by byte, not piece by piece: what is not needed is no number."""
    gguf = first_file
    needed = ranges_of(gguf, [Held(*layers)], 3)
    assert [*needed] == [file.name for file in files_of(gguf)]
    for file in files_of(gguf):
        whole = file.read_bytes()
        copy = bytearray(b"\xff" * len(whole))
        for start, end in needed[file.name]:
            copy[start:end] = whole[start:end]
        (tmp_path / file.name).write_bytes(copy)
    sent, own = (
        load_module(open_checkpoint(str(path)), *layers, "float32", "cpu").state_dict()
        for path in (tmp_path / gguf.name, gguf)
    )
    assert own.keys() == sent.keys()
    assert all(torch.equal(own[name], sent[name]) for name in own)


def test_of_a_gguf_file_a_middle_stage_needs_the_header_and_its_tensors(gguf: Path) -> None:
    header = read_header(gguf)
    tensors = sum(info.nbytes for name, info in header.tensors.items() if name.startswith("blk.1."))
    gaps = 32 * len(header.tensors)  # each begins at a multiple of 32 bytes
    needed = sum(end - start for start, end in ranges_of(gguf, [Held(1, 2)], 3)[gguf.name])
    assert header.data_start + tensors <= needed <= header.data_start + tensors + gaps


def test_a_model_over_several_files_is_asked_for_as_one(gguf: Path) -> None:
    first, *others = split_gguf(gguf, gguf.parent, 3)
    assert files_of(first) == [first, *others]
    question = Offer(first, 3).question([Held(0, 3)], 0)
    assert not question.asked.is_folder
    assert [file.name for file in question.asked.files] == [file.name for file in (first, *others)]
    check_parts(question.asked.digest, question.asked.files, False, question.digests)


@pytest.mark.parametrize("name", ["other.gguf", "model-00004-of-00003.gguf", "config.json"])
def test_a_single_file_comes_with_none_that_it_does_not_name(name: str) -> None:
    files = [FilePart("model-00001-of-00003.gguf", 1, "0" * 64), FilePart(name, 1, "1" * 64)]
    with pytest.raises(MalformedMessage, match="files that its first one does not name"):
        check_parts(digest_of(files), files, False, b"")


def test_hashing_uses_no_more_threads_than_it_says(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(bytes(3))
    before = threading.active_count()
    assert [HashedFile("a.json", 3, one.digests) for one in hashed(tmp_path)] == hashed(tmp_path)
    assert threading.active_count() == before


def test_a_part_survives_the_wire() -> None:
    files, _ = parts_of(ONE, OTHER)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(files), type=list[FilePart]) == files
