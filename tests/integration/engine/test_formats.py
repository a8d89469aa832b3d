"""Every format of weights: one text for every strategy, number of stages and company."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

from penstock.drafters.base import SyntheticDrafter
from penstock.messages import Sampling
from penstock.models.linear import works
from penstock.requests.request import Request
from tests.checkpoints import VOCAB, make_checkpoint
from tests.engines import InProcessEngine
from tests.exactness import PROFILE, PROMPTS, SAMPLED, TOKENS, Pair, every_pair, some_pairs, strategies, tokens_of
from tests.unit.models.compiled.formats import FAMILIES, FORMATS, WHOLE

pytestmark = pytest.mark.skipif(not works(), reason="this processor lacks what compiled products need")
STAGES = (1, 2, 4)
SAMPLINGS = [Sampling(), SAMPLED, *(Sampling(seed=seed, temperature=0.8) for seed in (12, 13))]


def cases() -> list[Any]:
    """Each format with one family and two strategies; and, as ``whole``, with every family and strategy."""
    for number, form in enumerate(FORMATS):
        families = [*FAMILIES, "gemma2"] if form in WHOLE else FAMILIES
        sample = families[-1 - number % len(families)]
        yield pytest.param(form, sample, some_pairs(number, STAGES, 2), id=f"{form}-{sample}")
        for family in families:
            yield pytest.param(form, family, every_pair(STAGES), id=f"{form}-{family}-all", marks=pytest.mark.whole)


@pytest.mark.parametrize(("form", "family", "pairs"), [*cases()])
def test_the_text_is_the_same_however_it_is_computed(tmp_path: Path, form: str, family: str, pairs: list[Pair]) -> None:
    """Greedy and sampled, each alone by plain decoding; then alone and eight at once by other strategies."""
    target, options = make_checkpoint(tmp_path, family), FORMATS[form]
    plain: dict[tuple[int, int | None], list[int]] = {}

    def answer(request: Request) -> list[int]:
        return plain[len(request.prompt), request.sampling.seed]

    accepted = 0
    for stages, those in groupby(sorted(pairs), key=itemgetter(0)):
        engine = InProcessEngine(target, stages, SyntheticDrafter(PROFILE, VOCAB, 1, answer), **options)
        for prompt in PROMPTS:
            for sampling in SAMPLINGS:
                if (len(prompt), sampling.seed) not in plain:
                    alone = engine.submit(prompt, sampling, TOKENS, strategies(stages)[0])
                    engine.run()
                    plain[len(prompt), sampling.seed] = tokens_of(alone)
        for _, make in those:
            requests = [engine.submit(PROMPTS[0], SAMPLINGS[-1], TOKENS, strategies(stages)[make])]
            engine.run()
            for prompt in PROMPTS:
                requests += [engine.submit(prompt, one, TOKENS, strategies(stages)[make]) for one in SAMPLINGS]
            engine.run()
            for request in requests:
                assert tokens_of(request) == answer(request)
            accepted += sum(request.metrics.accepted for request in requests)
    assert accepted > 100
