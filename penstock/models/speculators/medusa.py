"""Medusa: heads, checkpoint format, and the stage that answers with them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.checkpoint.checkpoint import Checkpoint
from penstock.checkpoint.tensors import StoredTensor, Tensors
from penstock.messages import Candidates, Sampling
from penstock.models.speculators.base import (
    DraftVocabulary,
    FeatureReader,
    Kind,
    Material,
    SpeculatorCheckpoint,
    check_equal,
    check_shapes,
    draft_vocabulary,
    refusal,
)
from penstock.stage.sampler import contexts_of, rank_candidates
from penstock.stage.visibility import BatchView

# --------------------------------------------------------------------------------------------------------------- medusa
# Medusa: heads on the target's last hidden state, each for one token further ahead.
#
# Source: Cai et al., Medusa (arXiv 2401.10774), section 2.1.1; FasterDecoding/Medusa. Shapes as in base.py.


class Block(nn.Module):
    """The layers of a head before its logits: x + SiLU(Wx + b) for each."""

    def __init__(self, hidden_size: int, layers: int, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden_size, hidden_size, bias=bias) for _ in range(layers))

    def forward(self, hidden_nD: Tensor) -> Tensor:
        for layer in self.layers:
            hidden_nD = hidden_nD + F.silu(layer(hidden_nD))
        return hidden_nD


class Medusa(nn.Module):
    """``heads`` heads of ``layers`` layers each, over v tokens that ``vocabulary`` maps to the target's."""

    def __init__(
        self, heads: int, layers: int, hidden_size: int, vocab_size: int, vocabulary: DraftVocabulary, *, bias: bool
    ) -> None:
        super().__init__()
        self.heads = heads
        self.hidden_size = hidden_size
        self.blocks = nn.ModuleList(Block(hidden_size, layers, bias) for _ in range(heads))
        self.lm_heads = nn.ModuleList(nn.Linear(hidden_size, vocab_size, bias=False) for _ in range(heads))
        self.vocabulary = vocabulary

    def head_logits(self, head: int, hidden_nD: Tensor) -> Tensor:
        """The logits, float32 [n, V], of the token ``head`` + 2 places after each row's, from final-normed states."""
        return self.vocabulary(self.lm_heads[head](self.blocks[head](hidden_nD)))


# -------------------------------------------------------------------------------------------------------- medusa format
# The names of Medusa's tensors, from which the numbers of heads and of their layers are derived.
#
# Published configurations state a wrong number of heads (2 where the file holds 5), so that number is not read.

ORIGINAL: Final = re.compile(r"(\d+)\.(\d+)\.(linear\.)?(weight|bias)")
"""FasterDecoding's names: head, layer, and "linear" except for the last layer, which gives the logits."""

BLOCK: Final = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.weight")
"""vLLM's names, which the modules here use, too."""

MOST_BLOCKS: Final = 10_000
"""Far more blocks than any Medusa has: the names in a file may hold any number."""


def _renamed(tensors: Tensors) -> dict[str, StoredTensor]:
    """The tensors under the names of the modules here."""
    return {_name(name): stored for name, stored in tensors.items()}


def _name(name: str) -> str:
    """A tensor's name in the modules here; unknown names stay."""
    match = ORIGINAL.fullmatch(name)
    if match is None:
        return name
    head, layer, linear, what = match.groups()
    return f"blocks.{head}.layers.{layer}.{what}" if linear else f"lm_heads.{head}.{what}"


# --------------------------------------------------------------------------------------------------------- medusa stage
# Medusa's heads as a stage: each predicts one token further from the target's newest state.


