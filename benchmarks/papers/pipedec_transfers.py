"""The cost of PipeDec's exclusive transfers, simulated: a device sends or receives one thing at a time.

    python -m benchmarks.papers.pipedec_transfers

Algorithms 2 and 3 of the paper, as the link property ``exclusive``. Six requests of 60 tokens with the synthetic
profile; both ways decode the same ones with `pipedec`: the time per token where links are full duplex, and how much
longer it takes where they are not, with 95% bounds over requests, on the preset's links and on slower ones.
"""

from __future__ import annotations

from typing import Any, Final

from benchmarks.shared.benchmark import Benchmark, show
from benchmarks.shared.paired import bounded
from benchmarks.shared.profile import ACCURACY
from penstock.cluster import load_cluster
from penstock.lab.script import profile_script
from penstock.lab.simulator import simulate
from penstock.speculation import SpeculativeConfig

NAME, HOW = "pipedec_transfers", "Simulated, with the synthetic profile"
LINKS: Final = (("pipedec-14x3090", None), ("pipedec-14x3090", 1.0), ("flowspec-7b", None), ("flowspec-7b", 0.1))
"""Clusters, and Gbit/s between hosts where they differ from the preset's."""
REQUESTS, TOKENS = 6, 60


def seconds(name: str, gbit_s: float | None, exclusive: bool) -> list[float]:
    """Seconds of each request from its first token to its last."""
    cluster = load_cluster(name, bandwidth_gbit_s=gbit_s, links={"exclusive": exclusive})
    script = profile_script(ACCURACY, REQUESTS, TOKENS, seed=0)
    return [run.seconds for run in simulate(cluster, script, SpeculativeConfig(strategy="pipedec"))]


def measured() -> list[dict[str, Any]]:
    found = []
    for name, gbit_s in LINKS:
        duplex, exclusive = (seconds(name, gbit_s, one) for one in (False, True))
        ms = 1e3 * sum(duplex) / (REQUESTS * (TOKENS - 1))
        longer = bounded(exclusive, duplex)
        found.append({"cluster": name, "gbit_s": gbit_s, "ms_per_token": ms, "exclusive": longer})
    return found


if __name__ == "__main__":
    figures = measured()
    Benchmark(__file__, HOW).keep(figures)
    show(figures)
