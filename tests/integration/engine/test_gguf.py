"""GGUF files wherever a model is named, and a real one: the ids of transformers on the dequantised model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoModelForCausalLM

from penstock import LLM, SamplingParams
from penstock.drafters.base import SyntheticDrafter
from penstock.messages import Sampling
from penstock.requests.request import Request
from tests.engines import InProcessEngine
from tests.exactness import (
    PLAIN,
    PROFILE,
    PROMPTS,
    TOKENS,
    Pair,
    check_same,
    every_pair,
    some_pairs,
    strategies,
    tokens_of,
)
from tests.generated import generate
from tests.gguf_files import TOKENS as VOCABULARY
from tests.gguf_files import make_gguf
from tests.real_model import smollm2

QUESTIONS = (
    "What is the capital of France? Answer in one sentence.",
    "Write a Python function that adds up the even numbers of a list.",
    "Summarize: Rivers carry water from mountains to the sea. On their way they turn mills, and people fish in them.",
)
ANSWER = 40


def dequantised(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


STAGES = (1, 3)
FILES = [("llama", Kind.Q4_1), ("llama_tied", Kind.Q8_0), ("qwen2", Kind.Q4_0)]


@pytest.mark.parametrize(
    ("architecture", "kind", "pairs"),
    [
        *((*file, some_pairs(number, STAGES)) for number, file in enumerate(FILES)),
        *(pytest.param(*file, every_pair(STAGES), id=f"{file[0]}-all", marks=pytest.mark.whole) for file in FILES),
    ],
)
def test_every_strategy_gives_the_tokens_of_generate(
    tmp_path: Path, architecture: str, kind: Kind, pairs: list[Pair]
) -> None:
    path = make_gguf(tmp_path, architecture, kind=kind)
    model = dequantised(path)
    expected = {tuple(prompt): generate(model, prompt, TOKENS) for prompt in PROMPTS}

    def answer(request: Request) -> list[int]:
        return expected[tuple(request.prompt)]

    for stages, those in groupby(sorted(pairs), key=itemgetter(0)):
        engine = InProcessEngine(path, stages, SyntheticDrafter(PROFILE, len(VOCABULARY), 1, answer))
        for make in dict.fromkeys((PLAIN, *(which for _, which in those))):
            requests = [engine.submit(list(prompt), Sampling(), TOKENS, strategies(stages)[make]) for prompt in PROMPTS]
            engine.run()
            for prompt, request in zip(PROMPTS, requests, strict=True):
                assert check_same(model, prompt, tokens_of(request), expected[tuple(prompt)])


@pytest.mark.processes
def test_target_and_draft_model_may_be_files(tmp_path: Path) -> None:
    target, draft = (make_gguf(tmp_path / kind.name, kind=kind) for kind in (Kind.Q8_0, Kind.F16))
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    speculation = {"method": "draft_model", "model": str(draft), "strategy": "continuous"}
    options = {"speculative_config": speculation, "quantization": "none", "max_model_len": 256}
    with LLM(target, pipeline_parallel_size=2, **options) as llm:
        found = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
        talk = llm.get_tokenizer().render([{"role": "user", "content": "the"}], True)
    model = dequantised(target)
    for prompt, output in zip(PROMPTS, found, strict=True):
        assert check_same(model, prompt, output.outputs[0].token_ids, generate(model, prompt, TOKENS))
    assert sum(output.outputs[0].metrics.accepted for output in found) > 0
    assert talk == "<s>user: the</s><s>assistant:"


@pytest.fixture(scope="module")
def real() -> Path:
    return smollm2()


@pytest.fixture(scope="module")
def answers(real: Path) -> tuple[Any, list[list[int]]]:
    """transformers' model, and its ids of the answers to ``QUESTIONS``, stops included."""
    from transformers import AutoTokenizer

    model, tokenizer = dequantised(real), AutoTokenizer.from_pretrained(real.parent, gguf_file=real.name)
    found = []
    for question in QUESTIONS:
        talk = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_tensors="pt")["input_ids"]
        found.append(model.generate(ids, max_new_tokens=ANSWER, do_sample=False)[0, ids.shape[1] :].tolist())
    return model, found


# Transformers alone takes half a minute for it. Ids of small files are compared with transformers' above.
@pytest.mark.whole
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("stages", [4, 1, 2])
def test_a_real_models_ids_are_those_of_transformers(
    real: Path, answers: tuple[Any, Sequence[list[int]]], stages: int
) -> None:
    model, expected = answers
    params = SamplingParams(temperature=0, max_tokens=ANSWER)
    options = {"speculative_config": {"method": "ngram"}, "quantization": "none"}
    with LLM(real, pipeline_parallel_size=stages, **options) as llm:
        tokenizer = llm.get_tokenizer()
        prompts = [tokenizer.apply_chat_template([{"role": "user", "content": one}]) for one in QUESTIONS]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    for prompt, output, ids in zip(prompts, outputs, expected, strict=True):
        assert check_same(model, prompt, output.outputs[0].token_ids, ids)
    assert outputs[0].outputs[0].text.strip() == "The capital of France is Paris."
