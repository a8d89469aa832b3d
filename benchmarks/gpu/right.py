"""The part ``right``: token ids on the device beside the processor's, and every strategy's beside plain decoding's.

Stages are in this process, over the device, and time is virtual, so that many engines fit into a minute. Stages as
processes are the part ``pipeline``'s.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.gpu.sizes import sizes_of
from benchmarks.shared.timed_parts import Findings
from penstock.drafters.base import SyntheticDrafter
from penstock.drafters.merged import NgramDrafter
from penstock.engine.options import DEMO
from penstock.engine.resolve import DEMO_DRAFTERS
from penstock.files import EXACT, FAST
from penstock.messages import Sampling
from penstock.requests.request import Request
from tests.checkpoints import ARCHITECTURES, VOCAB, make_checkpoint
from tests.engines import InProcessEngine
from tests.exactness import PLAIN, PROFILE, PROMPTS, SAMPLED, strategies, tokens_of

STAGES: Final = 2
PAIR_PROMPTS: Final = ([40 + i for i in range(12)], [300, 17, 2200, 5, 90, 41])
"""Token ids: which text they are does not matter here."""
LONGEST, SHORTEST = 4, 1
"""Longest and shortest run of tokens that prompt lookup looks for, as by default."""
WAYS: Final = (("float32", FAST), ("bfloat16", FAST), ("bfloat16", EXACT))
CALM: Final = 0.2
"""Standard deviation of the checkpoints' weights, so small that few tokens are nearly tied."""

Ids = list[list[int]]


class Asked(NamedTuple):
    """Prompts as token ids, and the number of tokens of each answer."""

    prompts: Sequence[Sequence[int]]
    tokens: int


def measure(options: argparse.Namespace, findings: Findings) -> None:
    sizes, device = sizes_of(options), options.device
    with tempfile.TemporaryDirectory() as folder:
        for name in list(ARCHITECTURES)[: sizes.architectures]:
            with findings.trying(name):
                findings.need(1.0)
                target = make_checkpoint(Path(folder) / name, name, initializer_range=CALM)
                findings.add(name, compared(target, device, Asked(PROMPTS[: sizes.prompts], sizes.compared)))
    asked = Asked(PAIR_PROMPTS[: sizes.prompts], sizes.compared)
    with findings.trying("demo"):
        for found in compared_pair(device, sizes.drafters, asked, findings):
            findings.add("demo", found)


def compared(target: Path, device: str, asked: Asked) -> dict[str, Any]:
    """A checkpoint's counts, with a synthetic drafter that knows the answers and is wrong now and then."""
    found: dict[str, Any] = {"like_cpu": like_cpu(target, device, asked)}
    for dtype, numerics in WAYS[:2]:
        answers: dict[int, list[int]] = {}
        drafter = SyntheticDrafter(PROFILE, VOCAB, 1, partial(answer_of, answers))
        engine = InProcessEngine(target, STAGES, drafter, dtype=dtype, device=device, numerics=numerics)
        plain = ids_of(engine, PLAIN, asked, answers)
        found[f"{dtype}, {numerics}"] = {"synthetic": same_by_strategy(engine, plain, asked)}
    return found


def compared_pair(device: str, drafters: Sequence[str], asked: Asked, findings: Findings) -> Iterator[dict[str, Any]]:
    """The demo pair's counts, with one drafter more each time."""
    target = DEMO / "target"
    found: dict[str, Any] = {"like_cpu": like_cpu(target, device, asked)}
    yield found
    for dtype, numerics in WAYS:
        label = f"{dtype}, {numerics}"
        with findings.trying(f"demo, {label}"):
            plain, counts = None, found.setdefault(label, {})
            for drafter in drafters:
                engine = engine_with(drafter, target, dtype, device, numerics)
                plain = plain or ids_of(engine, PLAIN, asked)
                counts[drafter] = same_by_strategy(engine, plain, asked)
                yield found


def like_cpu(target: Path, device: str, asked: Asked) -> list[int]:
    """The number of answers in float32 that the device, over two stages, shares with the processor, and that of all."""
    of_cpu, of_device = (
        ids_of(InProcessEngine(target, stages, NgramDrafter(LONGEST, SHORTEST), device=place), PLAIN, asked)
        for stages, place in ((1, "cpu"), (STAGES, device))
    )
    return count_same(of_device, of_cpu)


def engine_with(drafter: str, target: Path, dtype: str, device: str, numerics: str) -> InProcessEngine:
    """The demo target over two stages, with one of the drafters that ship with it."""
    own: dict[str, Any] = {"learned": DEMO_DRAFTERS / drafter}
    if drafter in ("ngram", "draft_model"):
        own = {"draft": NgramDrafter(LONGEST, SHORTEST) if drafter == "ngram" else DEMO / "draft"}
    return InProcessEngine(target, STAGES, dtype=dtype, device=device, numerics=numerics, **own)


def same_by_strategy(engine: InProcessEngine, plain: Ids, asked: Asked) -> dict[str, list[int]]:
    """The number of answers that are plain decoding's, and that of all, by strategy."""
    found: dict[str, list[int]] = {}
    for which, strategy in enumerate(strategies(STAGES)):
        if which != PLAIN:
            same, of = count_same(ids_of(engine, which, asked), plain)
            before = found.get(type(strategy).__name__, [0, 0])
            found[type(strategy).__name__] = [before[0] + same, before[1] + of]
    return found


def ids_of(engine: InProcessEngine, which: int, asked: Asked, answers: dict[int, list[int]] | None = None) -> Ids:
    """Every prompt's answer, greedy and sampled, one after the other, with one of the ``strategies``.

    ``answers``, where given, gets them by ``key_of``.
    """
    found = []
    for sampling in (Sampling(), SAMPLED):
        for prompt in asked.prompts:
            request = engine.submit(list(prompt), sampling, asked.tokens, strategies(STAGES)[which])
            engine.run()
            found.append(tokens_of(request))
            if answers is not None:
                answers[key_of(request)] = found[-1]
    return found


def answer_of(answers: Mapping[int, Sequence[int]], request: Request) -> Sequence[int]:
    return answers[key_of(request)]


def key_of(request: Request) -> int:
    """A number for what was asked: prompts differ by their lengths, and samplings by their temperatures."""
    return len(request.prompt) * 2 + (request.sampling.temperature > 0)


def count_same(found: Ids, expected: Ids) -> list[int]:
    return [sum(one == other for one, other in zip(found, expected, strict=True)), len(expected)]
