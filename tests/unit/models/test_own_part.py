"""A stage reads its own layers' part of what holds something for every layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.checkpoint.look import SINGLE_FILE
from penstock.checkpoint.tensors import StoredTensor
from penstock.hosts.weights import Held, ranges_of
from penstock.models.loader import PerLayerTable, load_module
from penstock.models.packing import usable
from tests.checkpoints import VOCAB, make_checkpoint
from tests.staged import Staged

LAYERS = 7
WIDTH = 6
"""Width of a token's embedding for one layer."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("gemma4"), "gemma4_shared", seed=2)


def test_a_part_of_a_tensor_has_the_shape_of_what_it_gives() -> None:
    whole = torch.arange(12.0).view(3, 4)
    part = StoredTensor(Path("a file"), "whole", (3, 4), "F32", whole.__getitem__).cut(slice(None), slice(1, 3))
    assert (part.get_shape(), part.get_dtype(), part.is_grouped) == ([3, 2], "F32", False)
    torch.testing.assert_close(part[...], whole[:, 1:3])
    torch.testing.assert_close(part[1:], whole[1:, 1:3])


def test_every_stage_holds_the_embeddings_of_its_own_layers(folder: Path) -> None:
    checkpoint = open_checkpoint(str(folder))
    whole = load_module(checkpoint, 0, LAYERS, "float32", "cpu").model.embed_tokens_per_layer.weight
    middle = load_module(checkpoint, 2, 4, "float32", "cpu").model
    torch.testing.assert_close(middle.embed_tokens_per_layer.weight, whole[:, 2 * WIDTH : 4 * WIDTH], rtol=0, atol=0)
    assert middle.per_layer_model_projection.weight.shape == (2 * WIDTH, checkpoint.hidden_size)


def test_a_host_in_the_middle_is_sent_what_is_for_every_layer(folder: Path) -> None:
    sent = sum(end - start for start, end in ranges_of(folder, [Held(2, 4)], LAYERS)[SINGLE_FILE])
    assert VOCAB * LAYERS * WIDTH * 4 < sent < (folder / SINGLE_FILE).stat().st_size


def test_rows_of_a_quantised_table_do_not_depend_on_the_layers_beside_them() -> None:
    torch.manual_seed(0)
    table = nn.Embedding(9, 4 * WIDTH)
    table.weight.data[:, :WIDTH] *= 100  # a scale of the whole row would leave nothing of the others
    ids = torch.tensor([[3, 8, 0]])
    expected = table(ids)
    last = nn.Embedding(9, 2 * WIDTH, _weight=table.weight.data[:, 2 * WIDTH :].clone())
    found = PerLayerTable(table, 4)(ids)
    torch.testing.assert_close(found[..., WIDTH:], expected[..., WIDTH:], rtol=0, atol=0.02)
    torch.testing.assert_close(PerLayerTable(last, 2)(ids), found[..., 2 * WIDTH :], rtol=0, atol=0)


@pytest.mark.skipif(not usable("int8"), reason="this processor does not compute with int8")
def test_quantised_ids_do_not_depend_on_the_cuts(folder: Path) -> None:
    one, five = (Staged(folder, stages, quantization="int8").greedy([5, 9, 77], 12) for stages in (1, 5))
    assert one == five
