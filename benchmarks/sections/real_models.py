"""Real models without emulation: formats of weights, peers, trained drafters, stages that share a host."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import geometric_mean
from typing import Any

from benchmarks.drafters.drafter_acceptance import shares, together
from benchmarks.sections.base import Section
from benchmarks.strategies import auto_chats, real_ids, shared_host, two_stages
from benchmarks.strategies.shared_host import ratio_over
from penstock.lab.trainer.options import IN_FLIGHT

SETS = {
    "alpaca": "alpaca",
    "gsm8k": "maths",
    "humaneval": "code",
    "mt_bench": "chats",
    "qa": "questions",
    "sum": "summaries",
}
Cases = list[tuple[str, str, Mapping[str, Any]]]


def ratio(seconds: Iterable[Any], base: str, entry: str) -> str:
    """Speed of an entry over ``base`` in words."""
    found = ratio_over(list(seconds), base, entry)
    return f"{found.mean:.2f} ({found.low:.2f}-{found.high:.2f})"


def cases_of(figures: Mapping[str, Any]) -> Cases:
    """Drafter, temperature and figures by prompt set."""
    return [(name, at, sets) for name, one in figures.items() for at, sets in one["temperatures"].items()]


def tokens_per_second(figures: Mapping[str, Any], entry: str) -> float:
    """Tokens after the first over the seconds that they took, all prompts of all sets together."""
    taken = [seconds for by_entry in figures["seconds"].values() for seconds in by_entry[entry]]
    return float((figures["tokens"] - 1) * len(taken) / sum(taken))


def ids_values(figures: Any) -> Mapping[str, Any]:
    return {"ways": [f"{strategy} over {stages}" for stages, strategy in real_ids.ways()]}


PEERS = {"autoregressive": "plain", "auto": "`auto`"}
WORDS = {"hf": "transformers", "llama.cpp": "llama.cpp, the wheel", "llama.cpp-native": "llama.cpp, native"}


def peers_values(figures: Any) -> Mapping[str, Any]:
    """Everyone's names, the features of builds that are stored, and ratios of seconds to the first token."""
    first = next(iter(figures.values()))
    names = {**PEERS, **{peer: WORDS.get(peer, peer) for peer in first["versions"]}}
    built = {peer: some for peer, some in first.get("features", {}).items() if some}
    return {
        "sets": SETS,
        "names": names,
        "built": built,
        "words": WORDS,
        "pair_words": pair_words,
        "second_thread": ", ".join(
            f"{second_thread(figures, name):.2f} ({words})" for name, words in names.items() if name != "auto"
        ),
    }


def second_thread(figures: Any, name: str) -> float:
    """How many times as fast an engine is on two threads as on one, in 4 bits: the geometric mean of the sets."""
    one, two = (figures[f"int4, {threads}"]["speeds"] for threads in (1, 2))
    return geometric_mean(two[of][name] / one[of][name] for of in one)


def pair_words(pair: str) -> str:
    """``plain over llama.cpp, native`` for ``autoregressive over llama.cpp-native``."""
    entry, peer = pair.split(" over ")
    return f"{PEERS[entry]} over {WORDS.get(peer, peer)}"


def many_values(figures: Any) -> Mapping[str, Any]:
    """A row for each way and number of requests at once, the peers' last: speed, ratios, times and acceptance."""
    first = next(iter(figures.values()))
    peers = list(first["versions"])

    def times(found: Any, base: str) -> str:
        if base not in found:
            return "-"
        mean, low, high = found[base]
        return f"{mean:.2f}" if low is None else f"{mean:.2f} ({low:.2f}-{high:.2f})"

    def row(one: Any, name: str) -> list[str]:
        way, _, entry = name.partition(", ")
        speed = f"{one['tokens_per_second'][name]:.0f}"
        if name in peers:
            return [str(one["at_once"]), WORDS[name], "", speed, *[""] * (5 + len(peers))]
        engine, ratios = one["engines"][name], one["ratios"][name]
        rate = engine["acceptance_rate"]
        return [
            *(str(one["at_once"]), way, entry.replace("autoregressive", "plain"), speed),
            times(ratios, f"{way}, autoregressive"),
            *(times(ratios, peer) for peer in peers),
            "-" if rate is None else f"{100 * rate:.0f}",
            f"{engine['mean_acceptance_length']:.2f}",
            *(f"{engine[key]:.2f}" for key in ("first_token_s", "latency_s")),
        ]

    rows = [row(one, name) for one in figures.values() for name in one["tokens_per_second"]]
    over = [f"over {WORDS[peer]}" for peer in peers]
    headings = ["at once", "way", "", "tokens/s", "over plain", *over, "AR, %", "AL", "first token, s", "latency, s"]
    identical = all(engine["identical"] for one in figures.values() for engine in one["engines"].values())
    return {"first": first, "words": WORDS, "headings": headings, "rows": rows, "identical": identical}


