"""Memory that a device needs: weights, the KV cache, the activations of a batch, and a drafter beside them."""

from __future__ import annotations

from typing import Final, NamedTuple

from penstock.cluster.prices import ModelPrice
from penstock.cluster.spec import Cluster, Device
from penstock.config import FieldError

BATCH_ROWS: Final = 512
"""Rows of the largest batch: a piece of a prompt."""
ROW_STATES: Final = 16
"""Memory of a row in a layer, in hidden states: residual, norm, queries to values, and 2 x 3.5 of the feed-forward."""


class Held(NamedTuple):
    """Bytes that one device holds."""

    weights: float
    cache: float
    activations: float

    @property
    def total(self) -> float:
        return sum(self)

    def __add__(self, other: object) -> Held:
        """Both on one device, where the activations of only one are there at a time."""
        assert isinstance(other, Held)
        return Held(self.weights + other.weights, self.cache + other.cache, max(self.activations, other.activations))


def held_by(model: ModelPrice, layers: int, kv_slots: int, *, embedding: bool, head: bool) -> Held:
    """Bytes of ``layers`` layers of a model with the KV of ``kv_slots`` tokens, and of embedding and head if stated."""
    return Held(
        weights=model.weight_bytes(layers, head=head) + (model.embedding_bytes if embedding else 0.0),
        cache=kv_slots * model.slot_bytes(layers),
        activations=BATCH_ROWS * ROW_STATES * model.row_bytes,
    )


def check_memory(cluster: Cluster, model: ModelPrice) -> None:
    """Raise FieldError, with the numbers, naming the first device whose memory does not suffice.

    A drafter, with an embedding of its own, counts on the device that holds it, beside a stage's layers.
    """
    draft = cluster.draft_as_model
    drafting = None
    if draft is not None:
        drafting = held_by(draft, draft.layers, cluster.kv_slots, embedding=True, head=True)
    last = cluster.stages[-1].devices[-1]
    for i, stage in enumerate(cluster.stages):
        for j, (name, layers) in enumerate(zip(stage.devices, stage.layers, strict=True)):
            held = held_by(model, layers, cluster.kv_slots, embedding=i == j == 0, head=name == last)
            where = f"stages[{i}].devices[{j}]"
            check_fits(where, cluster.device(name), held, f"its {layers} layers", cluster.kv_slots)
            if drafting is not None and name == cluster.drafter:
                what = f"{layers} layers and the draft model"
                check_fits("drafter", cluster.device(name), held + drafting, what, cluster.kv_slots)
    if drafting is not None and cluster.drafter is not None and cluster.drafting_stage is None:
        check_fits("drafter", cluster.device(cluster.drafter), drafting, "the draft model", cluster.kv_slots)


def check_fits(where: str, device: Device, held: Held, what: str, kv_slots: int) -> None:
    if device.memory_gb is not None and held.total > device.memory_gb * 1e9:
        parts = f"weights {held.weights / 1e9:.2f}, {kv_slots} tokens of KV {held.cache / 1e9:.2f}"
        numbers = f"{held.total / 1e9:.2f} GB for {what} ({parts}, activations {held.activations / 1e9:.2f})"
        remedy = "give it fewer layers or lower kv_slots"
        raise FieldError(where, f"({device.name!r}) would need {numbers}; it has {device.memory_gb:g} GB: {remedy}")
