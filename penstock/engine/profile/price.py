"""A checkpoint's price list, from the sizes of its tensors: memory and arithmetic of its layers, bytes of a row."""

from __future__ import annotations

from penstock.cluster.prices import ModelPrice
from penstock.dtypes import DTYPE_BYTES
from penstock.engine.places.footprint import WHOLE_NUMBERS, attending, kv_width, numbers_by_part
from penstock.engine.resolve import Resolved


def price_of(setup: Resolved) -> ModelPrice:
    """The price list of the target as it is held. A layer is the mean of all; its weights set its arithmetic."""
    checkpoint, number = setup.checkpoint, DTYPE_BYTES[setup.options.dtype]
    numbers = numbers_by_part(checkpoint.weights.sizes())
    embedding, rest = numbers.get("embedding", 0), numbers.get("rest", 0)
    layers, config = checkpoint.num_layers, checkpoint.config
    keeping = sum(attending(config, layers)) / layers
    width = kv_width(config)
    return ModelPrice(
        layers=layers,
        hidden_size=checkpoint.hidden_size,
        layer_parameters=max(1, sum(numbers.get(i, 0) for i in range(layers)) // layers),
        head_parameters=max(rest, embedding),
        embedding_parameters=embedding,
        bytes_per_parameter=WHOLE_NUMBERS.get(setup.quantization, float(number)),
        activation_bytes=float(number),
        key_value_size=width,
        cache_bytes=number * keeping if keeping else None,
    )
