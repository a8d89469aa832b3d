"""A long prompt amid requests that decode: its time to first token, and its effect on the others' tokens.

    python -m benchmarks.load.interference                  # simulated
    python -m benchmarks.load.interference --processes      # measured: two stages on this host

With plain decoding and with `auto`, eight requests decode, and then a prompt of 4,000 tokens comes. Inter-token latency
is the time between arrivals of a request's tokens (tokens that come together count as one arrival), before the prompt
came and while it was computed. Runs differ in ``prefill_stretch``: the factor by which the prompt's rows may prolong a
batch in the slowest stage. On this host the model is the demo target with its number of positions raised, and drafts
are looked up in the text.
"""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shared.benchmark import Benchmark, show
from benchmarks.shared.measured import kept_figures
from benchmarks.shared.profile import ACCURACY, synthetic
from penstock import AsyncLLM, SamplingParams
from penstock.cluster import load_cluster
from penstock.engine.options import DEMO
from penstock.engine.stream import RequestStream
from penstock.lab.script import profile_script
from penstock.lab.simulator import Timed, make_loop, scripted
from penstock.speculation import make_strategy

NAME, HOW = "interference", "Simulated, with the synthetic profile; on this host measured"
HOST = "this host, two stages"
ROOM = 5120
"""Positions that the model is told to have room for."""
CLUSTERS = ("flowspec-7b", "pipedec-14x3090")
STRATEGIES: tuple[str, ...] = ("autoregressive", "auto")
STRETCHES = (1.0, 2.0, 4.0, math.inf)
DECODING, PROMPT, TOKENS = 8, 4000, 600
WARM = 40
"""Tokens of each of the eight requests before the prompt comes."""


def run(cluster_name: str, strategy: str, stretch: float) -> dict[str, Any]:
    cluster = load_cluster(cluster_name)
    config = None
    if strategy != "autoregressive":
        config = synthetic(strategy)
    script = profile_script(ACCURACY, DECODING + 1, TOKENS, seed=0)
    script = script.with_prompt(DECODING, PROMPT)
    loop = make_loop(cluster, script, config, DECODING + 1)
    loop.scheduler.prefill_stretch = stretch
    runs = [Timed() for _ in range(DECODING + 1)]

    def begin(number: int) -> None:
        runs[number].queued = loop.clock.now()
        loop.add(scripted(script, number, make_strategy(config, len(cluster.stages)), runs[number]))

    for number in range(DECODING):
        begin(number)
    while min(len(one.moments) for one in runs[:DECODING]) < WARM:
        loop.step()
    begin(DECODING)
    while not runs[DECODING].moments:
        loop.step()
    return row(strategy, stretch, runs[DECODING].queued, runs[DECODING].moments[0], [one.moments for one in runs])


def row(strategy: str, stretch: float, came: float, first: float, moments: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Figures of one run, from the times at which the prompt, its first token and all other tokens came."""
    before, during = (gaps(moments[:DECODING], *bounds) for bounds in ((0.0, came), (came, first)))
    return {
        "strategy": strategy,
        "stretch": None if stretch == math.inf else stretch,
        "ttft": first - came,
        "before": [float(np.percentile(before, q)) for q in (50, 99)],
        "during": [float(np.percentile(during, q)) for q in (50, 99)],
        "tokens": sum(came < moment <= first for own in moments[:DECODING] for moment in own),
    }


def gaps(moments: Sequence[Sequence[float]], first: float, last: float) -> list[float]:
    within = [sorted({moment for moment in own if first <= moment <= last}) for own in moments]
    return [later - earlier for own in within for earlier, later in pairwise(own)]


# --------------------------------------------------------------------------------------------------------- on this host


async def measured(model: Path, strategy: str, stretch: float) -> dict[str, Any]:
    config = {"strategy": strategy} if strategy == "autoregressive" else {"method": "ngram", "strategy": strategy}
    llm = AsyncLLM(
        model,
        pipeline_parallel_size=2,
        speculative_config=config,
        max_model_len=ROOM,
        kv_slots=3 * ROOM,
        prefill_stretch=stretch,
    )
    rng = np.random.default_rng(0)
    prompts = [rng.integers(5, 4000, size).tolist() for size in [16] * DECODING + [PROMPT, PROMPT]]
    moments: list[list[float]] = [[] for _ in prompts]
    warm = asyncio.Event()

    async def read(number: int, stream: RequestStream) -> None:
        async for update in stream:
            moments[number] += [time.monotonic()] * sum(len(delta.token_ids) for delta in update.deltas)
            if min(map(len, moments[:DECODING])) >= WARM:
                warm.set()

    def ask(number: int, tokens: int) -> asyncio.Task[None]:
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        return asyncio.create_task(read(number, llm.submit({"prompt_token_ids": prompts[number]}, params)))

    try:
        await ask(DECODING + 1, 1)  # teaches the engine the cost of chunks
        others = [ask(number, TOKENS) for number in range(DECODING)]
        await warm.wait()
        came = time.monotonic()
        await ask(DECODING, 1)
        first = moments[DECODING][0]
        for task in others:
            task.cancel()
        return row(strategy, stretch, came, first, moments)
    finally:
        llm.close()


def on_this_host() -> list[dict[str, Any]]:
    found = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(shutil.copytree(DEMO / "target", Path(folder) / "target"))
        settings = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**settings, "max_position_embeddings": ROOM}))
        for strategy in STRATEGIES:
            for stretch in STRETCHES:
                found.append(asyncio.run(measured(model, strategy, stretch)))
                show(found[-1], HOST)
    return found


def main(processes: bool) -> None:
    figures: dict[str, list[dict[str, Any]]] = kept_figures(NAME)
    if processes:
        figures[HOST] = on_this_host()
    for cluster in () if processes else CLUSTERS:
        figures[cluster] = []
        for strategy in STRATEGIES:
            for stretch in STRETCHES:
                figures[cluster].append(run(cluster, strategy, stretch))
                show(figures[cluster][-1], cluster)
    benchmark = Benchmark(__file__, HOW)
    benchmark.keep(figures, commands=[benchmark.command(given) for given in ("", "--processes")])


if __name__ == "__main__":
    main("--processes" in sys.argv[1:])
