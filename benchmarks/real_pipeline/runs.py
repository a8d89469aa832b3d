"""One model in one format: engines over several numbers of stages, with each drafter, as long as there is time."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from benchmarks.real_pipeline.engines import DEMO, Engine, engines_of
from benchmarks.shared.formats import EXACT_FORMATS
from benchmarks.shared.timed_parts import DoesNotFit, Findings
from benchmarks.strategies.shared_host import chat
from penstock import LLM, SamplingParams
from penstock.engine.completion import Prompt
from penstock.hosts.facts import core_of
from penstock.lab.bench.comparison import measure as measure_strategies
from penstock.lab.bench.summary import StrategyRun
from penstock.lab.grid import DEFAULT_PROMPTS, Named, parse_entries, read_prompts

PROMPTS, TOKENS = 12, 64
"""Most prompts of an engine, and tokens of each answer."""
FEW_TOKENS: Final = 8
"""Tokens of the answer whose time says how many prompts there is time for."""
USED: Final = 0.8
"""Fraction of the time that is planned to be used."""
QUESTIONS: Final = (
    "Write a Python class for a stack with push, pop and peek, and an example of its use.",
    "Explain in a few sentences why the sky is blue.",
    "Repeat this list with each entry on a line of its own: apples, pears, plums, cherries, apricots, quinces.",
    "Rewrite this text and correct its mistakes: The quick brown foxes jumps over the lazy dog, and the dog sleep on.",
    "Give me a recipe for pancakes, first the ingredients and then the steps.",
    "Translate into French: Good morning. Where is the station? The train to Paris leaves at nine.",
)


def measure(options: argparse.Namespace, findings: Findings) -> None:
    model, _, form = options.part.partition("-")
    keep_to(options.cores)
    findings.add("model", DEMO if model == DEMO else Path(options.model).name)
    engines = engines_of(model, options.cores, options.tiny)
    for number, engine in enumerate(engines):
        share = len(engine.entries) / sum(len(one.entries) for one in engines[number:])
        ends = time.monotonic() + findings.left * share
        with findings.trying(engine.name):
            findings.add(engine.name, measured(options, engine, model, form, ends))


def keep_to(cores: int) -> None:
    """Have this process and those that it starts use so many cores, with all hardware threads of each."""
    usable = sorted(os.sched_getaffinity(0))
    kept = list(dict.fromkeys(core_of(cpu) for cpu in usable))[:cores]
    os.sched_setaffinity(0, [cpu for cpu in usable if core_of(cpu) in kept])


def measured(options: argparse.Namespace, engine: Engine, model: str, form: str, ends: float) -> dict[str, Any]:
    """Figures of an engine. Raises DoesNotFit where the time does not suffice for a single short answer."""
    target = DEMO if model == DEMO else os.path.expanduser(options.model)
    named = parse_entries(engine.entries, {"method": engine.method}, target)
    own: dict[str, Any] = {**EXACT_FORMATS[form], "pipeline_parallel_size": engine.stages, "max_model_len": 1024}
    with LLM(target, speculative_config=named[1][1], **own) as llm:
        prompts = prompts_of(llm, model, 1 if options.tiny else PROMPTS)
        # Texts that fall into loops flatter every drafter: the demo's greedy ones do, and a chat model's past its end.
        params = SamplingParams(temperature=float(model == DEMO), max_tokens=TOKENS, ignore_eos=model == DEMO)
        if options.tiny:
            params = replace(params, max_tokens=FEW_TOKENS)
        count, tokens = affordable(llm, prompts, params, named, ends)
        seeded = [replace(params, max_tokens=tokens, seed=seed) for seed in range(count)]
        runs = measure_strategies(llm, prompts[:count], seeded, named)
        setting = {"numerics": llm.numerics, "threads": llm.setup.threads, "layers": llm.setup.layers}
    stated = {"stages": engine.stages, "drafter": engine.method, "processes": engine.processes}
    cores = {"cores": options.cores, "own_cores": engine.processes <= options.cores}
    asked = {"prompts": count, "tokens": tokens, "temperature": params.temperature}
    return {**stated, **cores, **setting, **asked, "entries": [figures_of(run) for run in runs]}


def prompts_of(llm: LLM, model: str, count: int) -> list[Prompt]:
    """Python for the demo pair, questions for a chat model."""
    if model == DEMO:
        return list(read_prompts(DEFAULT_PROMPTS, count))
    asked: list[Prompt] = [chat(llm, text) for text in QUESTIONS[:count]]
    return asked


def affordable(
    llm: LLM, prompts: Sequence[Prompt], params: SamplingParams, named: Sequence[Named], ends: float
) -> tuple[int, int]:
    """How many of the prompts all entries can answer until ``ends``, and with how many tokens, by a short trial.

    Where the time does not suffice for one whole answer, it is shorter. Raises DoesNotFit where even that would be
    shorter than the trial's.
    """
    begun = time.monotonic()
    measure_strategies(llm, prompts[:1], [replace(params, max_tokens=FEW_TOKENS, seed=0)], named)
    now = time.monotonic()
    each, left = (now - begun) / FEW_TOKENS, USED * (ends - now)
    tokens = min(params.max_tokens, int(left / each))
    if tokens < FEW_TOKENS:
        needed = each * params.max_tokens
        raise DoesNotFit(f"an answer of each entry takes about {needed:.0f} s, and {max(0.0, left):.0f} s were left")
    return max(1, min(len(prompts), int(left / (each * tokens)))), tokens


def figures_of(run: StrategyRun) -> dict[str, Any]:
    """An entry's figures. A ratio is over plain decoding of the same prompts: geometric mean and 95% bounds."""
    return {
        "strategy": run.strategy.partition("[")[0],
        "options": run.options,
        "tokens_per_second": run.tokens_per_second,
        "ratio": run.wall_clock_speedup,
        "bounds": run.wall_clock_speedup_interval,
        "identical": run.identical_to_autoregressive,
        "tokens_per_tree": run.mean_acceptance_length,
        "tokens_per_trip": run.equivalent_acceptance_length,
        "stage_busy": run.stage_busy,
        "hop_ms": run.overhead_per_hop_ms,
        "loop_ms": run.overhead_per_loop_ms,
        "first_token_ms": run.mean_ttft_ms,
        "looping": run.looping_outputs,
        "seconds": [one["seconds"] for one in run.requests],
    }
