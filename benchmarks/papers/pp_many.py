"""Tables 2 and 3 of the vLLM report with as many sequences at once as it has: throughput of 1,024, latency of four.

    python -m benchmarks.papers.pp_many

Simulated on the GPUs of ``pp_eagle_table``, over one, two, four and eight stages; all sequences are there from the
beginning. The four have the report's 256 tokens each, the many have 64. The synthetic drafter accepts as the report's
EAGLE-3 does on HumanEval, whose chains have an AL of 4.4. Tensor and data parallelism are left out.
"""

from __future__ import annotations

from statistics import fmean
from typing import Any

from benchmarks.papers.pp_eagle_table import CHAIN, cluster
from penstock.bench.entries import PLAIN, is_plain, parse_entries
from penstock.cluster import Cluster
from penstock.simulator.run import simulate_serving
from penstock.simulator.script import Script, profile_script

NAME, HOW = "pp_many", "Simulated, with a synthetic drafter"
SIZES = (1, 2, 4, 8)
MANY, FEW = 1024, 4
"""Sequences at once: the report's for throughput, and for latency."""
TOKENS_OF_MANY, TOKENS_OF_FEW = 64, 256
ACCURACY = (0.87, 0.93, 0.95, 0.96)
"""Chances that the target's token is among so many candidates; 0.87 for five tokens in a row is an AL of 4.4."""
ENTRIES = (PLAIN, CHAIN, "auto")
LOGITS_ROW_BYTES = 128256 * 2
"""Of Llama-3.1's vocabulary in bf16: what a row's way back weighs where the first stage samples and drafts."""


def measured() -> list[dict[str, Any]]:
    many = profile_script(ACCURACY, MANY, TOKENS_OF_MANY, seed=0)
    few = profile_script(ACCURACY, FEW, TOKENS_OF_FEW, seed=0)
    return [row(stages, entry, many, few) for stages in SIZES for entry in ENTRIES]


def row(stages: int, entry: str, many: Script, few: Script) -> dict[str, Any]:
    gpus = cluster(stages)
    together, alone = served(gpus, entry, many), served(gpus, entry, few)
    return {
        "stages": stages,
        "entry": entry,
        "throughput": MANY * TOKENS_OF_MANY / max(together),
        "latency": fmean(alone),
    }


def served(gpus: Cluster, entry: str, script: Script) -> list[float]:
    """How long each sequence took, in virtual seconds."""
    config = dict(parse_entries(ENTRIES, {"method": "synthetic", "accuracy": list(ACCURACY)}))[entry]
    runs = simulate_serving(gpus, script, None if is_plain(config) else config, len(script.picks))
    return [run.moments[-1] - run.queued for run in runs]


def logits_ms(stages: int) -> float:
    """What the logits of one row of each of the many sequences take from the last stage to the first."""
    gpus = cluster(stages)
    link = gpus.link(gpus.stages[-1].devices[-1], gpus.stages[0].devices[0])
    return 0.0 if link is None else 8 * MANY * LOGITS_ROW_BYTES / link.bandwidth_gbit_s / 1e6


if __name__ == "__main__":
    for one in measured():
        print(
            f"pp {one['stages']}  {one['entry']:52} TP {one['throughput']:9.1f}  Lat {one['latency']:.4f}", flush=True
        )
