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
from penstock.stage.grammar import GrammarMasks
from penstock.stage.sampler import contexts_of, rank_candidates
from penstock.stage.visibility import BatchView, FeaturesError

# ------------------------------------------------------------------------------------------------------------- features
# The target's hidden states in a learned drafter: stored by slot, each with the node that it belongs to.


class FeatureStore:
    """States of the layers in ``reads``, each ``width`` wide, for ``capacity`` slots.

    Slots are the target's, and reused: a state counts only for the node that it came with. A drafter for a target with
    few layers may read one of them twice; it is sent and stored once.
    """

    def __init__(self, reads: Sequence[int], capacity: int, width: int, dtype: torch.dtype, device: str) -> None:
        self.layers = list(dict.fromkeys(reads))
        self._width = width
        self._places = torch.tensor([self.layers.index(layer) for layer in reads], device=device)
        self._states_SLD = torch.zeros(capacity, len(self.layers), width, dtype=dtype, device=device)
        self._owner_LS = np.zeros((len(self.layers), capacity), dtype=np.int64)
        self._nodes: list[set[int]] = [set() for _ in self.layers]

    def forget(self) -> None:
        """Forget all states."""
        self._states_SLD.zero_()
        self._owner_LS[:] = 0
        for known in self._nodes:
            known.clear()

    def add_features(self, features: Features, states: Tensor | None) -> None:
        """Store what a stage of the target has sent; ``states`` is [rows, layers x width], None without rows.

        Raises FeaturesError for layers, widths or slots that are not this drafter's.
        """
        if states is None:
            return
        width = states.shape[1]
        if not set(features.layers) <= set(self.layers) or width != len(features.layers) * self._width:
            raise FeaturesError(
                f"features of layers {features.layers}, {width} wide, came where {self.layers} of {self._width} each "
                "are read"
            )
        slots = np.asarray(features.slots, dtype=np.int64)
        if len(slots) and not 0 <= slots.min() <= slots.max() < len(self._states_SLD):
            raise FeaturesError(f"features name a slot outside the {len(self._states_SLD)} of this drafter")
        for i, layer in enumerate(features.layers):
            place = self.layers.index(layer)
            self._states_SLD[torch.from_numpy(slots), place] = states[:, i * self._width : (i + 1) * self._width]
            # The nodes that held these slots before have lost their states.
            self._nodes[place].difference_update(self._owner_LS[place, slots].tolist())
            self._nodes[place].update(features.nodes)
            self._owner_LS[place, slots] = features.nodes

    def missing_features(self, nodes: set[int]) -> set[tuple[int, int]]:
        """The states of these nodes that have not arrived, as (node, layer)."""
        here = zip(self.layers, self._nodes, strict=True)
        return {(node, layer) for layer, known in here for node in nodes - known}

    def has(self, slots_N: np.ndarray, nodes_N: np.ndarray) -> np.ndarray:
        """Whether all states of each node are here, bool [N]; False for a slot below 0."""
        held: np.ndarray = (self._owner_LS[:, slots_N] == nodes_N).all(axis=0) & (slots_N >= 0)
        return held

    def states(self, slots_N: np.ndarray) -> Tensor:
        """The states in these slots, side by side in the order in which they are read, [N, F]."""
        return self._states_SLD[torch.from_numpy(slots_N)][:, self._places].flatten(1)


# --------------------------------------------------------------------------------------------------------------- reader
# The parts of the stage core's interface that all kinds share.


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
