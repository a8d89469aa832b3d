"""The few figures in README.md and docs/background/comparison.md, from what is stored.

They stand between two comments, ``BEGIN`` and ``END``; the rest of those pages is written by hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from benchmarks.papers import six_sets
from benchmarks.sections.pipedec import WIDE
from benchmarks.shared.measured import stored
from benchmarks.shared.simulations import find, over
from benchmarks.strategies.shared_host import ratio_over
from penstock.lab.grid import PLAIN
from penstock.lab.report import Ratio

BEGIN: Final = "<!-- figures: written by python -m benchmarks.results -->"
END: Final = "<!-- end of figures -->"
NATIVE, WHEEL = "llama.cpp-native", "llama.cpp"
BUILDS: Final = {
    NATIVE: "built for the same processor",
    WHEEL: "a wheel without AVX-512 (a build for the processor is not measured yet)",
}
"""Words for the build that is compared with: the native one where it is stored."""


def times_of(ratio: Ratio | Sequence[float]) -> str:
    """``2.15 times (1.99 to 2.31)``."""
    mean, low, high = (ratio.mean, ratio.low, ratio.high) if isinstance(ratio, Ratio) else ratio
    return f"{mean:.2f} times ({low:.2f} to {high:.2f})"


def values() -> Mapping[str, Any]:
    measured, pair = stored("beside_peers"), stored("pipedec_demo_pair").figures["T1"]
    peers = measured.figures
    alone, two = (peers[f"int4, {threads}"]["ratios"] for threads in (1, 2))
    build = NATIVE if f"autoregressive over {NATIVE}" in alone else WHEEL
    itself, four_bits = stored("shared_host").figures["itself"], stored("two_stages").figures
    chats = six_sets.cases_of(stored(six_sets.NAME).figures, "pipedec-14x3090", 0.0)
    best = min((find(pair, name) for name in WIDE), key=lambda run: sum(run["seconds"]))
    auto = find(pair, "auto")
    served = next(iter(stored("serve_http").figures.values()))["concurrency"]
    rates = {at: next(one["over_plain"] for one in served[at] if one["strategy"] == "auto") for at in ("1", "4", "16")}
    return {
        "times_of": times_of,
        "build": f"{BUILDS[build]} ({measured.host['processor']})",
        "plain": alone[f"autoregressive over {build}"],
        "default": alone[f"auto over {build}"],
        "plain_on_two": two[f"autoregressive over {build}"],
        "in_8_bits": [peers[f"int8, {threads}"]["ratios"][f"autoregressive over {build}"] for threads in (1, 2)],
        "itself": ratio_over(itself["seconds"].values(), "autoregressive", "auto"),
        "two_stages": ratio_over(four_bits["seconds"].values(), "one stage, autoregressive", "two stages, auto"),
        "demo": stored("demo").figures["speedup"],
        "served": ", ".join(f"{mean:.2f} ({low:.2f} to {high:.2f})" for mean, low, high in rates.values()),
        "at_once": ", ".join(rates),
        "simulated": over(auto, find(pair, "autoregressive")),
        "over_pipedec": over(auto, best),
        "chats": six_sets.speed_up(chats, "auto", PLAIN),
    }


def between(page: str, text: str) -> str:
    """The page with this text between its two comments. Raises ValueError where it has not one of each."""
    before, found, rest = page.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not found or not ended or BEGIN in after or END in after:
        raise ValueError(f"the page has to have {BEGIN} and {END}, once each")
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"
