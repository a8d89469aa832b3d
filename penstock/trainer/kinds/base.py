"""The interface of a kind of drafter to its training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from penstock.models.checkpoint import Checkpoint
from penstock.models.loader import load_module
from penstock.models.speculators.base import SpeculatorCheckpoint
from penstock.trainer.data.batches import Batch
from penstock.trainer.options import TrainOptions

DECAY: Final = 0.8
"""Weight of a step, or a head, relative to the one before it (EAGLE-3's trainer, Medusa's)."""


class Trainee(Protocol):
    """A module in training with its loss. ``forward`` is called through Accelerate."""

    module: Any

    def __call__(self, batch: Batch, seed: int) -> Tensor:
        """The loss, summed over the rows that are learned from; ``seed`` decides everything random."""
        ...

    def unroll(self, batch: Batch, steps: int) -> Iterator[Tensor]:
        """The input of the logits at each step [B, m, D], for the last m rows of the batch.

        Each entry drafts the token after its row. ``Kind.shown`` says what a step is.
        """
        ...

    def logits(self, step: int, hidden_nD: Tensor) -> Tensor:
        """Logits over the target's vocabulary, float32 [n, V]."""
        ...


@dataclass(frozen=True)
class Shown:
    """Labels of each step's figures: a step's name, its meaning, and the number of the first step.

    ``alike``: a full pipeline drafts at all steps alike, so that estimates use their mean.
    """

    name: str
    meaning: str
    first: int
    alike: bool


POSITIONS: Final = Shown("position", "by position in a chain", 1, True)
LEVELS: Final = Shown("level", "by how deep the asked token's states are", 0, False)


@dataclass(frozen=True)
class Start:
    """The target, options and random generator of a fresh drafter.

    ``draft_ids_v`` [v]: the target's ids of the tokens that can be drafted; None: all.
    """

    target: Checkpoint
    options: TrainOptions
    generator: torch.Generator
    draft_ids_v: Tensor | None

    @property
    def drafted(self) -> int:
        """Number of tokens that can be drafted."""
        return self.target.vocab_size if self.draft_ids_v is None else len(self.draft_ids_v)

    def matrix(self, rows: int, columns: int) -> Tensor:
        """Random weights whose output is about as large as their input, whatever the target's width."""
        return torch.randn(rows, columns, generator=self.generator) * columns**-0.5

    def head(self) -> Tensor:
        """The target's head, for the tokens that can be drafted [v, D]."""
        last = self.target.num_layers
        weight: Tensor = load_module(self.target, last, last, "float32", "cpu").get_output_embeddings().weight
        return weight.detach().clone() if self.draft_ids_v is None else weight.detach()[self.draft_ids_v]

    def layer(self, prefix: str, width: int) -> dict[str, Tensor]:
        """A Llama layer of the target's sizes, whose attention takes in ``width``, without a first norm."""
        shape = layer_config(self.target)
        hidden, inner = shape["hidden_size"], shape["intermediate_size"]
        heads, keys = (shape[name] * shape["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
        sizes = {
            "self_attn.q_proj": (heads, width),
            "self_attn.k_proj": (keys, width),
            "self_attn.v_proj": (keys, width),
            "self_attn.o_proj": (hidden, heads),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        matrices = {f"{prefix}.{name}.weight": self.matrix(*size) for name, size in sizes.items()}
        return {**matrices, f"{prefix}.post_attention_layernorm.weight": torch.ones(hidden)}


Drafter = SpeculatorCheckpoint | Checkpoint
"""An opened drafter: a speculator, or a small model, which is a checkpoint like the target."""


class Files(Protocol):
    """The files of a kind of drafter: how it is begun, opened, loaded for training and written."""

    @property
    def file(self) -> str:
        """Name of the tensors' file in the drafter's folder."""
        ...

    def begin(self, folder: Path, start: Start) -> None:
        """Write an untrained drafter into an empty folder. Raises ConfigError for targets without such a drafter."""
        ...

    def open(self, folder: Path, target: Checkpoint) -> Drafter:
        """Read everything but the weights. Raises ConfigError for a drafter that does not fit the target."""
        ...

    def load(self, opened: Any, target: Checkpoint, device: str) -> tuple[Any, dict[str, nn.Parameter]]:
        """The module in float32 without gradients, and its trained parameters by name."""
        ...

    def write(self, output: Path, opened: Any, module: nn.Module, target: Checkpoint) -> None:
        """Write the trained drafter in the target's dtype; ``opened`` is the drafter that training began with."""
        ...


@dataclass(frozen=True)
class Kind:
    """One kind of drafter. ``learning_rate``, ``betas`` and ``clip`` are those of its paper or its authors' trainer."""

    name: str
    learning_rate: float
    betas: tuple[float, float]
    clip: float
    """Norm to which all gradients together are clipped."""
    files: Files
    settle: Callable[[TrainOptions, Checkpoint], TrainOptions]
    """Fills in the kind's defaults for options left out. Raises FieldError for options that do not fit the target."""
    reads: Callable[[TrainOptions, Checkpoint], tuple[int, ...]]
    trainee: Callable[[Any, nn.Module, TrainOptions, Checkpoint, Tensor | None], nn.Module]
    """Makes the trainee of the module, the target's head, settled options, the target and the ids that
    can be drafted."""
    shown: Shown = POSITIONS


def with_usual(options: TrainOptions, **usual: Any) -> TrainOptions:
    """The options, with ``usual`` in place of those that are None."""
    return replace(options, **{name: value for name, value in usual.items() if getattr(options, name) is None})


def layer_config(target: Checkpoint) -> dict[str, Any]:
    """Configuration of a Llama layer of the target's sizes, without long-context scaling of its rope."""
    config = target.config
    heads = int(config.num_attention_heads)
    rope: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    return {
        "model_type": "llama",
        "hidden_size": target.hidden_size,
        "intermediate_size": int(getattr(config, "intermediate_size", None) or 4 * target.hidden_size),
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": int(getattr(config, "num_key_value_heads", None) or heads),
        "head_dim": int(getattr(config, "head_dim", None) or target.hidden_size // heads),
        "hidden_act": "silu",
        "rms_norm_eps": float(getattr(config, "rms_norm_eps", None) or 1e-6),
        "rope_theta": float(rope.get("rope_theta") or 10000.0),
        "max_position_embeddings": int(config.max_position_embeddings),
        "vocab_size": target.vocab_size,
        "tie_word_embeddings": False,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(target.eos_token_ids) or None,
        "torch_dtype": dtype_name(target),
    }


def dtype_name(target: Checkpoint) -> str:
    """The dtype in which the target is stored, and the drafter as well."""
    return str(getattr(target.config, "dtype", None) or torch.float32).removeprefix("torch.")
