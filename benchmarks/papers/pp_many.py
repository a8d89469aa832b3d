"""Tables 2 and 3 of the vLLM report with as many sequences at once as it has: throughput of 1,024, latency of four.

    python -m benchmarks.papers.pp_many

Simulated on the GPUs of ``pp_eagle_table``, over one, two, four and eight stages; all sequences are there from the
beginning and have the report's 256 tokens each. The synthetic drafter accepts as the report's EAGLE-3 does on
HumanEval, whose chains have an AL of 4.4. Tensor and data parallelism are left out.

The report's other place for the drafter (section 3.4) is the first stage, with the sampler: there each result brings
its rows' logits back from the last stage, and the states that EAGLE-3 reads.
"""

from __future__ import annotations

from statistics import fmean
from typing import Any, Final

import msgspec

from benchmarks.papers.pp_eagle_table import CHAIN, LLAMA_8B, VOCABULARY, cluster
from benchmarks.shared.benchmark import show
from penstock.cluster import Cluster
from penstock.cluster.timing import link_timings
from penstock.emulation.device import LinkModel
from penstock.lab.grid import PLAIN, is_plain, parse_entries
from penstock.lab.script import Script, profile_script
from penstock.lab.simulator import simulate_serving
from penstock.messages import Message, Result

NAME, HOW = "pp_many", "Simulated, with a synthetic drafter"
SIZES = (1, 2, 4, 8)
MANY, FEW = 1024, 4
"""Concurrent sequences in the report: for throughput, and for latency."""
TOKENS = 256
ACCURACY = (0.87, 0.93, 0.95, 0.96)
"""Chance that the target's token is among the first 1, 2, ... candidates; 0.87 for each of five tokens
is an AL of 4.4."""
ENTRIES = (PLAIN, CHAIN, "auto")
RETURNED_ROW_BYTES: Final = 2 * (VOCABULARY + 3 * LLAMA_8B.hidden_size)
"""Bytes that return per row where the first stage samples and drafts: logits and three layers' states in bf16."""


class ReturnTrip(LinkModel):
    """The link from the last stage to a sampler on the first, which carries logits and states, and not just a token's
    id."""

    def __init__(self, gpus: Cluster) -> None:
        super().__init__(msgspec.structs.replace(link_timings(gpus)[-1], row_bytes=RETURNED_ROW_BYTES))

    def sending(self, message: Message, rows: int = 0) -> float:
        assert isinstance(message, Result)
        return super().sending(message, len(message.picks))


def measured() -> list[dict[str, Any]]:
    many, few = (profile_script(ACCURACY, requests, TOKENS, seed=0) for requests in (MANY, FEW))
    rows = [row(stages, "last", entry, many, few) for stages in SIZES for entry in ENTRIES]
    return rows + [row(stages, "first", CHAIN, many, few) for stages in SIZES[1:]]


def row(stages: int, drafter: str, entry: str, many: Script, few: Script) -> dict[str, Any]:
    """One row; ``drafter`` is the drafter's stage, the first or the last."""
    together, alone = (served(stages, drafter, entry, script) for script in (many, few))
    return {
        "stages": stages,
        "drafter": drafter,
        "entry": entry,
        "throughput": MANY * TOKENS / max(together),
        "latency": fmean(alone),
    }


def served(stages: int, drafter: str, entry: str, script: Script) -> list[float]:
    """Virtual seconds that each sequence took."""
    config = dict(parse_entries(ENTRIES, {"method": "synthetic", "accuracy": list(ACCURACY)}))[entry]
    gpus = cluster(stages, drafter=0 if drafter == "first" else -1)
    results = ReturnTrip(gpus) if drafter == "first" else None
    runs = simulate_serving(gpus, script, None if is_plain(config) else config, len(script.picks), results)
    return [run.moments[-1] - run.queued for run in runs]


if __name__ == "__main__":
    show(measured())
