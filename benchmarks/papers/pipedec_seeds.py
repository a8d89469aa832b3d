"""PipeDec's Fig. 7 over five seeds: the same prompts decoded greedily and sampled, in virtual time.

    python -m benchmarks.papers.pipedec_seeds [--prompts 30] [--tokens 48]

Section 4.3.3: temperature 0.6, top-p 0.9, top-k 80, every input five times, over 14 stages; PipeDec beside STPP, its
static tree. The demo pair on held-out code. Stored are the seconds and tokens of every request whose output does not
fall into a loop, which a drafter knows by heart, by prompt, and the accuracy over all of them. It is not run again if
it is there with as many prompts and tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from statistics import fmean
from typing import Any, Final

from benchmarks.shared import virtual
from benchmarks.shared.paired import paired
from penstock import SamplingParams
from penstock.cluster import load_cluster
from penstock.lab.bench.report import hit_rate
from penstock.lab.bench.summary import StrategyRun
from penstock.lab.grid import DEFAULT_PROMPTS, conversations_of, read_prompt_sets
from penstock.lab.report import Ratio, is_looping

NAME: Final = "pipedec_seeds"
CLUSTER: Final = "pipedec-14x3090"
STRATEGIES: Final = ("pipedec", "static_tree[tree_size=48]")
SEEDS: Final = 5
TEMPERATURES: Final = {"T0": 0.0, "T0.6": 0.6}
TOP_P, TOP_K = 0.9, 80
SIZES: Final = virtual.Sizes(prompts=30, tokens=48)


def measured(sizes: virtual.Sizes) -> dict[str, Any]:
    """The requests of both strategies and temperatures: greedy ones once, sampled ones with every seed."""
    params = SamplingParams(seed=0, top_p=TOP_P, top_k=TOP_K, max_tokens=sizes.tokens)
    sets = read_prompt_sets([DEFAULT_PROMPTS], sizes.prompts)
    asked = [one.opening for one in conversations_of(sets, [*TEMPERATURES.values()], SEEDS, params, 1)]
    drafter = {"method": "draft_model", "model": virtual.DRAFT}
    runs = virtual.compared(load_cluster(CLUSTER), drafter, STRATEGIES, asked)
    return {
        strategy: {name: kept(virtual.find(runs, strategy, at)) for name, at in TEMPERATURES.items()}
        for strategy in STRATEGIES
    }


def kept(run: StrategyRun) -> dict[str, Any]:
    """Milliseconds per token of each request by prompt, and what the whole run states."""
    ms_of: dict[str, list[float]] = {}
    for request, output in zip(run.requests, run.outputs, strict=True):
        if request["tokens"] and not is_looping(output.outputs[0].token_ids):
            ms = 1e3 * request["seconds"] / request["tokens"]
            ms_of.setdefault(str(request["prompt"]), []).append(float(f"{ms:.5g}"))
    accuracy, looping = hit_rate(run), run.looping_outputs
    return {"ms": ms_of, "accuracy": accuracy, "looping": looping, "identical": run.identical_to_autoregressive}


def sampled_over_greedy(found: Mapping[str, Any]) -> Ratio:
    """How many times as long a token takes when it is sampled."""
    return paired(costs(found).values(), [1.0] * len(costs(found)))


def beside_static(figures: Mapping[str, Any]) -> Ratio:
    """The cost of sampling with PipeDec over that with the static tree."""
    own, static = (costs(figures[strategy]) for strategy in STRATEGIES)
    both = [prompt for prompt in own if prompt in static]
    return paired((own[prompt] for prompt in both), (static[prompt] for prompt in both))


def costs(found: Mapping[str, Any]) -> dict[str, float]:
    """The sampled time of a token, as a mean over seeds, over the greedy time, by prompt."""
    greedy, warm = (found[name]["ms"] for name in TEMPERATURES)
    return {prompt: fmean(warm[prompt]) / fmean(greedy[prompt]) for prompt in greedy if prompt in warm}


def cases(wanted: virtual.Wanted) -> Iterator[virtual.Case]:
    yield CLUSTER, partial(measured, wanted.sizes)


if __name__ == "__main__":
    virtual.main(__file__, cases, sizes=SIZES)
