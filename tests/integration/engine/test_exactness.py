"""Every architecture over 3 or 5 stages, every strategy over 1, 3 and 5: the tokens of transformers' ``generate``.

And at three temperatures, on the shipped pair and on other architectures: the tokens of plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock.drafters.base import SyntheticDrafter
from penstock.engine.options import DEMO
from penstock.messages import Sampling
from penstock.requests.request import Request
from penstock.text.tokenizer import load_tokenizer
from tests.checkpoints import ARCHITECTURES, VOCAB, make_checkpoint
from tests.engines import InProcessEngine
from tests.exactness import (
    CODE,
    PROFILE,
    PROMPTS,
    TOKENS,
    Pair,
    compare_strategies,
    every_pair,
    some_strategies,
    strategies,
    tokens_of,
)

TEMPERATURES = [Sampling(), Sampling(seed=3, temperature=0.6, top_p=0.9, top_k=80), Sampling(seed=4, temperature=1.0)]
"""The papers' settings: greedy, PipeDec's sampling (section 4.3.3), and the model's own distribution."""


COMPARED = [*ARCHITECTURES, "qwen3_5", "gemma3n"]
STAGES = (1, 3, 5)


def sampled(number: int) -> list[Pair]:
    """A strategy for the architecture of this number, all of them in turn, over 3 stages or over 5.

    Strategies know no architecture and stages no strategy (tests/unit/test_imports.py); test_architectures.py and
    test_unusual_layers.py split every architecture in other ways, so that every third one is enough here.
    `make test-all` compares all pairs.
    """
    stages = 3 if number % 3 else 5
    return [(stages, which) for which in some_strategies(number, 1)]


WHOLE = [pytest.param(one, every_pair(STAGES), id=f"{one}-all", marks=pytest.mark.whole) for one in COMPARED]


@pytest.mark.parametrize(
    ("architecture", "pairs"),
    [
        *((one, sampled(number)) for number, one in enumerate(COMPARED[::3])),
        # A pipeline of one stage is a case of its own; over three, every strategy runs with the shipped pair below.
        ("llama", [*every_pair(STAGES[:1]), *every_pair(STAGES[2:])[1::2]]),
        *WHOLE,
    ],
)
def test_every_strategy_gives_the_tokens_of_generate(architecture: str, pairs: list[Pair], tmp_path: Path) -> None:
    compared = compare_strategies(make_checkpoint(tmp_path, architecture), pairs)
    assert compared.undecided <= 2, "rounding may decide a token now and then, not as a rule"


OTHERS = ("qwen3", "gemma2", "mixtral")
EVERY = range(1, len(strategies(3)))


@pytest.mark.parametrize(
    ("architecture", "speculating"),
    [
        ("demo", EVERY),
        *((one, some_strategies(number, 1)) for number, one in enumerate(OTHERS)),
        *(pytest.param(one, EVERY, marks=pytest.mark.whole) for one in OTHERS),
    ],
)
def test_every_strategy_gives_the_tokens_of_plain_decoding_at_every_temperature(
    architecture: str, speculating: Sequence[int], tmp_path: Path
) -> None:
    """The shipped pair, drafted for by its small model, and others, drafted for by one that knows the answer.

    All temperatures run together, and one of them alone, each in turn.
    """
    plain: dict[float, list[int]] = {}
    if architecture == "demo":
        prompt = load_tokenizer(DEMO / "target").encode(CODE)
        engine = InProcessEngine(DEMO / "target", 3, DEMO / "draft", slots=512)
    else:
        prompt = PROMPTS[0]
        drafter = SyntheticDrafter(PROFILE, VOCAB, 1, lambda request: plain[request.sampling.temperature])
        engine = InProcessEngine(make_checkpoint(tmp_path, architecture), 3, drafter)

    def ask(sampling: Sampling, make: int) -> Request:
        return engine.submit(prompt, sampling, TOKENS, strategies(3)[make])

    for make in (0, *speculating):
        together = [ask(sampling, make) for sampling in TEMPERATURES]
        engine.run()
        for request in together:
            assert tokens_of(request) == plain.setdefault(request.sampling.temperature, tokens_of(request))
        beside = together[make % len(TEMPERATURES)]
        alone = ask(beside.sampling, make)
        engine.run()
        assert tokens_of(alone) == tokens_of(beside)
        assert make == 0 or alone.metrics.accepted > 0, "nothing was speculated"
    assert len({tuple(tokens) for tokens in plain.values()}) == len(TEMPERATURES), "each says something of its own"
