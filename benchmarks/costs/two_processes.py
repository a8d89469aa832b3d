"""No emulation: the demo pair as one stage process and as two, plain and speculating, on this host's cores.

    python -m benchmarks.costs.two_processes

Prints tokens per second as they come out, and ratios over the plain single stage.
"""

from __future__ import annotations

from typing import Any

from benchmarks.shared.benchmark import show
from penstock import LLM, SamplingParams
from penstock.lab.bench.comparison import measure
from penstock.lab.bench.summary import StrategyRun
from penstock.lab.grid import DEFAULT_PROMPTS, read_prompts
from penstock.speculation import SpeculativeConfig

HOW = "Measured, with the demo pair"
PROMPTS = 4
ROUNDS = 3


def configs() -> list[tuple[str, SpeculativeConfig | None]]:
    draft = {"method": "draft_model", "model": "demo"}
    return [
        ("autoregressive", None),
        ("static_tree", SpeculativeConfig(**draft, strategy="static_tree", tree_size=12, tree_depth=4, children=4)),
        ("pipedec", SpeculativeConfig(**draft, strategy="pipedec", width=4, children=4)),
    ]


def run_all(stages: int) -> list[StrategyRun]:
    prompts = read_prompts(DEFAULT_PROMPTS, PROMPTS) * ROUNDS
    params = [SamplingParams(temperature=1.0, seed=i % PROMPTS, max_tokens=64) for i in range(len(prompts))]
    with LLM(
        "demo", pipeline_parallel_size=stages, speculative_config=configs()[1][1], enable_prefix_caching=False
    ) as llm:
        return measure(llm, prompts, params, configs())


def measured() -> list[dict[str, Any]]:
    """Figures by number of stages and strategy; ratios over the plain single stage."""
    runs = {stages: run_all(stages) for stages in (1, 2)}
    reference = runs[1][0].tokens_per_second
    return [
        {
            "stages": stages,
            "strategy": run.strategy,
            "tokens_per_second": run.tokens_per_second,
            "ratio": run.tokens_per_second / reference,
            "identical": run.identical_to_autoregressive,
        }
        for stages, some in runs.items()
        for run in some
    ]


if __name__ == "__main__":
    show(measured())
