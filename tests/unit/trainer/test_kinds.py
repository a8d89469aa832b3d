"""Each kind's loss is its paper's, and its fresh drafter fits the target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.models.checkpoint import Checkpoint, open_checkpoint
from penstock.models.speculators.formats import open_speculator
from penstock.trainer.batches import Batch
from penstock.trainer.chain import unroll
from penstock.trainer.eagle import EagleTrainee, noise_for
from penstock.trainer.eagle3 import Eagle3Trainee
from penstock.trainer.export import write_fresh
from penstock.trainer.kind import Start
from penstock.trainer.kinds import KINDS
from penstock.trainer.medusa import MedusaTrainee
from tests import speculators
from tests.checkpoints import VOCAB, make_checkpoint
from tests.speculators import DRAFTED, FIRST_DRAFTED
from tests.training import loaded, random_batch

ROWS = 6


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(str(make_checkpoint(tmp_path_factory.mktemp("target"), num_hidden_layers=8)))


@pytest.fixture
def head(target: Checkpoint) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(target.hidden_size, VOCAB, bias=False)


def batch_of(target: Checkpoint, reads: int) -> Batch:
    batch = random_batch(target, 2, ROWS + 2, reads)
    batch.learned_BL[0, 4] = False
    return batch


def divergence(wanted_V: Tensor, mine_V: Tensor) -> Tensor:
    return F.kl_div(mine_V.log_softmax(-1), wanted_V.log_softmax(-1), log_target=True, reduction="sum")


def test_eagle_regresses_the_feature_and_weighs_the_tokens_less(tmp_path: Path, target: Checkpoint, head: nn.Linear):
    module, batch = loaded(speculators.eagle(target), tmp_path, target), batch_of(target, 1)
    found = EagleTrainee(module, head, 1, None)(batch, 7)
    given = next(unroll(module, batch, 1, noise_BnD=noise_for(batch, 7)))
    expected = torch.zeros(())
    for sequence, row in batch.learned_Bn.nonzero().tolist():
        mine_D, own_D = given[sequence, row], batch.final_BnD[sequence, row]
        expected += F.smooth_l1_loss(mine_D, own_D) + 0.1 * divergence(head(own_D), module.logits(mine_D[None])[0])
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-4)
    assert not torch.equal(found, EagleTrainee(module, head, 1, None)(batch, 8))
    assert noise_for(batch, 7).abs().max() <= 0.1


def test_eagle3_weighs_each_step_less(tmp_path: Path, target: Checkpoint, head: nn.Linear) -> None:
    module, batch = loaded(speculators.eagle3(target), tmp_path, target), batch_of(target, 3)
    ids = torch.arange(DRAFTED) * 2 + FIRST_DRAFTED
    expected = torch.zeros(())
    for step, hidden in enumerate(unroll(module, batch, 3)):
        for sequence, row in batch.learned_Bn.nonzero().tolist():
            wanted_V = head(batch.final_BnD[sequence, row])
            if row >= step and wanted_V.argmax() in ids:
                mine_V = module.logits(hidden[sequence, row - step][None])[0]
                expected += 0.8**step * divergence(wanted_V[ids], mine_V[ids])
    found = Eagle3Trainee(module, head, 3, ids)(batch, 0)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-4)


def test_medusas_heads_look_further_and_further_ahead(tmp_path: Path, target: Checkpoint, head: nn.Linear) -> None:
    """Head k, on the state at a position, stands for what the target says k + 1 positions later."""
    module, batch = loaded(speculators.medusa(target, heads=3), tmp_path, target), batch_of(target, 1)
    batch = Batch(batch.tokens_BL, batch.learned_BL, batch.final_BLD, batch.final_BLD)
    expected = torch.zeros(())
    for k in range(3):
        for sequence in range(2):
            for position in range(ROWS + 2 - k - 2):
                later = position + k + 1
                if batch.learned_BL[sequence, later + 1]:
                    mine_V = module.head_logits(k, batch.final_BLD[sequence, position][None])[0]
                    expected += 0.8**k * divergence(head(batch.final_BLD[sequence, later]), mine_V)
    torch.testing.assert_close(MedusaTrainee(module, head, 3, None)(batch, 0), expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ["llama_tied", "gemma2", "phi3", "mixtral", "gpt_neox", "deepseek_v3"])
def test_a_fresh_drafter_fits_any_target(tmp_path: Path, architecture: str, kind: str) -> None:
    target = open_checkpoint(str(make_checkpoint(tmp_path / "target", architecture)))
    ids = torch.tensor([3, 8, 100]) if kind == "eagle3" else None
    start = Start(target, torch.Generator().manual_seed(0), ids)
    write_fresh(tmp_path / "fresh", KINDS[kind], start, "some/target", 3)
    checkpoint = open_speculator(str(tmp_path / "fresh"), target)
    assert (checkpoint.kind, checkpoint.reads) == (kind, KINDS[kind].reads(target))
    assert "some/target" in (tmp_path / "fresh" / "config.json").read_text() or kind == "eagle"


@pytest.mark.parametrize(("layers", "reads"), [(1, [1]), (2, [1, 2]), (4, [1, 2]), (6, [2, 3]), (32, [2, 16, 29])])
def test_eagle3_reads_different_layers(tmp_path: Path, layers: int, reads: list[int]) -> None:
    target = open_checkpoint(str(make_checkpoint(tmp_path, num_hidden_layers=layers)))
    assert list(KINDS["eagle3"].reads(target)) == reads
    config = KINDS["eagle3"].config(target, "name", 3)
    assert config["eagle_aux_hidden_state_layer_ids"] == reads
    assert config["speculators_config"]["verifier"] == {"name_or_path": "name", "architectures": ["LlamaForCausalLM"]}
    json.dumps(config)
