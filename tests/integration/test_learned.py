"""Learned drafters over a pipeline: plain decoding's tokens, and what the trainer's forward gives on the same text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock import LLM, SamplingParams
from penstock.config import FieldError
from penstock.engine.llm import Prompt
from penstock.messages import Sampling
from penstock.models.checkpoint import open_checkpoint
from penstock.models.speculators.eagle_stage import EagleStage
from tests import speculators
from tests.checkpoints import make_checkpoint
from tests.engines import InProcessEngine, Picks
from tests.integration.test_exactness import PROMPTS, TOKENS, check_same, generate, strategies
from tests.unit.models import speculators_reference as reference

CASES = [(kind, stages) for kind in ("eagle", "eagle3", "medusa") for stages in (1, 3, 5)]
CASES += [("speculators_eagle3", 3), ("vllm_medusa", 3)]
SAMPLINGS = (Sampling(), Sampling(seed=11, temperature=1.0, top_p=0.95))
NONE = 0
"""Of ``strategies``: plain decoding."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("target"), "llama")


@pytest.mark.parametrize(("kind", "stages"), CASES)
def test_every_strategy_gives_plain_decodings_tokens(target: Path, kind: str, stages: int, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    folder = getattr(speculators, kind)(open_checkpoint(str(target))).save(tmp_path / kind)
    engine = InProcessEngine(target, stages, learned=folder)
    expected: dict[tuple[int, int], list[int]] = {}
    for which in range(len(strategies(stages, engine.loop.experience))):
        asked = {}
        for i, prompt in enumerate(PROMPTS):
            for j, sampling in enumerate(SAMPLINGS):
                strategy = strategies(stages, engine.loop.experience)[which]
                asked[i, j] = engine.submit(prompt, sampling, TOKENS, strategy)
        engine.run()
        for (i, j), request in asked.items():
            assert isinstance(request.output, Picks)
            found = request.output.tokens
            if which == NONE:
                expected[i, j] = found
                assert j > 0 or check_same(model, PROMPTS[i], found, generate(model, PROMPTS[i]))
            assert found == expected[i, j]
            assert which == NONE or request.metrics.drafted_nodes > 0


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_stage_processes_send_their_states_to_the_drafters(target: Path, kind: str, tmp_path: Path) -> None:
    folder = getattr(speculators, kind)(open_checkpoint(str(target))).save(tmp_path / kind)
    speculation = {"method": kind, "model": str(folder), "width": 12, "children": 4}
    prompts: list[Prompt] = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    params = [SamplingParams(temperature=t, seed=3, max_tokens=TOKENS, ignore_eos=True) for t in (0.0, 1.0)]
    options = {"max_model_len": 128, "prefill_chunk": 8, "skip_tokenizer_init": True, "transport": "tcp"}
    with LLM(str(target), pipeline_parallel_size=3, speculative_config=speculation, **options) as llm:
        plain = llm.run(prompts, params, None)
        for _ in range(2):
            for one, other in zip(llm.generate(prompts, params), plain, strict=True):
                assert one.outputs[0].token_ids == other.outputs[0].token_ids
                assert one.outputs[0].metrics.drafted_nodes > 0
        llm.loop.audit()


def test_a_drafter_of_another_kind_is_refused_before_anything_starts(target: Path, tmp_path: Path) -> None:
    folder = speculators.medusa(open_checkpoint(str(target))).save(tmp_path / "medusa")
    with pytest.raises(FieldError, match=r"speculative_config.method is 'eagle3', the checkpoint is of kind 'medusa'"):
        LLM(str(target), speculative_config={"method": "eagle3", "model": str(folder)}, skip_tokenizer_init=True)
    with pytest.raises(FieldError, match="model is missing: method 'eagle3' needs the drafter's folder"):
        LLM(str(target), speculative_config={"method": "eagle3"}, skip_tokenizer_init=True)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("stages", [1, 4])
def test_certain_rows_are_what_the_whole_text_gives_at_once(
    target: Path, stages: int, kind: str, tmp_path: Path
) -> None:
    """The module's outputs for a text that went through the pipeline, row by row, drafted and computed anew."""
    checkpoint = open_checkpoint(str(target))
    draft = getattr(speculators, kind)(checkpoint)
    engine = InProcessEngine(target, stages, learned=draft.save(tmp_path / kind))
    strategy = strategies(stages, engine.loop.experience)[-2]
    request = engine.submit(PROMPTS[1], Sampling(), TOKENS, strategy)
    while len(request.certain) < len(PROMPTS[1]) + TOKENS - 4:
        engine.loop.step()
    stage, drafter = engine.reader, engine.drafter
    assert isinstance(stage, EagleStage)
    done = drafter._refreshed[request.number]
    while drafter.busy:
        engine.loop.step()
    certain = request.certain[:done]
    tokens, slots = [node.token for node in certain], np.array([node.slot for node in certain])
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.inference_mode():
        states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    layers = checkpoint.num_layers
    reads = (layers,) if kind == "eagle" else (2, layers // 2, layers - 3)
    features = stage.store.states(slots)[:-1]
    torch.testing.assert_close(features, torch.cat([states[k][0] for k in reads], dim=-1)[:-1], atol=1e-4, rtol=1e-3)
    embedding = draft.tensors.get("embed_tokens.weight", model.get_input_embeddings().weight.detach())
    expected = reference_outputs(kind, draft.tensors, embedding, tokens, features)
    torch.testing.assert_close(stage._own_SD[slots][1:], expected, atol=1e-5, rtol=1e-5)


def reference_outputs(
    kind: str, tensors: reference.Tensors, embedding: torch.Tensor, tokens: list[int], features: torch.Tensor
) -> torch.Tensor:
    """What the formulas give for all tokens but the first, which follows nothing and which no other sees [N - 1, D]."""
    count = len(tokens) - 1
    sees, positions = torch.ones(count, count).tril().bool(), torch.arange(count)
    if kind == "eagle":
        return reference.eagle(tensors, embedding, torch.tensor(tokens[1:]), features, positions, sees, 10000.0)
    fused = features @ tensors["fc.weight"].T
    return reference.eagle3(tensors, embedding, torch.tensor(tokens[1:]), fused, positions, sees, 10000.0)