def two_stages_values(figures: Any) -> Mapping[str, Any]:
    """Tokens per second of each way, and its speed over plain decoding in each layout."""
    sets = figures["seconds"]

    def cells(way: str) -> list[str]:
        over = (ratio(sets.values(), f"{layout}, autoregressive", way) for layout in two_stages.LAYOUTS)
        return [way.replace("autoregressive", "plain"), f"{tokens_per_second(figures, way):.0f}", *over]

    headings = ["", "tokens/s", *(f"over {layout}, plain" for layout in two_stages.LAYOUTS)]
    return {"headings": headings, "rows": [cells(way) for way in next(iter(sets.values()))]}


def auto_values(figures: Any) -> Mapping[str, Any]:
    """A row for each engine; the cells that are below the bounds at first, and those that are so twice."""
    sets = (*SETS, auto_chats.ALL)

    def cell(measured: Sequence[Sequence[Any]]) -> str:
        return ", again ".join(f"{mean:.2f}" + ("" if low is None else f" ({low:.2f})") for mean, low, _ in measured)

    def cells(*, noise: bool) -> list[Sequence[Sequence[Any]]]:
        """Measurements of every set's cell, of those in which nothing is compared but noise, or of the others."""
        return [
            measured
            for engine, found in figures.items()
            for name, measured in found.items()
            if name != auto_chats.ALL and (auto_chats.NONE in engine.split(", ")) == noise
        ]

    each, noise = cells(noise=False), cells(noise=True)
    first = [measured for measured in each if auto_chats.below(measured[0])]
    return {
        "headings": ["engine", *(SETS.get(name, name) for name in sets)],
        "rows": [
            [engine, *(cell(found[name]) if name in found else "" for name in sets)]
            for engine, found in figures.items()
        ],
        "cells": len(each),
        "below": len(first),
        "noise": (
            sum(auto_chats.below(measured[0]) for measured in noise),
            len(noise),
            sum(len(measured) > 1 and all(map(auto_chats.below, measured)) for measured in noise),
        ),
        "again": sum(len(measured) > 1 for measured in first),
        "twice": sum(all(map(auto_chats.below, measured)) for measured in first if len(measured) > 1),
        "chats": sum(found[auto_chats.ALL][0][2] for found in figures.values()),
        "least": (auto_chats.LEAST_MEAN, auto_chats.LEAST_LOW),
    }


def learning_values(figures: Any) -> Mapping[str, Any]:
    texts = list(dict.fromkeys(one["settings"].get("data") for one in figures.values()))

    def text_of(one: Mapping[str, Any]) -> int:
        return 1 + texts.index(one["settings"].get("data"))

    return {
        "rows": [learning_row(one, text_of(one)) for one in figures.values()],
        "further": [
            [
                f"`{one['settings']['kind']}`",
                str(text_of(one)),
                *(f"{100 * share:.0f}" for share in one["last"][: IN_FLIGHT + 1]),
            ]
            for one in figures.values()
            if "last" in one
        ],
    }


def learning_row(one: Mapping[str, Any], text: int) -> list[str]:
    settings, (steps, _, *shares) = one["settings"], one["entries"][-1]
    which = {"exit_layer": "behind layer {}", "stages": "{} stages"}
    told = [text.format(one_of(settings[name])) for name, text in which.items() if name in settings]
    return [
        ", ".join([f"`{settings['kind']}`", *told]),
        str(text),
        settings.get("dtype", "float32"),
        str(settings["batch_tokens"]),
        f"{settings['learning_rate']:g}",
        str(steps),
        f"{60 * one['hours']:.0f}",
        " / ".join(f"{100 * share:.0f}" for share in shares),
    ]


def one_of(value: Any) -> Any:
    """The element of a list with one element; any other value itself."""
    return value[0] if isinstance(value, list) else value


