"""Architectures with unusual layers say what transformers says, one layer to a stage.

And in an engine, those that carry a state, share keys and values or attend to chunks: prefixes that are shared,
requests that give way, texts beyond a fold, a window and a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from penstock import LLM, SamplingParams
from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.messages import Sampling
from penstock.models.stage_model import StageModel
from penstock.pipeline.engine_end import InProcessPipeline
from penstock.strategies.auto import Continuous
from tests.checkpoints import FURTHER, RECURRENT, UNUSUAL, make_checkpoint
from tests.engines import InProcessEngine
from tests.exactness import ALIKE, LONGER, compare_crowded, tokens_of
from tests.generated import generate
from tests.integration.engine.test_architectures import CAPACITY, PROMPT, check_tree, plain_stages, tree_logits
from tests.relatives import OWN_WAYS
from tests.staged import Staged

TREES = ((False, 4), (True, 1))
"""Fast layers in scattered slots, and plain ones in dense slots."""
SIBLINGS = {"qwen3_5", "lfm2", "bamba"}
"""Their mixers are those of qwen3_5_moe, lfm2_moe and granitemoehybrid, which have these and experts beside them."""


def sampled_trees() -> Iterator[Any]:
    """Every architecture with one kind of tree, both in turn; and, as ``whole``, with the other one, and siblings."""
    for number, one in enumerate([*FURTHER, *RECURRENT, *UNUSUAL, *OWN_WAYS]):
        yield pytest.param(one, *TREES[number % 2], marks=[pytest.mark.whole] if one in SIBLINGS else [])
        yield pytest.param(one, *TREES[1 - number % 2], marks=pytest.mark.whole)


@pytest.mark.parametrize(("architecture", "plain", "spread"), [*sampled_trees()])
def test_greedy_texts_and_trees_are_those_of_transformers(
    architecture: str, plain: bool, spread: int, tmp_path: Path
) -> None:
    path = make_checkpoint(tmp_path, architecture, seed=2)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype="float32").eval()
    expected = generate(reference, PROMPT, 24)
    assert len(set(expected)) > 7, "a text that repeats itself would hide mistakes"
    staged = Staged(path, open_checkpoint(str(path)).num_layers, capacity=CAPACITY)
    assert staged.greedy(PROMPT, 24) == expected
    check_tree(plain_stages(path) if plain else staged.begin(), tree_logits(reference), spread)


@pytest.mark.processes
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_rows_carry_travels_between_processes(temperature: float, tmp_path: Path) -> None:
    """The speculating engine shares no prefixes, so its stages keep nothing that is out of reach."""
    path = make_checkpoint(tmp_path, "gemma3n", tokenizer=True, seed=2)
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=16, ignore_eos=True)
    found = []
    for stages, config in ((1, None), (3, {"method": "ngram"})):
        options = {"max_model_len": 64, "enable_prefix_caching": stages == 1}
        with LLM(str(path), pipeline_parallel_size=stages, speculative_config=config, **options) as llm:
            found.append(llm.generate(["abcabcab"], params)[0].outputs[0].token_ids)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "architecture",
    ["qwen3_5", *(pytest.param(one, marks=pytest.mark.whole) for one in ("llama4", "gemma3n", "gemma4_shared"))],
)
def test_requests_that_share_a_prefix_and_give_way(architecture: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, architecture, initializer_range=0.2)
    compared, engine = compare_crowded(path, gives_back=False)
    assert not compared.undecided
    again = engine.submit(ALIKE[1], Sampling(), LONGER, Continuous(width=12, children=4))
    engine.run()
    model = AutoModelForCausalLM.from_pretrained(path, dtype="float32")
    assert tokens_of(again) == generate(model, ALIKE[1], LONGER), "what is shared is all that was computed"
    assert again.cached >= 64


@pytest.mark.parametrize(
    "architecture",
    ["llama4", *(pytest.param(one, marks=pytest.mark.whole) for one in ("gemma3n", "gpt_oss", "qwen3_5"))],
)
def test_requests_that_keep_nothing_out_of_reach(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their stages begin with fewer places than slots, and make more places as they go."""
    monkeypatch.setattr("penstock.stage.visibility.FIRST", 8)
    path = make_checkpoint(tmp_path, architecture, initializer_range=0.2)
    compared, engine = compare_crowded(path, gives_back=True)
    assert not compared.undecided
    for stage in stages_of(engine):
        assert stage._near is not None
        assert 8 < stage._near.size < engine.pool.total


def stages_of(engine: InProcessEngine) -> list[StageModel]:
    pipeline = engine.loop.pipeline
    assert isinstance(pipeline, InProcessPipeline)
    stages = [driver.core.layers for driver in pipeline.drivers]
    return [stage for stage in stages if isinstance(stage, StageModel)]
