"""EAGLE's training: chains drafted from all positions at once, and EAGLE-1's losses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.checkpoint.checkpoint import Checkpoint
from penstock.lab.trainer.kinds import DECAY, Keys, Kind, SpeculatorFiles, Start, Teaching, layer_config, staircase
from penstock.lab.trainer.options import TrainOptions
from penstock.lab.trainer.states import Batch

# ---------------------------------------------------------------------------------------------------------------- chain
# EAGLE's modules and MTP heads over whole sequences, which draft a chain from every position at once.
#
# Shapes: B sequences, n rows of each, N = B x rows at a step, D the drafter's hidden size, H query heads, K key heads,
# d width of a head.


class ChainAttention:
    """Computes a module's attention, with one call for each step.

    Chain i begins at row i, with the target's feature, and goes on at rows i + 1, i + 2, ... with the module's own
    output. As in the pipeline it sees the rows up to its beginning with the target's features, and its own rows:

        chain 2       row 0   row 1   row 2   row 3   row 4
        step 0 keys     x       x       x
        step 1 key                              x          (chain 2's, at row 3)
        step 2 key                                      x  (chain 2's, at row 4)

    Attention is therefore causal over the keys of step 0, with one diagonal for each later step (EAGLE-3, section 3.2).
    Soft caps, sinks and windows of a target's layer are left out of training.
    """

    def __init__(self, sequences: int) -> None:
        self._sequences = sequences
        self._common: Keys | None = None
        self._own: list[Keys] = []

    def __call__(
        self,
        module: Any,
        query_HNd: Tensor,
        key_KNd: Tensor,
        value_KNd: Tensor,
        mask: None,
        *,
        scaling: float,
        **options: Any,
    ) -> Tensor:
        """The output of attention, [N, H, d]."""
        query, key, value = (
            rows.unflatten(1, (self._sequences, -1)).transpose(0, 1) for rows in (query_HNd, key_KNd, value_KNd)
        )
        if self._common is None:
            self._common = Keys(key, value)
        else:
            self._own.append(Keys(key, value))
        return staircase(query, self._common, self._own, scaling).transpose(1, 2).flatten(0, 1)


def unroll(module: Any, batch: Batch, steps: int, noise_BnD: Tensor | None = None) -> Iterator[Tensor]:
    """The output of ``module`` at each step [B, n - step, D]: entry i belongs to chain i, at row i + step.

    Tokens are the text's. The feature of step 0 is the target's (plus ``noise_BnD``), that of a later step the module's
    own output at the step before. Positions are the pipeline's: row i has position i.
    """
    tokens_Bn = batch.tokens_Bn
    sequences, rows = tokens_Bn.shape
    feature = module.fuse(batch.states_BnF)
    if noise_BnD is not None:
        feature = feature + noise_BnD
    attend = ChainAttention(sequences)
    for step in range(min(steps, rows)):
        positions = torch.arange(step, rows, device=tokens_Bn.device).expand(sequences, -1)
        given = (tokens_Bn[:, step:].flatten(), feature.flatten(0, 1), positions.flatten())
        hidden = module(*given, attend).unflatten(0, (sequences, -1))
        yield hidden
        feature = hidden[:, :-1]  # the last row's chain would go on behind the text


class ChainTrainee(nn.Module):
    """A trainee (``kinds.Trainee``) distilled over its own drafts, step after step: EAGLE-3's training-time test."""

    def __init__(self, module: Any, head: nn.Module, steps: int, draft_ids_v: Tensor | None = None) -> None:
        super().__init__()
        self.module = module
        self.head = head
        self.steps = steps
        self.draft_ids_v = None if draft_ids_v is None else nn.Buffer(draft_ids_v, persistent=False)

    def forward(self, batch: Batch, seed: int) -> Tensor:
        teaching = Teaching(self.head, batch, self.draft_ids_v)
        steps = enumerate(self.unroll(batch, self.steps))
        losses = [DECAY**step * teaching.divergence(hidden, self.drafted) for step, hidden in steps]
        return torch.stack(losses).sum()

    def unroll(self, batch: Batch, steps: int) -> Iterator[Tensor]:
        return unroll(self.module, batch, steps)

    def logits(self, step: int, hidden_nD: Tensor) -> Tensor:
        logits_nV: Tensor = self.module.logits(hidden_nD)
        return logits_nV

    def drafted(self, hidden_nD: Tensor) -> Tensor:
        """Logits over the tokens that can be drafted."""
        return self.logits(0, hidden_nD)


# ---------------------------------------------------------------------------------------------------------------- eagle
# EAGLE-1 (EAGLE-2 has the same weights): regression to the next feature, distillation to the next token.
#
# Source: Li et al., EAGLE (arXiv 2401.15077), section 4.1; SafeAILab/EAGLE's trainer for noise and settings, and its
# format.

NOISE: Final = 0.2
"""Width of the uniform noise on features, because in drafting features are not quite the target's. EAGLE draws it from
-0.1 to 0.1 (section 4.1)."""
TOKEN_WEIGHT: Final = 0.1
"""Weight of the distillation beside the regression. It is EAGLE's (section 4.1)."""


class EagleTrainee(nn.Module):
    """A trainee (``kinds.Trainee``) with EAGLE-1's two losses."""

    def __init__(self, module: Any, head: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.head = head

    def forward(self, batch: Batch, seed: int) -> Tensor:
        teaching = Teaching(self.head, batch, None)
        taught_Bn = teaching.taught_Bn
        hidden_BnD = next(unroll(self.module, batch, 1, noise_BnD=noise_for(batch, seed)))
        given, aimed = hidden_BnD[taught_Bn].float(), batch.final_BnD[taught_Bn].float()
        # A mean over features, but a sum over rows, like the distillation.
        regression = F.smooth_l1_loss(given, aimed, reduction="sum") / aimed.shape[-1]
        return regression + TOKEN_WEIGHT * teaching.divergence(hidden_BnD, self.module.logits)

    def unroll(self, batch: Batch, steps: int) -> Iterator[Tensor]:
        return unroll(self.module, batch, steps)

    def logits(self, step: int, hidden_nD: Tensor) -> Tensor:
        logits_nV: Tensor = self.module.logits(hidden_nD)
        return logits_nV


def noise_for(batch: Batch, seed: int) -> Tensor:
    """Noise drawn on the CPU from the seed alone, so that it is the same on every device and in a resumed run."""
    states_BnF = batch.states_BnF
    drawn = torch.rand(states_BnF.shape, generator=torch.Generator().manual_seed(seed))
    return ((drawn - 0.5) * NOISE).to(states_BnF.device)


def reads(options: TrainOptions, target: Checkpoint) -> tuple[int, ...]:
    """The number of the state after the final norm."""
    return (target.num_layers,)


def config(start: Start) -> dict[str, Any]:
    """The content of config.json, as SafeAILab has it."""
    return {"architectures": ["LlamaForCausalLM"], **layer_config(start.target), "bias": True}


def fresh(start: Start) -> dict[str, Tensor]:
    """Random tensors."""
    width = start.target.hidden_size
    return {
        "fc.weight": start.matrix(width, 2 * width),
        "fc.bias": torch.zeros(width),
        **start.layer("layers.0", width),
    }


EAGLE: Final = Kind(
    name="eagle",
    learning_rate=3e-5,
    betas=(0.9, 0.95),
    clip=0.5,
    files=SpeculatorFiles(config, fresh, with_embedding=True),
    settle=lambda options, target: options,
    reads=reads,
    trainee=lambda module, head, options, target, draft_ids_v: EagleTrainee(module, head),
)
