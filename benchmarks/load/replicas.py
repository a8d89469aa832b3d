"""Engines behind one front end under load, while stages are killed and stopped, and engines drained and rolled.

    python -m benchmarks.load.replicas [--answers 1000] [--kills 1000] [--engines 2]

Answers with each field of SamplingParams, greedy and sampled, are asked of several engines of the demo pair's target,
two stages each, plainly and with the pair's drafter in turn. Each is compared with what one engine answers plainly.
Stages are killed, one or all of an engine's, or stopped; engines are drained and started again, one or all; each time
once all are up again. Chats of several turns count what prefix caches find, beside one engine's.

The work is done in portions, which are added to benchmarks/measured/load/replicas.json as they end, until it has so
many answers and kills in all: a run that was interrupted goes on where it was. A stopped stage counts as a kill. The
exit code is 1 if anything was wrong.
"""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from benchmarks.load.soaking.cases import drawn_text
from benchmarks.shared.benchmark import Benchmark, show
from benchmarks.shared.measured import kept_figures
from penstock import LLM, CompletionOutput, FinishReason, Replicas, SamplingParams
from penstock.core import PenstockError
from penstock.engine.replicas.stream import MovingStream, Replica
from penstock.engine.stats import ReplicaState
from tests.integration.engine.test_resume import CASES
from tests.replicas import all_up, lose, signal_stage, until

BENCHMARK: Final = Benchmark(__file__, "Measured, with the demo pair, on one host")
STAGES: Final = 2
TOKENS: Final = 48
PORTION: Final = 40
"""Fewest answers of a portion, in which each of ``DEEDS`` is done once."""
DEEDS: Final = ("kill a stage", "kill all stages", "kill a stage", "stop a stage", "kill a stage", "drain", "roll")
KILLS: Final = ("kill a stage", "kill all stages")
AT_A_TIME: Final = 6
"""Answers at a time for each engine."""
CHATS, TURNS = 8, 4
PATIENCE_S: Final = 120.0
"""Seconds within which all engines have to be up again."""

Asked = tuple[str, SamplingParams]


def drawn(count: int, rng: random.Random) -> list[Asked]:
    """Prompts, each with another field of SamplingParams than the one before."""
    fields = list(CASES.values())
    return [
        (
            drawn_text(rng),
            SamplingParams(
                **{
                    "max_tokens": TOKENS,
                    "seed": rng.randrange(2**31),
                    "temperature": rng.choice((0.0, 0.7, 1.0)),
                    **fields[number % len(fields)],
                }
            ),
        )
        for number in range(count)
    ]


def told(outputs: list[CompletionOutput]) -> list[Any]:
    return [(one.token_ids, one.text, one.finish_reason) for one in outputs]


@dataclass
class Counts:
    """The counts of one portion. ``gaps``: seconds from a deed to the next word of each answer that it struck."""

    asked: int = 0
    answers: int = 0
    different: list[str] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)
    deeds: Counter[str] = field(default_factory=Counter)
    gaps: dict[str, list[float]] = field(default_factory=dict)
    struck: dict[MovingStream, tuple[str, float]] = field(default_factory=dict)
    """Answers that the last deed struck and that have had no word since."""

    def strike(self, deed: str, replica: Replica) -> None:
        self.struck |= {stream: (deed, time.monotonic()) for stream in replica.streams}

    def heard(self, stream: MovingStream) -> None:
        if (struck := self.struck.pop(stream, None)) is not None:
            deed, at = struck
            self.gaps.setdefault(deed, []).append(round(time.monotonic() - at, 3))


