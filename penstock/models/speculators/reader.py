"""The base of all learned drafters' stages: the target's features, and the nodes that hold the slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.core import ConfigError
from penstock.files import torch_dtype
from penstock.messages import Candidates, Features, SampledToken, Sampling
from penstock.models.attention import Arenas, Plan, SlotAttention, fast_attention
from penstock.models.quantized.linear import weight_bytes
from penstock.models.speculators.base import FeatureStore
from penstock.stage.grammar import GrammarMasks
from penstock.stage.sampler import contexts_of, rank_candidates
from penstock.stage.visibility import BatchView


class FeatureReader:
    """Part of ``stage.core.Layers``, and all of ``Reader``, for a module that reads states of ``width`` values each."""

    grammars: GrammarMasks | None = None
    """Grammars over the target's tokenizer; None if no request can have one."""

    def __init__(self, module: Any, reads: Sequence[int], width: int, capacity: int, dtype: str, device: str) -> None:
        self.module = module
        self.device = torch.device(device)
        self.dtype = torch_dtype(dtype)
        self.store = FeatureStore(reads, capacity, width, self.dtype, device)
        self._node_at = np.zeros(capacity, dtype=np.int64)

    @property
    def hidden_size(self) -> int:
        return int(self.module.hidden_size)

    @property
    def entering_width(self) -> int:
        return self.hidden_size

    @property
    def leaving_width(self) -> int:
        return self.hidden_size

    @property
    def kv_bytes(self) -> int:
        return 0

    @property
    def exact(self) -> bool:
        """Whether a row's bits are its own: nobody asks that of a drafter."""
        return False

    @property
    def weight_bytes(self) -> int:
        return weight_bytes(self.module)

    def forget(self) -> None:
        """Forget all rows, features and requests, as after loading."""
        self.store.forget()
        self._node_at[:] = 0
        if self.grammars is not None:
            self.grammars.forget_all()

    def add_features(self, features: Features, states: Tensor | None) -> None:
        self.store.add_features(features, states)

    def missing_features(self, awaited: set[tuple[int, int]]) -> set[tuple[int, int]]:
        return self.store.missing_features({node for node, _ in awaited})

    def pick(
        self, view: BatchView, hidden: Tensor, wanted: Sequence[int], samplings: Sequence[Sampling]
    ) -> list[SampledToken]:
        raise ConfigError("a learned drafter picks no tokens; it gives candidates")

    def features(self, hidden: Tensor) -> Tensor:
        raise ConfigError("nobody reads a drafter's features")

    def register(self, view: BatchView) -> None:
        """Note that the rows of this batch now hold their slots."""
        self._node_at[view.slots] = view.nodes

    def nodes_in(self, slots_N: np.ndarray) -> np.ndarray:
        """The node that holds each slot, [N]; meaningless for a slot below 0."""
        nodes: np.ndarray = self._node_at[slots_N]
        return nodes


class AttendingReader(FeatureReader):
    """A reader whose module attends over slots, and gives logits after every row."""

    def __init__(self, module: Any, reads: Sequence[int], width: int, capacity: int, dtype: str, device: str) -> None:
        super().__init__(module, reads, width, capacity, dtype, device)
        self._arenas = Arenas(capacity)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the arenas; 0 before the first row."""
        return self._arenas.bytes

    def forget(self) -> None:
        super().forget()
        self._arenas.zero()

    def attention(self, view: BatchView) -> SlotAttention:
        """The attention for the module's calls for these rows."""
        return fast_attention(self._arenas, Plan(view, self.device, in_place=True), self.dtype)

    @torch.inference_mode()
    def candidates(
        self, view: BatchView, hidden: Tensor, wanted: Sequence[int], samplings: Sequence[Sampling], count: int
    ) -> list[Candidates]:
        """``count`` noise-ranked candidates after each row in ``wanted``."""
        positions, nodes = view.positions[list(wanted)] + 1, view.nodes[list(wanted)]
        logits_nV = self.module.logits(hidden[list(wanted)])
        contexts = contexts_of(view, wanted, samplings, self.grammars)
        return rank_candidates(logits_nV, samplings, positions.tolist(), nodes.tolist(), count, contexts)
