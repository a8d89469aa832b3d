"""The exactness check: every strategy, with any drafter, gives the token ids of transformers' own decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM

from penstock.drafters.base import SyntheticDrafter
from penstock.engine.loop import Observer
from penstock.messages import Sampling
from penstock.requests.request import Request
from penstock.stage.sampler import pick_tokens
from penstock.strategies.auto import Auto, Continuous
from penstock.strategies.base import STRATEGIES, Autoregressive, Strategy
from penstock.strategies.flowspec import FlowSpecOptions
from penstock.strategies.pipedec import PipeDec, StaticTree
from tests.checkpoints import VOCAB
from tests.engines import InProcessEngine, Picks
from tests.generated import generate

PROMPTS = [[5, 9, 13, 9, 5, 70, 31], [100, 4, 8, 15, 16, 23, 42, 99, 3, 77, 6, 12, 90, 41, 55, 66, 7, 19, 20]]
TOKENS = 16
MAX_GAP = 1e-4
"""Floats differ by batch shape: where ids first differ, the reference's two best logits must be this close."""

SAMPLED = Sampling(seed=11, temperature=1.0, top_p=0.95)
CODE = 'def read_lines(path):\n    """Return the lines of a file."""\n    with open('
PROFILE: Final = [0.6, 0.75, 0.85]
"""Probability that a drafter which knows the answer has it among its first candidates."""

TEXT: Final = [(7 * i * i + 3 * i) % VOCAB for i in range(100)]
"""A prompt longer than a window, a chunk and a fold."""
ALIKE: Final = [TEXT, [*TEXT[:70], 5, 9], [*TEXT[:90], 11], TEXT[::-1]]
"""Prompts of which three begin alike."""
LONGER: Final = 90
"""Tokens of each answer to ``ALIKE``: enough to go beyond another fold."""
LITTLE: Final = 340
"""Slots for little more than two prompts of ``ALIKE`` and their answers."""

PLAIN: Final = 0
"""Plain decoding among the ``strategies``."""

Pair = tuple[int, int]
"""A number of stages, and the names of the ``strategies`` to run over them."""

SMALL = ("autoregressive", "static_tree", "pipedec", "flowspec", "continuous", "auto")
"""Strategies with small sizes, so that little drafting shows much; the others run with their defaults."""


def strategies(stages: int) -> list[Strategy]:
    """Every strategy that is registered, and FlowSpec's ablations."""
    flowspec: dict[str, Any] = {"tree_size": 12, "tree_depth": 3, "segment": 4, "children": 4, "expansion_depth": 2}
    return [
        *(kind().make(stages) for name, kind in STRATEGIES.items() if name not in SMALL),
        Autoregressive(),
        StaticTree(tree_size=12, tree_depth=4, children=4, segments=stages),
        PipeDec(stages, width=6, children=4),
        FlowSpecOptions(**flowspec, expand=True, score_order=True).make(stages),
        FlowSpecOptions(**flowspec, expand=True, score_order=False).make(stages),
        FlowSpecOptions(**flowspec, expand=False, score_order=True).make(stages),
        Continuous(width=12, children=4),
        Auto(width=12, children=4),
    ]


def every_pair(counts: Sequence[int]) -> list[Pair]:
    """Every strategy over each of these numbers of stages."""
    return [(stages, which) for stages in counts for which in range(len(strategies(stages)))]


def some_pairs(number: int, counts: Sequence[int], count: int = 3) -> list[Pair]:
    """``count`` strategies for the case of this number, each over another count of stages: all of them in turn.

    Strategies know no architecture and stages no strategy (tests/unit/test_imports.py), so that a sample of the pairs
    shows what is wrong with either; `make test-all` compares them all.
    """
    return [(counts[(number + i) % len(counts)], which) for i, which in enumerate(some_strategies(number, count))]


def some_strategies(number: int, count: int = 3) -> list[int]:
    """``count`` speculating strategies for the case of this number; the cases go through all of them in turn."""
    speculating = len(strategies(1)) - 1
    return [1 + (count * number + i) % speculating for i in range(count)]


def submit_with(
    strategy: Strategy, engine: InProcessEngine, prompt: list[int], sampling: Sampling, tokens: int = TOKENS
) -> Request:
    """``Auto`` gets its requests one by one: where more run than there are stages, plain decoding has to set time aside
    for a trial first, which takes longer than these answers."""
    request = engine.submit(prompt, sampling, tokens, strategy)
    if isinstance(strategy, Auto):
        engine.run()
    return request


