"""Many requests at once: throughput and latency by concurrency, and a long prompt amid requests that decode."""

from __future__ import annotations

from typing import Any

from benchmarks.load import attack, chaos, interference, serve_http, serving, soak
from benchmarks.load.killing.victims import SERVER
from benchmarks.sections.base import Section, paragraphs
from penstock.lab.common import markdown
from penstock.lab.grid import PLAIN
from penstock.requests.slots import BLOCK

HEADINGS = ("cluster", "at once", "strategy", "tokens/s", "over plain (95%)", "latency, s", "per token, ms")


def render_serving(figures: Any) -> str:
    rows = [
        [f"`{cluster}`", concurrency, f"`{row['strategy']}`", *cells(row)]
        for cluster, found in figures.items()
        for concurrency, entries in found["concurrency"].items()
        for row in entries
    ]
    alone = "; ".join(
        f"`{cluster}` {per_token(found):.2f}x and {found['alone']:.2f}x" for cluster, found in figures.items()
    )
    worst = min(
        (row["over_plain"][1], cluster, concurrency)
        for cluster, found in figures.items()
        for concurrency, entries in found["concurrency"].items()
        for row in entries
        if row["strategy"] == "auto"
    )
    fewest, most = serving.ANSWER
    return paragraphs(
        "PipeDec's Figure 8 asks what becomes of throughput when several requests come at once; its answer at eight is "
        "that PipeDec is level with static trees and that plain pipelining will win with more memory. Here `plain` is "
        f"continuous batching. {next(iter(figures.values()))['sets']} sets of requests with prompts of "
        f"{serving.PROMPT[0]} to {serving.PROMPT[1]} tokens and answers of {fewest} to {most}; latency is p50 / p99 of "
        "whole requests, per token p50 / p99 of the mean after the first.",
        markdown(HEADINGS, rows),
        f"The least lower bound of `auto` over plain is {worst[0]:.2f} (`{worst[1]}`, {worst[2]} at once). One request "
        "at a time, by the time per token after the first (median), and in `penstock simulate`, request after request: "
        f"{alone}.",
    )


def per_token(found: dict[str, Any]) -> float:
    """Speed of a token with `auto` relative to plain decoding, for a single request."""
    plain, auto = ({row["strategy"]: row for row in found["concurrency"]["1"]}[name] for name in (PLAIN, "auto"))
    return float(plain["tpot_p50"] / auto["tpot_p50"])


def cells(row: dict[str, Any]) -> list[str]:
    return [*speed_cells(row, 1), f"{1e3 * row['tpot_p50']:.0f} / {1e3 * row['tpot_p99']:.0f}"]


def speed_cells(row: dict[str, Any], digits: int) -> list[str]:
    """Throughput with ``digits`` digits, its ratio over plain, and latency."""
    mean, low, high = row["over_plain"]
    return [
        f"{row['throughput']:.{digits}f}",
        f"{mean:.2f}x ({low:.2f} to {high:.2f})",
        f"{row['latency_p50']:.1f} / {row['latency_p99']:.1f}",
    ]


def render_interference(figures: Any) -> str:
    rows = [
        [
            cluster if cluster == interference.HOST else f"`{cluster}`",
            f"`{row['strategy']}`",
            "none" if row["stretch"] is None else f"{row['stretch']:g}",
            f"{row['ttft']:.1f}",
            *(" / ".join(f"{1e3 * value:.0f}" for value in row[name]) for name in ("before", "during")),
            str(row["tokens"]),
        ]
        for cluster, entries in figures.items()
        for row in entries
    ]
    return paragraphs(
        f"{interference.DECODING} requests decode when a prompt of {interference.PROMPT:,} tokens comes. By "
        "`prefill_stretch`, the most times as long as without the prompt's rows that a batch may take the slowest "
        "stage (default 2): the prompt's time to first token, and the others' time between tokens, p50 / p99, before "
        "it came and until its first token, with the tokens that they had meanwhile.",
        markdown(["cluster", "strategy", "stretch", "first token, s", "before, ms", "meanwhile, ms", "tokens"], rows),
        "The bound holds once the engine has seen what chunks of that size cost: the first of a size may take longer. "
        f"However small the bound, a batch takes {BLOCK} rows of the prompt. "
        "Modelled stages take prompts in planned pieces; a bound that these keep by themselves changes nothing.",
    )


def render_soak(figures: Any) -> str:
    kinds, counters = figures["kinds"], figures["counters"]
    answered = sum(kinds[kind] for kind in ("whole", "stream", "twice", "slow"))
    left = sum(count for kind, count in kinds.items() if kind.startswith("leaves"))
    warm, end = figures["warm"], figures["end"]
    rows = [
        [process, f"{before:.0f}", f"{after:.0f}", f"{slope / 1024:.2f}"]
        for process, before, after, slope in zip(
            figures["processes"],
            warm["resident"],
            end["resident"],
            figures["kib_per_1000_requests"],
            strict=True,
        )
    ]
    verdict = "; ".join(figures["problems"]) or "nothing"
    return paragraphs(
        f"{figures['requests']:,} requests to `penstock serve demo -pp 2` with a draft model, "
        f"{figures['rate']:g} a second, few KV slots and a short queue: {answered:,} answered, to fast and slow "
        f"readers; {left:,} clients left before, amid or after their answer or in the middle of their own body; "
        f"{kinds['bad']:,} bad requests of twenty kinds; {kinds['refused']:,} were told to come again later. Every "
        "answer is compared, token for token, with what its request gives alone in a plain engine of one stage. What "
        f"went wrong: {verdict}.",
        f"{counters['num_preemptions']:,.0f} requests were preempted and computed anew on the way; the prefix cache "
        f"had {counters['prefix_cache_hits']:,.0f} of {counters['prompt_tokens']:,.0f} prompt tokens. In the end no "
        f"request was left, no slot used, no process more; {warm['threads']} threads after the warm-up, "
        f"{end['threads']} in the end, {warm['descriptors']} and {end['descriptors']} descriptors. Told to stop, it "
        f"had ended after {figures['drain_seconds']:.1f} s. MiB after the warm-up and in the end, and by a "
        "straight line through the second half:",
        markdown(["process", "warm", "end", "MiB per 1,000 requests"], rows),
        "The drafter and the last stage keep the Gumbel noise of recent positions, 64 MiB at most; they grow in steps "
        "until they hold it.",
    )


