"""Training of SPD's module and of the early exit: their beginning, the depths of a pipeline, and the loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from typing import Any, Final

import torch
from torch import Tensor, nn

from penstock.checkpoint.checkpoint import Checkpoint
from penstock.drafters.spd import layers_done, levels_after
from penstock.lab.trainer.kinds import (
    LEVELS,
    Keys,
    Kind,
    SpeculatorFiles,
    Start,
    Teaching,
    dtype_name,
    staircase,
    with_usual,
)
from penstock.lab.trainer.options import DRAFT_VOCAB_SIZE, SPEC_LAYERS, STAGES, VARIANTS, TrainOptions, check_within
from penstock.lab.trainer.states import Batch
from penstock.models.loader import load_module
from penstock.models.speculators.spd import ANCHORS, PAPER

# ------------------------------------------------------------------------------------------------------------ spd start
# SPD's module and the early exit before training: sizes, configuration and initial tensors.
#
# The format is yuyijiong/speculative_pipeline_decoding's, which ``models/speculators/spd.py`` reads.

NOISE: Final = 0.02
"""Standard deviation of the first weights of the states above the first. It is about that of trained weights
(``models.loader.SAMPLE_SPREAD``)."""
OPTIONAL: Final = ("q_norm.weight", "k_norm.weight", "q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.bias")
"""Tensors that the module's attention has only if the target's has them."""


def settle(options: TrainOptions, target: Checkpoint) -> TrainOptions:
    """The options with defaults: anchors 0, 1, 2, 4, ... up to half of the layers, and the last; a quarter for an exit.

    Raises FieldError for numbers above the target's layers.
    """
    last = target.num_layers
    options = with_usual(options, spec_layers=SPEC_LAYERS, draft_vocab_size=min(DRAFT_VOCAB_SIZE, target.vocab_size))
    check_within(options, last, "spec_layers", "exit_layer")
    if options.kind == "early-exit":
        return with_usual(options, exit_layer=max(1, last // 4))
    doubled = [1 << i for i in range(last.bit_length()) if 1 << i <= last // 2]
    possible = tuple(stages for stages in STAGES if stages <= last)
    options = with_usual(options, variant=VARIANTS[0], stages=possible or (last,))
    if options.variant == "anchors":
        options = with_usual(options, anchors=(0, *doubled, last))
    check_within(options, last, "stages", "anchors")
    return options


def levels_read(options: TrainOptions, target: Checkpoint) -> tuple[tuple[int, ...], ...]:
    """The states that each level's feature reads. The paper's level k reads state 0, that of half of the layers passed,
    and that of all of them (Eq. 1)."""
    if options.variant == "paper":
        assert options.stages is not None
        done = layers_done(target.even_split(options.stages[0]))
        return tuple(tuple(sorted({0, layers // 2, layers})) for layers in done)
    anchors = anchors_of(options)
    return tuple(anchors[: i + 1] for i in range(len(anchors)))


def anchors_of(options: TrainOptions) -> tuple[int, ...]:
    """The states that are read at the deepest level: the anchors, or the early exit's only state."""
    if options.anchors is not None:
        return options.anchors
    assert options.exit_layer is not None
    return (options.exit_layer,)


def reads(options: TrainOptions, target: Checkpoint) -> tuple[int, ...]:
    """Numbers of the hidden states that are read from disk; state 0, the embedding, is computed from tokens."""
    return tuple(sorted({state for level in levels_read(options, target) for state in level} - {0}))


def config(start: Start) -> dict[str, Any]:
    """The content of config.json."""
    options, target, ids_v = start.options, start.target, start.draft_ids_v
    known = {} if ids_v is None else {"draft_token_ids": ids_v.tolist()}
    common = {
        "speculator": options.kind.replace("-", "_"),
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": start.drafted,
        "num_spec_layers": options.spec_layers,
        "base_model_path": options.model,
        "torch_dtype": dtype_name(target),
        **known,
    }
    if options.variant == "paper":
        assert options.stages is not None
        deepest_first = [list(level) for level in reversed(levels_read(options, target)[1:])]
        own = {"num_stages": options.stages[0], "shallow_hidden_layer_indices": deepest_first}
        return {**common, "version": PAPER, **own, "post_state": options.post_state}
    anchors = anchors_of(options)
    return {**common, "version": ANCHORS, "aggr_feature_bound": list(anchors), "num_aggr_types": len(anchors)}


