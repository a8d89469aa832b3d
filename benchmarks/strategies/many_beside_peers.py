"""Many requests at once beside llama.cpp, the wheel and a build for this processor: tokens per second of all together.

    python -m benchmarks.strategies.many_beside_peers MODEL.gguf PROMPTS [--threads N] [--at-once N ...] [--rounds N]

The first chats of the prompt sets, a number of them at the same time, greedily, as many tokens of each: plainly and
with `auto` and prompt lookup over one stage in 4 bits, and by llama.cpp with as many slots. The time counts from the
moment at which all are put to the last token, prompts included. Everyone in turn, several rounds; ratios are paired by
round. Every number at once is stored as it ends in benchmarks/measured/strategies/many_beside_peers.json. Stop whatever
else runs on the host, or the figures mean little.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.shared.benchmark import Benchmark, show
from benchmarks.shared.measured import kept_figures
from benchmarks.shared.paired import bounded
from benchmarks.strategies.beside_peers import installed
from benchmarks.strategies.shared_host import questions
from penstock import LLM, SamplingParams
from penstock.lab.bench.comparison import decode
from penstock.lab.bench.peer_worker import Ask
from penstock.lab.bench.peers import PeerProcess, ask_of, setup_of
from penstock.lab.grid import PLAIN, Question, parse_entries

HOW: Final = "Measured, one stage, nothing emulated"
ENTRIES: Final = (PLAIN, "auto")
LONGEST: Final = 1024
"""Tokens of a prompt with its answer for which llama.cpp's slots have room."""


def seconds_of(do: Callable[[], Any]) -> float:
    began = time.perf_counter()
    do()
    return time.perf_counter() - began


def asked(llm: LLM, options: argparse.Namespace, count: int) -> tuple[list[Question], list[Ask]]:
    """Take as many questions as are put at once, the sets in turn, and the same for a peer, without too long ones."""
    params = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True)
    found = questions(llm, options.prompts, count, params)
    pairs = [(one, ask_of(llm, one, options.tokens)) for one in found]
    fitting = [pair for pair in pairs if len(pair[1].token_ids) + options.tokens <= LONGEST][:count]
    return [one for one, _ in fitting], [ask for _, ask in fitting]


def measured(options: argparse.Namespace, count: int) -> dict[str, Any]:
    named = dict(parse_entries(ENTRIES, {"method": "ngram"}))
    with ExitStack() as stack:
        llm = stack.enter_context(
            LLM(
                options.model,
                quantization="int4",
                threads=options.threads,
                max_model_len=LONGEST,
                speculative_config=named["auto"],
                enable_prefix_caching=False,
            )
        )
        own, theirs = asked(llm, options, count)
        ways: dict[str, Callable[[], Any]] = {
            name: partial(decode, llm, [one.prompt for one in own], [one.params for one in own], config)
            for name, config in named.items()
        }
        setups = [setup_of(name, llm.setup, at_once=count) for name in installed() if name != "hf"]
        peers = [stack.enter_context(PeerProcess(setup)) for setup in setups]
        ways |= {peer.name: partial(peer.ask_together, theirs) for peer in peers}
        rounds = [{name: seconds_of(do) for name, do in ways.items()} for _ in range(options.rounds + 1)][
            1:
        ]  # the first warms up
    seconds = {name: [round(one[name], 4) for one in rounds] for name in ways}
    return {
        "at_once": len(own),
        "threads": options.threads,
        "tokens": options.tokens,
        "tokens_per_second": {
            name: len(own) * options.tokens * len(some) / sum(some) for name, some in seconds.items()
        },
        "ratios": {
            f"{entry} over {peer.name}": bounded(seconds[peer.name], seconds[entry])
            for peer in peers
            for entry in named
        },
        "seconds": seconds,
        "versions": {peer.name: peer.version for peer in peers},
        "features": {peer.name: peer.features for peer in peers},
    }


def main(benchmark: Benchmark, options: argparse.Namespace) -> None:
    given = (
        f"MODEL.gguf PROMPTS --threads {options.threads} --tokens {options.tokens} --rounds {options.rounds} --at-once"
    )
    for count in options.at_once:
        found = {f"{count} at once, threads {options.threads}": measured(options, count)}
        figures = kept_figures(benchmark.name) | found
        benchmark.keep(figures, f"{given} {' '.join(str(one['at_once']) for one in figures.values())}")
        show(found)


if __name__ == "__main__":
    benchmark = Benchmark(__file__, HOW)
    at_once = {"type": int, "nargs": "+", "default": [1, 4, 16]}
    parser = benchmark.parser(model=str, prompts=Path, threads=1, tokens=64, rounds=5, at_once=at_once)
    main(benchmark, parser.parse_args())
