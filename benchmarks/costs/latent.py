"""The cost of multi-head latent attention by the contents of its cache: latents, or keys and values made of them.

    python -m benchmarks.results --measure latent    # and python -m benchmarks.costs.latent only prints it

One attention layer with DeepSeek-V2-Lite's widths (16 heads) and random weights in float32 runs on one thread. A number
of rows of a text is added after a number of earlier ones. Both ways are measured in turn, and medians are taken. Stop
whatever else runs on the host.
"""

from __future__ import annotations

import time
from copy import deepcopy
from statistics import median
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from benchmarks.shared.benchmark import show
from penstock.models.attention import ATTENTION, Arenas, Plan, attending, fast_attention, plug_in
from penstock.models.carried import Latent, LatentAttention, keep_latents
from penstock.stage.visibility import BatchView, RequestView

NAME, HOW = "latent", "Measured, random weights, one thread"
REPEATS: Final = 9
CASES: Final = [(1, 200), (1, 2000), (1, 8000), (16, 2000), (64, 2000), (256, 2000), (512, 2000)]
"""Numbers of rows, and of the slots before them."""
MOST: Final = 8600


def layer() -> Any:
    config = DeepseekV3Config(
        hidden_size=2048,
        num_attention_heads=16,
        num_key_value_heads=16,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        attn_implementation=ATTENTION,
    )
    torch.manual_seed(0)
    return DeepseekV3Attention(config, 0)


def view(rows: int, slots: int) -> BatchView:
    own, order = np.arange(rows), np.arange(slots + rows)
    request = RequestView(0, own, order, order, order[None, :] <= slots + own[:, None], slots)
    at = slots + own
    return BatchView(own * 0, own, at, at, own * 0, [request], at - 1)


class Way:
    """The layer with a cache of its own."""

    def __init__(self, attention: Any, latents: dict[int, Latent]) -> None:
        self._attention, self._latents = attention, latents
        self.arenas = Arenas(MOST)

    def seconds(self, hidden_1ND: torch.Tensor, batch: BatchView) -> float:
        attend: Any = fast_attention(self.arenas, Plan(batch, torch.device("cpu"), in_place=True), torch.float32)
        rows = len(batch)
        turned = torch.ones(1, rows, 64), torch.zeros(1, rows, 64)
        begun = time.perf_counter()
        with attending(LatentAttention(attend, self._latents) if self._latents else attend):
            self._attention(hidden_1ND[:, :rows], turned, None)
        return time.perf_counter() - begun


@torch.inference_mode()
def measured() -> dict[str, Any]:
    """Milliseconds by case, and bytes of a row, of keys and values and of latents."""
    torch.set_num_threads(1)
    plug_in()
    whole, compressed = layer(), layer()
    compressed.load_state_dict(deepcopy(whole.state_dict()))
    ways = Way(whole, {}), Way(compressed, keep_latents([SimpleNamespace(self_attn=compressed)]))
    hidden_1ND = torch.randn(1, 512, 2048)
    cases = []
    for rows, slots in CASES:
        batch = view(rows, slots)
        pairs = [[way.seconds(hidden_1ND, batch) for way in ways] for _ in range(REPEATS + 1)][1:]
        one, other = (1e3 * median(times) for times in zip(*pairs, strict=True))
        cases.append({"rows": rows, "slots": slots, "expanded_ms": one, "latent_ms": other})
    expanded, latents = (way.arenas.bytes / MOST for way in ways)
    return {"cases": cases, "expanded_bytes": expanded, "latent_bytes": latents}


if __name__ == "__main__":
    show(measured())
