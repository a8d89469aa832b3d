"""Simulations for the pages: recordings of the demo pair on held-out code, the synthetic profile, the figures kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.shared.commands import penstock, with_json_file
from benchmarks.shared.paired import paired
from benchmarks.shared.profile import ACCURACY
from benchmarks.shared.root import ROOT
from penstock.lab.report import Ratio

RECORDINGS = ROOT / "benchmarks" / "recordings"
"""Folder of the recordings, ignored by Git; missing ones are made when they are needed."""
SAMPLING = {
    "T0": ["--temperature", "0"],
    "T0.6": ["--temperature", "0.6", "--top-p", "0.9", "--top-k", "80"],
    "T1": ["--temperature", "1"],
}
"""Settings: greedy, PipeDec's stochastic setting (section 4.3.3), plain sampling."""
LABELS = {"T0": "T = 0", "T0.6": "T = 0.6, top-p 0.9, top-k 80", "T1": "T = 1", "profile": "synthetic profile"}
SAMPLINGS = ("T0", "T0.6", "T1")
MOST_TOKENS = 10_000
"""Upper limit of tokens, more than a recording has, so that all of it is simulated."""
KEPT = (
    *("cluster", "strategy", "stages", "tokens", "ms_per_token", "speedup", "speedup_interval", "hit_rate"),
    *("mean_acceptance_length", "settings"),
)

Figures = Mapping[str, Any]
"""One strategy on one cluster: the fields KEPT of a ``SimulatedRun``, and ``seconds`` of each request."""


def recording(name: str) -> str:
    """The recording's path from the repository's folder, made where it is missing (about two minutes)."""
    path = RECORDINGS / f"demo-{name}.safetensors"
    if not path.exists():
        RECORDINGS.mkdir(exist_ok=True)
        penstock(recording_arguments(name))
    return str(path.relative_to(ROOT))


def recording_arguments(name: str) -> list[str]:
    strategies = "autoregressive,static_tree[tree_size=8]"
    texts = ["--num-prompts", "40", "--max-tokens", "64", *SAMPLING[name]]
    path = (RECORDINGS / f"demo-{name}.safetensors").relative_to(ROOT)
    return ["bench", "--model", "demo", "-pp", "1", "--strategies", strategies, *texts, "--record", str(path)]


def source(name: str, tokens: int = MOST_TOKENS) -> list[str]:
    """Arguments that select a recording, or ``profile``, with at most ``tokens`` tokens."""
    if name == "profile":
        return ["--accuracy", ",".join(map(str, ACCURACY)), "--tokens", str(tokens)]
    return ["--recording", recording(name), "--tokens", str(tokens)]


def simulated(clusters: Sequence[str], strategies: Sequence[str], more: Sequence[str]) -> tuple[str, list[Figures]]:
    """Run ``penstock simulate``. Returns its command line, and each strategy's figures by cluster, plain decoding
    first."""
    named = [argument for cluster in clusters for argument in ("--cluster", cluster)]
    command, content = with_json_file(["simulate", *named, "--strategies", ",".join(strategies), *more])
    return command, [kept(run) for run in content["runs"]]


def kept(run: Figures) -> Figures:
    seconds = [round(request["seconds"], 4) for request in run["requests"]]
    return {**{name: short(run[name]) for name in KEPT}, "seconds": seconds}


def short(value: Any) -> Any:
    """A number rounded to five digits; other values as they are."""
    if isinstance(value, list):
        return [short(one) for one in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def find(runs: Sequence[Figures], strategy: str, cluster: str | None = None) -> Figures:
    return next(run for run in runs if run["strategy"] == strategy and cluster in (None, run["cluster"]))


def over(run: Figures, base: Figures) -> Ratio:
    """Speed relative to ``base`` on the same requests, with bounds."""
    return paired(base["seconds"], run["seconds"])


def said(ratio: Ratio) -> str:
    """The ratio in words: ``1.20x (1.10 to 1.31)``."""
    return f"{ratio.mean:.2f}x ({ratio.low:.2f} to {ratio.high:.2f})"


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}%"


def ms(run: Figures) -> str:
    return f"{run['ms_per_token']:.1f}"
