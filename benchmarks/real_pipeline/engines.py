"""The engines that are measured: which numbers of stages, which drafters, and which strategies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

DEMO, OWN = "demo", "model"
"""Models, as parts are named: the embedded pair, and the one of ``--model``."""
MOST_STAGES: Final = 8
STAGES: Final = (2, 4, MOST_STAGES)
PLAIN: Final = "autoregressive"
ENTRIES: Final = (
    PLAIN,
    "static_tree[tree_size=12,tree_depth=4,children=4]",
    "pipedec[width=4,children=4]",
    "flowspec[tree_size=16,tree_depth=4,segment=8,children=4,expansion_depth=4]",
    "auto",
)
"""Trees are smaller than the papers': on a core, each further row of a batch costs time."""


@dataclass(frozen=True)
class Engine:
    """An engine to be measured: its stages, what drafts, and the entries that are compared."""

    stages: int
    method: str
    entries: Sequence[str]
    drafts_apart: bool
    """Whether the drafter has a process of its own, which needs a core, too."""

    @property
    def name(self) -> str:
        return f"{self.stages} stages, {self.method}"

    @property
    def processes(self) -> int:
        return self.stages + self.drafts_apart


def engines_of(model: str, cores: int, tiny: bool) -> list[Engine]:
    """The engines of a model, by stages. Where cores are few, a drafter shares them with the stages."""
    most = min(cores, MOST_STAGES)
    counts = [STAGES[0]] if tiny else sorted({*(count for count in STAGES if count <= most), most})
    found = []
    for stages in counts:
        if model != DEMO:
            found.append(Engine(stages, "ngram", ENTRIES, False))
            continue
        found.append(Engine(stages, "draft_model", ENTRIES, True))
        found += [Engine(stages, method, (PLAIN, "auto"), True) for method in ("spd", "eagle3") if not tiny]
    return found
