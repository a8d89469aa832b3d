"""The target's hidden states in a learned drafter: stored by slot, each with the node that it belongs to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from penstock.messages import Features
from penstock.stage.visibility import FeaturesError


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