class MedusaStage(FeatureReader):
    """Implements ``stage.driver.Layers`` and ``Reader``. A row is only a place in the tree: the heads see no token.

    The candidates after a row come from the nearest node above it whose state has arrived, by the head for that
    distance:

        state of y:  y -> root -> a -> b        head 0 after the root, head 1 after a, head 2 after b, ...

    A row beyond the last head gets no answer; once the root has moved on, it can be asked about again.
    """

    def __init__(self, module: Any, reads: Sequence[int], width: int, capacity: int, dtype: str, device: str) -> None:
        super().__init__(module, reads, width, capacity, dtype, device)
        self._parent_of = np.full(capacity, -1, dtype=np.int64)

    def forget(self) -> None:
        super().forget()
        self._parent_of[:] = -1

    def forward(self, view: BatchView, hidden: None) -> Tensor:
        """Only note the rows' slots and parents: nothing has to be computed. Returns [N, 0]."""
        self.register(view)
        self._parent_of[view.slots] = view.parents
        return torch.empty(len(view), 0)

    @torch.inference_mode()
    def candidates(
        self, view: BatchView, hidden: Tensor, wanted: Sequence[int], samplings: Sequence[Sampling], count: int
    ) -> list[Candidates]:
        """``count`` noise-ranked candidates after each row in ``wanted`` that a head reaches."""
        # Rows that are answered by one head go through it together.
        by_head: dict[int, list[tuple[int, int, Sampling]]] = {}
        for row, sampling in zip(wanted, samplings, strict=True):
            head, slot = self._source(int(view.parents[row]))
            if slot >= 0:
                by_head.setdefault(head, []).append((row, slot, sampling))
        answers = []
        for head, asked in by_head.items():
            rows, slots, of_rows = zip(*asked, strict=True)
            logits_nV = self.module.head_logits(head, self.store.states(np.array(slots)))
            positions, nodes = view.positions[list(rows)] + 1, view.nodes[list(rows)]
            contexts = contexts_of(view, rows, of_rows, self.grammars)
            answers += rank_candidates(logits_nV, of_rows, positions.tolist(), nodes.tolist(), count, contexts)
        return answers

    def _source(self, slot: int) -> tuple[int, int]:
        """The head, and the slot whose state it reads, for a row with its parent in ``slot``; slot -1 if none fits."""
        for head in range(self.module.heads):
            if slot < 0:
                break
            at = np.array([slot])
            if self.store.has(at, self.nodes_in(at))[0]:
                return head, slot
            slot = int(self._parent_of[slot])
        return 0, -1


# ---------------------------------------------------------------------------------------------------- medusa checkpoint
# FasterDecoding's layout and vLLM's. A configuration is not needed.


@dataclass(frozen=True, kw_only=True)
class MedusaCheckpoint(SpeculatorCheckpoint):
    """``heads`` heads with ``layers`` layers each before their logits."""

    stage = MedusaStage
    fields = frozenset(
        {"num_heads", "num_layers", "medusa_num_heads", "medusa_num_layers", "truncated_vocab_size", "version"}
    )
    lent = frozenset()

    kind: Kind = "medusa"
    depth: int = 0
    heads: int
    layers: int

    @classmethod
    def recognises(cls, config: Mapping[str, Any], tensors: Tensors, target: Checkpoint) -> bool:
        return any(BLOCK.fullmatch(name) for name in _renamed(tensors))

    @classmethod
    def parse(cls, path: Path, config: Mapping[str, Any], tensors: Tensors, target: Checkpoint) -> Self:
        tensors = _renamed(tensors)
        found = [match.groups() for match in map(BLOCK.fullmatch, tensors) if match]
        heads, layers = (1 + max(int(pair[i]) for pair in found) for i in (0, 1))
        if heads * layers > MOST_BLOCKS:
            numbered = f"its tensors are numbered as of {heads} heads of {layers} layers"
            raise refusal(path, f"{numbered}; it holds {len(found)}")
        check_equal(path, "hidden_size", config.get("hidden_size"), target.hidden_size, "the target's")
        check_equal(path, "vocab_size", config.get("vocab_size"), target.vocab_size, "the target's")
        width = target.hidden_size
        draft_vocab = tensors["lm_heads.0.weight"].shape[0] if "lm_heads.0.weight" in tensors else target.vocab_size
        check_equal(path, "truncated_vocab_size", config.get("truncated_vocab_size"), draft_vocab, "its heads'")
        needed: dict[str, Any] = {f"lm_heads.{head}.weight": (draft_vocab, width) for head in range(heads)}
        names = [f"blocks.{head}.layers.{layer}" for head in range(heads) for layer in range(layers)]
        needed |= {f"{name}.weight": (width, width) for name in names}
        if "blocks.0.layers.0.bias" in tensors:
            needed |= {f"{name}.bias": (width,) for name in names}
        needed |= draft_vocabulary(path, tensors, "token_map", draft_vocab, target)
        return cls(
            path=path,
            reads=(target.num_layers,),
            hidden_size=width,
            draft_vocab_size=draft_vocab,
            tensors=check_shapes(path, tensors, needed, {}),
            heads=heads,
            layers=layers,
        )

    def build(self, material: Material) -> Medusa:
        bias = "blocks.0.layers.0.bias" in material.weights
        with torch.device("meta"):
            return Medusa(
                self.heads, self.layers, self.hidden_size, self.draft_vocab_size, material.vocabulary, bias=bias
            )
