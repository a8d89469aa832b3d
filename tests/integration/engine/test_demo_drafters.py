"""The learned drafters that come with the demo target: found by their method's name, and exact."""

from __future__ import annotations

import pytest

from penstock import LLM, SamplingParams
from penstock.config import FieldError
from penstock.engine.options import EngineOptions
from penstock.engine.resolve import DEMO_DRAFTERS, resolve_options
from penstock.lab.bench.comparison import decode

pytestmark = pytest.mark.processes

METHODS = ("dspark", "eagle3", "early_exit", "medusa", "spd")
PROMPTS = ["def fibonacci(n):\n    if n < 2:\n", "class Stack:\n    def __init__(self):\n"]
TOKENS = 24
LIMIT = 16e6
"""Upper bound on the size of all of them together, in bytes."""


# Two samples: one that waits for its drafts, and one that cannot.
@pytest.mark.parametrize(
    "method",
    [pytest.param(one, marks=[pytest.mark.whole] * (one not in ("eagle3", "early_exit"))) for one in METHODS],
)
def test_a_shipped_drafter_drafts_and_changes_no_token(method: str) -> None:
    params = [SamplingParams(temperature=t, seed=5, max_tokens=TOKENS, ignore_eos=True) for t in (0.0, 1.0)]
    # The strategy that waits for its drafts, where there is one: on a busy processor others draft too late.
    waits = method != "early_exit"
    speculation = {"method": method, "strategy": "static_tree" if waits else "continuous"}
    with LLM(pipeline_parallel_size=2, speculative_config=speculation) as llm:
        plain = decode(llm, PROMPTS, params, None)

        def accepts() -> bool:
            outputs = [one.outputs[0] for one in llm.generate(PROMPTS, params)]
            assert [one.token_ids for one in outputs] == [one.outputs[0].token_ids for one in plain]
            return all(one.metrics.accepted > 0 for one in outputs)

        assert any(accepts() for _ in range(1 if waits else 20)), "nothing was speculated"


def test_together_they_stay_small() -> None:
    assert sorted(file.parent.name for file in DEMO_DRAFTERS.glob("*/config.json")) == sorted(METHODS)
    assert sum(file.stat().st_size for file in DEMO_DRAFTERS.rglob("*") if file.is_file()) <= LIMIT


def test_a_method_without_a_shipped_drafter_says_which_there_are() -> None:
    with pytest.raises(
        FieldError, match="'eagle' needs the drafter's folder or name; with the target 'demo' come dspark, eagle3"
    ):
        resolve_options(EngineOptions(speculative_config={"method": "eagle"}))
