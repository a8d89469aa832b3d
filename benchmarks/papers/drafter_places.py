"""The drafter in every place that the papers ask for, over links that are fast and slow: the same drafts, other times.

    python -m benchmarks.papers.drafter_places [--mbit 10] [--tokens 48] [--repeats 5]

The demo target's two stages are on two hosts, network namespaces with a worker each. Its draft model is in the engine,
on the first stage's host, on the last one's, or on a third host of its own (PipeDec, section 3.1; vLLM's report, 3.4).
The hosts' links have no limit, or let ``--mbit`` through each way. Trees are drafted whole before they are looked at
(`static_tree`), so that what is right depends on nobody's speed: ids have to be those of plain decoding, and drafts,
accepted tokens and misses those of the drafter in the engine. It needs root and iproute2.

The figures are stored in benchmarks/measured/papers/drafter_places.json. The exit code is 1 where anything differs.
Stop whatever else runs on the host, or the times mean little.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Final, NamedTuple

from benchmarks.papers.megatron_links import check_none_lost, limited, workers_on
from benchmarks.shared.benchmark import Benchmark, show
from penstock import LLM, SamplingParams
from tests.namespaces import Namespace

NAME, HOW = "drafter_places", "Measured over network namespaces on two cores, with the demo pair, nothing emulated"
PROMPTS: Final = ("def fibonacci(n):", "class Stack:\n")
DRAFTS: Final = {"method": "draft_model", "strategy": "static_tree"}
FIRST, LAST, ENGINE, OWN = "first-stage", "last-stage", "engine", "a host of its own"
PLACES: Final = (ENGINE, FIRST, LAST, OWN)


class Answer(NamedTuple):
    """Tokens, counts of drafts, accepted tokens and misses, and milliseconds per token after the first one."""

    ids: list[int]
    counts: tuple[int, int, int]
    ms: float


Answers = Mapping[int | None, Sequence[list[Answer]]]
"""The answers to all prompts, once for each repeat, by rate."""


def measured(mbit: int, tokens: int, repeats: int) -> list[dict[str, Any]]:
    """A row by place and rate."""
    with LLM("demo", speculative_config=None, max_model_len=512) as llm:
        plain = [one.ids for one in answered(llm, tokens)]
    with workers_on(3) as (hosts, names):
        found = {place: answers_from(place, hosts, names, (None, mbit), tokens, repeats) for place in PLACES}
    expected = [one.counts for one in found[ENGINE][None][0]]
    return [row for place, answers in found.items() for row in rows(place, answers, plain, expected)]


def answers_from(
    place: str, hosts: Sequence[Namespace], names: Sequence[str], rates: Sequence[int | None], tokens: int, repeats: int
) -> Answers:
    """Answers with the drafter in this place; every repeat has all rates. Raises ConfigError if a host was lost."""
    answers: dict[int | None, list[list[Answer]]] = {rate: [] for rate in rates}
    with LLM(
        "demo",
        hosts=",".join(names[:2]),
        drafter_on=names[2] if place == OWN else place,
        threads=1,
        insecure=True,
        speculative_config=DRAFTS,
        max_model_len=512,
    ) as llm:
        answered(llm, tokens)
        for _ in range(repeats):
            for rate in rates:
                with limited(hosts, rate):
                    answers[rate].append(answered(llm, tokens))
        check_none_lost(llm)
    return answers


def answered(llm: LLM, tokens: int) -> list[Answer]:
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=tokens, ignore_eos=True)
    found = []
    for prompt in PROMPTS:
        one = llm.generate([prompt], params)[0].outputs[0]
        counts = (one.metrics.drafts, one.metrics.accepted, one.metrics.misses)
        assert one.tokens_per_second is not None
        found.append(Answer([*one.token_ids], counts, 1e3 / one.tokens_per_second))
    return found


def rows(
    place: str, answers: Answers, plain: Sequence[list[int]], expected: Sequence[tuple[int, int, int]]
) -> list[dict[str, Any]]:
    """A row by rate: the median of milliseconds per token, the sums of counts, and whether ids and counts are equal."""
    return [
        {
            "place": place,
            "mbit": rate,
            "ms": median(one.ms for repeat in repeats for one in repeat),
            "counts": [sum(column) for column in zip(*(one.counts for one in repeats[0]), strict=True)],
            "same_tokens": all([one.ids for one in repeat] == [*plain] for repeat in repeats),
            "same_counts": all([one.counts for one in repeat] == [*expected] for repeat in repeats),
        }
        for rate, repeats in answers.items()
    ]


def main() -> int:
    benchmark = Benchmark(__file__, HOW)
    options = benchmark.parser(mbit=10, tokens=48, repeats=5).parse_args()
    with benchmark.refusing():
        figures = measured(options.mbit, options.tokens, options.repeats)
    benchmark.keep(figures, f"--mbit {options.mbit} --tokens {options.tokens} --repeats {options.repeats}")
    show(figures)
    return 0 if all(one["same_tokens"] and one["same_counts"] for one in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
