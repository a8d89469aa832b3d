"""SPD's speculation module, the paper's or with anchors, and the early exit, which has a single anchor.

Source: Wang et al., Speculative Pipeline Decoding (arXiv 2605.30852), section 3 and appendix A;
yuyijiong/speculative_pipeline_decoding for anchors and settings.

Shapes: B sequences, L - 1 rows of each, of which the n last ones are the batch's, N rows of all blocks, H query heads,
K key heads, d width of a head, D the target's hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Final

import torch
from torch import Tensor, nn

from penstock.drafters.depths import levels_after
from penstock.models.checkpoint import Checkpoint
from penstock.trainer.data.batches import Batch
from penstock.trainer.kinds.attention import Keys, staircase
from penstock.trainer.kinds.base import LEVELS, Kind
from penstock.trainer.kinds.depths import Block, lay_out
from penstock.trainer.kinds.distill import Teaching
from penstock.trainer.kinds.export import SpeculatorFiles
from penstock.trainer.kinds.spd_start import config, fresh, levels_read, reads, settle
from penstock.trainer.options import TrainOptions

FULL: Final = 0.5
"""Chance that the pipeline is full; the lesser fills are equally likely (appendix A.2)."""
AGAIN_WEIGHT: Final = 0.5
"""Weight of a token asked about again in flight, relative to one asked about when it enters."""


class BlockAttention:
    """Computes a module's attention; rows are ordered by block, and by sequence within each.

    A row sees its own token and those shortly before it at the levels of its block, and all earlier ones in the last
    block, which is that of the deepest level. Rows that are not asked get nothing.
    """

    def __init__(self, blocks: Sequence[Block], sequences: int) -> None:
        self._blocks = blocks
        self._sequences = sequences
        self._place = {block.level: i for i, block in enumerate(blocks)}

    def __call__(
        self, module: Any, query_HNd: Tensor, key_KNd: Tensor, value_KNd: Tensor, mask: None, *, scaling: float
    ) -> Tensor:
        """The output of attention, [N, H, d]."""
        sizes = (len(self._blocks), self._sequences, -1)
        # Block by block [B, heads, L - 1, d].
        queries, keys, values = (rows.unflatten(1, sizes).movedim(0, 2) for rows in (query_HNd, key_KNd, value_KNd))
        outputs = []
        for query, block in zip(queries, self._blocks, strict=True):
            if block.near is None:
                outputs.append(torch.zeros_like(query))
                continue
            own = [Keys(keys[i], values[i], j) for j, i in enumerate(self._place[level] for level in block.near)]
            outputs.append(staircase(query, Keys(keys[-1], values[-1], len(own)), own, scaling))
        return torch.stack(outputs).transpose(2, 3).flatten(0, 2)


class SpdTrainee(nn.Module):
    """A trainee (``base.Trainee``) whose steps are the levels at which tokens are asked about.

    ``levels`` are the levels by depth, for each number of stages that is trained for.
    """

    def __init__(
        self, module: Any, head: nn.Module, levels: Sequence[tuple[int, ...]], draft_ids_v: Tensor | None
    ) -> None:
        super().__init__()
        self.module = module
        self.head = head
        self.levels = levels
        self.draft_ids_v = None if draft_ids_v is None else nn.Buffer(draft_ids_v, persistent=False)

    def forward(self, batch: Batch, seed: int) -> Tensor:
        """The divergence at every row that has just entered, and at as many others of tokens in flight.

        How full the pipeline is, and its number of stages, are drawn for every sequence (appendix A.2).
        """
        generator = torch.Generator().manual_seed(seed)
        alike: dict[tuple[tuple[int, ...], int], list[int]] = {}
        for sequence in range(len(batch.tokens_BL)):
            alike.setdefault(self.drawn(generator), []).append(sequence)
        parts = [self._divergence(batch.of(some), *drawn, generator) for drawn, some in alike.items()]
        return torch.stack(parts).sum() + self._nothing()

    def _divergence(self, batch: Batch, levels: Sequence[int], fill: int, generator: torch.Generator) -> Tensor:
        """The divergence of sequences in pipelines with these levels by depth and the same fill."""
        blocks = self._blocks(levels, fill)
        first, *others = self.hidden(batch, blocks)
        teaching = Teaching(self.head, batch, self.draft_ids_v)
        loss = teaching.divergence(first, self._drafted)
        again = [hidden for hidden, block in zip(others, blocks[1:], strict=True) if self._asked(block, fill)]
        for hidden in again:
            chosen_Bn = torch.rand(batch.learned_Bn.shape, generator=generator) < 1 / len(again)
            among_Bn = chosen_Bn.to(batch.learned_Bn.device)
            loss = loss + AGAIN_WEIGHT * teaching.divergence(hidden, self._drafted, among_Bn)
        return loss

    def unroll(self, batch: Batch, steps: int) -> Iterator[Tensor]:
        """The states in a full pipeline of the most stages, level by level."""
        levels = max(self.levels, key=len)
        fill = len(levels) - 1
        blocks = self._blocks(levels, fill)
        found = zip(self.hidden(batch, blocks), blocks, strict=True)
        asked = (hidden for hidden, block in found if block is blocks[0] or self._asked(block, fill))
        yield from islice(asked, steps)

    def logits(self, step: int, hidden_nD: Tensor) -> Tensor:
        logits_nV: Tensor = self.module.logits(hidden_nD)
        return logits_nV

    def hidden(self, batch: Batch, blocks: Sequence[Block]) -> Tensor:
        """The input of the logits for the batch's rows in each block [blocks, B, n, D]."""
        tokens_BL, states_BLF = batch.tokens_BL[:, :-1], batch.states_BLF[:, :-1]
        sequences, rows = tokens_BL.shape
        given = tokens_BL.flatten(), states_BLF.flatten(0, 1)
        feature_ND = torch.cat([self.module.fuse(block.level, *given) for block in blocks])
        levels = torch.tensor([block.level for block in blocks], device=tokens_BL.device)
        positions = torch.arange(rows, device=tokens_BL.device).repeat(len(blocks) * sequences)
        attend = BlockAttention(blocks, sequences)
        hidden_ND = self.module(feature_ND, levels.repeat_interleave(sequences * rows), positions, attend)
        # The first token is seen by all others, but drafts nothing, as in the other kinds.
        hidden: Tensor = hidden_ND.unflatten(0, (len(blocks), sequences, rows))[:, :, 1:]
        return hidden

    def drawn(self, generator: torch.Generator) -> tuple[tuple[int, ...], int]:
        """Levels by depth, and number of tokens in flight, drawn at random."""
        levels = self.levels[int(torch.randint(len(self.levels), (), generator=generator))]
        stages = len(levels) - 1
        if stages == 1 or float(torch.rand((), generator=generator)) < FULL:
            return levels, stages
        return levels, int(torch.randint(1, stages, (), generator=generator))

    def _blocks(self, levels: Sequence[int], fill: int) -> tuple[Block, ...]:
        return lay_out(levels, fill, self.module.asking, only=self.module.memory is not None)

    def _asked(self, block: Block, fill: int) -> bool:
        """Whether the block holds tokens in flight; the tokens after other ones are known."""
        return block.near is not None and block.depth < fill

    def _drafted(self, hidden_nD: Tensor) -> Tensor:
        """Logits over the tokens that can be drafted: the module's head before its map to the target's vocabulary."""
        logits_nv: Tensor = self.module.head[0](self.module.norm(hidden_nD))
        return logits_nv

    def _nothing(self) -> Tensor:
        """Zero, as a function of every projection: data parallelism waits for the gradients of levels left out."""
        memory = self.module.memory or ()
        projections = [*self.module.projections, *(one for layer in memory for one in layer)]
        return torch.stack([one.weight.sum() for one in projections]).sum() * 0


def trainee(
    module: Any, head: nn.Module, options: TrainOptions, target: Checkpoint, draft_ids_v: Tensor | None
) -> SpdTrainee:
    return SpdTrainee(module, head, levels_by_depth(options, target), draft_ids_v)


def levels_by_depth(options: TrainOptions, target: Checkpoint) -> list[tuple[int, ...]]:
    """The level of a token by the number of stages it has passed, for each number of stages that is trained for.

    For an early exit all are the same.
    """
    if options.variant == "paper":
        return [tuple(range(len(levels_read(options, target))))]
    if options.anchors is None:
        return [(0, 0)]
    assert options.stages is not None
    read = levels_read(options, target)
    return [levels_after(target.even_split(stages), read) for stages in options.stages]


SPD: Final = Kind(
    name="spd",
    learning_rate=1e-4,
    betas=(0.9, 0.999),
    clip=1.0,
    files=SpeculatorFiles(config, fresh),
    settle=settle,
    reads=reads,
    trainee=trainee,
    shown=LEVELS,
)
EARLY_EXIT: Final = replace(SPD, name="early-exit")
