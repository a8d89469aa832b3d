"""The cost of a draft tree in a gated delta net: its rows as one batch, and one after another; memory per row.

    python -m benchmarks.results --measure recurrent    # and python -m benchmarks.costs.recurrent only prints it

One layer with Qwen3.5-4B's widths and random weights in float32 runs after 100 committed tokens, on one thread. The
tree has 64 rows, and the parent of each is any of those before it. Both ways are measured in turn, and medians are
taken. Stop whatever else runs on the host.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any, Final

import numpy as np
import torch
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from benchmarks.shared.benchmark import show
from penstock.models.mixers import DeltaNet, MixerGroup, qwen3_5
from penstock.models.recurrent import FoldedState
from penstock.stage.visibility import BatchView, RequestView

NAME, HOW = "recurrent", "Measured, random weights, one thread"
CONTEXT: Final = 100
ROWS: Final = 64
HIDDEN: Final = 2560
REPEATS: Final = 15
KV_NUMBERS: Final = 2 * 4 * 256
"""Numbers in keys and values of one row in one of the model's layers with attention."""


def layer() -> DeltaNet:
    config = Qwen3_5TextConfig(
        hidden_size=HIDDEN,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
    )
    torch.manual_seed(0)
    group = MixerGroup(CONTEXT + ROWS, torch.device("cpu"), FoldedState)
    mixer = DeltaNet(Qwen3_5GatedDeltaNet(config, 0), group, qwen3_5)
    group.members.append(mixer)
    return mixer


def ancestors() -> np.ndarray:
    """[ROWS, ROWS] True where a row sees another of the tree, or itself."""
    rng = np.random.default_rng(0)
    sees = np.eye(ROWS, dtype=bool)
    for row in range(1, ROWS):
        parent = rng.integers(-1, row)
        if parent >= 0:
            sees[row] |= sees[parent]
    return sees


def view(rows: Sequence[int], sees: np.ndarray) -> BatchView:
    """The batch of these rows of the tree."""
    own = np.asarray(rows)
    depth = sees.sum(axis=1) - 1
    slots = np.arange(CONTEXT + ROWS)
    positions = np.concatenate([np.arange(CONTEXT), CONTEXT + depth])
    mask = np.concatenate([np.ones((len(own), CONTEXT), dtype=bool), sees[own]], axis=1)
    request = RequestView(0, np.arange(len(own)), slots, positions, mask, CONTEXT)
    at = CONTEXT + own
    return BatchView(own * 0, own, at, positions[at], own * 0, [request], at - 1)


def context_view() -> BatchView:
    order = np.arange(CONTEXT)
    request = RequestView(0, order, order, order, np.tri(CONTEXT, dtype=bool), CONTEXT)
    return BatchView(order * 0, order, order, order, order * 0, [request], order - 1)


def seconds_of(mixer: DeltaNet, batches: Sequence[BatchView], hidden_1ND: torch.Tensor) -> float:
    begun = time.perf_counter()
    for batch in batches:
        mixer.group.begin(batch)
        mixer(hidden_1ND[:, batch.nodes])
    return time.perf_counter() - begun


@torch.inference_mode()
def measured() -> dict[str, Any]:
    """Milliseconds of the rows as one batch and one by one; bytes of a row beside those of keys and values."""
    torch.set_num_threads(1)
    mixer, sees = layer(), ancestors()
    mixer.group.begin(context_view())
    mixer(torch.randn(1, CONTEXT, HIDDEN))
    measure = partial(seconds_of, mixer, hidden_1ND=torch.randn(1, ROWS, HIDDEN))
    together, apart = [view(range(ROWS), sees)], [view([row], sees) for row in range(ROWS)]
    pairs = [(measure(together), measure(apart)) for _ in range(REPEATS)]
    batch, single = (1e3 * median(times) for times in zip(*pairs, strict=True))
    row = mixer.bytes / (CONTEXT + ROWS + 1)
    return {"rows": ROWS, "batch_ms": batch, "single_ms": single, "row_bytes": row, "kv_bytes": 4 * KV_NUMBERS}


if __name__ == "__main__":
    show(measured())
