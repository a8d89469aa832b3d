"""SPD's acceptance length by the paper's rule beside ours, at T = 1 with one candidate (W = 1).

    python -m benchmarks.papers.spd_rejection --spd DIR ... [--prompts 8] [--tokens 48]

The demo target samples held-out code at T = 1 with top-k 50, as for Table 1. The module then reads it as in a full
pipeline of n stages, after a token that has just entered. By our rule its best candidate, ranked with the target's own
noise, is the token or is not. By the paper's rule (3.6) a token drawn from the module's distribution q is accepted with
the chance min(1, p / q), which is the sum of min(p, q) in the mean. In a full pipeline a hit takes one step and a miss
takes n, so that of a request with the share a of hits L' = n / (a + n (1 - a)); the mean over requests is geometric, as
in the tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from math import exp, log
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.papers.spd_tables import STAGES, TOP_K, key_of, unfit
from benchmarks.shared import virtual
from benchmarks.shared.reading import Answer, Reader, answer_of
from penstock import LLM
from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.models.speculators.open import open_speculator
from penstock.stage.sampler import distribution, rank_one

NAME = "spd_rejection"
RULES = ("shared noise", "rejection")


def answers(sizes: virtual.Sizes) -> list[Answer]:
    questions = virtual.asked(sizes, (1.0,), TOP_K)
    with LLM(virtual.TARGET, dtype="float32", threads=1, speculative_config=None) as llm:
        outputs = llm.generate([one.prompt for one in questions], [one.params for one in questions])
    return [answer_of("", output, one.params) for one, output in zip(questions, outputs, strict=True)]


def accepted(reader: Reader, answer: Answer) -> tuple[float, float]:
    """Fraction of an answer's tokens that each of ``RULES`` accepts, with one candidate at a time."""
    target, steps = reader.read(answer)
    noisy, overlap = [], []
    for position, target_V, draft_V in zip(range(answer.first, len(answer.tokens)), target, steps[0], strict=True):
        best = rank_one(draft_V, answer.sampling, position, 0, 1).tokens
        noisy.append(best == [answer.tokens[position]])
        p_V, q_V = (distribution(logits_V, answer.sampling, position) for logits_V in (target_V, draft_V))
        overlap.append(float(np.minimum(p_V, q_V).sum()))
    return fmean(noisy), fmean(overlap)


def length(shares: Sequence[float], stages: int) -> float:
    """L' of requests with these fractions of hits."""
    return exp(fmean(log(stages / (share + stages * (1 - share))) for share in shares))


def measured(folder: str, stages: int, sizes: virtual.Sizes) -> dict[str, Any]:
    asked = answers(sizes)
    reader = Reader(virtual.TARGET, "spd", folder, stages, max(len(one.tokens) for one in asked))
    by_rule = list(zip(*(accepted(reader, one) for one in asked), strict=True))
    return {
        rule: {"accepted": fmean(shares), "length": length(shares, stages)}
        for rule, shares in zip(RULES, by_rule, strict=True)
    }


def cases(wanted: virtual.Wanted) -> Iterator[virtual.Case]:
    target = open_checkpoint(virtual.TARGET)
    for folder in wanted.drafters["spd"]:
        speculator = open_speculator(folder, target)
        for stages in STAGES:
            if unfit(speculator, stages, target.num_layers // stages) is None:
                variant = "paper, " if speculator.stages else ""
                yield variant + key_of("spd", stages, speculator.depth), partial(measured, folder, stages, wanted.sizes)


if __name__ == "__main__":
    virtual.main(__file__, cases, ("spd",), sizes=virtual.Sizes(8, 48))
