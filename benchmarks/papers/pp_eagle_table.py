"""The shape of Table 2 of "Pipeline parallelism with speculative decoding based on vLLM" (Zhao and Tong).

    python -m benchmarks.papers.pp_eagle_table --eagle DIR --eagle3 DIR [--prompts 10] [--tokens 64]

One, two and four H100 of one server with Llama-3.1-8B in bf16 evenly over them: without a drafter, and with EAGLE-1
and EAGLE-3 on the last stage's GPU (section 3.4), a chain of five tokens drafted and verified by turns, as vLLM does;
beside it `auto`. T = 0 (Table 1). The GPUs are those of the preset two-servers, whose numbers come from that report.

Real tokens of the demo target in virtual time, one request at a time: the report has a thousand at once for its
throughput and four for its latency (``pp_many``). It does not say how long its chains are, and AR and AL fit no one
length: (AL - 1) / AR, which would be it, is 3.6 for EAGLE-1 on MT-Bench and 5.2 for EAGLE-3 on HumanEval. Ours are
five, between the 4.7 and the 5.2 of HumanEval. ``benchmarks.drafters.like_for_like`` trains both drafters on the same
tokens.

Each row is written to benchmarks/measured/papers/pp_eagle_table.json as it finishes. What is there is not run again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

from benchmarks.shared import virtual
from penstock.cluster import Cluster, load_cluster
from penstock.cluster.spec import ModelPrice, eagle, llama
from penstock.lab.bench.summary import StrategyRun
from penstock.lab.grid import PLAIN

NAME = "pp_eagle_table"
SIZES = (1, 2, 4)
METHODS = ("eagle", "eagle3")
CHAIN = "static_tree[tree_size=5,tree_depth=5,children=1]"
ENTRIES = (PLAIN, CHAIN, "auto")
VOCABULARY = 128256
LLAMA_8B = llama(
    layers=32, hidden=4096, intermediate=14336, key_value=1024, key_value_heads=8, vocabulary=VOCABULARY, bits=16
)
"""Sizes from the config.json of meta-llama/Llama-3.1-8B."""


def cluster(stages: int, drafter: int = -1, ranks: int = 1, model: ModelPrice = LLAMA_8B) -> Cluster:
    """A cluster of GPUs of the preset's first server: ``stages`` stages of ``ranks`` tensor parallel GPUs each.

    The last stage's first GPU, or that of stage ``drafter``, drafts, and has the engine beside it.
    """
    names = [f"h100-{i + 1}" for i in range(stages * ranks)]
    groups = [names[i : i + ranks] for i in range(0, len(names), ranks)]
    split = "tensors" if ranks > 1 else "layers"
    return load_cluster(
        "two-servers",
        name=f"h100-x{len(names)}",
        description=f"{len(names)} H100 of one server",
        as_model=asdict(model),
        draft_as_model=asdict(eagle(model)),
        devices=[{"name": name, "host": "server", "kind": "h100"} for name in names],
        stages=[{"devices": group, "layers": model.layers // stages, "split": split} for group in groups],
        drafter=groups[drafter][0],
        engine=groups[drafter][0],
    )


def measured(method: str, folder: str, stages: int, sizes: virtual.Sizes) -> dict[str, Any]:
    """The columns of every entry over this number of stages."""
    drafter = {"method": method, "model": folder}
    runs = virtual.compared(cluster(stages), drafter, ENTRIES, virtual.asked(sizes, (0.0,)))
    return {"method": method, "stages": stages, "entries": {run.strategy: columns(run) for run in runs}}


def columns(run: StrategyRun) -> dict[str, Any]:
    return {
        "AR": run.draft_acceptance_rate,
        "AL": run.mean_acceptance_length,
        "TP": run.tokens_per_second,
        "Lat": run.mean_e2el_ms / 1e3,
        "identical": run.identical_to_autoregressive,
        "latencies": [float(f"{one['e2el_ms'] / 1e3:.5g}") for one in run.requests],
    }


def cases(wanted: virtual.Wanted) -> Iterator[virtual.Case]:
    for method, folders in wanted.drafters.items():
        for stages in SIZES if folders else ():
            yield f"{method} pp={stages}", partial(measured, method, folders[0], stages, wanted.sizes)


if __name__ == "__main__":
    virtual.main(__file__, cases, METHODS)
