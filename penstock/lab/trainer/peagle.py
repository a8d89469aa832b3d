"""P-EAGLE: rows of all depths distilled together, beside the rows at depth 0 that are their context.

Source: P-EAGLE (arXiv 2602.01469); vllm-project/speculators for the format and the learning rate. There, each depth has
fewer rows than the one above it, drawn anew. Here rows are drawn in whole blocks, as for the other block drafters, and
blocks show the tokens in flight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from penstock.checkpoint.checkpoint import Checkpoint
from penstock.lab.trainer.block import DSPARK, EASED, Blocks, BlocksAttention, BlockTrainee, mask_token
from penstock.lab.trainer.eagle import eagle3_config, eagle3_fresh, eagle3_reads
from penstock.lab.trainer.kinds import SpeculatorFiles, Start, Teaching
from penstock.lab.trainer.options import TrainOptions
from penstock.lab.trainer.states import Batch

# Shapes as in block.py; R rows of a sequence: those at depth 0, then those of its blocks.


class PeagleTrainee(BlockTrainee):
    """A block's first row is at depth 0, and no other one has states. All rows at depth 0 learn, with weight 1."""

    def drafted(self, entering_mE: Tensor) -> Tensor:
        """Logits over the tokens that can be drafted: the module's head before its map to the target's vocabulary."""
        logits_mv: Tensor = self.module.head[0](entering_mE)
        return logits_mv

    def _paths(self, batch: Batch, generator: torch.Generator) -> Iterator[Blocks]:
        """None: all rows at depth 0 learn anyway."""
        yield from ()

    def _summed(self, teaching: Teaching, batch: Batch, blocks: Blocks) -> tuple[Tensor, Tensor]:
        context_BnD, hidden_BAMD = self._both(batch, blocks)
        divergence, weight = self._weighed(teaching, batch, blocks, hidden_BAMD)
        return divergence + teaching.divergence(context_BnD, self.drafted), weight + teaching.taught_Bn.sum()

    def _hidden(self, batch: Batch, blocks: Blocks) -> Tensor:
        return self._both(batch, blocks)[1]

    def _both(self, batch: Batch, blocks: Blocks) -> tuple[Tensor, Tensor]:
        """The module's output for the rows at depth 0, [B, n, D], and for those of blocks, [B, A, M, D]."""
        module, (sequences, count) = self.module, batch.tokens_Bn.shape
        tokens_BAM, positions_BAM = self._entered(batch, blocks)
        known_BnD = module.fuse(batch.states_BnF)
        every = torch.arange(sequences, device=known_BnD.device)[:, None]
        firsts_BA1D = known_BnD[every, blocks.anchors_BA][:, :, None]
        others = module.masked().expand(*positions_BAM.shape[:2], blocks.rows - 1, -1)
        feature_BRD = torch.cat([known_BnD, torch.cat([firsts_BA1D, others], dim=2).flatten(1, 2)], dim=1)
        tokens_BR = torch.cat([batch.tokens_Bn, tokens_BAM.flatten(1)], dim=1)
        # A row at position p is rotated by p - 1, and the batch's row i stands at position i + 1.
        places_Bn = torch.arange(count, device=tokens_BR.device).expand(sequences, -1)
        places_BR = torch.cat([places_Bn, positions_BAM.flatten(1) - 1], dim=1)
        attend = BlocksAttention([], self._sees(blocks, count))
        hidden_ND = module(tokens_BR.flatten(), feature_BRD.flatten(0, 1), places_BR.flatten(), attend)
        context_BnD, hidden_BRD = hidden_ND.unflatten(0, (sequences, -1)).split([count, tokens_BAM[0].numel()], dim=1)
        return context_BnD, hidden_BRD.reshape(*positions_BAM.shape, -1)

    def _sees(self, blocks: Blocks, seen: int) -> Tensor:
        """A mask of what each row sees, [B, 1, R, R]: rows at depth 0 those before, blocks also their own."""
        sequences, count = blocks.anchors_BA.shape
        rows, device = count * blocks.rows, blocks.anchors_BA.device
        whole_nn = torch.ones(seen, seen, dtype=torch.bool, device=device).tril()
        before_nR = torch.cat([whole_nn, whole_nn.new_zeros(seen, rows)], dim=1).expand(sequences, -1, -1)
        # A block has its own row for the token that it begins with.
        context_BAn = torch.arange(seen, device=device) < blocks.anchors_BA[..., None]
        within_MM = torch.ones(blocks.rows, blocks.rows, dtype=torch.bool, device=device).tril()
        own_RR = torch.block_diag(*[within_MM] * count).expand(sequences, -1, -1)
        blocks_BRR = torch.cat([context_BAn.repeat_interleave(blocks.rows, dim=1), own_RR], dim=2)
        return torch.cat([before_nR, blocks_BRR], dim=1)[:, None]


def config(start: Start) -> dict[str, Any]:
    """The content of config.json, as vllm-project/speculators has it."""
    options, stated = start.options, eagle3_config(start)
    proposals = {"default_proposal_method": "greedy", "proposal_methods": [proposal(options)]}
    return {
        **stated,
        "architectures": ["PEagleSpeculator"],
        "speculators_model_type": "peagle",
        "speculators_config": {**stated["speculators_config"], "algorithm": "peagle", **proposals},
        "transformer_layer_config": {**stated["transformer_layer_config"], "num_hidden_layers": options.spec_layers},
        "mask_token_id": mask_token(start.target),
        "trained_with_tokens_shown": options.in_flight,
    }


def proposal(options: TrainOptions) -> dict[str, Any]:
    """How many tokens a pass proposes, in speculators' words."""
    return {"proposal_type": "greedy", "speculative_tokens": options.block_size}


def fresh(start: Start) -> dict[str, Tensor]:
    """EAGLE-3's tensors, further layers with small outputs, and a random vector in place of states."""
    tensors, width = eagle3_fresh(start), start.target.hidden_size
    assert start.options.spec_layers is not None
    for i in range(1, start.options.spec_layers):
        layer = start.layer(f"layers.{i}", width)
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            layer[f"layers.{i}.{name}.weight"] *= EASED
        tensors |= {**layer, f"layers.{i}.input_layernorm.weight": torch.ones(width)}
    states = tensors["fc.weight"].shape[1]
    return {**tensors, "mask_hidden": torch.randn(1, 1, states, generator=start.generator)}


def trainee(
    module: Any, head: nn.Module, options: TrainOptions, target: Checkpoint, draft_ids_v: Tensor | None
) -> PeagleTrainee:
    """The module in training."""
    assert options.in_flight is not None
    return PeagleTrainee(module, head, options.in_flight, draft_ids_v)


PEAGLE: Final = replace(
    DSPARK, name="peagle", files=SpeculatorFiles(config, fresh), reads=eagle3_reads, trainee=trainee
)
