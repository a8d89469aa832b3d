"""Direct links between stages against a centralised executor, whose engine relays every hop.

    python -m benchmarks.papers.centralised [--prompts 6] [--tokens 24]

Plain decoding and `auto` over the demo pair: as four stage processes without emulation, on the four boards of the
preset demo and on fourteen such boards, in virtual time and emulated in processes. One switch joins the boards, so that
a hop by way of the engine takes the time of two. In virtual time nothing else counts; without emulation, nothing but
what the relaying process costs. Both executors are up at once and take turns within every request. Each ratio is paired
per request, with the 95% bounds of `penstock bench`. Without emulation a request is so short that each comes ROUNDS
times.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch

from benchmarks.papers.relay import RelayExecutor, priced
from benchmarks.shared import virtual
from penstock import LLM
from penstock.cluster import load_cluster
from penstock.cluster.drawn import uniform_cluster
from penstock.emulation.cluster import RealTimeExecutor
from penstock.estimates.estimates import Estimates
from penstock.lab.bench.comparison import run_alone, run_one
from penstock.lab.bench.summary import Sample, same_tokens
from penstock.lab.grid import PLAIN, Named, Question, parse_entries, short
from penstock.lab.report import paired_ratio
from penstock.pipeline.base import Executor, StagePlan, VirtualClock
from penstock.pipeline.engine_end import InProcessExecutor, InProcessPipeline

NAME, HOW = "centralised", "Measured, in virtual time and emulated, with the demo pair"
DRAFTER = {"method": "draft_model", "model": "demo"}
BOARDS: Final = {count: uniform_cluster(load_cluster("demo"), count) for count in (4, 14)}
VIRTUAL: Final = "in virtual time"
CASES: Final[Mapping[str, dict[str, Any]]] = {
    "4 processes": {"pipeline_parallel_size": 4},
    **{f"{count} boards, {VIRTUAL}": {"cluster": cluster} for count, cluster in BOARDS.items()},
    **{f"{count} boards, emulated": {"cluster": cluster} for count, cluster in BOARDS.items()},
}
"""Engine options of each case."""
ROUNDS = 5

Executors = Mapping[str, tuple[LLM, Mapping[str, Estimates]]]
"""An engine, and the estimates of each of its strategies, by design."""
Samples = dict[str, dict[str, list[Sample]]]
"""A sample per question, by strategy and design."""


class RelayInProcessExecutor(InProcessExecutor):
    """A host where time is virtual: nothing has to be relayed, and the time for it is enough."""

    def begin(self, plans: Sequence[StagePlan], name: str = "stage") -> InProcessPipeline:
        return super().begin(priced(plans), name)


def compared(case: str, sizes: virtual.Sizes) -> dict[str, Any]:
    """Both times per token by strategy, and how many times longer a request takes where every hop is relayed."""
    named = parse_entries((PLAIN, "auto"), DRAFTER)
    torch.set_num_threads(1)
    questions = virtual.asked(sizes, (0.0,)) * (1 if "cluster" in CASES[case] else ROUNDS)
    with executors(named, case) as both:
        samples = interleaved(both, named, questions)
    return {"entries": {name: figures_of(by_design) for name, by_design in samples.items()}}


@contextmanager
def executors(named: list[Named], case: str) -> Iterator[Executors]:
    hosts: tuple[Executor, Executor] = (
        (InProcessExecutor(VirtualClock()), RelayInProcessExecutor(VirtualClock()))
        if VIRTUAL in case
        else (RealTimeExecutor(), RelayExecutor())
    )
    options = {**CASES[case], "speculative_config": next(config for name, config in named if name != PLAIN)}
    with LLM(host=hosts[0], **options) as direct, LLM(host=hosts[1], **options) as relayed:
        yield {
            design: (llm, {name: llm.loop.estimates.anew() for name, _ in named})
            for design, llm in (("direct", direct), ("relayed", relayed))
        }


def interleaved(both: Executors, named: list[Named], questions: list[Question]) -> Samples:
    """Every question through both executors, the one that begins changing; each strategy warms up with a short run."""
    for name, config in named:
        for llm, learned in both.values():
            run_alone(llm, replace(questions[0], params=short(questions[0].params)), config, learned[name])
    samples: Samples = {name: {design: [] for design in both} for name, _ in named}
    for i, question in enumerate(questions):
        for name, config in named:
            for design in sorted(both, reverse=i % 2 == 1):
                llm, learned = both[design]
                samples[name][design].append(run_one(llm, question, config, learned[name])[0])
    return samples


def figures_of(samples: Mapping[str, list[Sample]]) -> dict[str, Any]:
    pairs = list(zip(samples["direct"], samples["relayed"], strict=True))
    ratio = paired_ratio([direct.speed / relayed.speed for direct, relayed in pairs if direct.speed and relayed.speed])
    assert ratio is not None
    late, modelled = (sum(one.overruns[k] for some in samples.values() for one in some) for k in (0, 1))
    return {
        **{f"{design}_ms": ms_per_token(some) for design, some in samples.items()},
        "ratio": ratio.mean,
        "low": ratio.low,
        "high": ratio.high,
        "pairs": ratio.pairs,
        "overruns": late / modelled if modelled else 0.0,
        "identical": all(same_tokens(one.output, other.output) for one, other in pairs),
    }


def ms_per_token(samples: list[Sample]) -> float:
    return 1e3 * sum(sample.seconds for sample in samples) / sum(sample.tokens for sample in samples)


def cases(wanted: virtual.Wanted) -> Iterator[virtual.Case]:
    for case in CASES:
        yield case, partial(compared, case, wanted.sizes)


if __name__ == "__main__":
    virtual.main(__file__, cases, how=HOW, sizes=virtual.Sizes(prompts=6, tokens=24))
