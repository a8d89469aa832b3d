"""A small emulated cluster whose times can be worked out in one's head (see test_timing.py)."""

from __future__ import annotations

from typing import Any

KIND = {"memory_gb": 10, "weight_bandwidth_gb_s": 100, "compute_tflops": 1, "overhead_ms": 1}
MODEL = {
    "layers": 6,
    "hidden_size": 1000,
    "layer_parameters": 500_000_000,
    "head_parameters": 250_000_000,
    "embedding_parameters": 250_000_000,
}
EMULATED: dict[str, Any] = {
    "name": "two-boxes",
    "as_model": MODEL,
    "draft_as_model": "llama-160m-fp16",
    "drafter": "d",
    "kinds": {"gpu": KIND},
    "devices": [
        {"name": "a1", "host": "a", "kind": "gpu"},
        {"name": "a2", "host": "a", "kind": "gpu"},
        {"name": "b1", "host": "b", "kind": "gpu"},
        {"name": "d", "host": "b", "kind": "gpu"},
    ],
    "stages": [{"devices": ["a1"]}, {"devices": ["a2", "b1"]}],
    "links": {
        "local": {"bandwidth_gbit_s": 80, "latency_ms": 0.01},
        "network": {"bandwidth_gbit_s": 8, "latency_ms": 0.1},
    },
}
