"""What Penstock itself costs: 14 stage processes of 10 ms each, next to nothing on the links.

    python benchmarks/overhead.py

Prints the time per token beside the modelled one, decoding plainly (one row goes through all stages) and with a drafter
that is always right (a row leaves the last stage at every step), and the overhead per hop and per loop, unscaled.

First with the two-layer draft model as the target, so that most stages hold no layer and what is measured is Penstock;
then with the 16-layer target, whose real computation (about 14 x 1 ms a step) competes with it for this host's cores.
"""

from __future__ import annotations

from pathlib import Path

from penstock import LLM, SamplingParams
from penstock.bench.command import DEFAULT_PROMPTS
from penstock.bench.measure import StrategyRun, measure
from penstock.bench.prompts import read_prompts
from penstock.cluster import load_cluster, plain_step_seconds, stage_timings
from penstock.config import SpeculativeConfig
from penstock.engine.options import DEMO

CLUSTER = Path(__file__).with_name("ten-ms-14.toml")


def report(run: StrategyRun, modelled: float) -> str:
    real = run.seconds / run.tokens
    return (
        f"{run.strategy:15} {1e3 * real:8.2f} ms per token, modelled {1e3 * modelled:7.2f} "
        f"({real / modelled - 1:+.1%})   "
        f"hop {run.overhead_per_hop_ms:.2f} ms   loop {run.overhead_per_loop_ms:.2f} ms   "
        f"overruns {run.overrun_fraction:.1%}"
    )


def main() -> None:
    cluster = load_cluster(str(CLUSTER))
    kinds = {
        name: SpeculativeConfig(method="synthetic", strategy=name, accuracy=(1.0,), width=1, children=1)
        for name in ("pipedec", "auto")
    }
    prompts = read_prompts(DEFAULT_PROMPTS, 3)
    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=100, ignore_eos=True) for i in range(3)]
    for part in ("draft", "target"):
        with LLM(DEMO / part, cluster=cluster, speculative_config=kinds["auto"]) as llm:
            print(f"{llm.setup.checkpoint.num_layers} layers over {llm.setup.stages} stages")
            plain, *full = measure(llm, prompts, params, [("autoregressive", None), *kinds.items()])
        print(report(plain, plain_step_seconds(cluster)))
        for run in full:
            print(report(run, max(timing.seconds(1) for timing in stage_timings(cluster))))


if __name__ == "__main__":
    main()
