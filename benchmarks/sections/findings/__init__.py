"""The five papers' findings beside the stored figures: a verdict for each, made from the figures.

A verdict is computed, so that it changes with the figures that are measured anew. Where bounds are stored they decide;
where there are none the figure says so, or the finding counts as not comparable.
"""

from __future__ import annotations

from benchmarks.sections.findings import flowspec, jupiter, pipedec, spd, vllm
from benchmarks.sections.findings.verdicts import Finding

BY_PAPER = {one.PAPER: one.findings for one in (pipedec, spd, jupiter, flowspec, vllm)}
"""The findings of each paper, in the order of the pages."""


def of_paper(name: str) -> list[Finding]:
    return list(BY_PAPER[name]())


def findings() -> list[Finding]:
    return [one for name in BY_PAPER for one in of_paper(name)]
