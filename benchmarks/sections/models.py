"""Models of many kinds: families beside transformers, layers that carry a state, latents, MTP heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.costs import latent, out_of_reach, recurrent
from benchmarks.sections.base import Section, by_script

COMPARED = {
    "strategies": "every strategy, at T = 0 and 1",
    "chunks": "a long prompt in chunks",
    "crowded": "requests that give way",
    "gives_back": "the same, nothing stored out of reach",
}


def mtp_values(figures: Any) -> Mapping[str, Any]:
    return {"same": all(one["identical"] for row in figures.values() for one in row["temperatures"].values())}


SECTIONS = {
    "families": Section(values=lambda figures: {"compared": COMPARED}),
    "recurrent": by_script(recurrent),
    "latent": by_script(latent),
    "out_of_reach": by_script(out_of_reach),
    "mtp": Section(values=mtp_values),
}
