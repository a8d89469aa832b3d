"""Training asks a block drafter about the blocks that a pipeline asks it about: the plain reference, block by block."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.checkpoint.checkpoint import Checkpoint, open_checkpoint
from penstock.config import FieldError
from penstock.lab.trainer.block import MARKOV, MOST_OWN_LOGIT, MOST_STAGES, Blocks, BlockTrainee
from penstock.lab.trainer.kinds import HEAD, Start
from penstock.lab.trainer.options import TrainOptions
from penstock.lab.trainer.run import KINDS
from penstock.lab.trainer.states import Batch
from penstock.models.speculators.block import MOST_SCRATCH
from tests.checkpoints import make_checkpoint
from tests.training import options, random_batch
from tests.unit.models import blocks_reference as reference

LENGTH, SIZE, SHOWN = 12, 5, 3
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "dspark": ("dspark", {}),
    "headrace": ("headrace", {}),
    "dflash": ("dflash", {}),
    "two-way dspark": ("dspark", {"bidirectional": True}),
    "published dflash": ("dflash", {"bidirectional": True, "in_flight": 0}),
    "peagle": ("peagle", {"spec_layers": 3}),
}


def settled(target: Checkpoint, kind: str, **others: Any) -> TrainOptions:
    small = {"block_size": SIZE, "in_flight": SHOWN} | ({"markov_rank": 6} if kind in MARKOV else {}) | others
    here = Path(__file__)
    return KINDS[kind].settle(options(kind, target.path, here, here.parent / "nowhere", **small), target)


class Case:
    """A module whose weights are all random, in training and as its files' tensors."""

    def __init__(self, folder: Path, target: Checkpoint, kind: str, **others: Any) -> None:
        given, own = settled(target, kind, **others), KINDS[kind]
        generator = torch.Generator().manual_seed(0)
        own.files.begin(folder, Start(target, given, generator, None))
        opened = own.files.open(folder, target)
        module, parameters = own.files.load(opened, target, "cpu")
        for parameter in parameters.values():
            parameter.data.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
        torch.manual_seed(0)
        head = torch.nn.Linear(target.hidden_size, target.vocab_size, bias=False)
        trainee = own.trainee(module.requires_grad_(True), head, given, target, None)
        assert isinstance(trainee, BlockTrainee)
        self.trainee, self.module = trainee, module
        self.kind = kind
        self.reads, self.layers = opened.reads, target.num_layers
        self.t = {
            name.replace("midlayer.", "layers.0."): parameter.detach().double().numpy()
            for name, parameter in parameters.items()
        }
        self.causal = module.shape.causal
        self.eps = opened.layer.rms_norm_eps
        self.lag = int(not module.shape.from_anchor)
        self.embedding, self.head = (
            load_file(target.path / "model.safetensors")[name].double().numpy()
            for name in ("model.embed_tokens.weight", "lm_head.weight")
        )
        self.head = self.t.get("lm_head.weight", self.head)
        self.batch = random_batch(target, 2, LENGTH, len(opened.reads))

    def reference(self, sequence: int, first: int, shown: int, rows: int, stages: int = 0) -> np.ndarray:
        """The output of a block whose first token stands at position ``first`` [rows, D].

        The tokens shown are in a pipeline of so many stages; 0: as many as they fill.
        """
        known = self.batch.tokens_BL[sequence, first : first + shown + 1].tolist()
        if self.kind == "peagle":
            states = self.batch.states_BLF[sequence].double().numpy()
            before = self.batch.tokens_BL[sequence, 1:first].tolist()
            return reference.peagle(
                self.t,
                self.embedding,
                [*before, *known, *[self.module.shape.mask_token] * (rows - len(known))],
                [*states[:first], *[None] * (rows - 1)],
                1,
                theta=10000.0,
                eps=self.eps,
                normed_residual=False,
            )[first - 1 :]
        return reference.block(
            self.t,
            self.embedding,
            self.batch.states_BLF[sequence, :first].double().numpy(),
            range(first),
            [*known, *[self.module.shape.mask_token] * (rows - len(known))],
            first,
            causal=self.causal,
            windows=(None, None),
            theta=10000.0,
            eps=self.eps,
            partial=self.partial(sequence, first, shown, stages or shown + 1) if self.kind == "headrace" else None,
        )

    def partial(self, sequence: int, first: int, shown: int, stages: int) -> np.ndarray:
        """The states [shown + 1, F] of the tokens shown: each has passed as many stages as there are tokens behind it,
        and has the states of their layers."""
        found = []
        for ahead in range(shown + 1):
            layers = (shown - ahead) * self.layers // stages
            at = min(first + ahead, LENGTH - 1)  # rows behind the text's end teach nothing
            states = self.batch.states_BLF[sequence, at].double().numpy().reshape(len(self.reads), -1)
            found.append([state * (read <= layers) for read, state in zip(self.reads, states, strict=True)])
        return np.array(found).reshape(shown + 1, -1)

    def logits(self, hidden_D: np.ndarray, before: int) -> np.ndarray:
        added = reference.markov(self.t, hidden_D, before) if "markov_head.markov_w1.weight" in self.t else 0.0
        return hidden_D @ self.head.T + added


