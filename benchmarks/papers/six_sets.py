"""PipeDec's, FlowSpec's and the vLLM report's strategies on six prompt sets, with a chat model, in virtual time.

    python -m benchmarks.papers.six_sets MODEL.gguf PROMPTS
    python -m benchmarks.papers.six_sets MODEL.gguf PROMPTS --eagle3 DIR --prompts 5 --tokens 64

MODEL is a chat model's folder or GGUF file, PROMPTS a folder with the six sets, whose first turns are asked as the
model's chat template puts them: 20 of each, 128 tokens, as in FlowSpec's Table 1. Greedy once, and at T = 1 with five
seeds. Devices are those of each paper, as modelled. Drafts are looked up in the text, or made by the drafters that are
named. The model computes in 4 bits, for which its tokens are plain decoding's, too; where the drafter allows it, it
computes plain decoding's text alone (``benchmarks.shared.replayed``). EAGLE-3 and Headrace do not allow it: with 20
prompts of 128 tokens a case takes 35 minutes of a core with one and 40 with the other, so that they are asked less.

Every set, temperature and seed on a cluster with a drafter is a case, written to
benchmarks/measured/papers/six_sets.json as it ends, and not run again if it is there with as many prompts and tokens:
stop it when you like. ``--sets``, ``--clusters``, ``--seeds`` and ``--temperatures`` choose a part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import geometric_mean
from typing import Any, Final

from benchmarks.drafters.spd_chats import chats
from benchmarks.papers import flowspec, pp_eagle_table
from benchmarks.shared import virtual
from benchmarks.shared.replayed import REPLAYED
from penstock.checkpoint.checkpoint import Checkpoint, open_checkpoint
from penstock.cluster import load_cluster
from penstock.engine.options import model_folder
from penstock.lab.bench.summary import StrategyRun
from penstock.lab.grid import PLAIN
from penstock.lab.report import Ratio, paired_ratio

NAME: Final = "six_sets"
HOW: Final = "In virtual time, with SmolLM2-135M-Instruct in 4 bits"
SETS: Final = ("alpaca", "gsm8k", "humaneval", "mt_bench", "qa", "sum")
STRATEGIES: Final[Mapping[str, tuple[str, ...]]] = {
    "flowspec-7b": (flowspec.NAIVE, flowspec.PIPEDEC, "flowspec", flowspec.NO_ORDER, flowspec.NO_EXPANSION, "auto"),
    "pipedec-14x3090": ("static_tree[tree_size=48]", "pipedec", "auto"),
    "two-servers": (pp_eagle_table.CHAIN, "pipedec", "auto"),
}
"""Strategies beside plain decoding by cluster: FlowSpec's Tables 1 and 2, PipeDec's Fig. 5, the report's chain."""
BASES: Final = {"flowspec-7b": flowspec.NAIVE, "pipedec-14x3090": PLAIN, "two-servers": PLAIN}
"""The entry that each paper's speed-ups are over."""
TEMPERATURES: Final = (0.0, 1.0)
SEEDS: Final = (0, 1, 2, 3, 4)
LOOKUP: Final = "ngram"
METHODS: Final = ("eagle", "eagle3", "medusa", "dspark", "headrace", "draft_model")
SIZES: Final = virtual.Sizes(prompts=20, tokens=128)


def measured(
    cluster: str,
    drafter: Mapping[str, Any],
    target: Checkpoint,
    prompts: Path,
    asked: tuple[str, float, int],
    sizes: Any,
) -> dict[str, Any]:
    """Seconds of every request by entry, of one set at one temperature with one seed."""
    name, temperature, seed = asked
    questions = chats(target, prompts, name, sizes, (temperature,), seed=seed, top_k=0)
    replayed = drafter["method"] in REPLAYED
    runs = virtual.compared(
        load_cluster(cluster),
        drafter,
        STRATEGIES[cluster],
        questions,
        replayed=replayed,
        model=str(target.source),
        quantization="int4",
    )
    stated = {"cluster": cluster, "method": drafter["method"], "set": name, "temperature": temperature, "seed": seed}
    stated["replayed"] = replayed
    return {**stated, "entries": {run.strategy: kept(run) for run in runs}}


def kept(run: StrategyRun) -> dict[str, Any]:
    return {
        "seconds": [float(f"{one['seconds']:.5g}") for one in run.requests],
        "tokens": run.tokens,
        "mean_acceptance_length": run.mean_acceptance_length,
        "identical": run.identical_to_autoregressive,
    }


def cases(wanted: virtual.Wanted) -> Iterator[virtual.Case]:
    """One seed of everything first, so that a run that is stopped has all sets."""
    options = wanted.options
    target = open_checkpoint(model_folder(options.model, "target"))
    named = [{"method": name, "model": one} for name, folders in wanted.drafters.items() for one in folders]
    drafters = named or [{"method": LOOKUP}]
    for seed, temperature, cluster, drafter, name in product(
        options.seeds, options.temperatures, options.clusters, drafters, options.sets
    ):
        if temperature == 0 and seed != SEEDS[0]:
            continue  # greedily a seed changes nothing
        key = f"{cluster}, {drafter['method']}, {name}, T={temperature:g}, seed {seed}"
        asked = (name, temperature, seed)
        yield key, partial(measured, cluster, drafter, target, options.prompt_sets, asked, wanted.sizes)


def cases_of(
    figures: Mapping[str, Mapping[str, Any]], cluster: str, temperature: float, method: str = LOOKUP
) -> list[Mapping[str, Any]]:
    """The cases of a cluster at a temperature, with one method of drafting."""
    wanted = (cluster, method, temperature)
    return [one for one in figures.values() if (one["cluster"], one["method"], one["temperature"]) == wanted]


def speed_up(rows: Sequence[Mapping[str, Any]], entry: str, base: str) -> Ratio:
    """How many times as fast, over all prompts of these cases, in pairs.

    Answers to one prompt with several seeds resemble each other, so that they count as one measurement, their geometric
    mean. An answer of one token has no time and is left out.
    """
    ratios: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        slow, fast = (row["entries"][name]["seconds"] for name in (base, entry))
        for prompt, (one, other) in enumerate(zip(slow, fast, strict=True)):
            if other:
                ratios.setdefault((row["set"], prompt), []).append(one / other)
    found = paired_ratio([geometric_mean(some) for some in ratios.values()])
    assert found is not None
    return found


if __name__ == "__main__":
    sets_of = {"type": Path, "metavar": "prompts"}
    virtual.main(
        __file__,
        cases,
        METHODS,
        HOW,
        SIZES,
        "MODEL PROMPTS",
        model=str,
        prompt_sets=sets_of,
        sets=SETS,
        clusters=tuple(STRATEGIES),
        seeds=SEEDS,
        temperatures=TEMPERATURES,
    )
