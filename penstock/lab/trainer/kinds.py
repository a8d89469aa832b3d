"""The interface of a kind of drafter to its training, distillation, attention over sequences, and export."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from penstock.checkpoint.checkpoint import Checkpoint
from penstock.checkpoint.look import SINGLE_FILE, key_groups
from penstock.lab.trainer.options import TrainOptions
from penstock.lab.trainer.states import Batch, write_whole
from penstock.models.loader import load_module
from penstock.models.speculators.base import MAPS, DraftVocabulary, Material, SpeculatorCheckpoint, TargetHead
from penstock.models.speculators.open import open_speculator

# ----------------------------------------------------------------------------------------------------------------- base
# The interface of a kind of drafter to its training.

DECAY: Final = 0.8
"""Factor of a step's weight, or a head's, over that of the one before it (EAGLE-3's trainer, Medusa's)."""


class Trainee(Protocol):
    """A module in training, with its loss. ``forward`` is called through Accelerate."""

    module: Any

    def __call__(self, batch: Batch, seed: int) -> Tensor:
        """The loss, summed over the rows that are learned from; ``seed`` determines everything random."""
        ...

    def unroll(self, batch: Batch, steps: int) -> Iterator[Tensor]:
        """The input of the logits at each step, [B, m, D], for the last m rows of the batch.

        Each entry drafts the token after its row. ``Kind.shown`` states what a step is.
        """
        ...

    def logits(self, step: int, hidden_nD: Tensor) -> Tensor:
        """Logits over the target's vocabulary, float32, [n, V]."""
        ...


@dataclass(frozen=True)
class Shown:
    """Labels of each step's figures: the name of a step, its meaning, and the number of the first step.

    ``alike``: whether a full pipeline drafts at all steps equally often, so that estimates use their mean.
    """

    name: str
    meaning: str
    first: int
    alike: bool


POSITIONS: Final = Shown("position", "by position in a chain", 1, True)
LEVELS: Final = Shown("level", "by how deep the asked token's states are", 0, False)
"""Steps of chains, and steps of SPD's levels."""


SAMPLED: Final = 256
"""Tokens of which a mean is taken. The logits of all tokens for all others would fill the memory."""


@dataclass(frozen=True)
class Start:
    """The material of a fresh drafter: its target, options and random generator.

    ``draft_ids_v`` [v]: the target's ids of the tokens that can be drafted; None: all tokens.
    """

    target: Checkpoint
    options: TrainOptions
    generator: torch.Generator
    draft_ids_v: Tensor | None

    @property
    def drafted(self) -> int:
        """The number of tokens that can be drafted."""
        return self.target.vocab_size if self.draft_ids_v is None else len(self.draft_ids_v)

    def matrix(self, rows: int, columns: int) -> Tensor:
        """Random weights [rows, columns] whose output is about as large as their input, whatever the width."""
        return torch.randn(rows, columns, generator=self.generator) * columns**-0.5

    def head(self) -> Tensor:
        """The target's head for the tokens that can be drafted, [v, D]."""
        last = self.target.num_layers
        weight: Tensor = load_module(self.target, last, last, "float32", "cpu").get_output_embeddings().weight
        return weight.detach().clone() if self.draft_ids_v is None else weight.detach()[self.draft_ids_v]

    def embeddings(self) -> Tensor:
        """The target's embeddings [V, D] as stored, which is how a drafter without its own reads them."""
        vocabulary = DraftVocabulary(None, self.target.vocab_size)
        return Material({}, vocabulary, self.target, "float32", "cpu").embedding().weight.detach()

    @torch.inference_mode()
    def own_logit(self, norm: nn.Module, embeddings_VD: Tensor) -> float:
        """The mean logit of a token for its own embedding behind the target's final ``norm``, of ``SAMPLED`` tokens."""
        tokens_n = torch.linspace(0, self.target.vocab_size - 1, SAMPLED).long()
        logits_nV = TargetHead(self.target, "float32", "cpu")(norm(embeddings_VD[tokens_n]))
        return float(logits_nV.gather(1, tokens_n[:, None]).mean())

    def layer(self, prefix: str, width: int) -> dict[str, Tensor]:
        """A Llama layer of the target's sizes, without a first norm, whose attention reads ``width`` elements."""
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
    """The files of a kind of drafter: how they are begun, opened, loaded for training, and written."""

    @property
    def file(self) -> str:
        """The name of the tensors' file in the drafter's folder."""
        ...

    def begin(self, folder: Path, start: Start) -> None:
        """Write an untrained drafter into an empty folder. Raises ConfigError if the target can have none."""
        ...

    def open(self, folder: Path, target: Checkpoint) -> Drafter:
        """Read everything but the weights. Raises ConfigError if the drafter does not fit the target."""
        ...

    def load(self, opened: Any, target: Checkpoint, device: str) -> tuple[Any, dict[str, nn.Parameter]]:
        """The module in float32 without gradients, and its trained parameters by name."""
        ...

    def write(self, output: Path, opened: Any, module: nn.Module, target: Checkpoint) -> None:
        """Write the trained drafter in the target's dtype; ``opened`` is the untrained one."""
        ...


