"""A profile of devices that are not there, from their prices in a cluster file."""

from __future__ import annotations

from penstock.cluster.measured import LayerTimes
from penstock.cluster.prices import ModelPrice
from penstock.cluster.spec import Cluster, Device
from penstock.cluster.timing import chunk, stage_part
from penstock.engine.profile.measure import CONTEXTS, ROWS
from penstock.planner.costs import candidates


def times_by_price(cluster: Cluster) -> dict[str, LayerTimes]:
    """Layer times by device. Raises FieldError for a device with times for its own layers only."""
    model = cluster.as_model
    assert model is not None
    return {device.name: times_on(device, model, cluster.time_scale) for device in candidates(cluster)}


def times_on(device: Device, model: ModelPrice, time_scale: float) -> LayerTimes:
    """The device's times of a layer within a stage of many, of a stage beside its layers, and of the head."""
    many = max(2, model.layers)

    def stage_ms(layers: int, rows: int, context: int, *, head: bool = False) -> float:
        return 1e3 * stage_part(device, model, layers, time_scale, head=head).seconds(rows, chunk(rows, context))

    def layer_ms(rows: int, context: int) -> float:
        # The difference of a long and a short stage leaves out the fixed time of a batch.
        return (stage_ms(many, rows, context) - stage_ms(1, rows, context)) / (many - 1)

    return LayerTimes(
        rows=ROWS,
        contexts=CONTEXTS,
        layer_ms=tuple(tuple(layer_ms(rows, context) for context in CONTEXTS) for rows in ROWS),
        stage_ms=tuple(max(0.0, stage_ms(1, rows, 0) - layer_ms(rows, 0)) for rows in ROWS),
        head_ms=tuple(max(0.0, stage_ms(1, rows, 0, head=True) - stage_ms(1, rows, 0)) for rows in ROWS),
    )
