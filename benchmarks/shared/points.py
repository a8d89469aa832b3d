"""Answers in points, simulated: an outline, then all points at the same time.

The outline's tokens come one after another after the question. Then every point is a request of its own, whose prompt
is the question, the outline, and the request for the point; all but the last is in the prefix cache. A scripted drafter
serves both. ``benchmarks/strategies/outlines.py`` measures a real model's outlines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from penstock.cluster import Cluster
from penstock.engine.loop import EngineLoop
from penstock.lab.script import DistantDrafts, Script
from penstock.lab.simulator import Timed, make_loop
from penstock.messages import Sampling
from penstock.requests.request import Request
from penstock.speculation import SpeculativeConfig, make_strategy

TITLE: Final = 8
"""Assumed tokens of an outline's line: number, dot, and three or four words. Small models write longer ones."""
ASKING: Final = 32
"""Prompt tokens that a point does not share with others: the request for it, and its heading."""
ScriptOf = Callable[[int, int, int, int], Script]
"""Makes a script of so many requests, of so many tokens each, from a seed, behind prompts of so many tokens."""


@dataclass(frozen=True)
class Answer:
    """The sizes of an answer: ``points`` points, and the tokens of each and of the prompt."""

    prompt: int
    points: int
    tokens: int


@dataclass(frozen=True)
class Decoded:
    """Seconds from the outline's first token to its last one, and to the last one of the last point."""

    outline_s: float
    seconds: float


def answered(
    cluster: Cluster, answer: Answer, script_of: ScriptOf, config: SpeculativeConfig | None, seed: int
) -> Decoded:
    outline, shared = TITLE * answer.points, answer.prompt + TITLE * answer.points
    script = joined(
        script_of(1, outline, seed, answer.prompt),
        script_of(answer.points, answer.tokens, seed + 1, shared + ASKING),
    )
    loop = make_loop(cluster, script, config, concurrency=answer.points)
    loop.scheduler.pool.sharing = True
    question = [0] * answer.prompt
    (first,) = decoded(loop, cluster, script, config, {0: question})
    before = [*question, *script.picks[0]]
    asked = {number: [*before, *[number] * ASKING] for number in range(1, answer.points + 1)}
    points = decoded(loop, cluster, script, config, asked)
    began = first.moments[0]
    return Decoded(first.moments[-1] - began, max(point.moments[-1] for point in points) - began)


def joined(first: Script, second: Script) -> Script:
    """Two scripts' requests, one after the other's. They share pools of drafts, which have the same distributions."""

    def moved(drafts: tuple[tuple[int, ...], ...], by: int) -> tuple[tuple[int, ...], ...]:
        """Indices into the second part of a joint pool."""
        return tuple(tuple(i + by for i in some) for some in drafts)

    further = (
        DistantDrafts(
            drafts=one.drafts + moved(other.drafts, len(one.pool)),
            ranks=one.ranks + other.ranks,
            pool=one.pool + other.pool,
        )
        for one, other in zip(first.further, second.further, strict=True)
    )
    return replace(
        first,
        prompts=first.prompts + second.prompts,
        picks=first.picks + second.picks,
        drafts=first.drafts + moved(second.drafts, len(first.pool)),
        pool=first.pool + second.pool,
        further=tuple(further),
    )


def decoded(
    loop: EngineLoop,
    cluster: Cluster,
    script: Script,
    config: SpeculativeConfig | None,
    asked: Mapping[int, list[int]],
) -> list[Timed]:
    """Run requests with these numbers and prompts, all at once, until the last one has ended."""
    runs = []
    for number, prompt in asked.items():
        strategy, timed = make_strategy(config, len(cluster.stages)), Timed()
        tokens = len(script.picks[number])
        loop.add(Request(number, prompt, Sampling(), tokens, frozenset(), strategy, timed))
        runs.append(timed)
    while loop.busy:
        loop.step()
    loop.drain()
    return runs
