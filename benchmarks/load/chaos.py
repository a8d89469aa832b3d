"""Processes killed at random tokens, again and again: every token is compared with plain decoding's.

    python -m benchmarks.load.chaos [KILLS] [SEED] [ranks]

Four requests run at once on two stages of the demo target, greedy and at T = 0.8, with each strategy and each kind of
drafter, on this host and on two workers with addresses of their own, which have no checkpoint and are sent their
layers. A process is killed at a random result: a stage, the drafter or, less often, the fork server or a worker's
agent, which returns with its cache or with an empty one. It needs root. Afterwards slots are audited, and remaining
processes are counted. KILLS is the least number of kills (100). With ``ranks`` every stage has two ranks, on one host
or on the two workers.

The results are added to benchmarks/measured/load/chaos.json, replacing those of the same seed, with ``ranks`` or
without. The exit code is 1 if anything was wrong.
"""

from __future__ import annotations

import logging
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.load.killing.victims import Elsewhere, Here, Victims
from benchmarks.load.killing.workers import KilledWorker, workers
from benchmarks.shared.benchmark import show
from benchmarks.shared.measured import kept_figures, store
from penstock import LLM, SamplingParams
from penstock.engine.loop import Observer
from penstock.messages import Batch, Result

NAME, HOW = "chaos", "Measured, with the demo pair"
KILLS: Final = 100
STAGES: Final = 2
PROMPTS: Final = ("def fibonacci(n):", "class Stack:\n", "import os\n", "for line in open(path):\n")
TOKENS: Final = 120
TEMPERATURES: Final = (0.0, 0.8)
KILLS_EACH: Final = 2
"""Kills per call: a drafter that is lost more often within a minute is not started again."""
RESULTS: Final = range(5, 60)
"""Numbers of results, counted from the call's beginning or the last kill, at one of which a process is killed."""
WORKERS: Final = 2


class Setting(NamedTuple):
    method: str
    strategy: str
    on_workers: bool = False
    ranks: int = 1

    @property
    def stages(self) -> int:
        """One where its ranks are to be on both workers."""
        return 1 if self.on_workers and self.ranks > 1 else STAGES

    @property
    def drafts(self) -> bool:
        """Whether a model drafts."""
        return self.method not in ("none", "ngram")

    def __str__(self) -> str:
        drafter = f", {self.method}" if self.method != "none" else ""
        ranks = f", {self.stages} x {self.ranks} ranks" if self.ranks > 1 else ""
        return f"{self.strategy}{drafter}{', on workers' if self.on_workers else ''}{ranks}"


SETTINGS: Final = (
    Setting("none", "autoregressive"),
    Setting("draft_model", "auto", on_workers=True),
    Setting("ngram", "auto"),
    Setting("none", "autoregressive", on_workers=True),
    Setting("draft_model", "auto"),
    Setting("ngram", "continuous", on_workers=True),
    Setting("draft_model", "continuous"),
    Setting("draft_model", "pipedec"),
    Setting("eagle3", "continuous", on_workers=True),
    Setting("draft_model", "static_tree"),
    Setting("draft_model", "flowspec"),
    Setting("draft_model", "pipedec", on_workers=True),
    Setting("eagle3", "continuous"),
    Setting("spd", "continuous"),
    Setting("spd", "continuous", on_workers=True),
)
RANKED: Final = (
    Setting("none", "autoregressive", on_workers=True, ranks=2),
    Setting("none", "autoregressive", ranks=2),
    Setting("draft_model", "pipedec", on_workers=True, ranks=2),
    Setting("draft_model", "continuous", ranks=2),
    Setting("ngram", "auto", on_workers=True, ranks=2),
)
"""The settings whose stages have several ranks."""


class Killer(Observer):
    """Kills processes, and measures the seconds after each until a batch that entered later comes out."""

    def __init__(self, rng: random.Random, victims: Victims) -> None:
        self.killed: list[tuple[str, float]] = []
        """Kind of each killed process, and the seconds until batches came out again."""
        self._rng = rng
        self._victims = victims
        self._left = KILLS_EACH
        self._in = rng.choice(RESULTS)
        self._struck: tuple[str, float] | None = None
        self._entered = self._entered_then = -1
        """Stream number of the batch that entered last, and of the last one at the time of a kill."""

    def submitted(self, batch: Batch, at: float) -> None:
        self._entered = batch.stream

    def arrived(self, result: Result, at: float) -> None:
        if self._struck is not None and result.stream > self._entered_then:
            self.killed.append((self._struck[0], at - self._struck[1]))
            self._struck = None
        self._in -= 1
        if self._in <= 0 and self._left and self._struck is None:
            self._left -= 1
            self._in = self._rng.choice(RESULTS)
            self._entered_then = self._entered
            self._struck = self._victims.kill(self._rng), at


