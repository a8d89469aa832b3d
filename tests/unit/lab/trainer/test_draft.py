"""A small model begins as the target without most of its layers, and is trained as the pipeline will run it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.checkpoint.checkpoint import Checkpoint, open_checkpoint
from penstock.core import ConfigError
from penstock.lab.trainer.draft import DraftTrainee, nearest_like
from penstock.lab.trainer.kinds import Start
from penstock.lab.trainer.run import KINDS
from penstock.models.speculators.base import TargetHead
from penstock.models.stage_model import load_stage
from penstock.stage.visibility import view_of
from penstock.text.tokenizer import load_tokenizer
from tests.checkpoints import ARCHITECTURES, LAYERS, make_checkpoint
from tests.training import changed, options, random_batch

LENGTH = 12


def fresh(target: Checkpoint, folder: Path, layers: int) -> Checkpoint:
    given = options("draft", target.path, folder, folder / "out", layers=layers)
    folder.mkdir()
    KINDS["draft"].files.begin(folder, Start(target, given, torch.Generator(), None))
    opened: Checkpoint = KINDS["draft"].files.open(folder, target)
    return opened


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_in_training_it_says_what_it_says_in_the_pipeline(tmp_path: Path, architecture: str) -> None:
    target = open_checkpoint(str(make_checkpoint(tmp_path / "target", architecture)))
    opened = fresh(target, tmp_path / "small", 2)
    assert opened.num_layers == 2
    module, parameters = KINDS["draft"].files.load(opened, target, "cpu")
    assert {id(one) for one in parameters.values()} == {id(one) for one in module.parameters()}
    trainee = DraftTrainee(module, torch.nn.Identity())
    batch = random_batch(target, 1, LENGTH, 0)
    stage = load_stage(str(opened.path), 0, 2, capacity=LENGTH)
    stage.tap([2])
    stage_LD = stage.features(stage.forward(view_of(batch.tokens_BL[0].tolist(), range(LENGTH)), None))
    (hidden_BnD,) = trainee.unroll(batch, 7)
    torch.testing.assert_close(hidden_BnD[0], stage_LD[1:-1], atol=1e-4, rtol=1e-4)
    expected_nV = TargetHead(opened, "float32", "cpu")(stage_LD[1:-1])
    torch.testing.assert_close(trainee.logits(0, hidden_BnD[0]), expected_nV, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("architecture", ["llama_tied", "gemma3", "gpt_oss", "deepseek_v3"])
def test_of_all_layers_it_is_the_target(tmp_path: Path, architecture: str) -> None:
    target = open_checkpoint(str(make_checkpoint(tmp_path / "target", architecture)))
    module, _ = KINDS["draft"].files.load(fresh(target, tmp_path / "same", LAYERS), target, "cpu")
    head = TargetHead(target, "float32", "cpu")
    trainee = DraftTrainee(module, head)
    batch = random_batch(target, 2, LENGTH, 0)
    (hidden_BnD,) = trainee.unroll(batch, 1)
    final_BLD = torch.cat([hidden_BnD[:, :1], hidden_BnD, hidden_BnD[:, :1]], dim=1)
    stage = load_stage(str(target.path), 0, LAYERS, capacity=LENGTH)
    stage.tap([LAYERS])
    own = stage.features(stage.forward(view_of(batch.tokens_BL[0].tolist(), range(LENGTH)), None))
    torch.testing.assert_close(hidden_BnD[0], own[1:-1], atol=1e-4, rtol=1e-4)
    assert abs(float(trainee(changed(batch, final_BLD=final_BLD), 0))) < 1e-3
    assert float(trainee(batch, 0)) > 0.1


def test_its_layers_are_spread_over_the_targets(tmp_path: Path, target: Checkpoint, model: Path) -> None:
    assert target.num_layers == 4
    for layers, picked in ((1, [0]), (2, [0, 3]), (3, [0, 2, 3])):
        module, _ = KINDS["draft"].files.load(fresh(target, tmp_path / str(layers), layers), target, "cpu")
        for layer, number in zip(module.model.layers, picked, strict=True):
            expected = nearest_like(target, layer, number)
            assert all(torch.equal(tensor, expected[name]) for name, tensor in layer.state_dict().items())
    assert load_tokenizer(tmp_path / "2").encode("a cat") == load_tokenizer(model).encode("a cat")


def test_a_layer_that_is_built_otherwise_is_not_taken(tmp_path: Path) -> None:
    """DeepSeek's first layers are dense, and so are both layers of a model of two."""
    target = open_checkpoint(str(make_checkpoint(tmp_path / "target", "deepseek_v3")))
    module, _ = KINDS["draft"].files.load(fresh(target, tmp_path / "small", 2), target, "cpu")
    dense = nearest_like(target, module.model.layers[1], 1)
    assert all(torch.equal(tensor, dense[name]) for name, tensor in module.model.layers[1].state_dict().items())
    with pytest.raises(ConfigError, match="layers: of so few, one is like none of the target's"):
        nearest_like(target, torch.nn.Linear(2, 2), 0)
