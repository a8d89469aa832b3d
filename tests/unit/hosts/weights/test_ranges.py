"""Which bytes a host is sent."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors import safe_open

from penstock.core import ConfigError
from penstock.hosts.weights.ranges import PIECE, merged, parts_of, pieces_of
from penstock.models.checkpoint import open_checkpoint
from penstock.models.gguf.header import read_header
from penstock.models.loader import load_module
from penstock.models.shards import layer_of
from tests.gguf_files import make_gguf

LAYERS = 5


def test_ranges_that_touch_are_one() -> None:
    assert merged([(5, 9), (0, 2), (2, 5), (20, 20), (30, 31)]) == [(0, 9), (30, 31)]


def test_pieces_are_cut_at_the_same_places_whatever_the_range() -> None:
    one = set(pieces_of([(10, 3 * PIECE)]))
    other = set(pieces_of([(PIECE + 5, 3 * PIECE)]))
    assert (PIECE * 2, PIECE * 3) in one & other
    assert sum(end - start for start, end in one) == 3 * PIECE - 10
    assert max(end - start for start, end in one) <= PIECE


@pytest.mark.parametrize("layers", [(0, 2), (2, 4), (4, 5), (0, 5)])
def test_a_part_holds_the_layers_and_little_else(target: Path, layers: tuple[int, int]) -> None:
    parts = {part.name: part for part in parts_of(target, [layers], LAYERS)}
    assert parts["config.json"].ranges == [(0, (target / "config.json").stat().st_size)]
    weights = parts["model.safetensors"]
    sent = sum(end - start for start, end in weights.ranges)
    at_an_end = layers[0] == 0 or layers[1] == LAYERS
    with safe_open(target / "model.safetensors", framework="pt") as file:
        own = sum(
            4 * file.get_tensor(name).numel()
            for name in open_checkpoint(str(target)).weights.names()
            if (at_an_end if (layer := layer_of(name)) is None else layers[0] <= layer < layers[1])
        )
    header = weights.ranges[0][1] if len(weights.ranges) > 1 else 0
    assert own <= sent <= own + max(header, 16_384)
    assert open_checkpoint(str(target)).num_layers == LAYERS


def test_nothing_of_the_weights_is_needed_for_no_layer(target: Path) -> None:
    (weights,) = [part for part in parts_of(target, [], LAYERS) if part.name == "model.safetensors"]
    assert len(weights.ranges) == 1
    assert weights.ranges[0][1] < weights.size / 2


def test_a_damaged_header_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\x05\0\0\0\0\0\0\0{]}")
    with pytest.raises(ConfigError, match=r"model\.safetensors is damaged"):
        parts_of(tmp_path, [(0, 1)], 1)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gguf(tmp_path_factory.mktemp("gguf"), kind=Kind.Q8_0, num_hidden_layers=3)


@pytest.mark.parametrize("layers", [(0, 1), (1, 2), (2, 3), (0, 3)])
def test_a_stage_loads_from_its_part_of_a_gguf_file_alone(gguf: Path, tmp_path: Path, layers: tuple[int, int]) -> None:
    (part,) = parts_of(gguf, [layers], 3)
    whole = gguf.read_bytes()
    assert (part.name, part.size) == (gguf.name, len(whole))
    copy = bytearray(b"\xff" * len(whole))  # what is not sent is no number
    for start, end in part.ranges:
        copy[start:end] = whole[start:end]
    (tmp_path / gguf.name).write_bytes(copy)
    sent, own = (
        load_module(open_checkpoint(str(path)), *layers, "float32", "cpu").state_dict()
        for path in (tmp_path / gguf.name, gguf)
    )
    assert own.keys() == sent.keys()
    assert all(torch.equal(own[name], sent[name]) for name in own)


def test_of_a_gguf_file_a_middle_stage_needs_the_header_and_its_tensors(gguf: Path) -> None:
    (part,) = parts_of(gguf, [(1, 2)], 3)
    header = read_header(gguf)
    tensors = sum(info.nbytes for name, info in header.tensors.items() if name.startswith("blk.1."))
    gaps = 32 * len(header.tensors)  # each begins at a multiple of 32 bytes
    assert (
        header.data_start + tensors
        <= sum(end - start for start, end in part.ranges)
        <= header.data_start + tensors + gaps
    )
