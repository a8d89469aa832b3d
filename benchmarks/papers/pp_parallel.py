"""Table 3 of the vLLM report, predicted: data, pipeline and tensor parallelism over the eight H100 of one server.

    python -m benchmarks.papers.pp_parallel

Every row of the table, simulated by the prices of tensor parallel stages before an engine runs any, with chains of
five drafted tokens. The GPUs and links are those of the preset two-servers, whose overhead is fitted to the report's
Table 2. Data parallel replicas share the sequences evenly and nothing else: what the report says of their contention
for processors is left out.

Latency is of four sequences of 256 tokens, as the report's; throughput of 1,024 sequences of 32 tokens, because so many
fill every stage from the first step on. The synthetic drafters accept as the report's do on HumanEval: EAGLE-3 of the
8B has an AL of 4.4 there, EAGLE-1 of the 70B one of 2.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from statistics import fmean
from typing import Any, Final

from benchmarks.papers.pp_eagle_table import CHAIN, LLAMA_8B, cluster
from benchmarks.papers.pp_many import ACCURACY, FEW, MANY
from benchmarks.shared.benchmark import show
from penstock.cluster.spec import PRICES, ModelPrice
from penstock.core import ConfigError
from penstock.lab.grid import parse_entries
from penstock.lab.script import profile_script
from penstock.lab.simulator import simulate_serving

NAME, HOW = "pp_parallel", "Simulated, with synthetic drafters"
TOKENS_FOR_THROUGHPUT, TOKENS_FOR_LATENCY = 32, 256
Way = tuple[int, int, int]
"""Data parallel replicas, pipeline stages, tensor parallel ranks of a stage."""
MODELS: Final[Mapping[str, ModelPrice]] = {"70B": PRICES["llama-3.1-70b-bf16"], "8B": LLAMA_8B}
ACCURACIES: Final[Mapping[str, tuple[float, ...]]] = {"70B": (0.585, 0.7, 0.76, 0.8), "8B": ACCURACY}
"""Chance that the target's token is among the first 1, 2, ... candidates. 0.585 for each of five tokens is an AL of
1 + 0.585 + ... + 0.585^5 = 2.31."""
WAYS: Final[Mapping[str, tuple[Way, ...]]] = {
    "70B": ((1, 1, 8), (1, 2, 4), (1, 4, 2), (1, 8, 1), (2, 1, 4), (2, 2, 2), (2, 4, 1), (4, 1, 1)),
    "8B": (
        *((1, 1, 1), (1, 1, 2), (1, 1, 4), (1, 1, 8), (1, 2, 1), (1, 2, 2), (1, 2, 4), (1, 4, 1), (1, 4, 2), (1, 8, 1)),
        *((2, 1, 1), (2, 1, 2), (2, 1, 4), (2, 2, 1), (2, 2, 2), (2, 4, 1), (4, 1, 1), (4, 1, 2), (4, 2, 1), (8, 1, 1)),
    ),
}
"""Table 3's rows in its order; the 8B's first one stands in Table 2."""


def measured() -> list[dict[str, Any]]:
    rows = [(model, way) for model, ways in WAYS.items() for way in ways]
    with ProcessPoolExecutor(2) as pool:
        return list(pool.map(predicted, *zip(*rows, strict=True)))


def predicted(model: str, way: Way) -> dict[str, Any]:
    """One row: tokens per second, and seconds of a sequence; or the reason why the model does not fit."""
    dp, pp, tp = way
    found: dict[str, Any] = {"model": model, "dp": dp, "pp": pp, "tp": tp}
    try:
        cluster(pp, ranks=tp, model=MODELS[model])
    except ConfigError as error:
        return {**found, "refused": str(error)}
    # A replica serves its share; with fewer sequences than replicas one of them serves one.
    together = served(model, pp, tp, MANY // dp, TOKENS_FOR_THROUGHPUT)
    alone = served(model, pp, tp, -(-FEW // dp), TOKENS_FOR_LATENCY)
    return {**found, "throughput": MANY * TOKENS_FOR_THROUGHPUT / max(together), "latency": fmean(alone)}


def served(model: str, pp: int, tp: int, sequences: int, tokens: int) -> list[float]:
    """Virtual seconds that each sequence took on one replica."""
    accuracy = ACCURACIES[model]
    script = profile_script(accuracy, sequences, tokens, seed=0)
    ((_, config),) = parse_entries((CHAIN,), {"method": "synthetic", "accuracy": list(accuracy)})
    runs = simulate_serving(cluster(pp, ranks=tp, model=MODELS[model]), script, config, sequences)
    return [run.moments[-1] - run.queued for run in runs]


if __name__ == "__main__":
    show(measured())
