"""gpt-oss's answers in a running engine: ``<|end|>`` closes its analysis, and the answer goes on to ``<|return|>``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock import LLM, FinishReason, SamplingParams
from tests.harmony_model import ANSWER, PROMPT, QUESTION, REPLY, THOUGHT, TOKENS, make_file, make_folder
from tests.serving import PATIENCE, served

pytestmark = pytest.mark.processes

ASKED: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_file(tmp_path_factory.mktemp("harmony"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("harmony"))


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_an_answer_goes_on_past_the_end_of_its_analysis(kind: str, request: pytest.FixtureRequest) -> None:
    params = SamplingParams(temperature=0, max_tokens=64, skip_special_tokens=False)
    with LLM(str(request.getfixturevalue(kind)), pipeline_parallel_size=2) as llm:
        (output,) = llm.chat(ASKED, params)
    (answer,) = output.outputs
    assert output.prompt == PROMPT
    assert answer.text == REPLY
    assert TOKENS.index("<|end|>") in answer.token_ids[:-1]
    assert answer.token_ids[-1] == TOKENS.index("<|return|>")
    assert answer.finish_reason == FinishReason.STOP


def test_a_server_tells_analysis_and_answer_apart(file: Path) -> None:
    with served(str(file), "-pp", "2") as server:
        body = {"messages": ASKED, "temperature": 0, "max_tokens": 64}
        found = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE).json()
    (choice,) = found["choices"]
    assert choice["finish_reason"] == "stop"
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == (THOUGHT, ANSWER)
