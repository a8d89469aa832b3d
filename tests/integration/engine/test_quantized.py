"""Weights in whole numbers: one text for every strategy, number of stages and company, from a GGUF file as well."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from pathlib import Path

import pytest

from penstock.drafters.synthetic import SyntheticDrafter
from penstock.messages import Sampling
from penstock.models.quantization.pack import usable
from penstock.requests.request import Request
from tests.checkpoints import VOCAB, make_checkpoint
from tests.engines import InProcessEngine
from tests.exactness import PROMPTS, SAMPLED, TOKENS, Pair, every_pair, some_pairs, strategies, tokens_of

STAGES = (1, 2, 4)
FORMATS = [
    pytest.param(
        name, marks=pytest.mark.skipif(not usable(name), reason="this processor lacks what compiled products need")
    )
    for name in ("int8", "int4")
]


@pytest.mark.parametrize("pairs", [some_pairs(0, STAGES), pytest.param(every_pair(STAGES), marks=pytest.mark.whole)])
@pytest.mark.parametrize("quantization", FORMATS)
@pytest.mark.parametrize("architecture", ["llama_tied", "gemma2"])
def test_the_text_is_the_same_however_it_is_computed(
    tmp_path: Path, architecture: str, quantization: str, pairs: list[Pair]
) -> None:
    target = make_checkpoint(tmp_path, architecture)
    plain: dict[tuple[int, int | None], list[int]] = {}

    def answer(request: Request) -> list[int]:
        return plain[len(request.prompt), request.sampling.seed]

    accepted = 0
    for stages, those in groupby(sorted(pairs), key=itemgetter(0)):
        drafter = SyntheticDrafter([0.6, 0.75, 0.85], VOCAB, 1, answer)
        engine = InProcessEngine(target, stages, drafter, quantization=quantization)
        for _, make in those:
            requests = []
            for prompt in PROMPTS:
                for sampling in (Sampling(), SAMPLED):
                    if not plain.keys() >= {(len(prompt), sampling.seed)}:
                        alone = engine.submit(prompt, sampling, TOKENS, strategies(stages)[0])
                        engine.run()
                        plain[len(prompt), sampling.seed] = tokens_of(alone)
                    requests.append(engine.submit(prompt, sampling, TOKENS, strategies(stages)[make]))
            engine.run()
            for request in requests:
                assert tokens_of(request) == answer(request)
            accepted += sum(request.metrics.accepted for request in requests)
    assert accepted > 100