def acceptance_values(figures: Any) -> Mapping[str, Any]:
    """The cases, the rows of later steps, the tokens that a row is based on and two standard errors (percent)."""
    cases = cases_of(figures)
    later = []
    for name, temperature, sets in cases:
        steps = min(len(found) for found in sets.values())
        if steps > 1:
            cells = [shares(together(sets, step)) if step < steps else "-" for step in (1, 2)]
            later.append([f"`{name}`", temperature, *cells])
    tokens = max(together(sets)[0] for sets in next(iter(figures.values()))["temperatures"].values())
    chance = 200 * (0.25 * 0.75 / tokens) ** 0.5  # of a share of one in four
    return {"sets": SETS, "cases": cases, "later": later, "tokens": tokens, "chance": chance}


def trained_values(figures: Any) -> Mapping[str, Any]:
    def over(sets: Mapping[str, Any], entry: str) -> str:
        return ratio((one["seconds"] for one in sets.values()), "autoregressive", entry)

    def least(sets: Mapping[str, Any]) -> str:
        return f"{least_of([one['seconds'] for one in sets.values()], 'auto'):.2f}"

    def hits(one: Mapping[str, Any]) -> str:
        pairs = zip(one["right"], one["decided"], strict=True)
        return ", ".join(f"{100 * right / decided:.0f}" for right, decided in pairs if decided)

    greedy = figures["ngram"]
    seconds = {name: one["seconds"] for name, one in greedy["temperatures"]["0.0"].items()}
    return {
        "sets": SETS,
        "cases": cases_of(figures),
        "over": over,
        "least": least,
        "hits": hits,
        "plain_ms": plain_ms({"tokens": greedy["tokens"], "seconds": seconds}),
    }


def plain_ms(figures: Mapping[str, Any]) -> str:
    """Milliseconds of a token by plain decoding."""
    return f"{1e3 / tokens_per_second(figures, 'autoregressive'):.0f}"


def least_of(sets: Iterable[Mapping[str, Sequence[float]]], entry: str) -> float:
    """The least speed over plain decoding of all sets."""
    return min(sum(by["autoregressive"]) / sum(by[entry]) for by in sets)


# ------------------------------------------------------------------------------------------------------ a shared host

DRAFTERS = {
    "ngram": "prompt lookup",
    "right": "synthetic, right in 88% of the steps",
    "wrong": "synthetic, never right",
    "itself": "itself in `int8`, as draft model",
    "random": "a draft model with random weights",
    **{f"right{percent}": f"synthetic, right in {percent}%" for percent in shared_host.PERCENT},
}


def shared_host_values(figures: Any) -> Mapping[str, Any]:
    keys = [case + suffix for suffix in ("", shared_host.IN_INT4) for case in shared_host.CASES]
    headings = ["weights", "drafter", "host", "chats a set", "plain, tokens/s", "`auto`", "least of the sets"]
    headings += ["plain again, least", "`continuous`"]
    return {
        "headings": headings,
        "rows": [shared_host_row(key, figures[key]) for key in keys if key in figures],
        "plain_ms": plain_ms(figures[shared_host.CASES[0]]),
    }


def shared_host_row(key: str, one: Mapping[str, Any]) -> list[str]:
    case = key.removesuffix(shared_host.IN_INT4)
    drafter = case.removesuffix(shared_host.BUSY)
    sets = list(one["seconds"].values())
    return [
        "`int4`" if case != key else "float32",
        DRAFTERS[drafter],
        "one core busy" if drafter != case else "quiet",
        str(one["per_set"]),
        f"{tokens_per_second(one, 'autoregressive'):.1f}",
        ratio(sets, "autoregressive", "auto"),
        *(f"{least_of(sets, entry):.2f}" for entry in ("auto", shared_host.AGAIN)),
        ratio(sets, "autoregressive", "continuous"),
    ]


SECTIONS = {
    "real_ids": Section(values=ids_values),
    "beside_peers": Section(values=peers_values),
    "many_beside_peers": Section(values=many_values),
    "two_stages": Section(values=two_stages_values),
    "auto_chats": Section(values=auto_values),
    "learning": Section(values=learning_values),
    "drafter_acceptance": Section(values=acceptance_values),
    "trained": Section(values=trained_values),
    "shared_host": Section(values=shared_host_values),
}