def fresh(start: Start) -> dict[str, Tensor]:
    """Layers and head are copies of the target's; each feature is nearly the deepest state that it reads."""
    options, levels = start.options, levels_read(start.options, start.target)
    assert options.spec_layers is not None
    deepest = len(levels) - 1
    tensors = {"lm_head.weight": start.head()}
    for i, level in enumerate(levels):
        shallow, name = "g0_proj" if i == 0 else f"stage_projs.{deepest - i}", f"aggr_projs.{i}"
        tensors[f"{shallow if options.variant == 'paper' else name}.weight"] = projection(start, len(level))
    for j in range(options.spec_layers):
        tensors |= layer(start, j)
        if options.variant == "paper":
            # Block i = 0 is the deepest; the newest tokens are no memory.
            names = (f"fixed_stage_per_layer_projs.{j}.{i}.weight" for i in range(deepest))
            tensors |= {name: projection(start, 1) for name in names}
    return tensors


def projection(start: Start, states: int) -> Tensor:
    """[D, states x D]: the identity for the last of the states, and a little noise for the others."""
    width = start.target.hidden_size
    others = torch.randn(width, (states - 1) * width, generator=start.generator) * NOISE
    return torch.cat([others, torch.eye(width)], dim=1)


def layer(start: Start, index: int) -> dict[str, Tensor]:
    """A copy of one of the target's layers if these are Llama or Qwen layers, else a random layer of their sizes.

    Copies are spread from the target's first layer, which can read the embedding of a token, to its last, whose output
    the head can read; a single one is the last. With two layers this starts the demo target's module at a loss of 3.6
    after 50 steps, where the last two layers gave 5.3 and the first two 4.6.
    """
    prefix, target = f"spec_layers.{index}", start.target
    made = start.layer(prefix, target.hidden_size)
    made[f"{prefix}.input_layernorm.weight"] = torch.ones(target.hidden_size)
    last, others = target.num_layers - 1, (start.options.spec_layers or 1) - 1
    # Index 0 is the target's first layer and index ``others`` its last; a single one is the last.
    number = last - (others - index) * last // max(1, others)
    base = getattr(load_module(target, number, number + 1, "float32", "cpu"), target.parts.base)
    own = getattr(base, target.parts.layers)[number].state_dict()
    copied = {f"{prefix}.{name}": tensor.clone() for name, tensor in own.items()}
    optional = {f"{prefix}.self_attn.{name}" for name in OPTIONAL}
    alike = all(name in copied and copied[name].shape == tensor.shape for name, tensor in made.items())
    return copied if alike and set(copied) - set(made) <= optional else made


# --------------------------------------------------------------------------------------------------------------- depths
# Levels at which SPD's module sees the tokens of a sequence, by how many tokens are in flight.
#
# Source: Wang et al., Speculative Pipeline Decoding (arXiv 2605.30852), section 3.7 and appendix A.


@dataclass(frozen=True)
class Block:
    """All tokens of a sequence at one level.

    A row that is asked about has passed ``depth`` stages. It sees the j-th token before it at level ``near[j]``, and
    all earlier tokens at the deepest level. None: the rows of this block are only seen, and nothing is asked.
    """

    level: int
    depth: int
    near: tuple[int, ...] | None


