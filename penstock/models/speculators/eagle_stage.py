"""EAGLE's modules and MTP heads behind the stage core's interface: rows and the target's features to candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.core import ConfigError
from penstock.models.speculators.reader import AttendingReader
from penstock.stage.visibility import BatchView, RequestView


class EagleStage(AttendingReader):
    """A module over slots whose rows are a token and a feature each; implements ``stage.core.Layers`` and ``Reader``.

    A row is a token and the feature of its parent: the target's if it has arrived, else the module's own output for the
    parent's row. Rows whose parents are in the same batch therefore wait for them, level by level; where the target's
    features are there, as for a prompt, all rows go together. As in EAGLE's own code a token at position p is rotated
    by p - 1, and the very first token, which has no predecessor, is seen by no other.
    """

    def __init__(self, module: Any, reads: Sequence[int], width: int, capacity: int, dtype: str, device: str) -> None:
        super().__init__(module, reads, width, capacity, dtype, device)
        self._own_SD = torch.zeros(capacity, module.hidden_size, dtype=self.dtype, device=device)
        self._own_node = np.zeros(capacity, dtype=np.int64)

    def forget(self) -> None:
        super().forget()
        self._own_SD.zero_()
        self._own_node[:] = 0

    @torch.inference_mode()
    def forward(self, view: BatchView, hidden: None) -> Tensor:
        """Compute the rows; store their keys, values and the module's output [N, D]."""
        self.register(view)
        output_ND = self._own_SD.new_zeros(len(view), self.hidden_size)
        left = np.arange(len(view))
        while len(left):
            ready = left[self._has_feature(view, left)]
            if not len(ready):
                raise ConfigError("a drafter's row came before its parent's")
            output_ND[torch.from_numpy(ready)] = self._level(subset(view, ready))
            left = np.setdiff1d(left, ready, assume_unique=True)
        return output_ND

    def _has_feature(self, view: BatchView, rows: np.ndarray) -> np.ndarray:
        parents = view.parents[rows]
        nodes = self.nodes_in(parents)
        there: np.ndarray = (parents < 0) | self.store.has(parents, nodes) | (self._own_node[parents] == nodes)
        return there

    def _level(self, view: BatchView) -> Tensor:
        nodes = self.nodes_in(view.parents)
        true = self.store.has(view.parents, nodes)
        feature_ND = self._own_SD[torch.from_numpy(view.parents)]
        # A row without a parent has read the last slot (index -1); its feature is zero.
        feature_ND[torch.from_numpy(view.parents < 0)] = 0
        if true.any():
            rows = torch.from_numpy(np.flatnonzero(true))
            feature_ND[rows] = self.module.fuse(self.store.states(view.parents[true])).to(feature_ND.dtype)
        seen = replace(view, views=[blind(request) for request in view.views])
        attend = self.attention(seen)
        tokens_N = torch.from_numpy(view.tokens).to(self.device)
        positions_N = torch.from_numpy(np.maximum(view.positions - 1, 0)).to(self.device)
        output_ND: Tensor = self.module(tokens_N, feature_ND, positions_N, attend)
        slots = torch.from_numpy(view.slots)
        self._own_SD[slots] = output_ND
        self._own_node[view.slots] = view.nodes
        return output_ND


def subset(view: BatchView, rows: np.ndarray) -> BatchView:
    """Some of a batch's rows, in order, with the slots that they see."""
    if len(rows) == len(view):
        return view
    place = np.full(len(view), -1, dtype=np.int64)
    place[rows] = np.arange(len(rows))
    views = []
    for request in view.views:
        kept = place[request.rows] >= 0
        if kept.any():
            seen = request.mask[kept].any(axis=0)
            part = place[request.rows[kept]]
            views.append(
                RequestView(
                    request.request, part, request.slots[seen], request.positions[seen], request.mask[kept][:, seen]
                )
            )
    return BatchView(
        view.requests[rows],
        view.nodes[rows],
        view.slots[rows],
        view.positions[rows],
        view.tokens[rows],
        views,
        view.parents[rows],
    )


def blind(view: RequestView) -> RequestView:
    """The view with the row at position 0 hidden from all others, since it has no feature."""
    mask = view.mask.copy()
    others = mask.sum(axis=1) > 1
    mask[np.ix_(others, view.positions == 0)] = False
    return RequestView(view.request, view.rows, view.slots, view.positions, mask)
