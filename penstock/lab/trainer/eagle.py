"""Training of the drafters that chain a small layer: EAGLE-1, EAGLE-3 and MTP heads, from all positions at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.checkpoint.checkpoint import Checkpoint
from penstock.config import FieldError
from penstock.lab.trainer.kinds import (
    DECAY,
    Keys,
    Kind,
    SpeculatorFiles,
    Start,
    Teaching,
    dtype_name,
    layer_config,
    staircase,
    unit_weight,
    with_usual,
)
from penstock.lab.trainer.options import DRAFT_VOCAB_SIZE, TTT_STEPS, TrainOptions
from penstock.lab.trainer.states import Batch
from penstock.models.loader import load_module
from penstock.models.speculators.base import final_norm
from penstock.models.speculators.mtp import place_of

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


def final_state(options: TrainOptions, target: Checkpoint) -> tuple[int, ...]:
    """The number of the state after the final norm."""
    return (target.num_layers,)


def eagle_config(start: Start) -> dict[str, Any]:
    """The content of config.json, as SafeAILab has it."""
    return {"architectures": ["LlamaForCausalLM"], **layer_config(start.target), "bias": True}


def eagle_fresh(start: Start) -> dict[str, Tensor]:
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
    files=SpeculatorFiles(eagle_config, eagle_fresh, with_embedding=True),
    settle=lambda options, target: options,
    reads=final_state,
    trainee=lambda module, head, options, target, draft_ids_v: EagleTrainee(module, head),
)


# -------------------------------------------------------------------------------------------------------------- eagle-3
# A module distilled over its own drafts, step after step (training-time test).
#
# Source: Li et al., EAGLE-3 (arXiv 2503.01840), section 3.2; SafeAILab/EAGLE's trainer for the weights of the steps and
# the settings; vllm-project/speculators for the format.

DRAFTED_AHEAD: Final = 5
"""Tokens that vLLM drafts at a time with the trained module, unless it is told otherwise."""


class Eagle3Trainee(ChainTrainee):
    def drafted(self, hidden_nD: Tensor) -> Tensor:
        """Logits over the tokens that can be drafted: the module's head before its map to the target's vocabulary."""
        logits_nv: Tensor = self.module.head[0](self.module.norm(hidden_nD))
        return logits_nv


def eagle3_reads(options: TrainOptions, target: Checkpoint) -> tuple[int, ...]:
    """Numbers of the hidden states 2, L // 2 and L - 3; with few layers some of them coincide."""
    last = target.num_layers
    return tuple(sorted({min(max(index, 1), last) for index in (2, last // 2, last - 3)}))


def eagle3_config(start: Start) -> dict[str, Any]:
    """The content of config.json, as vllm-project/speculators has it."""
    options, target = start.options, start.target
    proposal = {"proposal_type": "greedy", "speculative_tokens": DRAFTED_AHEAD}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{**proposal, "verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": options.model, "architectures": target.config.architectures},
        },
        "transformer_layer_config": layer_config(target),
        "draft_vocab_size": start.drafted,
        "target_hidden_size": target.hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(eagle3_reads(options, target)),
        "norm_before_residual": False,
        "norm_before_fc": False,
        "tie_word_embeddings": False,
        "torch_dtype": layer_config(target)["torch_dtype"],
    }


def eagle3_fresh(start: Start) -> dict[str, Tensor]:
    """Random tensors, except for the head: the target's, for the tokens that can be drafted."""
    target = start.target
    width = target.hidden_size
    norms = ("layers.0.input_layernorm", "layers.0.hidden_norm", "norm")
    tensors = {
        "fc.weight": start.matrix(width, len(eagle3_reads(start.options, target)) * width),
        **start.layer("layers.0", 2 * width),
        **{f"{name}.weight": torch.ones(width) for name in norms},
        "lm_head.weight": start.head(),
    }
    ids_v = start.draft_ids_v
    if ids_v is None:
        return tensors
    known_V = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill_(0, ids_v, True)
    # d2t is added to a drafted id to get the target's; t2d marks the target's ids that can be drafted.
    return {**tensors, "d2t": ids_v - torch.arange(len(ids_v)), "t2d": known_V}


def eagle3_settle(options: TrainOptions, target: Checkpoint) -> TrainOptions:
    """The options with the kind's defaults."""
    return with_usual(options, ttt_steps=TTT_STEPS, draft_vocab_size=min(DRAFT_VOCAB_SIZE, target.vocab_size))


def eagle3_trainee(
    module: Any, head: nn.Module, options: TrainOptions, target: Checkpoint, draft_ids_v: Tensor | None
) -> Eagle3Trainee:
    assert options.ttt_steps is not None
    return Eagle3Trainee(module, head, options.ttt_steps, draft_ids_v)


EAGLE3: Final = Kind(
    name="eagle3",
    learning_rate=5e-5,
    betas=(0.9, 0.95),
    clip=0.5,
    files=SpeculatorFiles(eagle3_config, eagle3_fresh),
    settle=eagle3_settle,
    reads=eagle3_reads,
    trainee=eagle3_trainee,
)


# ------------------------------------------------------------------------------------------------------------ mtp heads
# One more layer of the target's own kind, distilled over its own drafts.
#
# Source: DeepSeek-V3 (arXiv 2412.19437), section 2.2, for the head; EAGLE-3 (arXiv 2503.01840), section 3.2, for the
# steps, since one head drafts at every depth. The format is Qwen's (``models/speculators/mtp.py``).

PROJECTION_NOISE: Final = 0.1
"""Scale of the noise in a fresh projection, whose other part hands embedding and state to the layer unchanged. A larger
one hands the layer less of what it was trained to read."""


def mtp_config(start: Start) -> dict[str, Any]:
    """The content of config.json."""
    target = start.target
    return {
        "architectures": ["MTP"],
        "base_model_path": str(target.source),
        "mtp_num_hidden_layers": 1,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "torch_dtype": dtype_name(target),
    }


def mtp_fresh(start: Start) -> dict[str, Tensor]:
    """A copy of the target's own layer of the head's kind, norms that change nothing, and half of each input."""
    target, width = start.target, start.target.hidden_size
    place = place_of(target)
    assert place is not None
    base = getattr(load_module(target, place, place + 1, "float32", "cpu"), target.parts.base)
    layer = getattr(base, target.parts.layers)[place].state_dict()
    norm = final_norm(target, "float32", "cpu")
    even = torch.cat([torch.eye(width), torch.eye(width)], dim=1) / 2
    norms = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden")
    return {
        "mtp.fc.weight": even + PROJECTION_NOISE * start.matrix(width, 2 * width),
        **{f"{name}.weight": unit_weight(norm) for name in norms},
        "mtp.norm.weight": norm.get_parameter("weight").detach().clone(),
        **{f"mtp.layers.0.{name}": tensor for name, tensor in layer.items()},
    }


def mtp_settle(options: TrainOptions, target: Checkpoint) -> TrainOptions:
    """The options with the kind's defaults. Raises FieldError for a target without a layer of full attention."""
    if place_of(target) is None:
        raise FieldError("kind", "is 'mtp', and none of the target's layers attends to everything: take eagle3")
    return with_usual(options, ttt_steps=TTT_STEPS)


def mtp_trainee(
    module: Any, head: nn.Module, options: TrainOptions, target: Checkpoint, draft_ids_v: Tensor | None
) -> ChainTrainee:
    assert options.ttt_steps is not None
    return ChainTrainee(module, head, options.ttt_steps)


MTP: Final = Kind(
    name="mtp",
    learning_rate=1e-4,
    betas=(0.9, 0.95),
    clip=1.0,
    files=SpeculatorFiles(mtp_config, mtp_fresh),
    settle=mtp_settle,
    reads=final_state,
    trainee=mtp_trainee,
)
