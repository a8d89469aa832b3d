"""A drafter and prompt lookup in one tree, beside each alone, on text that copies its prompt and on other text.

    python -m benchmarks.strategies.several_sources [--prompts 8] [--tokens 64]

The demo pair runs on held-out code under `auto`, in virtual time, at T = 0 and T = 1. "copies": prompts hold a piece of
code and the first half of it again, like an edit, so that much of what follows is in the prompt. Each cell is written
to benchmarks/measured/strategies/several_sources.json as it finishes, and is not run again if it is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from benchmarks.shared import virtual
from penstock.cluster import load_cluster
from penstock.core import SamplingParams
from penstock.lab.bench.summary import StrategyRun
from penstock.lab.grid import DEFAULT_PROMPTS, Question, conversations_of, read_prompts

NAME: Final = "several_sources"
CLUSTERS: Final = ("spd-4", "pipedec-7")
TEXTS: Final = ("copies", "other text")
TEMPERATURES: Final = (0.0, 1.0)
SOURCES: Final = {"ngram": "ngram", "draft_model": "draft_model", "both": ["draft_model", "ngram"]}
SHORTEST, LONGEST = 200, 800
"""Fewest and most characters of a piece of code that is copied."""
STRATEGY: Final = "auto"


def asked(text: str, sizes: virtual.Sizes) -> list[Question]:
    prompts = [one for one in read_prompts(DEFAULT_PROMPTS, 1000) if len(one) >= SHORTEST][: sizes.prompts]
    if text == "copies":
        prompts = [f"{one[:LONGEST]}\n\n\n{one[: min(len(one), LONGEST) // 2]}" for one in prompts]
    params = SamplingParams(seed=0, max_tokens=sizes.tokens)
    conversations = conversations_of({text: [(one,) for one in prompts]}, TEMPERATURES, 1, params, 1)
    return [one.opening for one in conversations]


def measured(cluster: str, text: str, sizes: virtual.Sizes) -> dict[str, Any]:
    """Speed over plain decoding by temperature and source, and that of both sources over the better of the two."""
    runs: dict[str, list[StrategyRun]] = {}
    for source, method in SOURCES.items():
        drafter = {"method": method} if method == "ngram" else {"method": method, "model": virtual.DRAFT}
        runs[source] = virtual.compared(load_cluster(cluster), drafter, [STRATEGY], asked(text, sizes))
    return {"temperatures": {f"T={t:g}": cell(runs, t) for t in TEMPERATURES}}


def cell(runs: Mapping[str, Sequence[StrategyRun]], temperature: float) -> dict[str, Any]:
    plain = virtual.find(runs["both"], "autoregressive", temperature)
    found = {source: virtual.find(some, STRATEGY, temperature) for source, some in runs.items()}
    better = max(("ngram", "draft_model"), key=lambda source: found[source].tokens_per_second)
    ratio = virtual.over(found["both"], found[better])
    return {
        **{source: run.tokens_per_second / plain.tokens_per_second for source, run in found.items()},
        "ratio": ratio.mean,
        "bounds": ratio.bounds,
        "identical": all(run.identical_to_autoregressive for run in found.values()),
    }


def cases(wanted: virtual.Wanted) -> Iterator[virtual.Case]:
    for cluster in CLUSTERS:
        for text in TEXTS:
            yield f"{cluster}, {text}", partial(measured, cluster, text, wanted.sizes)


if __name__ == "__main__":
    virtual.main(__file__, cases, sizes=virtual.Sizes(prompts=8))