@dataclass(frozen=True)
class Kind:
    """One kind of drafter. ``learning_rate``, ``betas`` and ``clip`` are its paper's, or its authors' trainer's."""

    name: str
    learning_rate: float
    betas: tuple[float, float]
    clip: float
    """The norm to which all gradients together are clipped."""
    files: Files
    settle: Callable[[TrainOptions, Checkpoint], TrainOptions]
    """Fills in the kind's defaults for options that are None. Raises FieldError if options do not fit the target."""
    reads: Callable[[TrainOptions, Checkpoint], tuple[int, ...]]
    """Numbers of the target's hidden states that the drafter reads, as transformers counts them."""
    trainee: Callable[[Any, nn.Module, TrainOptions, Checkpoint, Tensor | None], nn.Module]
    """Makes the trainee from the module, the target's head, settled options, the target, and the ids that can be
    drafted."""
    shown: Shown = POSITIONS


def with_usual(options: TrainOptions, **usual: Any) -> TrainOptions:
    """The options, with the values in ``usual`` for those that are None."""
    return replace(options, **{name: value for name, value in usual.items() if getattr(options, name) is None})


def layer_config(target: Checkpoint) -> dict[str, Any]:
    """The configuration of a Llama layer of the target's sizes, without long-context scaling of its positions."""
    config = target.config
    heads = int(config.num_attention_heads)
    rope: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    return {
        "model_type": "llama",
        "hidden_size": target.hidden_size,
        "intermediate_size": int(getattr(config, "intermediate_size", None) or 4 * target.hidden_size),
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": key_groups(config),
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


def unit_weight(norm: nn.Module) -> Tensor:
    """The weight of an untrained norm of this class: some scale by the weight, others by one more than it."""
    made = type(norm)(len(norm.get_parameter("weight")))
    return made.get_parameter("weight").detach()


def dtype_name(target: Checkpoint) -> str:
    """The dtype in which the target is stored, and in which the drafter will be."""
    return str(getattr(target.config, "dtype", None) or torch.float32).removeprefix("torch.")


# -------------------------------------------------------------------------------------------------------------- distill
# Distillation: the divergence of a drafter's distributions from the target's.
#
# Shapes: B sequences, n rows, l of them that drafts stand for, m that are learned from, v tokens that can be drafted, V
# the target's vocabulary, D the width of the logits' input.


class Teaching:
    """The target's distributions at the rows of a batch that are learned from.

    With a vocabulary of the drafter's own, rows whose best token cannot be drafted are left out, and the distributions
    of the others are restricted to the tokens that can be drafted, as in SafeAILab/EAGLE's trainer.
    """

    def __init__(self, head: Callable[[Tensor], Tensor], batch: Batch, draft_ids_v: Tensor | None) -> None:
        with torch.no_grad(), torch.autocast(batch.final_BLD.device.type, enabled=False):
            taught_Bn = batch.learned_Bn.clone()
            logits = head(batch.final_BnD[taught_Bn])
            if draft_ids_v is not None:
                can_m = torch.isin(logits.argmax(-1), draft_ids_v)
                taught_Bn[batch.learned_Bn] = can_m
                logits = logits[can_m].index_select(1, draft_ids_v)
            log_chances_mv = logits.log_softmax(-1)
            self.taught_Bn = taught_Bn
            self._chances_mv = log_chances_mv.exp()
            self._entropy_m = -(self._chances_mv * log_chances_mv).sum(-1)
            # The index of each taught row among the taught rows, by which _chances_mv is ordered.
            self._place_Bn = taught_Bn.flatten().cumsum(0).view_as(taught_Bn) - 1

    def divergence(self, hidden_BlD: Tensor, logits: Callable[[Tensor], Any], among_Bn: Tensor | None = None) -> Tensor:
        """The KL divergence from target to drafter in nats, summed over all rows, or over those in ``among_Bn``.

        ``hidden_BlD`` belongs to the last l rows; ``logits`` makes [m, v] of the chosen ones, [m, D].
        """
        taught_Bn = self.taught_Bn if among_Bn is None else self.taught_Bn & among_Bn
        first = taught_Bn.shape[1] - hidden_BlD.shape[1]
        taught = taught_Bn[:, first:]
        return self._divergences(hidden_BlD[taught], logits, self._place_Bn[:, first:][taught]).sum()

    def divergences(self, hidden_mD: Tensor, logits: Callable[[Tensor], Any], rows_m: Tensor) -> Tensor:
        """The KL divergence of each of m drafts in nats.

        ``rows_m``: rows of ``taught_Bn``, counted over all sequences; a row may come more than once.
        """
        return self._divergences(hidden_mD, logits, self._place_Bn.flatten()[rows_m])

    def _divergences(self, hidden_mD: Tensor, logits: Callable[[Tensor], Any], places_m: Tensor) -> Tensor:
        """The divergences of m drafts, for the taught rows with these indices."""
        # Cross entropy less the target's own entropy, which needs no gradient, is the divergence.
        crossed_m = F.cross_entropy(logits(hidden_mD).float(), self._chances_mv[places_m], reduction="none")
        return crossed_m - self._entropy_m[places_m]


# ------------------------------------------------------------------------------------------------------------ attention
# Attention in which nearly all rows see the same keys, and each row also a few keys of its own.
#
# Shapes: B sequences, n rows of each, H query heads, K key heads, G = H / K, d width of a head.


@dataclass(frozen=True)
class Keys:
    """Keys and values [B, K, n, d]; row t sees those of row t - ``distance``, and of common keys all up to there."""

    key_BKnd: Tensor
    value_BKnd: Tensor
    distance: int = 0


def staircase(query_BHnd: Tensor, common: Keys, own: Sequence[Keys], scaling: float) -> Tensor:
    """Attention [B, H, n, d], in which row t sees the common keys up to t - distance, and one key of each of ``own``.

    It is one product for the common keys and a diagonal for each of ``own``, without a mask over all keys together.
    """
    if not own:
        assert common.distance == 0
        return F.scaled_dot_product_attention(
            query_BHnd, common.key_BKnd, common.value_BKnd, is_causal=True, scale=scaling, enable_gqa=True
        )
    rows = query_BHnd.shape[2]
    query_BKGnd = query_BHnd.unflatten(1, (common.key_BKnd.shape[1], -1)) * scaling
    # True at [t, s] where s > t - distance: row t does not see that key.
    hidden_nn = torch.ones(rows, rows, dtype=torch.bool, device=query_BHnd.device).triu(1 - common.distance)
    keys, values = (part[:, :, None, :rows] for part in (common.key_BKnd, common.value_BKnd))
    scores = [(query_BKGnd @ keys.transpose(-1, -2)).float().masked_fill(hidden_nn, -torch.inf)]
    scores += [_diagonal(query_BKGnd, one) for one in own]
    chances = torch.cat(scores, dim=-1).softmax(-1).to(query_BHnd.dtype)
    output_BKGnd = chances[..., :rows] @ values
    for i, one in enumerate(own):
        # Column rows + i has the weight of each row's i-th own key.
        output_BKGnd = output_BKGnd + chances[..., rows + i, None] * _shifted(one.value_BKnd, one.distance, rows)
    return output_BKGnd.flatten(1, 2)


def _diagonal(query_BKGnd: Tensor, own: Keys) -> Tensor:
    """Each row's score with its own key, [B, K, G, n, 1]; -inf for rows that have none so far back."""
    rows = query_BKGnd.shape[3]
    scores = (query_BKGnd * _shifted(own.key_BKnd, own.distance, rows)).sum(-1, keepdim=True).float()
    lacking_n1 = torch.arange(rows, device=scores.device)[:, None] < own.distance
    return scores.masked_fill(lacking_n1, -torch.inf)


def _shifted(of_BKnd: Tensor, distance: int, rows: int) -> Tensor:
    """[B, K, 1, n, d]: row t has the value of row t - ``distance``; the first ones have zeros."""
    return F.pad(of_BKnd, (0, 0, distance, 0))[:, :, None, :rows]


# --------------------------------------------------------------------------------------------------------------- export
# Writes speculators in the formats that other engines load.
#
# The formats are vllm-project/speculators' for eagle3 and peagle; SafeAILab's for eagle; FasterDecoding's for medusa,
# or vLLM's if its heads cannot draft all tokens; yuyijiong/speculative_pipeline_decoding's for spd and early-exit;
# Qwen's for mtp; z-lab's and SpecForge's for dflash and dspark.
#
# A fresh drafter is written first and then opened like any other, so that the module in training is made by the loader
# of the pipeline. The trained drafter has the same files with other weights.

CONFIG: Final = "config.json"
EMBEDDING: Final = "embed_tokens.weight"
HEAD: Final = {"lm_head.weight": "head.0.weight"}
"""The configuration's file, the embedding's tensor, and tensors whose names in the formats are not the modules'."""


@dataclass(frozen=True)
class SpeculatorFiles:
    """The files of a kind of speculator (``kinds.Files``)."""

    config: Callable[[Start], dict[str, Any]]
    """Makes the content of config.json."""
    fresh: Callable[[Start], dict[str, Tensor]]
    """Makes the initial tensors, under the format's names."""
    file: str = SINGLE_FILE
    with_embedding: bool = False
    """Whether the format wants the target's embedding in the file."""

    def begin(self, folder: Path, start: Start) -> None:
        (folder / CONFIG).write_text(json.dumps(self.config(start), indent=2) + "\n", encoding="utf-8")
        write_whole(self.fresh(start), folder / self.file)

    def open(self, folder: Path, target: Checkpoint) -> SpeculatorCheckpoint:
        return open_speculator(str(folder), target)

    def load(
        self, opened: SpeculatorCheckpoint, target: Checkpoint, device: str
    ) -> tuple[Any, dict[str, nn.Parameter]]:
        module = opened.load(target, "float32", device)
        return module, trained_parameters(module, opened)

    def write(self, output: Path, opened: SpeculatorCheckpoint, module: nn.Module, target: Checkpoint) -> None:
        dtype = getattr(torch, dtype_name(target))
        tensors = load_file(opened.path / self.file)
        for name, parameter in trained_parameters(module, opened).items():
            tensors[opened.tensors[name].name] = parameter.detach().cpu()
        if self.with_embedding:
            tensors[EMBEDDING] = module.get_parameter(EMBEDDING).detach().cpu()
        output.mkdir(parents=True, exist_ok=True)
        shutil.copy(opened.path / CONFIG, output / CONFIG)
        write_whole({name: stored(tensor, dtype) for name, tensor in tensors.items()}, output / self.file)


def trained_parameters(module: nn.Module, checkpoint: SpeculatorCheckpoint) -> dict[str, nn.Parameter]:
    """The trained parameters by their names in ``checkpoint.tensors``: all in its file but embedding and id maps."""
    buffers = dict(module.named_buffers())  # such as biases that a router adapts by itself
    names = [name for name in checkpoint.tensors if name not in (*MAPS, EMBEDDING) and name not in buffers]
    return {name: module.get_parameter(HEAD.get(name, name)) for name in names}


def stored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Weights as ``dtype``; ids and masks unchanged."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
