"""Architectures with unusual layers say what transformers says, one layer to a stage.

And those that carry a state, in an engine: prefixes that are shared, requests that give way, texts beyond a fold.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from penstock import LLM, SamplingParams
from penstock.drafters.synthetic import SyntheticDrafter
from penstock.messages import Sampling
from penstock.models.checkpoint import open_checkpoint
from penstock.requests.request import Request
from penstock.strategies.continuous import Continuous
from tests.checkpoints import FURTHER, RECURRENT, UNUSUAL, VOCAB, make_checkpoint
from tests.engines import InProcessEngine, Picks
from tests.generated import generate
from tests.integration.engine.test_architectures import PROMPT, check_tree
from tests.staged import Staged

TEXT = [(7 * i * i + 3 * i) % VOCAB for i in range(100)]
TOKENS = 90


@pytest.mark.parametrize("architecture", [*FURTHER, *RECURRENT, *UNUSUAL])
def test_greedy_texts_and_trees_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, architecture, seed=2)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype="float32").eval()
    expected = generate(reference, PROMPT, 24)
    assert len(set(expected)) > 7, "a text that repeats itself would hide mistakes"
    assert Staged(path, open_checkpoint(str(path)).num_layers).greedy(PROMPT, 24) == expected
    check_tree(path, reference, plain=False, spread=4)
    check_tree(path, reference, plain=True, spread=1)


@pytest.mark.processes
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_rows_carry_travels_between_processes(temperature: float, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "gemma3n", tokenizer=True, seed=2)
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=16, ignore_eos=True)
    found = []
    for stages, config in ((1, None), (3, {"method": "ngram"})):
        with LLM(str(path), pipeline_parallel_size=stages, speculative_config=config, max_model_len=64) as llm:
            found.append(llm.generate(["abcabcab"], params)[0].outputs[0].token_ids)
    assert found[0] == found[1]


def test_requests_that_share_a_prefix_and_give_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four requests of 160 to 190 tokens, three of which begin alike, over slots for little more than two of them."""
    path = make_checkpoint(tmp_path, "qwen3_5", initializer_range=0.2)
    model = AutoModelForCausalLM.from_pretrained(path, dtype="float32")
    prompts = [TEXT, [*TEXT[:70], 5, 9], [*TEXT[:90], 11], TEXT[::-1]]
    expected = [generate(model, prompt, TOKENS) for prompt in prompts]
    greedy = {tuple(prompt): answer for prompt, answer in zip(prompts, expected, strict=True)}
    drafter = SyntheticDrafter([0.6, 0.75, 0.85], VOCAB, 1, lambda request: greedy[tuple(request.prompt)])
    engine = InProcessEngine(path, 3, drafter, slots=340)
    given_way: list[Request] = []
    preempt = engine.loop.scheduler.preempt
    monkeypatch.setattr(engine.loop.scheduler, "preempt", lambda one: [given_way.append(one), preempt(one)])
    requests = [engine.submit(prompt, Sampling(), TOKENS, Continuous(width=12, children=4)) for prompt in prompts]
    engine.run()
    for request, wanted in zip(requests, expected, strict=True):
        assert isinstance(request.output, Picks)
        assert request.output.tokens == wanted
    again = engine.submit(prompts[1], Sampling(), TOKENS, Continuous(width=12, children=4))
    engine.run()
    assert isinstance(again.output, Picks)
    assert again.output.tokens == expected[1], "what is shared is the state as well"
    assert again.cached >= 64
    assert sum(request.metrics.accepted for request in requests) > TOKENS
    assert given_way
