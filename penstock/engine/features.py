"""What features weigh on their way: the hidden states that stages send a learned drafter."""

from __future__ import annotations

from penstock.dtypes import DTYPE_BYTES
from penstock.engine.build import tapped_layers
from penstock.engine.resolve import Resolved


def feature_bytes(setup: Resolved) -> list[float]:
    """Bytes that each stage sends the drafter for a row, without headers; those of the emulated model where one is.

    0 throughout where nobody reads features.
    """
    if setup.speculator is None:
        return [0.0] * setup.stages
    state = float(setup.checkpoint.hidden_size * DTYPE_BYTES[setup.options.dtype])
    if setup.cluster is not None and setup.cluster.as_model is not None:
        state = setup.cluster.as_model.row_bytes
    return [len(layers) * state for layers in tapped_layers(setup.layers, setup.speculator.reads)]
