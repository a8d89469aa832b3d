"""MTP heads: one more layer of the target's own kind, distilled over its own drafts.

Source: DeepSeek-V3 (arXiv 2412.19437), section 2.2, for the head; EAGLE-3 (arXiv 2503.01840), section 3.2, for the
steps, since one head drafts at every depth. The format is Qwen's (``models/speculators/mtp.py``).
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

from penstock.checkpoint.checkpoint import Checkpoint
from penstock.config import FieldError
from penstock.lab.trainer.eagle import ChainTrainee
from penstock.lab.trainer.kinds import Kind, SpeculatorFiles, Start, dtype_name, unit_weight, with_usual
from penstock.lab.trainer.options import TTT_STEPS, TrainOptions
from penstock.models.loader import load_module
from penstock.models.speculators.base import final_norm
from penstock.models.speculators.mtp import place_of

NOISE: Final = 0.1
"""Scale of the noise in a fresh projection, whose other part hands embedding and state to the layer unchanged. A larger
one hands the layer less of what it was trained to read."""


def reads(options: TrainOptions, target: Checkpoint) -> tuple[int, ...]:
    """The number of the state after the final norm."""
    return (target.num_layers,)


def config(start: Start) -> dict[str, Any]:
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


def fresh(start: Start) -> dict[str, Tensor]:
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
        "mtp.fc.weight": even + NOISE * start.matrix(width, 2 * width),
        **{f"{name}.weight": unit_weight(norm) for name in norms},
        "mtp.norm.weight": norm.get_parameter("weight").detach().clone(),
        **{f"mtp.layers.0.{name}": tensor for name, tensor in layer.items()},
    }


def settle(options: TrainOptions, target: Checkpoint) -> TrainOptions:
    """The options with the kind's defaults. Raises FieldError for a target without a layer of full attention."""
    if place_of(target) is None:
        raise FieldError("kind", "is 'mtp', and none of the target's layers attends to everything: take eagle3")
    return with_usual(options, ttt_steps=TTT_STEPS)


def trainee(
    module: Any, head: nn.Module, options: TrainOptions, target: Checkpoint, draft_ids_v: Tensor | None
) -> ChainTrainee:
    assert options.ttt_steps is not None
    return ChainTrainee(module, head, options.ttt_steps)


MTP: Final = Kind(
    name="mtp",
    learning_rate=1e-4,
    betas=(0.9, 0.95),
    clip=1.0,
    files=SpeculatorFiles(config, fresh),
    settle=settle,
    reads=reads,
    trainee=trainee,
)
