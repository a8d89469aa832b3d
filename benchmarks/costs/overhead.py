"""The cost of Penstock itself: 14 stage processes of 10 ms each, next to nothing on the links.

    python -m benchmarks.costs.overhead

Prints the time per token beside the modelled one, decoding plainly (one row goes through all stages) and with a drafter
that is always right (a row leaves the last stage at every step), and the overhead per hop and per loop, unscaled.

First with the two-layer draft model as the target, so that most stages hold no layer and what is measured is Penstock;
then with the 16-layer target, whose real computation (about 14 x 1 ms a step) competes with it for this host's cores.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.shared.benchmark import show
from penstock import LLM, SamplingParams
from penstock.cluster import load_cluster, plain_step_seconds, stage_timings
from penstock.emulation.cluster import RealTimeExecutor
from penstock.engine.options import DEMO
from penstock.lab.bench.comparison import measure, on_time
from penstock.lab.bench.summary import StrategyRun
from penstock.lab.grid import DEFAULT_PROMPTS, read_prompts
from penstock.speculation import SpeculativeConfig

HOW = "Emulated, with a drafter that is always right"
CLUSTER = Path(__file__).with_name("ten-ms-14.toml")


def measured() -> list[dict[str, Any]]:
    """Figures by model and strategy; times in milliseconds."""
    cluster = load_cluster(str(CLUSTER))
    kinds = {
        name: SpeculativeConfig(method="synthetic", strategy=name, accuracy=(1.0,), width=1, children=1)
        for name in ("pipedec", "auto")
    }
    step = max(timing.seconds(1) for timing in stage_timings(cluster))
    prompts = read_prompts(DEFAULT_PROMPTS, 3)
    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=100, ignore_eos=True) for i in range(3)]
    found = []
    for part in ("draft", "target"):
        with LLM(
            DEMO / part,
            cluster=cluster,
            speculative_config=kinds["auto"],
            enable_prefix_caching=False,
            host=RealTimeExecutor(),
        ) as llm:
            layers = llm.setup.checkpoint.num_layers
            with on_time(llm):
                plain, *full = measure(llm, prompts, params, [("autoregressive", None), *kinds.items()])
        found.append(figures_of(plain, layers, plain_step_seconds(cluster)))
        found += [figures_of(run, layers, step) for run in full]
    return found


def figures_of(run: StrategyRun, layers: int, modelled: float) -> dict[str, Any]:
    return {
        "layers": layers,
        "strategy": run.strategy,
        "ms": 1e3 * run.seconds / run.tokens,
        "modelled_ms": 1e3 * modelled,
        "hop_ms": run.overhead_per_hop_ms,
        "loop_ms": run.overhead_per_loop_ms,
        "overruns": run.overrun_fraction,
    }


if __name__ == "__main__":
    show(measured())