class Portion:
    """One start of the engines: answers are asked until there are enough of them and every deed is done."""

    def __init__(self, engine: Replicas, asked: list[Asked], want: list[list[Any]], rng: random.Random) -> None:
        self.counts = Counts()
        self._engine, self._asked, self._want, self._rng = engine, asked, want, rng
        self._done = False

    async def run(self) -> None:
        await asyncio.gather(self._deeds(), *(self._client() for _ in range(AT_A_TIME * len(self._engine._replicas))))
        await until(lambda: all_up(self._engine), PATIENCE_S)
        await self._engine.drained()

    async def _client(self) -> None:
        while self.counts.asked < PORTION or not self._done:
            number = self.counts.asked % len(self._asked)
            self.counts.asked += 1
            await self._ask(number)

    async def _ask(self, number: int) -> None:
        prompt, params = self._asked[number]
        stream: MovingStream | None = None
        try:
            stream = self._engine.submit(prompt, params)
            async for _ in stream:
                self.counts.heard(stream)
        except PenstockError as error:
            self.counts.cut.append(f"{params}: {error}")
            return
        finally:
            if stream is not None:
                self.counts.struck.pop(stream, None)
        self.counts.answers += 1
        outputs = stream.output().outputs
        if any(one.finish_reason in (FinishReason.ABORT, FinishReason.ERROR) for one in outputs):
            self.counts.cut.append(f"{params}: {[one.finish_reason for one in outputs]}")
        elif told(outputs) != self._want[number]:
            self.counts.different.append(f"{prompt!r}, {params}")

    async def _deeds(self) -> None:
        try:
            for deed in self._rng.sample(DEEDS, len(DEEDS)):
                await until(lambda: all_up(self._engine), PATIENCE_S)
                replica = self._rng.choice(self._engine._replicas)
                enough = self._rng.randrange(1, 2 * AT_A_TIME // 3)
                await until(lambda at=replica, least=enough: len(at.streams) >= least, PATIENCE_S)  # type: ignore[misc]
                await self._do(deed, replica)
                self.counts.deeds[deed] += 1
        finally:
            self._done = True

    async def _do(self, deed: str, replica: Replica) -> None:
        for one in self._engine._replicas if deed == "roll" else [replica]:
            self.counts.strike(deed, one)
            if deed in ("kill a stage", "kill all stages"):
                lose(one, STAGES if deed == "kill all stages" else 1)
                await until(lambda at=one: at.state is not ReplicaState.UP, PATIENCE_S)  # type: ignore[misc]
            elif deed == "stop a stage":
                signal_stage(one, 0, signal.SIGSTOP)
                try:
                    await until(lambda at=one: at.silent, PATIENCE_S)  # type: ignore[misc]
                finally:
                    signal_stage(one, 0, signal.SIGCONT)
            else:
                await self._engine.restart(one.number)
            await until(lambda: not self.counts.struck, PATIENCE_S)  # else the next deed would be taken for the cause


async def chats(engine: Replicas, seed: int) -> dict[str, Any]:
    """Conversations side by side, each turn behind the answer to the one before: tokens found in prefix caches."""
    before, routed = engine.stats(), [sum(one.routed.values()) for one in engine.replicas()]

    async def chat(number: int) -> None:
        rng = random.Random(seed * CHATS + number)
        ids = [rng.randrange(5, 1000) for _ in range(64)]
        for _ in range(TURNS):
            params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
            stream = engine.submit({"prompt_token_ids": ids}, params)
            async for _ in stream:
                pass
            ids = ids + stream.output().outputs[0].token_ids + [rng.randrange(5, 1000) for _ in range(32)]

    await asyncio.gather(*(chat(number) for number in range(CHATS)))
    after = engine.stats()
    return {
        "hits": after.prefix_cache_hits - before.prefix_cache_hits,
        "queries": after.prefix_cache_queries - before.prefix_cache_queries,
        "requests": [sum(one.routed.values()) - then for one, then in zip(engine.replicas(), routed, strict=True)],
    }


def engines(count: int, *, speculates: bool) -> Replicas:
    config = {"method": "draft_model", "strategy": "auto"} if speculates else None
    return Replicas("demo", data_parallel_size=count, pipeline_parallel_size=STAGES, speculative_config=config)


def portion(number: int, count: int) -> dict[str, Any]:
    """The figures of portion ``number``: every second one speculates."""
    rng, begun = random.Random(number), time.monotonic()
    asked, speculates = drawn(PORTION, rng), number % 2 == 1
    with LLM("demo", speculative_config=None) as llm:
        prompts, params = map(list, zip(*asked, strict=True))
        want = [told(output.outputs) for output in llm.generate(prompts, params)]

    async def alone() -> dict[str, Any]:
        async with engines(1, speculates=speculates) as engine:
            return await chats(engine, number)

    async def together() -> tuple[dict[str, Any], Counts, int]:
        async with engines(count, speculates=speculates) as engine:
            found, work = await chats(engine, number), Portion(engine, asked, want, rng)
            await work.run()
            return found, work.counts, sum(one.moved for one in engine.replicas())

    one = asyncio.run(alone())
    several, counts, moved = asyncio.run(together())
    return {
        "engines": count,
        "speculates": speculates,
        "seconds": round(time.monotonic() - begun),
        "answers": counts.answers,
        "moved": moved,
        "different": counts.different,
        "cut": counts.cut,
        "deeds": dict(counts.deeds),
        "gaps": counts.gaps,
        "chats": {"one": one, "several": several},
    }


def together(portions: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The sums of several portions; ``balance`` is the most requests of an engine over their mean, in chats."""
    found = list(portions)
    deeds: Counter[str] = Counter()
    gaps: dict[str, list[float]] = {}
    for one in found:
        deeds.update(one["deeds"])
        for deed, some in one["gaps"].items():
            gaps[deed] = gaps.get(deed, []) + some
    hits = {
        name: sum(one["chats"][name]["hits"] for one in found)
        / max(1, sum(one["chats"][name]["queries"] for one in found))
        for name in ("one", "several")
    }
    routed = [one["chats"]["several"]["requests"] for one in found]
    return {
        "answers": sum(one["answers"] for one in found),
        "moved": sum(one["moved"] for one in found),
        "kills": sum(deeds[deed] for deed in KILLS),
        "different": [problem for one in found for problem in one["different"]],
        "cut": [problem for one in found for problem in one["cut"]],
        "deeds": dict(sorted(deeds.items())),
        "gaps": {
            deed: {"answers": len(some), "median_s": statistics.median(some), "longest_s": max(some)}
            for deed, some in sorted(gaps.items())
        },
        "prefix_hits": hits,
        "balance": max((max(one) * len(one) / sum(one) for one in routed), default=1.0),
    }


def by_engines(portions: Mapping[str, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The sums of all portions with as many engines."""
    counts = sorted({one["engines"] for one in portions.values()})
    return {count: together(one for one in portions.values() if one["engines"] == count) for count in counts}


def main(answers: int, kills: int, count: int) -> int:
    logging.disable()
    portions = kept_figures(BENCHMARK.name)
    while (found := by_engines(portions).get(count, together([])))["answers"] < answers or found["kills"] < kills:
        portions[str(len(portions))] = portion(len(portions), count)
        sums = by_engines(portions)
        given = [f"--answers {one['answers']} --kills {one['kills']} --engines {n}" for n, one in sums.items()]
        BENCHMARK.keep(portions, commands=[BENCHMARK.command(one) for one in given])
        show(sums[count])
    return 1 if found["different"] or found["cut"] else 0


if __name__ == "__main__":
    options = BENCHMARK.parser(answers=1000, kills=1000, engines=2).parse_args()
    with BENCHMARK.refusing():
        sys.exit(main(options.answers, options.kills, options.engines))
