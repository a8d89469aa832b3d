"""Architectures with unusual layers say what transformers says, one layer to a stage.

And in an engine, those that carry a state, share keys and values or attend to chunks: prefixes that are shared,
requests that give way, texts beyond a fold, a window and a chunk.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from penstock import LLM, SamplingParams
from penstock.drafters.synthetic import SyntheticDrafter
from penstock.messages import Sampling
from penstock.models.checkpoint import open_checkpoint
from penstock.models.stage_model import StageModel
from penstock.pipeline.inprocess import InProcessPipeline
from penstock.requests.request import Request
from penstock.strategies.continuous import Continuous
from tests.checkpoints import FURTHER, RECURRENT, UNUSUAL, VOCAB, make_checkpoint
from tests.engines import InProcessEngine, Picks
from tests.generated import generate
from tests.integration.engine.test_architectures import PROMPT, check_tree
from tests.staged import Staged

TEXT = [(7 * i * i + 3 * i) % VOCAB for i in range(100)]
PROMPTS = [TEXT, [*TEXT[:70], 5, 9], [*TEXT[:90], 11], TEXT[::-1]]
"""Three begin alike."""
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
    """And stages keep nothing that is out of reach, where they share nothing either."""
    path = make_checkpoint(tmp_path, "gemma3n", tokenizer=True, seed=2)
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=16, ignore_eos=True)
    found = []
    for stages, config in ((1, None), (3, {"method": "ngram"})):
        options = {"max_model_len": 64, "enable_prefix_caching": stages == 1}
        with LLM(str(path), pipeline_parallel_size=stages, speculative_config=config, **options) as llm:
            found.append(llm.generate(["abcabcab"], params)[0].outputs[0].token_ids)
    assert found[0] == found[1]


@pytest.mark.parametrize("architecture", ["qwen3_5", "gemma3n", "gemma4_shared", "llama4"])
def test_requests_that_share_a_prefix_and_give_way(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_checkpoint(tmp_path, architecture, initializer_range=0.2)
    engine, expected = run_beside_each_other(path, monkeypatch, gives_back=False)
    again = engine.submit(PROMPTS[1], Sampling(), TOKENS, Continuous(width=12, children=4))
    engine.run()
    assert isinstance(again.output, Picks)
    assert again.output.tokens == expected[1], "what is shared is all that was computed"
    assert again.cached >= 64


@pytest.mark.parametrize("architecture", ["qwen3_5", "gemma3n", "llama4", "gpt_oss"])
def test_requests_that_keep_nothing_out_of_reach(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their stages have fewer places than slots, and made more of them as they went."""
    monkeypatch.setattr("penstock.stage.near.FIRST", 8)
    path = make_checkpoint(tmp_path, architecture, initializer_range=0.2)
    engine, _ = run_beside_each_other(path, monkeypatch, gives_back=True)
    for stage in stages_of(engine):
        assert stage._near is not None
        assert 8 < stage._near.size < engine.pool.total


def run_beside_each_other(
    path: Path, monkeypatch: pytest.MonkeyPatch, gives_back: bool
) -> tuple[InProcessEngine, list[list[int]]]:
    """All ``PROMPTS``, over slots for little more than two of them; the engine, and the answers."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype="float32")
    expected = [generate(model, prompt, TOKENS) for prompt in PROMPTS]
    greedy = {tuple(prompt): answer for prompt, answer in zip(PROMPTS, expected, strict=True)}
    drafter = SyntheticDrafter([0.6, 0.75, 0.85], VOCAB, 1, lambda request: greedy[tuple(request.prompt)])
    engine = InProcessEngine(path, 3, drafter, slots=340, gives_back=gives_back)
    given_way: list[Request] = []
    preempt = engine.loop.scheduler.preempt
    monkeypatch.setattr(engine.loop.scheduler, "preempt", lambda one: [given_way.append(one), preempt(one)])
    requests = [engine.submit(prompt, Sampling(), TOKENS, Continuous(width=12, children=4)) for prompt in PROMPTS]
    engine.run()
    for request, wanted in zip(requests, expected, strict=True):
        assert isinstance(request.output, Picks)
        assert request.output.tokens == wanted
    assert sum(request.metrics.accepted for request in requests) > TOKENS
    assert given_way
    return engine, expected


def stages_of(engine: InProcessEngine) -> list[StageModel]:
    pipeline = engine.loop.pipeline
    assert isinstance(pipeline, InProcessPipeline)
    stages = [driver.core.layers for driver in pipeline.drivers]
    return [stage for stage in stages if isinstance(stage, StageModel)]