def render_attack(figures: Any) -> str:
    rows = [
        [
            f"`{name}`",
            f"{found['tried']:,}",
            f"{found['seconds'] / 60:.1f}",
            ", ".join(f"{outcome} ({count:,})" for outcome, count in found["outcomes"].items()),
            "; ".join(found["faults"]) or "nothing",
        ]
        for name, found in figures.items()
    ]
    seeds = ", ".join(map(str, sorted({found["seed"] for found in figures.values()})))
    return paragraphs(
        f"{sum(found['tried'] for found in figures.values()):,} attacks in "
        f"{sum(found['seconds'] for found in figures.values()) / 60:.0f} minutes, seed {seeds}: changed bodies and "
        "heads, up to 600 connections at once that ask for nothing or never to the end, grammars, changed checkpoints "
        "and drafters, up to 400 frames an attempt from those who know the session's secret and those who do not, "
        f"{'thousands of requests of which a third is left, ' if 'memory' in figures else ''}and processes killed and "
        "stopped beside running requests. An attempt fails where something hangs, another request's token changes, an "
        "error is raw or untyped, a checkpoint's code runs, memory grows, or processes, descriptors or folders stay "
        "behind.",
        "What became of an attempt is a reply's status; from how many addresses how many connections came; whether "
        "frames moved anything or ended the session with an error; or how many of three requests beside a killed "
        "process had their whole answer, where the others had an error.",
        markdown(["kind", "tried", "minutes", "what became of it", "what failed"], rows),
    )


def render_http(figures: Any) -> str:
    rows = [
        [str(found["boards"]), concurrency, f"`{row['strategy']}`", *speed_cells(row, 2), late(found, row)]
        for found in figures.values()
        for concurrency, entries in found["concurrency"].items()
        for row in entries
    ]
    same = all(found["identical"] for found in figures.values())
    sizes = [
        f"on {found['boards']} boards {found['rounds']} rounds of at least {found['prompts']} requests of "
        f"{found['tokens']} tokens"
        for found in figures.values()
    ]
    headings = ["boards", "at once", "strategy", "tokens/s", "over plain (95%)", "latency, s: p50 / p99", "overruns"]
    return paragraphs(
        "`penstock serve` on emulated edge boards in real processes, asked by `penstock bench serve`: a server per "
        f"strategy, in turns, {' and '.join(sizes)}, and of as many as run at once. Ratios are "
        f"paired by round. All texts {'are the same' if same else 'are NOT the same'} whatever the strategy.",
        markdown(headings, rows),
    )


def render_chaos(portions: Any) -> str:
    figures = chaos.together(portions.values())
    rows = [
        [kind, str(pause["kills"]), f"{pause['median_s']:.2f}", f"{pause['longest_s']:.2f}"]
        for kind, pause in figures["pauses"].items()
        if kind != SERVER  # its stages go on until the engine has noticed
    ]
    servers = figures["pauses"].get(SERVER, {"kills": 0})["kills"]
    verdict = "; ".join(figures["problems"]) or "nothing"
    return paragraphs(
        f"{figures['kills']} processes killed at random tokens, amid {figures['requests']} requests of "
        f"{chaos.TOKENS} tokens, {len(chaos.PROMPTS)} at a time on {chaos.STAGES} stages of this host or on two "
        "workers with addresses of their own, greedily and at T = 0.8: "
        f"{'; '.join(figures['by_setting'])}. {servers} of them were the fork server, which takes all others along. "
        f"Stages were replaced {figures['recoveries']} times, the drafter alone {figures['drafter_losses']} times. "
        "Every token is compared with what plain decoding gives without any kill, "
        f"and after each call slots are audited and processes counted. What was wrong: {verdict}.",
        "Seconds until a batch comes out that has entered since. Unless a draft model was killed all requests wait for "
        "it:",
        markdown(["killed", "times", "median, s", "longest, s"], rows),
    )


def late(found: dict[str, Any], row: dict[str, Any]) -> str:
    return f"{100 * found['overruns'][row['strategy']]:.1f}%"


SECTIONS = (
    Section(name=serve_http.NAME, title="Many requests over HTTP", how=serve_http.HOW, take=None, render=render_http),
    Section(name=soak.NAME, title="Ten thousand requests", how=soak.HOW, take=None, render=render_soak),
    Section(name=chaos.NAME, title="Killed again and again", how=chaos.HOW, take=None, render=render_chaos),
    Section(name=attack.NAME, title="Under attack", how=attack.HOW, take=None, render=render_attack),
    Section(name=serving.NAME, title="Many requests at once", how=serving.HOW, take=None, render=render_serving),
    Section(
        name=interference.NAME,
        title="A long prompt amid requests that decode",
        how=interference.HOW,
        take=None,
        render=render_interference,
    ),
)
