"""Each kind's loss is its paper's, and its fresh drafter fits the target."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from penstock.checkpoint.checkpoint import Checkpoint, open_checkpoint
from penstock.config import FieldError
from penstock.lab.trainer import spd
from penstock.lab.trainer.eagle import Eagle3Trainee, EagleTrainee, eagle3_config, noise_for, unroll
from penstock.lab.trainer.kinds import Start
from penstock.lab.trainer.medusa import MedusaTrainee
from penstock.lab.trainer.options import BELONGS
from penstock.lab.trainer.run import KINDS
from penstock.lab.trainer.states import Batch
from tests import speculators
from tests.checkpoints import VOCAB, make_checkpoint
from tests.speculators import DRAFTED, FIRST_DRAFTED
from tests.training import loaded, options, random_batch

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
    found = EagleTrainee(module, head)(batch, 7)
    given = next(unroll(module, batch, 1, noise_BnD=noise_for(batch, 7)))
    expected = torch.zeros(())
    for sequence, row in batch.learned_Bn.nonzero().tolist():
        mine_D, own_D = given[sequence, row], batch.final_BnD[sequence, row]
        expected += F.smooth_l1_loss(mine_D, own_D) + 0.1 * divergence(head(own_D), module.logits(mine_D[None])[0])
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-4)
    assert not torch.equal(found, EagleTrainee(module, head)(batch, 8))
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
    torch.testing.assert_close(MedusaTrainee(module, head, None)(batch, 0), expected, atol=1e-3, rtol=1e-4)


def test_medusas_heads_learn_only_what_they_can_draft(tmp_path: Path, target: Checkpoint, head: nn.Linear) -> None:
    module = loaded(speculators.vllm_medusa(target, heads=2, layers=1), tmp_path, target)
    batch, ids = batch_of(target, 1), torch.arange(DRAFTED) * 2 + FIRST_DRAFTED
    expected, rows = torch.zeros(()), 0
    for k in range(2):
        for sequence, row in batch.learned_Bn.nonzero().tolist():
            wanted_V = head(batch.final_BnD[sequence, row])
            if row >= k and wanted_V.argmax() in ids:
                mine_V = module.head_logits(k, batch.states_BnF[sequence, row - k][None])[0]
                expected += 0.8**k * divergence(wanted_V[ids], mine_V[ids])
                rows += 1
    assert 0 < rows < int(batch.learned_Bn.sum()) * 2
    torch.testing.assert_close(MedusaTrainee(module, head, ids)(batch, 0), expected, atol=1e-3, rtol=1e-4)


def targets_and_kinds() -> Iterator[Any]:
    """Every kind for one target, and each kind for three of the others, all of them in turn."""
    others = ["qwen3", "gemma2", "phi3", "mixtral", "gpt_neox", "deepseek_v3"]
    kinds = [kind for kind in KINDS if kind != "draft"]
    for i, architecture in enumerate(["llama_tied", *others]):
        for j, kind in enumerate(kinds):
            for k, drafted in enumerate([None, torch.tensor([3, 8, 100])]):
                sampled = i == 0 or (i + j + k) % 4 == 0
                name = f"{architecture}-{kind}-{'some' if k else 'all'}"
                yield pytest.param(architecture, kind, drafted, id=name, marks=[] if sampled else [pytest.mark.whole])


@pytest.mark.parametrize(("architecture", "kind", "drafted"), [*targets_and_kinds()])
def test_a_fresh_drafter_fits_any_target(tmp_path: Path, architecture: str, kind: str, drafted: Tensor | None) -> None:
    target = open_checkpoint(str(make_checkpoint(tmp_path / "target", architecture)))
    given = KINDS[kind].settle(options(kind, target.path, tmp_path, tmp_path / "out"), target)
    ids = drafted if kind in BELONGS["draft_vocab_size"] else None
    (tmp_path / "fresh").mkdir()
    files = KINDS[kind].files
    files.begin(tmp_path / "fresh", Start(target, given, torch.Generator().manual_seed(0), ids))
    checkpoint = files.open(tmp_path / "fresh", target)
    assert checkpoint.reads == KINDS[kind].reads(given, target)
    # A DFlash whose rows see those before them alone is JetSpec's.
    assert checkpoint.kind == {"dflash": "jetspec"}.get(kind, kind.replace("-", "_"))
    assert checkpoint.draft_vocab_size == (VOCAB if ids is None else 3)
    assert str(target.path) in (tmp_path / "fresh" / "config.json").read_text() or kind == "eagle" or ids is not None
    module, parameters = files.load(checkpoint, target, "cpu")
    not_learned = {"d2t", "token_map", "embed_tokens.weight", *dict(module.named_buffers())}
    assert set(parameters) == set(checkpoint.tensors) - not_learned


def test_medusa_has_as_many_heads_as_asked_for(tmp_path: Path, target: Checkpoint) -> None:
    for heads, ids in ((2, None), (7, torch.tensor([3, 8]))):
        given = options("medusa", target.path, tmp_path, tmp_path / "out", heads=heads)
        folder = tmp_path / str(heads)
        folder.mkdir()
        KINDS["medusa"].files.begin(folder, Start(target, given, torch.Generator(), ids))
        assert KINDS["medusa"].files.open(folder, target).heads == heads
    assert json.loads((folder / "config.json").read_text())["truncated_vocab_size"] == 2


@pytest.mark.parametrize(
    ("architecture", "norms", "biases", "layers"),
    [("llama", 0, 0, (0, 4)), ("llama", 0, 0, (4,)), ("qwen3", 2, 0, (0, 2, 4)), ("qwen2", 0, 3, (0, 4))],
)
def test_spd_begins_with_layers_spread_over_the_targets(
    tmp_path: Path, architecture: str, norms: int, biases: int, layers: tuple[int, ...]
) -> None:
    target = open_checkpoint(str(make_checkpoint(tmp_path / "target", architecture, num_hidden_layers=5)))
    asked = options("spd", target.path, tmp_path, tmp_path / "out", spec_layers=len(layers))
    given = KINDS["spd"].settle(asked, target)
    tensors = spd.fresh(Start(target, given, torch.Generator().manual_seed(0), None))
    held = load_file(target.path / "model.safetensors")
    for j, source in enumerate(layers):
        own = {name: tensor for name, tensor in tensors.items() if name.startswith(f"spec_layers.{j}.")}
        assert sum(".q_norm." in name or ".k_norm." in name for name in own) == norms
        assert sum(name.endswith(".bias") for name in own) == biases
        layer = f"model.layers.{source}."
        assert all(torch.equal(one, held[name.replace(f"spec_layers.{j}.", layer)]) for name, one in own.items())
    width = target.hidden_size
    for i in range(len(given.anchors or ())):
        weight = tensors[f"aggr_projs.{i}.weight"]
        assert torch.equal(weight[:, i * width :], torch.eye(width))
        assert i == 0 or 0.01 < weight[:, : i * width].std() < 0.03


@pytest.mark.parametrize(
    ("layers", "anchors", "stages", "leaves"),
    [
        (1, (0, 1), (1,), 1),
        (2, (0, 1, 2), (2,), 1),
        (5, (0, 1, 2, 5), (4,), 1),
        (16, (0, 1, 2, 4, 8, 16), (4, 8, 16), 4),
        (36, (0, 1, 2, 4, 8, 16, 36), (4, 8, 16), 9),
    ],
)
def test_what_spd_reads_unless_told(
    tmp_path: Path, layers: int, anchors: tuple[int, ...], stages: tuple[int, ...], leaves: int
) -> None:
    target = open_checkpoint(str(make_checkpoint(tmp_path / "target", num_hidden_layers=layers)))
    given = KINDS["spd"].settle(options("spd", target.path, tmp_path, tmp_path / "out"), target)
    assert (given.anchors, given.stages) == (anchors, stages)
    assert KINDS["spd"].reads(given, target) == anchors[1:]
    early = KINDS["early-exit"].settle(options("early-exit", target.path, tmp_path, tmp_path / "out"), target)
    assert KINDS["early-exit"].reads(early, target) == (leaves,)


@pytest.mark.parametrize(
    ("kind", "wrong", "said"),
    [
        ("spd", {"stages": (4, 9)}, r"stages is \(4, 9\); the target has 8 layers"),
        ("spd", {"anchors": (0, 12)}, r"anchors is \(0, 12\); the target has 8 layers"),
        ("spd", {"spec_layers": 9}, "spec_layers is 9; the target has 8 layers"),
        ("early-exit", {"exit_layer": 9}, "exit_layer is 9; the target has 8 layers"),
        ("draft", {"layers": 9}, "layers is 9; the target has 8 layers"),
    ],
)
def test_more_layers_than_the_target_has_are_refused(
    tmp_path: Path, target: Checkpoint, kind: str, wrong: dict[str, object], said: str
) -> None:
    with pytest.raises(FieldError, match=said):
        KINDS[kind].settle(options(kind, target.path, tmp_path, tmp_path / "out", **wrong), target)


@pytest.mark.parametrize(("layers", "reads"), [(1, [1]), (2, [1, 2]), (4, [1, 2]), (6, [2, 3]), (32, [2, 16, 29])])
def test_eagle3_reads_different_layers(tmp_path: Path, layers: int, reads: list[int]) -> None:
    target = open_checkpoint(str(make_checkpoint(tmp_path, num_hidden_layers=layers)))
    given = options("eagle3", target.path, tmp_path, tmp_path / "out")
    assert list(KINDS["eagle3"].reads(given, target)) == reads
    config = eagle3_config(Start(target, given, torch.Generator(), None))
    assert config["eagle_aux_hidden_state_layer_ids"] == reads
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": str(tmp_path),
        "architectures": ["LlamaForCausalLM"],
    }
    json.dumps(config)
