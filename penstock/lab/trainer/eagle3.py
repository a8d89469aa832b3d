"""EAGLE-3: a module distilled over its own drafts, step after step (training-time test).

Source: Li et al., EAGLE-3 (arXiv 2503.01840), section 3.2; SafeAILab/EAGLE's trainer for the weights of the steps and
the settings; vllm-project/speculators for the format.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

from penstock.checkpoint.checkpoint import Checkpoint
from penstock.lab.trainer.eagle import ChainTrainee
from penstock.lab.trainer.kinds import Kind, SpeculatorFiles, Start, layer_config, with_usual
from penstock.lab.trainer.options import DRAFT_VOCAB_SIZE, TTT_STEPS, TrainOptions

DRAFTED_AHEAD: Final = 5
"""Tokens that vLLM drafts at a time with the trained module, unless it is told otherwise."""


class Eagle3Trainee(ChainTrainee):
    def drafted(self, hidden_nD: Tensor) -> Tensor:
        """Logits over the tokens that can be drafted: the module's head before its map to the target's vocabulary."""
        logits_nv: Tensor = self.module.head[0](self.module.norm(hidden_nD))
        return logits_nv


def reads(options: TrainOptions, target: Checkpoint) -> tuple[int, ...]:
    """Numbers of the hidden states 2, L // 2 and L - 3; with few layers some of them coincide."""
    last = target.num_layers
    return tuple(sorted({min(max(index, 1), last) for index in (2, last // 2, last - 3)}))


def config(start: Start) -> dict[str, Any]:
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
        "eagle_aux_hidden_state_layer_ids": list(reads(options, target)),
        "norm_before_residual": False,
        "norm_before_fc": False,
        "tie_word_embeddings": False,
        "torch_dtype": layer_config(target)["torch_dtype"],
    }


def fresh(start: Start) -> dict[str, Tensor]:
    """Random tensors, except for the head: the target's, for the tokens that can be drafted."""
    target = start.target
    width = target.hidden_size
    norms = ("layers.0.input_layernorm", "layers.0.hidden_norm", "norm")
    tensors = {
        "fc.weight": start.matrix(width, len(reads(start.options, target)) * width),
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


def settle(options: TrainOptions, target: Checkpoint) -> TrainOptions:
    """The options with the kind's defaults."""
    return with_usual(options, ttt_steps=TTT_STEPS, draft_vocab_size=min(DRAFT_VOCAB_SIZE, target.vocab_size))


def trainee(
    module: Any, head: nn.Module, options: TrainOptions, target: Checkpoint, draft_ids_v: Tensor | None
) -> Eagle3Trainee:
    assert options.ttt_steps is not None
    return Eagle3Trainee(module, head, options.ttt_steps, draft_ids_v)


EAGLE3: Final = Kind(
    name="eagle3",
    learning_rate=5e-5,
    betas=(0.9, 0.95),
    clip=0.5,
    files=SpeculatorFiles(config, fresh),
    settle=settle,
    reads=reads,
    trainee=trainee,
)