def lay_out(levels: Sequence[int], fill: int, asked: int = 0, only: bool = False) -> tuple[Block, ...]:
    """The blocks that occur in a pipeline whose ``fill`` newest tokens are in flight, from shallow to deep.

    ``levels`` [stages + 1]: the levels by depth. The newest token has passed ``asked`` stages, the one before it one
    more, and so on; tokens before the ``fill`` newest ones have passed all stages. ``only``: only the newest token is
    asked about; otherwise each level is, at its smallest depth. For levels 0 1 1 2 2 and a full pipeline of four
    stages:

        asked at level 0  depth 0   sees  ... 2  2  1  1  0
        asked at level 1  depth 1   sees     ... 2  2  1  1
        asked at level 2  depth 3   sees        ... 2  2  2
    """
    deepest = levels[-1]
    seen = [level if depth < fill + asked else deepest for depth, level in enumerate(levels)]
    found: list[Block] = []
    for level in sorted(set(seen[asked:])):
        depth = seen.index(level, asked)
        near = tuple(takewhile(lambda one: one != deepest, seen[depth:]))
        found.append(Block(level, depth, near if not only or not found else None))
    return tuple(found)


# ------------------------------------------------------------------------------------------------------------------ spd
# SPD's speculation module, the paper's or with anchors; and the early exit, which has a single anchor.
#
# Sources: Wang et al., Speculative Pipeline Decoding (arXiv 2605.30852), section 3 and appendix A;
# yuyijiong/speculative_pipeline_decoding for anchors and settings.
#
# Shapes: B sequences, L - 1 rows of each, the last n of which are the batch's, N rows of all blocks, H query heads, K
# key heads, d width of a head, D the target's hidden size.

FULL: Final = 0.5
"""Chance, 0 to 1, that the pipeline is full; the lesser fills are equally likely (appendix A.2)."""
AGAIN_WEIGHT: Final = 0.5
"""Weight of a token that is asked about again in flight, beside one that is asked about when it enters. At 0 the module
would be trained for tokens that enter only, at 1 for both alike."""


class BlockAttention:
    """Computes a module's attention; rows are ordered by block, and in each block by sequence.

    A row sees its own token and those shortly before it at its block's levels, and all earlier ones in the last block,
    which has the deepest level. Rows that are not asked about get zeros.
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
    """A trainee (``kinds.Trainee``) whose steps are the levels at which tokens are asked about.

    ``levels``: the levels by depth, for each number of stages that the module is trained for.
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
        """The divergence at every row that has just entered, and at as many others, of tokens in flight.

        The number of stages, and how many tokens are in flight, are drawn for each sequence (appendix A.2).
        """
        generator = torch.Generator().manual_seed(seed)
        alike: dict[tuple[tuple[int, ...], int], list[int]] = {}
        for sequence in range(len(batch.tokens_BL)):
            alike.setdefault(self.drawn(generator), []).append(sequence)
        parts = [self._divergence(batch.of(some), *drawn, generator) for drawn, some in alike.items()]
        return torch.stack(parts).sum() + self._nothing()

    def _divergence(self, batch: Batch, levels: Sequence[int], fill: int, generator: torch.Generator) -> Tensor:
        """The divergence of sequences whose pipelines have these levels by depth, and as many tokens in flight."""
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
        """The states in a full pipeline with the most stages, level by level."""
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
        """The input of the logits for the batch's rows in each block, [blocks, B, n, D]."""
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
        """Levels by depth, and the number of tokens in flight, both drawn at random."""
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
        """Zero, as a function of every projection: data parallelism waits for the gradients of absent levels, too."""
        memory = self.module.memory or ()
        projections = [*self.module.projections, *(one for layer in memory for one in layer)]
        return torch.stack([one.weight.sum() for one in projections]).sum() * 0


def trainee(
    module: Any, head: nn.Module, options: TrainOptions, target: Checkpoint, draft_ids_v: Tensor | None
) -> SpdTrainee:
    return SpdTrainee(module, head, levels_by_depth(options, target), draft_ids_v)


def levels_by_depth(options: TrainOptions, target: Checkpoint) -> list[tuple[int, ...]]:
    """The level of a token by the number of stages that it has passed, for each number of stages trained for.

    An early exit has only one level.
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
