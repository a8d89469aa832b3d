"""Block drafters: DFlash's and DSpark's modules, by default causal in the block and shown the tokens in flight, and
Headrace, which also reads the states that these have by then.

Sources: DFlash (z-lab/dflash) for the module and the layout; JetSpec (arXiv 2606.18394) for causal blocks and for the
forward divergence as their loss; DSpark (arXiv 2607.05147; deepseek-ai/DeepSpec) for the Markov head and for rows that
predict the token after them. It is Penstock's own that blocks of training show tokens after the first: in a full
pipeline the token that is asked about stands that far behind the last token whose states are known. So is Headrace; SPD
(arXiv 2605.30852, section 3.5) has a module of another kind that reads the states of tokens in flight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.checkpoint.checkpoint import Checkpoint
from penstock.config import FieldError
from penstock.lab.trainer.kinds import (
    Keys,
    Kind,
    Shown,
    SpeculatorFiles,
    Start,
    Teaching,
    layer_config,
    unit_weight,
    with_usual,
)
from penstock.lab.trainer.options import (
    BLOCK_LAYERS,
    BLOCK_SIZE,
    DRAFT_VOCAB_SIZE,
    IN_FLIGHT,
    MARKOV_RANK,
    TrainOptions,
)
from penstock.lab.trainer.states import Batch
from penstock.models.speculators.base import final_norm
from penstock.models.speculators.block import MOST_SCRATCH

# ---------------------------------------------------------------------------------------------------------------- block
# Blocks over whole sequences, many blocks at once.
#
# Shapes: B sequences, L tokens, n rows of each (see ``Batch``), A blocks of a sequence, M rows of a block, H query
# heads, K key heads, d width of a head, D hidden size, E width of the logits' input.

NONE_SHOWN: Final = 0.4
"""Chance, 0 to 1, that a block shows its first token alone; all other numbers of tokens are equally likely. At 1
modules are trained as published, at 0 never as a request begins."""
EASED: Final = 0.3
"""Factor of a fresh layer's outputs, which are added to the embedding. Beside a fresh layer's whole output, which is
noise, the embedding would be lost."""
MOST_OWN_LOGIT: Final = 50.0
"""Greatest mean logit by which a fresh module predicts that tokens are repeated; its final norm is scaled down to it.

A row begins with its token's embedding, which many targets have as this token's row of the head, too. SmolLM2's module
began with 133, and was 100 steps behind in the first half of 700. The demo target's begins with 38. With a tenth of
that it was right less often after 1,000 steps (in 49% in place of 53%), because the norm has to grow again.
"""
EASED_STATES: Final = 0.67
"""Root mean square of what the states of a token in flight add to its row at first, over that of the embeddings."""
EASED_PROJECTION: Final = 0.58
"""Factor of the fresh projection of these states. Since a norm follows, it only decides how fast training turns the
projection: with 1, the demo target's drafter was right in 52% after 1,000 steps in place of 53%."""
MOST_STAGES: Final = 16
"""Most stages of a pipeline that tokens in flight are drawn for. With more of them, four tokens have passed the first
of five taps at most."""
TOGETHER: Final = 512
"""Rows of one sequence's blocks that are evaluated at once: each of them has a column in the mask of all others."""


class BlocksAttention:
    """Computes a module's attention; the rows of a sequence are those of its blocks, one after the other.

    A block whose first token is at position p sees the context before p, and only its own rows:

        context       c0  c1  c2  c3  c4     rows   r2 r3 r4 | r4 r5 r6
        block at 2     x   x                        x  x  x  |                  (causal: r3 does not see r4)
        block at 4     x   x   x   x                         | x  x  x
    """

    def __init__(self, context: Sequence[Keys], sees_B1RS: Tensor) -> None:
        """``context``: keys and values of each layer; ``sees_B1RS``: what each row sees of them and of all rows."""
        self._context = context
        self._sees_B1RS = sees_B1RS

    def __call__(
        self, module: Any, query_HNd: Tensor, key_KNd: Tensor, value_KNd: Tensor, mask: None, *, scaling: float
    ) -> Tensor:
        """The output of attention, [N, H, d]."""
        sequences = len(self._sees_B1RS)
        query, key, value = (
            rows.unflatten(1, (sequences, -1)).transpose(0, 1) for rows in (query_HNd, key_KNd, value_KNd)
        )
        if self._context:
            context = self._context[module.layer_idx]
            key, value = torch.cat([context.key_BKnd, key], dim=2), torch.cat([context.value_BKnd, value], dim=2)
        output_BHRd = F.scaled_dot_product_attention(
            query, key, value, attn_mask=self._sees_B1RS, scale=scaling, enable_gqa=True
        )
        return output_BHRd.transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True)