@contextmanager
def engine(setting: Setting, others: Sequence[KilledWorker]) -> Iterator[LLM]:
    config = {"method": setting.method, "strategy": setting.strategy} if setting.method != "none" else None
    own: dict[str, Any] = {"pipeline_parallel_size": setting.stages, "tensor_parallel_size": setting.ranks}
    if others:
        own |= {"hosts": ",".join(one.host for one in others), "keys": str(others[0].keys)}
    with LLM("demo", speculative_config=config, **own) as llm:
        yield llm


def params(temperature: float) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=TOKENS, ignore_eos=True)
        for seed in range(len(PROMPTS))
    ]


def tokens(llm: LLM, temperature: float) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params(temperature))]


def attacked(
    setting: Setting, others: Sequence[KilledWorker], rng: random.Random, expected: dict[float, list[list[int]]]
) -> dict[str, Any]:
    """One engine, with kills during a call at each temperature."""
    killed: list[tuple[str, float]] = []
    problems: list[str] = []
    victims = Elsewhere(others) if others else Here(setting.drafts)
    for worker in others:
        worker.wait_until_it_listens()
    with engine(setting, others) as llm:
        for temperature in TEMPERATURES:
            killer = Killer(rng, victims)
            with llm.observing(killer):
                if tokens(llm, temperature) != expected[temperature]:
                    problems.append(f"{setting}, T = {temperature}: other tokens")
            killed += killer.killed
            llm.loop.audit()
        recovery = llm.loop.recovery
        assert recovery is not None
        counts = recovery.recoveries, recovery.drafter_losses
    problems += [f"{setting}: left behind {one}" for one in victims.left()]
    return {"killed": killed, "recoveries": counts[0], "drafter_losses": counts[1], "problems": problems}


def figures_of(found: Sequence[tuple[Setting, dict[str, Any]]], seconds: float) -> dict[str, Any]:
    """The figures of one portion."""
    pauses: dict[str, list[float]] = {}
    for _, one in found:
        for kind, pause in one["killed"]:
            pauses.setdefault(kind, []).append(round(pause, 3))
    by_setting: Counter[str] = Counter()
    for setting, one in found:
        by_setting[str(setting)] += len(one["killed"])
    return {
        "seconds": round(seconds),
        "requests": len(found) * len(TEMPERATURES) * len(PROMPTS),
        "by_setting": dict(by_setting),
        "recoveries": sum(one["recoveries"] for _, one in found),
        "drafter_losses": sum(one["drafter_losses"] for _, one in found),
        "pauses": pauses,
        "problems": [problem for _, one in found for problem in one["problems"]],
    }


def together(portions: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The sums of several portions."""
    sums: Counter[str] = Counter()
    by_setting: Counter[str] = Counter()
    pauses: dict[str, list[float]] = {}
    problems: list[str] = []
    for one in portions:
        sums.update({name: one[name] for name in ("seconds", "requests", "recoveries", "drafter_losses")})
        by_setting.update(one["by_setting"])
        for kind, some in one["pauses"].items():
            pauses[kind] = pauses.get(kind, []) + some
        problems += one["problems"]
    return {
        **sums,
        "kills": by_setting.total(),
        "by_setting": dict(by_setting),
        "pauses": {
            kind: {"kills": len(some), "median_s": statistics.median(some), "longest_s": max(some)}
            for kind, some in sorted(pauses.items())
        },
        "problems": problems,
    }


def main(kills: int = KILLS, seed: int = 0, *, settings: Sequence[Setting] = SETTINGS) -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    logging.disable()
    rng, begun = random.Random(seed), time.monotonic()
    with engine(Setting("none", "autoregressive"), ()) as llm:
        expected = {temperature: tokens(llm, temperature) for temperature in TEMPERATURES}
    found: list[tuple[Setting, dict[str, Any]]] = []
    with tempfile.TemporaryDirectory() as folder, workers(WORKERS, Path(folder)) as others:
        while sum(len(one["killed"]) for _, one in found) < kills:
            setting = settings[(seed + len(found)) % len(settings)]
            found.append((setting, attacked(setting, others if setting.on_workers else (), rng, expected)))
    portion = figures_of(found, time.monotonic() - begun)
    show(together([portion]))
    ranked = settings is RANKED
    portions = kept_figures(NAME) | {f"{seed}, ranks" if ranked else str(seed): portion}
    commands = [f"python -m benchmarks.load.chaos KILLS SEED{last}" for last in ("", " ranks")]
    store(NAME, HOW, (commands if any("ranks" in key for key in portions) else commands[:1], portions))
    return 1 if portion["problems"] else 0


if __name__ == "__main__":
    *numbers, last = sys.argv[1:] or [""]
    ranked = last == "ranks"
    sys.exit(main(*map(int, numbers if ranked else sys.argv[1:]), settings=RANKED if ranked else SETTINGS))
