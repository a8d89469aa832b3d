"""What a device has to hold: weights, the KV cache, the activations of a batch, and a drafter beside them."""

from __future__ import annotations

from typing import Final, NamedTuple

from penstock.cluster.prices import ModelPrice
from penstock.cluster.spec import Cluster, Device
from penstock.config import FieldError

BATCH_ROWS: Final = 512
"""Rows of the largest batch: a piece of a prompt."""
ROW_STATES: Final = 16
"""Hidden states that a row needs in a layer: the residual, its norm, queries to values, the feed-forward's 2 x 3.5."""


class Held(NamedTuple):
    """Bytes on one device."""

    weights: float
    cache: float
    activations: float

    @property
    def total(self) -> float:
        return sum(self)

    def __add__(self, other: object) -> Held:
        """Both on one device: their activations are never there at the same time."""
        assert isinstance(other, Held)
        return Held(self.weights + other.weights, self.cache + other.cache, max(self.activations, other.activations))


def held_by(model: ModelPrice, layers: int, kv_slots: int, *, embedding: bool, head: bool) -> Held:
    """So many layers of a model, with the KV of ``kv_slots`` tokens; the embedding and the head where they are."""
    return Held(
        weights=model.weight_bytes(layers, head=head) + (model.embedding_bytes if embedding else 0.0),
        cache=kv_slots * model.slot_bytes(layers),
        activations=BATCH_ROWS * ROW_STATES * model.row_bytes,
    )


def check_memory(cluster: Cluster, model: ModelPrice) -> None:
    """Raise FieldError naming the device that cannot hold what it is to, with the numbers.

    A drafter, an embedding of its own included, counts on the device that holds it beside a stage's layers.
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
