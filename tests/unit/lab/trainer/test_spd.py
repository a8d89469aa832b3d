"""Training asks the module about exactly what a pipeline asks it about: a plain computation, query by query, agrees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.checkpoint.checkpoint import Checkpoint, open_checkpoint
from penstock.lab.trainer import spd
from penstock.lab.trainer.kinds import Start, Teaching
from penstock.lab.trainer.options import TrainOptions
from penstock.lab.trainer.run import KINDS
from penstock.lab.trainer.spd import FULL, SpdTrainee, lay_out, levels_by_depth
from penstock.lab.trainer.states import Batch
from penstock.messages import Features
from penstock.models.speculators.spd import SpdStage
from penstock.stage.visibility import view_of
from tests.checkpoints import VOCAB, make_checkpoint
from tests.training import options, random_batch

LAYERS = 8
STAGES = 4
LENGTH = 10
DRAFTED = torch.arange(VOCAB // 2) * 2


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(str(make_checkpoint(tmp_path_factory.mktemp("target"), num_hidden_layers=LAYERS)))


def settled(target: Checkpoint, kind: str = "spd", **others: Any) -> TrainOptions:
    here = Path(__file__)
    return KINDS[kind].settle(options(kind, target.path, here, here.parent / "nowhere", **others), target)


def trainee_of(folder: Path, given: TrainOptions, target: Checkpoint, ids: Tensor | None = None) -> SpdTrainee:
    """A module whose weights are all random, and so small that what it gives is about 1."""
    kind = KINDS[given.kind]
    generator = torch.Generator().manual_seed(0)
    folder.mkdir(exist_ok=True)
    kind.files.begin(folder, Start(target, given, generator, ids))
    module, _ = kind.files.load(kind.files.open(folder, target), target, "cpu")
    for parameter in module.parameters():
        kept = 0.3 if parameter.dim() > 1 else 1.0
        parameter.data.mul_(kept).add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    torch.manual_seed(0)
    head = torch.nn.Linear(target.hidden_size, target.vocab_size, bias=False)
    trainee = kind.trainee(module.requires_grad_(True), head, given, target, ids)
    assert isinstance(trainee, SpdTrainee)
    return trainee


def batch_of(trainee: SpdTrainee, target: Checkpoint, sequences: int = 2) -> Batch:
    return random_batch(target, sequences, LENGTH, len(trainee.module.reads))


def causal(module: Any, query_HNd: Tensor, key_KNd: Tensor, value_KNd: Tensor, mask: None, *, scaling: float) -> Tensor:
    """Every row sees all before it, and itself."""
    groups, rows = len(query_HNd) // len(key_KNd), query_HNd.shape[1]
    key_HNd, value_HNd = (part.repeat_interleave(groups, 0) for part in (key_KNd, value_KNd))
    scores = (query_HNd @ key_HNd.transpose(1, 2)) * scaling
    later = torch.ones(rows, rows, dtype=torch.bool).triu(1)
    return (scores.masked_fill(later, -torch.inf).softmax(-1) @ value_HNd).transpose(0, 1)


def seen_at(levels: Sequence[int], depth: int, fill: int, asking: int, count: int) -> list[int]:
    """Eq. 2 and 3: the level of each of ``count`` tokens, the last of which has passed ``depth`` stages."""
    found = []
    for distance in range(count - 1, -1, -1):
        passed = depth + distance
        done = passed - asking >= fill or passed >= len(levels) - 1
        found.append(levels[-1] if done else levels[passed])
    return found


def plain(trainee: SpdTrainee, batch: Batch, sequence: int, seen: Sequence[int]) -> Tensor:
    """The module over one row for each of the first tokens, at these levels; what it gives for the last [D]."""
    module, rows = trainee.module, len(seen)
    tokens, states = batch.tokens_BL[sequence], batch.states_BLF[sequence]
    features = [module.fuse(level, tokens[i : i + 1], states[i : i + 1]) for i, level in enumerate(seen)]
    given: Tensor = module(torch.cat(features), torch.tensor(seen), torch.arange(rows), causal)
    return given[-1]


OWN_LEVELS: Final[dict[str, Any]] = {"anchors": (0, 2, 4, 6, 8)}
SHARED: Final[dict[str, Any]] = {"anchors": (0, 1, 4, 8)}
PAPER: Final[dict[str, Any]] = {"variant": "paper"}
LATER: Final[dict[str, Any]] = {"variant": "paper", "post_state": True}


@pytest.mark.parametrize("fill", [1, STAGES, *(pytest.param(one, marks=pytest.mark.whole) for one in (2, 3))])
@pytest.mark.parametrize(
    ("layers", "given"),
    [(1, OWN_LEVELS), (2, OWN_LEVELS), (1, SHARED), (1, PAPER), (2, PAPER), (1, LATER), (2, LATER)],
    ids=["anchors", "anchors, 2 layers", "shared", "paper", "paper, 2 layers", "after a stage", "after it, 2 layers"],
)
def test_each_query_is_a_plain_pass_over_its_own_sequence(
    tmp_path: Path, target: Checkpoint, layers: int, given: dict[str, Any], fill: int
) -> None:
    trainee = trainee_of(tmp_path, settled(target, spec_layers=layers, stages=(STAGES,), **given), target)
    batch, asking = batch_of(trainee, target), trainee.module.asking
    (levels,) = trainee.levels
    only = "variant" in given
    blocks = lay_out(levels, fill, asking, only)
    assert next(block.level for block in blocks if block.near is not None) == asking
    hidden = trainee.hidden(batch, blocks)
    for block, given_BnD in zip(blocks, hidden, strict=True):
        if block.near is None:
            continue
        for sequence in range(2):
            for position in range(1, LENGTH - 1):
                seen = seen_at(levels, block.depth, fill, asking, position + 1)
                expected_D = plain(trainee, batch, sequence, seen)
                torch.testing.assert_close(given_BnD[sequence, position - 1], expected_D, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("given", [OWN_LEVELS, PAPER, LATER], ids=["anchors", "paper", "after a stage"])
def test_each_query_is_what_the_stage_computes(tmp_path: Path, target: Checkpoint, given: dict[str, Any]) -> None:
    """With rows in slots, states by node, and the pipeline's own attention."""
    trainee = trainee_of(tmp_path, settled(target, spec_layers=2, stages=(STAGES,), **given), target)
    module, batch, (levels,) = trainee.module, batch_of(trainee, target), trainee.levels
    asked_BnD = next(trainee.unroll(batch, 1))
    for sequence in range(2):
        stage = SpdStage(module, module.reads, target.hidden_size, LENGTH, "float32", "cpu")
        positions = list(range(LENGTH))
        features = Features(layers=list(module.reads), nodes=[i + 1 for i in positions], slots=positions)
        stage.add_features(features, batch.states_BLF[sequence])
        for position in range(1, LENGTH - 1):
            plain_view = view_of(batch.tokens_BL[sequence].tolist(), range(position + 1))
            seen = seen_at(levels, module.asking, STAGES, module.asking, position + 1)
            view = replace(plain_view, nodes=plain_view.nodes + 1, levels=np.array(seen))
            expected_D = stage.forward(view, None)[-1]
            torch.testing.assert_close(asked_BnD[sequence, position - 1], expected_D, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("fill", [2, 3, STAGES])
def test_of_depths_that_share_a_level_the_first_one_counts(tmp_path: Path, target: Checkpoint, fill: int) -> None:
    """A row is not computed anew before its level changes: what it gave then is what others see, layer by layer."""
    trainee = trainee_of(tmp_path, settled(target, spec_layers=2, stages=(STAGES,), **SHARED), target)
    batch, module = batch_of(trainee, target, 1), trainee.module
    (levels,) = trainee.levels
    assert levels == (0, 1, 2, 2, 3)
    blocks = lay_out(levels, fill)
    first = {block.level: block.depth for block in blocks}

    @cache
    def row(position: int, level: int, after: int) -> Tensor:
        """[D] of a token at a level, after so many layers."""
        if after == 0:
            own = slice(position, position + 1)
            fused: Tensor = module.fuse(level, batch.tokens_BL[0, own], batch.states_BLF[0, own])[0]
            return fused
        seen = seen_at(levels, first[level], fill, 0, position + 1)
        rows_ND = torch.stack([row(i, one, after - 1) for i, one in enumerate(seen)])
        rotation = module.rotation(rows_ND, torch.arange(position + 1))
        given: Tensor = module.layers[after - 1](rows_ND, rotation, causal)[-1]
        return given

    hidden = trainee.hidden(batch, blocks)
    for block, given_BnD in zip(blocks, hidden, strict=True):
        for position in range(1, LENGTH - 1):
            expected_D = row(position, block.level, 2)
            torch.testing.assert_close(given_BnD[0, position - 1], expected_D, atol=1e-5, rtol=1e-5)


def test_an_early_exit_is_a_plain_causal_module(tmp_path: Path, target: Checkpoint) -> None:
    given = settled(target, "early-exit", spec_layers=2)
    assert (given.exit_layer, KINDS["early-exit"].reads(given, target)) == (2, (2,))
    trainee = trainee_of(tmp_path, given, target)
    batch = batch_of(trainee, target)
    (hidden_BnD,) = trainee.unroll(batch, 7)
    for position in range(1, LENGTH - 1):
        expected_D = plain(trainee, batch, 1, [0] * (position + 1))
        torch.testing.assert_close(hidden_BnD[1, position - 1], expected_D, atol=1e-5, rtol=1e-5)


def test_the_loss_is_the_divergence_of_what_enters(tmp_path: Path, target: Checkpoint) -> None:
    trainee = trainee_of(tmp_path, settled(target, stages=(1,), **OWN_LEVELS), target, DRAFTED)
    batch = batch_of(trainee, target)
    batch.learned_BL[:, 5] = False
    taught_Bn = Teaching(trainee.head, batch, DRAFTED).taught_Bn
    (hidden_BnD,) = trainee.unroll(batch, 7)
    drafted = trainee.logits(0, hidden_BnD[taught_Bn])[:, DRAFTED].log_softmax(-1)
    wanted = trainee.head(batch.final_BnD[taught_Bn])[:, DRAFTED].log_softmax(-1)
    torch.testing.assert_close(trainee(batch, 0), (wanted.exp() * (wanted - drafted)).sum(), atol=1e-3, rtol=1e-4)


def test_about_as_many_that_are_under_way_are_asked_about_again(
    tmp_path: Path, target: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainee = trainee_of(tmp_path, settled(target, stages=(STAGES,), **OWN_LEVELS), target, DRAFTED)
    batch = batch_of(trainee, target, 40)
    batch.learned_BL[:, 5] = False
    asked: list[Tensor] = []
    trainee.module.norm.register_forward_hook(lambda module, given, output: asked.append(given[0]))
    monkeypatch.setattr(trainee, "drawn", lambda generator: (trainee.levels[0], STAGES))
    loss = trainee(batch, 0)
    first, *others = (len(rows) for rows in asked)
    taught_Bn = Teaching(trainee.head, batch, DRAFTED).taught_Bn
    assert first == int(taught_Bn.sum()) < int(batch.learned_Bn.sum())
    assert len(others) == STAGES - 1
    assert 0.8 * first < sum(others) < 1.2 * first
    assert torch.equal(trainee(batch, 0), loss)
    assert not torch.equal(trainee(batch, 1), loss)


def test_every_sequence_has_a_fill_of_its_own(
    tmp_path: Path, target: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Appendix A.2."""
    monkeypatch.setattr(spd, "AGAIN_WEIGHT", 0.0)  # those that are asked about again are drawn, too
    trainee = trainee_of(tmp_path, settled(target, stages=(STAGES,), **OWN_LEVELS), target)
    batch, (levels,) = batch_of(trainee, target, 3), trainee.levels

    def loss(some: Batch, *fills: int) -> Tensor:
        ahead = iter(fills)
        monkeypatch.setattr(trainee, "drawn", lambda generator: (levels, next(ahead)))
        return trainee(some, 0)

    drawn = loss(batch, 1, STAGES, 1)
    alone = [loss(batch.of([i]), fill) for i, fill in enumerate((1, STAGES, 1))]
    torch.testing.assert_close(drawn, torch.stack(alone).sum())
    assert abs(loss(batch, 1, 1, STAGES) - drawn) > 1e-3


def test_every_fill_and_number_of_stages_is_drawn(tmp_path: Path, target: Checkpoint) -> None:
    given = settled(target, stages=(2, 4, 8))
    trainee = SpdTrainee(None, torch.nn.Identity(), levels_by_depth(given, target), None)
    drawn = [trainee.drawn(torch.Generator().manual_seed(seed)) for seed in range(600)]
    found = {(len(levels) - 1, fill) for levels, fill in drawn}
    assert found == {(stages, fill) for stages in (2, 4, 8) for fill in range(1, stages + 1)}
    full = sum(fill == len(levels) - 1 for levels, fill in drawn) / len(drawn)
    assert abs(full - FULL) < 0.06


@pytest.mark.parametrize("given", [SHARED, PAPER], ids=["anchors", "paper"])
def test_all_that_is_trained_gets_a_gradient_in_every_part(
    tmp_path: Path, target: Checkpoint, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data parallelism waits for each of them; the target's embedding and norm are not trained."""
    trainee = trainee_of(tmp_path, settled(target, stages=(STAGES,), **given), target)
    monkeypatch.setattr(trainee, "drawn", lambda generator: (trainee.levels[0], 1))
    trainee(batch_of(trainee, target), 0).backward()
    lacking = {name for name, one in trainee.module.named_parameters() if one.grad is None}
    assert lacking <= {"embed_tokens.weight", "norm.weight"}