@pytest.mark.parametrize("way", WAYS)
def test_every_step_is_the_references_block_with_so_many_tokens_shown(
    tmp_path: Path, target: Checkpoint, way: str
) -> None:
    kind, others = WAYS[way]
    case = Case(tmp_path, target, kind, **others)
    steps = list(case.trainee.unroll(case.batch, 7))
    assert [step.shape[1] for step in steps] == [LENGTH - 2 - d for d in range(case.trainee.shown + 1)]
    for d, step in enumerate(steps):
        given = case.trainee.logits(d, step.flatten(0, 1)).view(2, LENGTH - 2 - d, -1)
        for sequence in range(2):
            for i in range(LENGTH - 2 - d):
                # Row i + d of the batch is the token at position i + d + 1, d behind the block's first.
                hidden = case.reference(sequence, i + 1, d, SIZE)[d + case.lag]
                before = int(case.batch.tokens_BL[sequence, i + 1 + d])
                expected = torch.from_numpy(case.logits(hidden, before)).float()
                torch.testing.assert_close(given[sequence, i], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_the_loss_is_the_weighed_divergence_of_the_rows_that_do_not_see_their_answers(
    tmp_path: Path, target: Checkpoint, way: str
) -> None:
    kind, others = WAYS[way]
    case = Case(tmp_path, target, kind, **others)
    batch = case.batch
    batch.learned_BL[0, 6] = False
    generator = torch.Generator().manual_seed(9)
    lessons = [case.trainee._drawn(batch, generator), *case.trainee._paths(batch, generator)]
    total, weights = 0.0, 0.0
    for sequence, blocks in product(range(2), lessons):
        drawn = [blocks.anchors_BA, blocks.shown_BA]
        drawn += [torch.zeros_like(blocks.shown_BA) if blocks.stages_BA is None else blocks.stages_BA]
        for anchor, shown, stages in zip(*(one[sequence].tolist() for one in drawn), strict=True):
            hidden = case.reference(sequence, anchor + 1, shown, blocks.rows, stages)
            for k in range(blocks.rows):
                says = anchor + 1 + k + 1 - case.lag  # the position of the token that row k says
                further = says - (anchor + 1 + shown) - 1
                sees_it = further < 0 and (case.lag or not all(case.causal))
                if sees_it or says >= LENGTH or not batch.learned_BL[sequence, says]:
                    continue
                mine = torch.from_numpy(case.logits(hidden[k], int(batch.tokens_BL[sequence, says - 1]))).float()
                weight = math.exp(-max(0, further) / (SIZE / 2))
                total += weight * divergence(case.trainee.head(batch.final_BLD[sequence, says - 1]), mine).item()
                weights += weight
    if kind == "peagle":  # all of its rows at depth 0 learn, too
        for sequence, row in batch.learned_Bn.nonzero().tolist():
            mine = torch.from_numpy(case.logits(case.reference(sequence, row + 1, 0, 1)[0], 0)).float()
            total += divergence(case.trainee.head(batch.final_BnD[sequence, row]), mine).item()
            weights += 1
    expected = total / weights * int(batch.learned_Bn.sum())
    assert weights > 4
    found = case.trainee(batch, 9)
    assert float(found.detach()) == pytest.approx(expected, rel=1e-3)
    found.backward()
    learning = {name.replace("midlayer.", "layers.0."): one.grad for name, one in case.module.named_parameters()}
    assert [name for name in case.t if learning.get(HEAD.get(name, name)) is None] == []


def divergence(wanted_V: Tensor, mine_V: Tensor) -> Tensor:
    return F.kl_div(mine_V.log_softmax(-1), wanted_V.log_softmax(-1), log_target=True, reduction="sum")


def test_blocks_stand_where_something_is_learned_as_their_seed_decides(tmp_path: Path, target: Checkpoint) -> None:
    case = Case(tmp_path, target, "dspark")
    batch = random_batch(target, 40, 42, len(case.module.shape.causal))
    batch.learned_BL[:, :20] = False
    drawn: list[Blocks] = [case.trainee._drawn(batch, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert drawn[0].anchors_BA.shape == (40, 40 // SIZE)
    assert int(drawn[0].anchors_BA.min()) >= 18  # the batch's row 18 says the token at position 20
    assert all(len(set(row)) == len(row) for row in drawn[0].anchors_BA.tolist())
    assert set(drawn[0].shown_BA.flatten().tolist()) == set(range(SHOWN + 1))
    assert torch.equal(drawn[0].shown_BA, drawn[1].shown_BA)
    assert torch.equal(drawn[0].anchors_BA, drawn[1].anchors_BA)
    assert not torch.equal(drawn[0].anchors_BA, drawn[2].anchors_BA)


@pytest.mark.parametrize("way", WAYS)
def test_paths_show_every_token_alone_and_behind_others(tmp_path: Path, target: Checkpoint, way: str) -> None:
    kind, others = WAYS[way]
    case = Case(tmp_path, target, kind, **others)
    batch, firsts = random_batch(target, 3, 42, len(case.reads)), set()
    for seed in range(20):
        paths = list(case.trainee._paths(batch, torch.Generator().manual_seed(seed)))
        # Rows that say their own token, or see later ones, would see the answer; all of P-EAGLE's at depth 0 learn.
        assert [one.rows for one in paths] == ([1, SHOWN + 1] if way in ("dspark", "headrace") else [])
        for one in paths:
            assert bool((one.shown_BA == one.rows - 1).all())
            shown_BR = (one.anchors_BA[..., None] + one.offsets()).flatten(1)
            first = int(shown_BR[0, 0])
            assert first < one.rows
            assert shown_BR.tolist() == [list(range(first, first + shown_BR.shape[1]))] * 3
            assert first + shown_BR.shape[1] >= batch.tokens_Bn.shape[1]
            firsts.add((one.rows, first))
    assert len(firsts) == (SHOWN + 2 if way in ("dspark", "headrace") else 0)


def test_tokens_in_flight_fill_a_pipeline_or_are_in_a_longer_one(tmp_path: Path, target: Checkpoint) -> None:
    case = Case(tmp_path, target, "headrace")
    batch = random_batch(target, 40, 42, len(case.reads))
    drawn = case.trainee._drawn(batch, torch.Generator().manual_seed(1))
    assert drawn.stages_BA is not None
    further_BA = drawn.stages_BA - drawn.shown_BA - 1
    assert int(further_BA.min()) == 0
    assert int(drawn.stages_BA.max()) == MOST_STAGES
    assert float((further_BA == 0).float().mean()) == pytest.approx(0.5, abs=0.1)
    part = drawn.part(slice(2, 5))
    assert part.stages_BA is not None
    assert torch.equal(part.stages_BA, drawn.stages_BA[:, 2:5])


def test_in_evaluation_tokens_in_flight_stand_in_a_pipeline_of_so_many_stages(
    tmp_path: Path, target: Checkpoint
) -> None:
    case = Case(tmp_path, target, "headrace")
    found = {}
    for stages in (0, 5, 1000):
        case.trainee.stages = stages
        found[stages] = list(case.trainee.unroll(case.batch, 7))
        for i in (0, 3):
            hidden = case.reference(1, i + 1, 3, SIZE, max(4, stages))[3]
            expected = torch.from_numpy(hidden).float()
            torch.testing.assert_close(found[stages][3][1, i, : len(hidden)], expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(found[0][0], found[1000][0]), "with none in flight there is nothing to read"
    assert not torch.allclose(found[0][3], found[1000][3], atol=1e-2)


def test_a_sequence_without_lessons_teaches_nothing(tmp_path: Path, target: Checkpoint) -> None:
    case = Case(tmp_path, target, "dspark")
    nothing = torch.zeros_like(case.batch.learned_BL)
    batch = Batch(case.batch.tokens_BL, nothing, case.batch.states_BLF, case.batch.final_BLD)
    loss = case.trainee(batch, 0)
    loss.backward()
    assert float(loss.detach()) == 0


@pytest.mark.parametrize(
    ("layers", "reads"),
    [(1, (1,)), (4, (2,)), (8, (2, 3, 4, 5, 6)), (16, (2, 5, 8, 11, 14)), (36, (2, 10, 18, 26, 34))],
)
def test_the_published_choice_of_states(tmp_path: Path, layers: int, reads: tuple[int, ...]) -> None:
    """For Qwen3-4B of 36 layers z-lab reads the outputs of 1, 9, 17, 25 and 33, counted from 0."""
    target = open_checkpoint(str(make_checkpoint(tmp_path, num_hidden_layers=layers)))
    assert KINDS["dflash"].reads(settled(target, "dflash"), target) == reads


@pytest.mark.parametrize(
    ("kind", "most"), [("dspark", SIZE - 1), ("headrace", SIZE - 1), ("dflash", SIZE - 2), ("peagle", SIZE - 1)]
)
def test_more_tokens_than_a_block_can_show_are_refused(target: Checkpoint, kind: str, most: int) -> None:
    assert settled(target, kind, in_flight=most).in_flight == most
    said = f"in_flight is {most + 1}; a block of {SIZE} shows at most {most}"
    with pytest.raises(FieldError, match=said):
        settled(target, kind, in_flight=most + 1)


@pytest.mark.parametrize("kind", ["dflash", "dspark", "headrace", "peagle"])
def test_blocks_of_more_rows_than_are_computed_at_once_are_refused(target: Checkpoint, kind: str) -> None:
    assert settled(target, kind, block_size=MOST_SCRATCH).block_size == MOST_SCRATCH
    with pytest.raises(FieldError, match=f"block_size is {MOST_SCRATCH + 1}; at most {MOST_SCRATCH} rows"):
        settled(target, kind, block_size=MOST_SCRATCH + 1)


@pytest.mark.parametrize("kind", MARKOV)
def test_a_markov_head_of_a_higher_rank_than_there_are_tokens_is_refused(target: Checkpoint, kind: str) -> None:
    most = target.vocab_size
    assert settled(target, kind, markov_rank=most).markov_rank == most
    with pytest.raises(FieldError, match=f"markov_rank is {most + 1}; the vocabulary has {most} tokens"):
        settled(target, kind, markov_rank=most + 1)


def test_peagle_learns_among_the_tokens_that_it_can_draft(tmp_path: Path, target: Checkpoint) -> None:
    ids = torch.tensor([3, 8, 20, 100])
    given, own = settled(target, "peagle"), KINDS["peagle"]
    own.files.begin(tmp_path, Start(target, given, torch.Generator().manual_seed(0), ids))
    module, _ = own.files.load(own.files.open(tmp_path, target), target, "cpu")
    head = torch.nn.Linear(target.hidden_size, target.vocab_size, bias=False)
    batch = random_batch(target, 4, LENGTH, module.mask_hidden.shape[-1] // target.hidden_size)
    with torch.no_grad():
        head.weight[ids] *= 9
        loss = own.trainee(module, head, given, target, ids)(batch, 0)
        wanted = head(batch.final_BnD)
        assert 0 < int(torch.isin(wanted.argmax(-1), ids).sum()) < wanted[..., 0].numel()
        module.head[0].weight.mul_(100.0)
        assert float(own.trainee(module, head, given, target, ids)(batch, 0)) > float(loss) > 0


@pytest.mark.parametrize("large", [1.0, 90.0])
@pytest.mark.parametrize("kind", ["dflash", "dspark", "headrace"])
def test_a_fresh_module_is_not_sure_that_tokens_are_repeated(tmp_path: Path, kind: str, large: float) -> None:
    """A row begins with its token's embedding, which is that token's row of the head where both are tied."""
    place = make_checkpoint(tmp_path / "target", num_hidden_layers=2, tie_word_embeddings=True)
    file = place / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"] *= large
    save_file(tensors, file, {"format": "pt"})
    target, folder = open_checkpoint(str(place)), tmp_path / "drafter"
    folder.mkdir()
    given = settled(target, kind)
    KINDS[kind].files.begin(folder, Start(target, given, torch.Generator().manual_seed(0), None))
    fresh = load_file(folder / "model.safetensors")
    rows_VD = tensors["model.embed_tokens.weight"].float()
    logits_V = (F.rms_norm(rows_VD, rows_VD.shape[1:]) * fresh["norm.weight"] * rows_VD).sum(-1)
    if large == 1:
        torch.testing.assert_close(fresh["norm.weight"], tensors["model.norm.weight"].float())
        assert 0 < float(logits_V.mean()) < MOST_OWN_LOGIT
    else:
        assert float(logits_V.mean()) == pytest.approx(MOST_OWN_LOGIT, rel=1e-2)


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "granite"])
def test_fresh_states_in_flight_are_beside_the_embedding_that_the_drafter_reads(
    tmp_path: Path, architecture: str
) -> None:
    """Gemma and Granite scale what their first layer gets; a drafter reads the embedding as it is stored."""
    target = open_checkpoint(str(make_checkpoint(tmp_path / "target", architecture)))
    folder = tmp_path / "drafter"
    folder.mkdir()
    own = KINDS["headrace"].files
    own.begin(folder, Start(target, settled(target, "headrace"), torch.Generator().manual_seed(0), None))
    module, _ = own.load(own.open(folder, target), target, "cpu")
    size = module.embed_tokens.weight.square().mean().sqrt()
    torch.testing.assert_close(module.partial_norm.weight, torch.full_like(module.partial_norm.weight, 0.67 * size))