def check_same(model: Any, prompt: Sequence[int], found: list[int], expected: list[int]) -> bool:
    """Whether the ids agree; where they do not, asserts that the reference is undecided at the first difference."""
    assert len(found) == len(expected)
    if found == expected:
        return True
    at = next(i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
    with torch.inference_mode():
        best = model(torch.tensor([[*prompt, *expected[:at]]])).logits[0, -1].topk(2).values
    assert (best[0] - best[1]).item() < MAX_GAP, f"token {at} is {found[at]}, transformers has {expected[at]}"
    print(f"undecided within {MAX_GAP} at token {at}")
    return False


def check_sampled(model: Any, prompt: Sequence[int], found: list[int], sampling: Sampling) -> None:
    """Every token is the one that transformers' logits after the text before it, filtered and with noise, give."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *found]])).logits[0, len(prompt) - 1 : -1]
    positions = range(len(prompt), len(prompt) + len(found))
    picks = pick_tokens(logits, [sampling] * len(found), positions, positions)
    assert found == [pick.token for pick in picks]


def tokens_of(request: Request) -> list[int]:
    assert isinstance(request.output, Picks)
    return request.output.tokens


@dataclass
class Compared:
    """Counts over all requests that were compared for one model."""

    requests: int = 0
    tokens: int = 0
    undecided: int = 0
    """Requests whose tokens differ at a position where the reference itself is undecided."""
    misses: int = 0
    dead: int = 0
    """Rows that were found wrong while they were in flight."""
    given_way: int = 0
    """How often a request has been preempted and computed anew."""

    def add(self, request: Request) -> None:
        self.requests += 1
        self.tokens += request.produced
        self.misses += request.metrics.misses
        self.dead += request.metrics.rows_dead


def compare_strategies(target: Path, pairs: Sequence[Pair]) -> Compared:
    """Strategies over so many stages: greedy tokens are those of ``generate``, sampled ones those that transformers'
    logits give. Raises AssertionError where they are not.
    """
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    expected = {tuple(prompt): generate(model, prompt, TOKENS) for prompt in PROMPTS}
    compared = Compared()
    answers: dict[int, list[int]] = {}

    def answer(request: Request) -> list[int]:
        sampled = request.sampling.temperature > 0
        return answers[len(request.prompt)] if sampled else expected[tuple(request.prompt)]

    for stages, those in groupby(sorted(pairs), key=itemgetter(0)):
        engine = InProcessEngine(target, stages, SyntheticDrafter(PROFILE, VOCAB, 1, answer))
        first = () if answers else (PLAIN,)  # the drafter knows plain decoding's answers, whatever the stages
        for which in dict.fromkeys((*first, *(which for _, which in those))):
            strategy = strategies(stages)[which]
            greedy, sampled = (
                [submit_with(strategies(stages)[which], engine, prompt, sampling) for prompt in PROMPTS]
                for sampling in (Sampling(), SAMPLED)
            )
            engine.run()
            for request in greedy:
                wanted = expected[tuple(request.prompt)]
                compared.undecided += not check_same(model, request.prompt, tokens_of(request), wanted)
            for request in sampled:
                if len(request.prompt) not in answers:
                    check_sampled(model, request.prompt, tokens_of(request), SAMPLED)
                known = answers.setdefault(len(request.prompt), tokens_of(request))
                assert tokens_of(request) == known, "the same seed gives the same tokens with every strategy"
            for request in (both := [*greedy, *sampled]):
                compared.add(request)
            if not isinstance(strategy, Autoregressive) and not (isinstance(strategy, PipeDec) and stages == 1):
                # PipeDec's tree has one layer per stage
                assert sum(request.metrics.accepted for request in both) > TOKENS
    return compared


class GivenWay(Observer):
    """Counts preemptions."""

    def __init__(self) -> None:
        self.count = 0

    def preempted(self, request: Request, at: float) -> None:
        self.count += 1


def compare_chunks(target: Path, sizes: Sequence[int]) -> Compared:
    """A long prompt that enters in chunks of each size, over three stages; as ``compare_strategies``."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    expected = generate(model, TEXT, TOKENS)
    compared = Compared()
    for size in sizes:
        engine = InProcessEngine(target, 3, SyntheticDrafter(PROFILE, VOCAB, 1, lambda request: expected), chunk=size)
        greedy, sampled = (
            engine.submit(TEXT, sampling, TOKENS, Continuous(width=12, children=4))
            for sampling in (Sampling(), SAMPLED)
        )
        engine.run()
        compared.undecided += not check_same(model, TEXT, tokens_of(greedy), expected)
        check_sampled(model, TEXT, tokens_of(sampled), SAMPLED)
        for request in (greedy, sampled):
            compared.add(request)
    return compared


def compare_crowded(target: Path, gives_back: bool) -> tuple[Compared, InProcessEngine]:
    """``ALIKE`` over three stages with ``LITTLE`` slots: some wait, and some give way and are computed anew.

    Prefixes are shared, or with ``gives_back`` slots that no later row reaches are given back. Raises AssertionError
    where tokens are not those of ``generate``, and where nobody has given way.
    """
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    expected = {tuple(prompt): generate(model, prompt, LONGER) for prompt in ALIKE}
    drafter = SyntheticDrafter(PROFILE, VOCAB, 1, lambda request: expected[tuple(request.prompt)])
    engine = InProcessEngine(target, 3, drafter, slots=LITTLE, gives_back=gives_back)
    given_way, compared = GivenWay(), Compared()
    engine.loop.observers.append(given_way)
    requests = [engine.submit(prompt, Sampling(), LONGER, Continuous(width=12, children=4)) for prompt in ALIKE]
    engine.run()
    for request in requests:
        wanted = expected[tuple(request.prompt)]
        compared.undecided += not check_same(model, request.prompt, tokens_of(request), wanted)
        compared.add(request)
    assert sum(request.metrics.accepted for request in requests) > LONGER
    assert given_way.count
    compared.given_way = given_way.count
    return compared, engine