class Blocks:
    """Blocks of a batch's sequences: the batch's row of each first token, and how many more tokens the block shows.

    ``stages_BA`` is the number of stages of the pipeline, None for as many as the tokens fill. Each token in flight has
    passed one stage more than the token after it.
    """

    anchors_BA: Tensor
    shown_BA: Tensor
    rows: int
    stages_BA: Tensor | None = None

    def offsets(self) -> Tensor:
        """Each row's distance from the first token of its block, [M]."""
        return torch.arange(self.rows, device=self.anchors_BA.device)

    def part(self, blocks: slice) -> Blocks:
        """Some of the blocks of each sequence."""
        stages_BA = None if self.stages_BA is None else self.stages_BA[:, blocks]
        return Blocks(self.anchors_BA[:, blocks], self.shown_BA[:, blocks], self.rows, stages_BA)


class BlockTrainee(nn.Module):
    """A trainee (``kinds.Trainee``) whose steps are the numbers of tokens in flight.

    ``shown``: the greatest number of tokens that a block shows after its first one.
    """

    def __init__(self, module: Any, head: nn.Module, shown: int, draft_ids_v: Tensor | None = None) -> None:
        super().__init__()
        self.module = module
        self.head = head
        self.shown = shown
        self.draft_ids_v = None if draft_ids_v is None else nn.Buffer(draft_ids_v, persistent=False)
        self._causal = all(module.shape.causal)
        self._lag = int(not module.shape.from_anchor)
        """Rows between a token that is shown and the row that predicts the token after it."""

    def forward(self, batch: Batch, seed: int) -> Tensor:
        """The mean divergence of the rows, times the number of tokens that the batch has to learn."""
        teaching = Teaching(self.head, batch, self.draft_ids_v)
        generator = torch.Generator().manual_seed(seed)
        lessons = [self._drawn(batch, generator), *self._paths(batch, generator)]
        divergences, weights = zip(*(self._summed(teaching, batch, blocks) for blocks in lessons), strict=True)
        return torch.stack(divergences).sum() / torch.stack(weights).sum().clamp(min=1e-6) * batch.learned_Bn.sum()

    def drafted(self, entering_mE: Tensor) -> Tensor:
        """Logits over the tokens that can be drafted."""
        return self.logits(0, entering_mE)

    def _summed(self, teaching: Teaching, batch: Batch, blocks: Blocks) -> tuple[Tensor, Tensor]:
        """The divergences of all rows that learn, and their weights, each summed."""
        return self._weighed(teaching, batch, blocks, self._hidden(batch, blocks))

    def _weighed(self, teaching: Teaching, batch: Batch, blocks: Blocks, hidden_BAMD: Tensor) -> tuple[Tensor, Tensor]:
        """The divergences of the blocks' rows with this output, and their weights, each summed.

        Rows count less the further they are behind the tokens shown (DFlash's decay).
        """
        taught_BAM, rows_BAM = self._taught(teaching, blocks)
        rows_m = rows_BAM[taught_BAM]
        entering_mE = self.module.entering(hidden_BAMD[taught_BAM], batch.tokens_Bn.flatten()[rows_m])
        divergence_m = teaching.divergences(entering_mE, self.drafted, rows_m)
        gamma = self.module.shape.size / 2  # 4 for blocks of 8, as published; of blocks of 16 it is 7
        weights_m = torch.exp(-self._further(blocks).clamp(min=0) / gamma)[taught_BAM]
        return (divergence_m * weights_m).sum(), weights_m.sum()

    def unroll(self, batch: Batch, steps: int) -> Iterator[Tensor]:
        """Step d: a block for each row, which begins d rows before it and shows all tokens up to the row."""
        sequences, rows = batch.tokens_Bn.shape
        for ahead in range(min(steps, self.shown + 1, rows)):
            anchors_BA = torch.arange(rows - ahead, device=batch.tokens_BL.device).expand(sequences, -1)
            # A causal row sees no later row, so that the block may end with it; others see all rows of the block.
            length = max(ahead + 1 + self._lag, 0 if self._causal else self.module.shape.size)
            blocks = Blocks(anchors_BA, torch.full_like(anchors_BA, ahead), length)
            some = max(1, TOGETHER // length)
            parts = [blocks.part(slice(first, first + some)) for first in range(0, rows - ahead, some)]
            hidden_BnD = torch.cat([self._hidden(batch, part)[:, :, ahead + self._lag] for part in parts], dim=1)
            yield self.module.entering(hidden_BnD, batch.tokens_Bn[:, ahead:])

    def logits(self, step: int, hidden_nD: Tensor) -> Tensor:
        logits_nV: Tensor = self.module.logits(hidden_nD)
        return logits_nV

    def _drawn(self, batch: Batch, generator: torch.Generator) -> Blocks:
        """Blocks with about as many rows as there are tokens, which begin at tokens that are to be learned."""
        learned_Bn, size = batch.learned_Bn, self.module.shape.size
        sequences, rows = learned_Bn.shape
        order_Bn = torch.rand(sequences, rows, generator=generator).to(learned_Bn.device)
        anchors_BA = order_Bn.masked_fill(~learned_Bn, -1).topk(max(1, rows // size), dim=1).indices
        some_BA = torch.rand(anchors_BA.shape, generator=generator) >= NONE_SHOWN
        shown_BA = some_BA * torch.randint(self.shown + 1, anchors_BA.shape, generator=generator)
        return Blocks(anchors_BA, shown_BA.to(learned_Bn.device), size)

    def _paths(self, batch: Batch, generator: torch.Generator) -> Iterator[Blocks]:
        """Blocks without masks, one behind the other, that show every token with none in flight and, again, in blocks
        from a random beginning whose tokens after the first are in flight.

        Only an eighth of the rows of drawn blocks says what follows a known token. With these, as many rows as there
        are tokens do, and as many what follows one in flight: the demo target's Headrace was right in 67% after 1,000
        steps in place of 52%. Rows of other kinds would see their answer there.
        """
        if not self._causal or self._lag:
            return
        sequences, rows = batch.tokens_Bn.shape
        for length in sorted({1, min(self.shown + 1, rows)}):
            first = int(torch.randint(length, (1,), generator=generator))
            anchors_BA = torch.arange(first, rows, length, device=batch.tokens_Bn.device).expand(sequences, -1)
            yield Blocks(anchors_BA, torch.full_like(anchors_BA, length - 1), length)

    def _further(self, blocks: Blocks) -> Tensor:
        """How far each row's token is behind the one after the last token shown, [B, A, M]; below 0 for a known token.

        Without a lag that is the row's own distance from the last token shown: it predicts the token after it.
        """
        return blocks.offsets() - blocks.shown_BA[..., None] - self._lag

    def _taught(self, teaching: Teaching, blocks: Blocks) -> tuple[Tensor, Tensor]:
        """A mask of the rows that learn, [B, A, M], and the batch's row of each, counted over all sequences.

        A causal row that predicts the token after it also learns among the tokens shown; others would see the answer.
        """
        sequences, rows = teaching.taught_Bn.shape
        rows_BAM = blocks.anchors_BA[..., None] + blocks.offsets() - self._lag
        inside_BAM = (rows_BAM >= 0) & (rows_BAM < rows)
        if not self._causal or self._lag:
            inside_BAM &= self._further(blocks) >= 0
        first_B11 = torch.arange(sequences, device=rows_BAM.device)[:, None, None] * rows
        every_BAM = rows_BAM.clamp(0, rows - 1) + first_B11
        return inside_BAM & teaching.taught_Bn.flatten()[every_BAM], every_BAM

    def _hidden(self, batch: Batch, blocks: Blocks) -> Tensor:
        """The module's output for the rows of blocks, [B, A, M, D]."""
        module, states_BnF = self.module, batch.states_BnF
        sequences, seen = states_BnF.shape[:2]
        tokens_BAM, positions_BAM = self._entered(batch, blocks)
        places = torch.arange(seen, device=states_BnF.device).repeat(sequences)
        context_ND = module.fuse(states_BnF.flatten(0, 1))
        context = [
            Keys(*(part.unflatten(1, (sequences, seen)).transpose(0, 1) for part in layer))
            for layer in module.context(context_ND, places)
        ]
        attend = BlocksAttention(context, self._sees(blocks, seen))
        partial = self._partial(batch, blocks)
        hidden_ND: Tensor = module(tokens_BAM.flatten(), positions_BAM.flatten(), attend, **partial)
        return hidden_ND.view(*positions_BAM.shape, -1)

    def _partial(self, batch: Batch, blocks: Blocks) -> dict[str, Tensor]:
        """The module's arguments about the blocks' rows beside their tokens and positions."""
        return {}

    def _entered(self, batch: Batch, blocks: Blocks) -> tuple[Tensor, Tensor]:
        """The tokens of the blocks' rows and their positions, [B, A, M]."""
        # The batch's row i is the token at position i + 1.
        positions_BAM = blocks.anchors_BA[..., None] + 1 + blocks.offsets()
        last = batch.tokens_BL.shape[1] - 1
        tokens_BAM = batch.tokens_BL.gather(1, positions_BAM.clamp(max=last).flatten(1)).view_as(positions_BAM)
        # Tokens behind those shown are not known in the pipeline: their rows hold the mask.
        known_BAM = blocks.offsets() <= blocks.shown_BA[..., None]
        return tokens_BAM.where(known_BAM, self.module.shape.mask_token), positions_BAM

    def _sees(self, blocks: Blocks, seen: int) -> Tensor:
        """A mask of what each row sees, [B, 1, A x M, seen + A x M]: context, and rows of its own sequence."""
        sequences, count = blocks.anchors_BA.shape
        rows, device = blocks.rows, blocks.anchors_BA.device
        # A block at the batch's row i sees the states of positions 0 to i.
        context_BAn = torch.arange(seen, device=device) <= blocks.anchors_BA[..., None]
        within_MM = torch.ones(rows, rows, dtype=torch.bool, device=device)
        own_RR = torch.block_diag(*[within_MM.tril() if self._causal else within_MM] * count)
        context_BRn = context_BAn.repeat_interleave(rows, dim=1)
        return torch.cat([context_BRn, own_RR.expand(sequences, -1, -1)], dim=2)[:, None]


class HeadraceTrainee(BlockTrainee):
    """A block trainee that reads the states of tokens in flight as far as they have got in the pipeline.

    ``reads`` are the target's hidden states that the module reads, ``layers`` is the target's number of layers.
    ``stages`` is the number of stages in evaluation, if it is more than the tokens in flight fill.
    """

    def __init__(self, module: Any, head: nn.Module, shown: int, reads: tuple[int, ...], layers: int) -> None:
        super().__init__(module, head, shown)
        self._reads, self._layers = reads, layers
        self.stages = 0

    def _drawn(self, batch: Batch, generator: torch.Generator) -> Blocks:
        return self._staged(super()._drawn(batch, generator), generator)

    def _paths(self, batch: Batch, generator: torch.Generator) -> Iterator[Blocks]:
        for blocks in super()._paths(batch, generator):
            yield self._staged(blocks, generator)

    def _staged(self, blocks: Blocks, generator: torch.Generator) -> Blocks:
        """The blocks with a number of stages for each. About half of them are in a pipeline that their tokens fill, the
        others in a longer one of up to ``MOST_STAGES``, whose other stages hold other requests' rows, or other
        branches'."""
        fewest_BA = blocks.shown_BA + 1
        share_BA = torch.rand(fewest_BA.shape, generator=generator).mul(2).sub(1).clamp(min=0).to(fewest_BA.device)
        further_BA = (share_BA * (MOST_STAGES + 1 - fewest_BA).clamp(min=0)).long()
        return replace(blocks, stages_BA=fewest_BA + further_BA)

    def _partial(self, batch: Batch, blocks: Blocks) -> dict[str, Tensor]:
        stages_BA = (blocks.shown_BA + 1).clamp(min=self.stages) if blocks.stages_BA is None else blocks.stages_BA
        passed_BAM = (blocks.shown_BA[..., None] - blocks.offsets()).clamp(min=0)
        done_BAM = passed_BAM * self._layers // stages_BA[..., None]
        reads_T = torch.tensor(self._reads, device=done_BAM.device)
        there_BAMT = (reads_T <= done_BAM[..., None]) & (passed_BAM > 0)[..., None]
        positions_BAM = (blocks.anchors_BA[..., None] + 1 + blocks.offsets()).clamp(max=batch.states_BLF.shape[1] - 1)
        every_B = torch.arange(len(positions_BAM), device=positions_BAM.device)[:, None, None]
        states_BAMTD = batch.states_BLF[every_B, positions_BAM].unflatten(-1, (len(self._reads), -1))
        partial_BAMTD = states_BAMTD.masked_fill(~there_BAMT[..., None], 0.0)
        return {"partial_NF": partial_BAMTD.flatten(0, 2).flatten(1)}


# ---------------------------------------------------------------------------------------------------------------- files
# z-lab's layout for ``dflash``, with JetSpec's ``causal_head``, SpecForge's for ``dspark``, and the same with two more
# tensors for ``headrace``. All use the target's embedding and head, so that the file has neither, and the mask is one
# of the target's tokens.

ARCHITECTURES: Final = {"dflash": "DFlashDraftModel", "dspark": "DSparkDraftModel", "headrace": "HeadraceDraftModel"}
"""The class that a kind's config.json names."""
MARKOV: Final = ("dspark", "headrace")
"""Kinds with a Markov head."""
TAPS: Final = 5
"""Number of the target's hidden states that the module reads, as published."""


def reads(options: TrainOptions, target: Checkpoint) -> tuple[int, ...]:
    """Numbers of hidden states, evenly from 2 to L - 2 as z-lab has them; with few layers some of them coincide."""
    first = min(2, target.num_layers)
    last = max(first, target.num_layers - 2)
    return tuple(sorted({round(first + i * (last - first) / (TAPS - 1)) for i in range(TAPS)}))


def config(start: Start) -> dict[str, Any]:
    """The content of config.json."""
    options, target, markov = start.options, start.target, start.options.kind in MARKOV
    own: dict[str, Any] = {
        "mask_token_id": mask_token(target),
        "target_layer_ids": [state - 1 for state in reads(options, target)],  # state i is the output of layer i - 1
        "causal_head": not options.bidirectional,
    }
    if markov:
        own |= {"projector_type": options.kind, "markov_rank": options.markov_rank, "markov_head_type": "vanilla"}
        own |= {"enable_confidence_head": False}
    return {
        **layer_config(target),
        "architectures": [ARCHITECTURES[options.kind]],
        "model_type": "qwen3",
        "num_hidden_layers": options.spec_layers,
        "attention_bias": False,
        "block_size": options.block_size,
        "num_target_layers": target.num_layers,
        "base_model_name_or_path": options.model,
        "dflash_config": own,
        "trained_with_tokens_shown": options.in_flight,
    }


def mask_token(target: Checkpoint) -> int:
    """The token of masks: one that ends texts, since no text in the making holds it."""
    ids = [*target.eos_token_ids, target.config.bos_token_id]
    return next((one for one in ids if isinstance(one, int)), target.vocab_size - 1)


def fresh(start: Start) -> dict[str, Tensor]:
    """Random layers with small outputs before the target's final norm, scaled down where it would be too sure.

    A Markov head adds nothing yet, and the states of tokens in flight somewhat less than the embedding.
    """
    target, options, width = start.target, start.options, start.target.hidden_size
    norm = final_norm(target, "float32", "cpu")
    embeddings_VD = start.embeddings()
    eased = min(1.0, MOST_OWN_LOGIT / max(1.0, start.own_logit(norm, embeddings_VD)))
    head_dim = layer_config(target)["head_dim"]
    tensors = {
        "fc.weight": start.matrix(width, len(reads(options, target)) * width),
        "hidden_norm.weight": torch.ones(width),
        # The norms of some models scale by one more than their weight.
        "norm.weight": eased * (norm.get_parameter("weight").detach() + 1 - unit_weight(norm)),
    }
    assert options.spec_layers is not None
    for i in range(options.spec_layers):
        layer = start.layer(f"layers.{i}", width)
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            layer[f"layers.{i}.{name}.weight"] *= EASED
        norms = {f"layers.{i}.self_attn.{name}.weight": torch.ones(head_dim) for name in ("q_norm", "k_norm")}
        tensors |= {**layer, **norms, f"layers.{i}.input_layernorm.weight": torch.ones(width)}
    if options.kind in MARKOV:
        assert options.markov_rank is not None
        tensors["markov_head.markov_w1.weight"] = start.matrix(target.vocab_size, options.markov_rank)
        tensors["markov_head.markov_w2.weight"] = torch.zeros(target.vocab_size, options.markov_rank)
    if options.kind == HEADRACE.name:
        tensors["partial.weight"] = EASED_PROJECTION * start.matrix(*tensors["fc.weight"].shape)
        size = float(embeddings_VD.square().mean().sqrt())
        tensors["partial_norm.weight"] = torch.full((width,), EASED_STATES * size)
    return tensors


def settle(options: TrainOptions, target: Checkpoint) -> TrainOptions:
    """The options with the kinds' defaults.

    Raises FieldError for a block of more rows than are computed at once, for one that cannot show so many tokens in
    flight, and for a Markov head of a higher rank than the vocabulary has tokens.
    """
    options = with_usual(options, spec_layers=BLOCK_LAYERS, block_size=BLOCK_SIZE, in_flight=IN_FLIGHT)
    if options.kind == "peagle":
        options = with_usual(options, draft_vocab_size=min(DRAFT_VOCAB_SIZE, target.vocab_size))
    if options.kind in MARKOV:
        options = with_usual(options, markov_rank=min(MARKOV_RANK, target.vocab_size))
        assert options.markov_rank is not None
        if options.markov_rank > target.vocab_size:
            tokens = f"the vocabulary has {target.vocab_size} tokens"
            raise FieldError("markov_rank", f"is {options.markov_rank}; {tokens}, and a rank is at most as high")
    assert options.block_size is not None
    assert options.in_flight is not None
    if options.block_size > MOST_SCRATCH:
        raise FieldError("block_size", f"is {options.block_size}; at most {MOST_SCRATCH} rows are computed at once")
    most = options.block_size - 1 - (options.kind == DFLASH.name)
    if options.in_flight > most:
        raise FieldError("in_flight", f"is {options.in_flight}; a block of {options.block_size} shows at most {most}")
    return options


def trainee(
    module: Any, head: nn.Module, options: TrainOptions, target: Checkpoint, draft_ids_v: Tensor | None
) -> BlockTrainee:
    """The module in training."""
    assert options.in_flight is not None
    return BlockTrainee(module, head, options.in_flight)


DSPARK: Final = Kind(
    name="dspark",
    learning_rate=6e-4,
    betas=(0.9, 0.95),
    clip=1.0,
    files=SpeculatorFiles(config, fresh),
    settle=settle,
    reads=reads,
    trainee=trainee,
    shown=Shown("distance", "by how many tokens are in flight", 0, True),
)
DFLASH: Final = replace(DSPARK, name="dflash")


def headrace_trainee(
    module: Any, head: nn.Module, options: TrainOptions, target: Checkpoint, draft_ids_v: Tensor | None
) -> BlockTrainee:
    """Headrace's module in training."""
    assert options.in_flight is not None
    return HeadraceTrainee(module, head, options.in_flight, reads(options, target), target.num_layers)


HEADRACE: Final = replace(DSPARK, name="headrace", trainee=headrace_trainee)
