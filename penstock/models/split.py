"""The layers of each stage: split evenly, or as the user writes."""

from __future__ import annotations

from penstock.core import ConfigError


def even_split(num_layers: int, stages: int, head_layers: float = 1.0) -> list[tuple[int, int]]:
    """Split ``num_layers`` into ``stages`` ranges [first, last) of nearly equal work.

    The last stage also holds the head, which weighs as much as ``head_layers`` layers. Stages get no layer only where
    there are too few, or where the head alone outweighs a fair share.
    """
    if stages < 1:
        raise ConfigError(f"pipeline_parallel_size is {stages}; it has to be at least 1")
    fair = (num_layers + head_layers) / stages
    # The head takes its share of the last stage's work, but leaves it a layer where there are enough.
    last = num_layers if stages == 1 else min(num_layers, max(0, round(fair - head_layers)))
    last = max(last, min(1, num_layers // stages))
    counts = [last]
    # Filled from the back with rounded-down shares, so that the first stages get what remains.
    for left in range(stages - 1, 0, -1):
        counts.insert(0, (num_layers - sum(counts)) // left)
    return _ranges(counts)


def parse_layer_split(text: str, num_layers: int) -> list[tuple[int, int]]:
    """Read a split like "4,6,6": the number of layers of each stage. Raises ConfigError unless it adds up."""
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"layer_split is {text!r}; it has to be numbers of layers like '4,6,6'") from None
    if any(count < 0 for count in counts):
        raise ConfigError(f"layer_split is {text!r}; a stage cannot hold a negative number of layers")
    if sum(counts) != num_layers:
        raise ConfigError(f"layer_split {text!r} adds up to {sum(counts)} layers; the model has {num_layers}")
    return _ranges(counts)


def _ranges(counts: list[int]) -> list[tuple[int, int]]:
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return list(zip([0, *ends[:-1]], ends, strict=True))
