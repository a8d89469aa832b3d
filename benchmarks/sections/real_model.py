"""A real model without emulation: where a step goes, beside peers, with trained drafters, token for token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.costs import quantized, step
from benchmarks.drafters import trained
from benchmarks.sections.base import Section, paragraphs
from benchmarks.strategies import beside_peers, real_ids, two_stages
from benchmarks.strategies.shared_host import ratio_over
from penstock.lab.common import markdown

SETS = {
    "alpaca": "alpaca",
    "gsm8k": "maths",
    "humaneval": "code",
    "mt_bench": "chats",
    "qa": "questions",
    "sum": "summaries",
}


def render_quantized(figures: Any) -> str:
    formats = figures["formats"]
    rows = list(next(iter(formats.values()))["step_ms"])
    steps = [[f"`{name}`", *(f"{one['step_ms'][n]:.1f}" for n in rows)] for name, one in formats.items()]
    kept = [
        [
            f"`{name}`",
            *(f"{one['step_ms'][n] / one['step_ms']['1']:.2f}" for n in ("4", "8", "16")),
            f"{one['weight_bytes'] / 1e6:.0f} MB, {one['weight_bytes'] / figures['file_bytes']:.2f}",
            f"{one['perplexity']:.3f}",
        ]
        for name, one in formats.items()
    ]
    return paragraphs(
        "SmolLM2-135M-Instruct from its Q4_1 GGUF file, all layers, embedding and head on one stage. The first table "
        f"has the milliseconds of a step by rows, behind {quantized.CONTEXT} tokens: the time of so many drafted "
        "tokens, logits of all of them included.",
        markdown(["rows", *rows], steps),
        "Then what 4, 8 and 16 rows take, one row taking 1; what the weights take in memory, and beside the file; and "
        f"the perplexity of {figures['tokens']:,} tokens of prompts. "
        "[quantization.md](../../reference/quantization.md) says what int8 is.",
        markdown(["", "4", "8", "16", "weights, of the file", "perplexity"], kept),
    )


def render_step(figures: Mapping[str, Any]) -> str:
    threads = next(iter(figures.values()))["threads"]
    parts = ["linear layers", "head", "attention", "the rest", "pick"]
    inside = [
        [f"`{name}`", rows, *(milliseconds(by_part.get(part)) for part in parts), f"{one['rows'][rows]:.1f}"]
        for name, one in figures.items()
        for rows, by_part in one["parts"].items()
    ]
    engines = [
        [
            f"`{name}`",
            str(run["stages"]),
            str(run["requests"]),
            f"{run['tokens_per_second']:.0f}",
            f"{run['step_ms']:.1f}",
            f"{run['computed_ms']:.1f}",
        ]
        for name, one in figures.items()
        for run in one["engines"]
    ]
    return paragraphs(
        f"SmolLM2-135M-Instruct from its Q4_1 GGUF file, stages of {threads} thread(s), behind {step.CONTEXT} tokens. "
        "First one stage with all layers: milliseconds by rows of one request, and what they go into. The parts are "
        "watched one by one, which slows them a little; the whole step is not. `the rest` is norms, rotary embeddings, "
        "activations, residuals, and Python between them.",
        markdown(["weights", "rows", *parts, "whole step"], inside),
        "Then engines that decode plainly: tokens per second, milliseconds from result to result, and how many of them "
        "all stages together computed for it. What the latter leave of one request's step is engine and messages.",
        markdown(["weights", "stages", "requests", "tokens/s", "step, ms", "computed, ms"], engines),
        "Layers with exact numerics, all but those of `fast`, are compiled into one call "
        "(docs/background/architecture.md): their products are timed by themselves, one after another, and attention "
        "is part of the rest. Torch's own kernel for four bits took 4.0 ms with one row, 5.7 with four and 10.8 with "
        "eight for the same layers.",
        "`torch.compile` is not offered. Its compiled functions take 16 microseconds a call before they compute "
        "anything: a residual sum with its norm 17 microseconds where torch's own operations take 8, the "
        "feed-forward's activation 16 where they take 3 (one row, one thread).",
    )


def milliseconds(taken: float | None) -> str:
    return "-" if taken is None else f"{taken:.1f}"


def render_peers(figures: Mapping[str, Any]) -> str:
    names = [*beside_peers.ENTRIES, *beside_peers.PEERS]
    speeds = [
        [f"`{one['quantization']}`", str(one["threads"]), SETS.get(of, of), *(f"{by[name]:.0f}" for name in names)]
        for one in figures.values()
        for of, by in one["speeds"].items()
    ]
    ratios = [
        [f"`{one['quantization']}`", str(one["threads"]), pair, f"{mean:.2f} ({low:.2f}-{high:.2f})"]
        for one in figures.values()
        for pair, (mean, low, high) in one["ratios"].items()
    ]
    first = next(iter(figures.values()))
    versions = " and ".join(first["versions"].values())
    return paragraphs(
        "SmolLM2-135M-Instruct from its Q4_1 GGUF file, answering greedily; of each of six prompt sets the first "
        f"chats ({first['per_set']}), at most {first['tokens']} tokens an answer. Tokens per second after the first, "
        f"of plain decoding, of `auto` with prompt lookup, and of {versions}, in turn, with as many threads each. "
        "transformers computes with the dequantised float32, llama.cpp with the file's own 4 bits.",
        markdown(["weights", "threads", "prompts", "plain", "`auto`", "transformers", "llama.cpp"], speeds),
        "How many times as fast, mean of the sets with 95% bounds:",
        markdown(["weights", "threads", "", "times"], ratios),
    )


def render_trained(figures: Mapping[str, Any]) -> str:
    one = next(iter(figures.values()))
    every = [(name, t, sets) for name, figure in figures.items() for t, sets in figure["temperatures"].items()]
    return paragraphs(
        "SmolLM2-135M-Instruct in float32; of each of six prompt sets the first chats "
        f"({one['per_set']}), at most {one['tokens']} tokens an answer. Speed of two stages over plain decoding on "
        "the same two, mean with 95% bounds and the least of the sets. `draft_model` is the target with 22 of its 30 "
        "layers, distilled from 156 thousand tokens of its own answers (`penstock train draft --layers 22`, 435 steps "
        "of 512 tokens, [no data set](../../how-to/training.md)); it computes in `int8`. A plain token takes 47 ms "
        "here, on an AMD EPYC (Zen 4), and the drafter's round 8 ms. On a processor where it took 22 ms, and a round "
        "4.3, 20 layers made 1.12 by `continuous` and 0.99 by `auto`, with an engine that sent roots without waiting "
        "for their drafts.",
        markdown(
            ["drafter", "T", "`auto`", "least of the sets", "`continuous`"],
            [speed_cells(*case) for case in every],
        ),
        "How often, in percent, `continuous` had the target's token among the nodes of the tree at depth 1, 2, 3 and "
        "4, where the path before it was right:",
        markdown(
            ["drafter", "T", *SETS.values()],
            [hit_cells(*case) for case in every],
        ),
    )


def speed_cells(drafter: str, temperature: str, sets: Mapping[str, Any]) -> list[str]:
    def over(base: str, entry: str) -> str:
        ratio = ratio_over([one["seconds"] for one in sets.values()], base, entry)
        return f"{ratio.mean:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"

    plain, auto, continuous = trained.ENTRIES
    least = min(sum(one["seconds"][plain]) / sum(one["seconds"][auto]) for one in sets.values())
    return [
        f"`{drafter}`",
        temperature,
        over(plain, auto),
        f"{least:.2f}",
        over(plain, continuous),
    ]


def hit_cells(drafter: str, temperature: str, sets: Mapping[str, Any]) -> list[str]:
    def shares(one: Mapping[str, Any]) -> str:
        pairs = zip(one["right"], one["decided"], strict=True)
        return ", ".join(f"{100 * right / decided:.0f}" for right, decided in pairs if decided)

    return [f"`{drafter}`", temperature, *(shares(sets[name]) for name in SETS)]


def render_ids(figures: Mapping[str, Any]) -> str:
    ways = [f"{strategy} over {stages}" for stages, strategy in real_ids.ways()]
    tokens = max(one["tokens"] for one in figures.values())
    rows = [
        [
            f"`{case}`",
            f"{one['prompts']}",
            f"{one['answered']:,}",
            f"{one['others']}" if case == real_ids.JUDGED else "-",
            *(f"{one['ways'][way]}" for way in ways),
        ]
        for case, one in real_ids.added_up(figures).items()
    ]
    return paragraphs(
        "SmolLM2-135M-Instruct from its Q4_1 GGUF file, greedily, at most "
        f"{tokens} tokens an answer, of six prompt sets as many each, up to 16 requests together. Prompts that exceed "
        "1,024 tokens with their answer are left out: 17 of all 360. How many tokens are not those that transformers "
        "gives on the dequantised model; and how many answers, by strategy and stages, are not those of plain decoding "
        "of each request alone on one stage. Strategies draft by prompt lookup, and `auto` with the model itself, too.",
        markdown(
            [
                "weights",
                "prompts",
                "tokens",
                "not transformers'",
                *(way.replace("autoregressive", "plain") for way in ways),
            ],
            rows,
        ),
    )


def render_two_stages(figures: Mapping[str, Any]) -> str:
    sets = figures["seconds"]
    ways = list(next(iter(sets.values())))

    def over(base: str, way: str) -> str:
        ratio = ratio_over(sets.values(), base, way)
        return f"{ratio.mean:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"

    def speed(way: str) -> str:
        taken = [seconds for by_way in sets.values() for seconds in by_way[way]]
        return f"{(figures['tokens'] - 1) * len(taken) / sum(taken):.0f}"

    plain = [f"{layout}, autoregressive" for layout in two_stages.LAYOUTS]
    rows = [[way.replace("autoregressive", "plain"), speed(way), *(over(base, way) for base in plain)] for way in ways]
    return paragraphs(
        "SmolLM2-135M-Instruct from its Q4_1 GGUF file in `int4`: two stages of one thread each, and one stage of two "
        f"threads, in turn; of each of six prompt sets the first chats ({figures['per_set']}), {figures['tokens']} "
        "tokens each, without the first token's time. `auto` drafts by prompt lookup. How many times as fast, mean "
        "with 95% bounds:",
        markdown(["", "tokens/s", *(f"over {layout}, plain" for layout in two_stages.LAYOUTS)], rows),
    )


SECTIONS = (
    Section(name=quantized.NAME, title="Formats of weights", how=quantized.HOW, take=None, render=render_quantized),
    Section(name=step.NAME, title="Where a step goes", how=step.HOW, take=None, render=render_step),
    Section(name=real_ids.NAME, title="A real model's tokens", how=real_ids.HOW, take=None, render=render_ids),
    Section(
        name=beside_peers.NAME,
        title="Beside transformers and llama.cpp",
        how=beside_peers.HOW,
        take=None,
        render=render_peers,
    ),
    Section(
        name=two_stages.NAME,
        title="Two stages beside one of two threads",
        how=two_stages.HOW,
        take=None,
        render=render_two_stages,
    ),
    Section(
        name=trained.NAME,
        title="Drafters trained for a real model",
        how=trained.HOW,
        take=None,
        render=render_trained,
    ),
)
