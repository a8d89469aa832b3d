"""Many requests at once, on one stage, two stages, two ranks and two engines, beside llama.cpp's slots.

    python -m benchmarks.strategies.many_beside_peers MODEL.gguf PROMPTS [--threads N] [--at-once N ...] [--rounds N]

The first chats of the prompt sets, a number of them at the same time, greedily, as many tokens of each, in 4 bits. Each
way of using the host's threads has engines of its own, plainly and with `auto` and prompt lookup: one stage of all
threads, and half of them for each of two stages (pp), two ranks of one stage (tp) and two engines (dp). llama.cpp, the
wheel and a build for this processor, has as many slots as there are requests. The time counts from the moment at which
all are put to the last token, prompts included. Everyone in turn, several rounds; ratios are paired by round. Every
number at once is stored as it ends in benchmarks/measured/strategies/many_beside_peers.json. Stop whatever else runs on
the host, or the figures mean little.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from benchmarks.shared.benchmark import Benchmark, show
from benchmarks.shared.measured import kept_figures
from benchmarks.shared.paired import bounded
from benchmarks.strategies.beside_peers import installed
from benchmarks.strategies.shared_host import questions
from penstock import LLM, RequestOutput, SamplingParams
from penstock.lab.bench.peer_worker import Ask
from penstock.lab.bench.peers import PeerProcess, ask_of, setup_of
from penstock.lab.bench.summary import same_tokens
from penstock.lab.grid import PLAIN, Question, is_plain, parse_entries

HOW: Final = "Measured, nothing emulated"
ENTRIES: Final = (PLAIN, "auto")
WAYS: Final[Mapping[str, Mapping[str, Any]]] = {
    "one stage": {},
    "pp 2": {"pipeline_parallel_size": 2},
    "tp 2": {"tensor_parallel_size": 2},
    "dp 2": {"data_parallel_size": 2},
}
"""Options of each way; all use as many threads together."""
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


class Engine:
    """One way with one strategy: an engine of its own, and its outputs of the last round."""

    def __init__(self, options: argparse.Namespace, way: str, config: Any, count: int) -> None:
        parts = max([1, *WAYS[way].values()])
        self.llm = LLM(
            options.model,
            quantization="int4",
            threads=max(1, options.threads // parts),
            max_model_len=LONGEST,
            max_num_seqs=count,
            speculative_config=None if is_plain(config) else config,
            enable_prefix_caching=False,
            **WAYS[way],
        )
        self.outputs: Sequence[RequestOutput] = ()

    def answer(self, own: Sequence[Question]) -> None:
        self.outputs = self.llm.generate([one.prompt for one in own], [one.params for one in own])

    def figures(self, reference: Sequence[RequestOutput]) -> dict[str, Any]:
        """The outputs' times in seconds, AL and acceptance rate, and whether their ids are the reference's."""
        answers = [one.outputs[0] for one in self.outputs]
        accepted, drafts = (sum(getattr(one.metrics, name) for one in answers) for name in ("accepted", "drafts"))
        misses = sum(one.metrics.misses for one in answers)
        return {
            "first_token_s": round(fmean(one.first_token_seconds or 0.0 for one in answers), 4),
            "latency_s": round(fmean(one.seconds or 0.0 for one in answers), 4),
            "mean_acceptance_length": round(1 + accepted / drafts, 3) if drafts else 1.0,
            "acceptance_rate": round(accepted / (accepted + misses), 3) if accepted + misses else None,
            "identical": all(same_tokens(a, b) for a, b in zip(self.outputs, reference, strict=True)),
        }


def measured(options: argparse.Namespace, count: int) -> dict[str, Any]:
    named = parse_entries(ENTRIES, {"method": "ngram"})
    with ExitStack() as stack:
        engines = {}
        for way in options.ways:
            for name, config in named:
                engines[f"{way}, {name}"] = engine = Engine(options, way, config, count)
                stack.enter_context(engine.llm)
        first = next(iter(engines.values()))
        own, theirs = asked(first.llm, options, count)
        ways: dict[str, Callable[[], Any]] = {name: partial(one.answer, own) for name, one in engines.items()}
        setups = [setup_of(name, first.llm.setup, at_once=count) for name in installed() if name != "hf"]
        peers = [stack.enter_context(PeerProcess(setup)) for setup in setups]
        ways |= {peer.name: partial(peer.ask_together, theirs) for peer in peers}
        rounds = [{name: seconds_of(do) for name, do in ways.items()} for _ in range(options.rounds + 1)]
    # The first round warms everyone up.
    seconds = {name: [round(one[name], 4) for one in rounds[1:]] for name in ways}
    return {
        "at_once": len(own),
        "threads": options.threads,
        "tokens": options.tokens,
        "tokens_per_second": {
            name: len(own) * options.tokens * len(some) / sum(some) for name, some in seconds.items()
        },
        "ratios": {
            name: {
                base: bounded(seconds[base], seconds[name]) for base in bases_of(name, [peer.name for peer in peers])
            }
            for name in engines
        },
        "engines": {name: one.figures(first.outputs) for name, one in engines.items()},
        "seconds": seconds,
        "versions": {peer.name: peer.version for peer in peers},
        "features": {peer.name: peer.features for peer in peers},
    }


def bases_of(name: str, peers: Sequence[str]) -> list[str]:
    """The ways that an engine is compared with: plain decoding in its own way, on one stage, and the peers."""
    plain = [f"{name.split(', ')[0]}, {PLAIN}", f"{next(iter(WAYS))}, {PLAIN}"]
    return [base for base in dict.fromkeys([*plain, *peers]) if base != name]


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
    at_once = {"type": int, "nargs": "+", "default": [1, 4, 16, 64]}
    parser = benchmark.parser(
        model=str, prompts=Path, threads=2, tokens=64, rounds=5, at_once=at_once, ways=tuple(WAYS)
    )
    main(benchmark, parser.parse_args())
