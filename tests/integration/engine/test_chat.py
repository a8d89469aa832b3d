"""Chat models through ``LLM.chat`` and ``AsyncLLM.chat``: the tokens of transformers' own template and ``generate``."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock import LLM, AsyncLLM, RequestError, SamplingParams
from tests.checkpoints import EOS, make_tokenizer

pytestmark = pytest.mark.processes

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role + ': ' + m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What turns the wheel?"},
]
GREEDY = SamplingParams(temperature=0, max_tokens=16)


@pytest.fixture(scope="module")
def chat_model(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(target, folder)
    make_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def llm(chat_model: Path) -> Iterator[LLM]:
    with LLM(chat_model, pipeline_parallel_size=2, speculative_config=None, max_model_len=256) as llm:
        yield llm


def test_answers_are_those_of_transformers(llm: LLM, chat_model: Path) -> None:
    conversations = [TALK, [*TALK, {"role": "assistant", "content": "Water."}, {"role": "user", "content": "Why?"}]]
    outputs = llm.chat(conversations, GREEDY)
    model: Any = AutoModelForCausalLM.from_pretrained(chat_model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    for output, messages in zip(outputs, conversations, strict=True):
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
        assert output.prompt_token_ids == ids[0].tolist()
        expected = model.generate(ids, do_sample=False, max_new_tokens=GREEDY.max_tokens, eos_token_id=EOS)
        assert output.outputs[0].token_ids == expected[0, ids.shape[1] :].tolist()
    assert outputs[0].prompt == "<s>system: Be brief.\n<s>user: What turns the wheel?\n<s>assistant: "


def test_the_asynchronous_chat_has_the_same_tokens(llm: LLM, chat_model: Path) -> None:
    async def run() -> list[int]:
        async with AsyncLLM(chat_model, max_model_len=256) as engine:
            async for output in engine.chat(TALK, GREEDY, "mine"):
                assert output.request_id == "mine"
            with pytest.raises(RequestError, match=r"messages\[0\]"):
                await anext(engine.chat([{"role": "user"}], GREEDY))
            async for _ in engine.chat(TALK, SamplingParams(max_tokens=150, ignore_eos=True), "left"):
                break
            await engine.drained()
        return output.outputs[0].token_ids

    assert asyncio.run(run()) == llm.chat(TALK, GREEDY)[0].outputs[0].token_ids


def test_a_format_of_ones_own(llm: LLM) -> None:
    (output,) = llm.chat(
        TALK, GREEDY, chat_template="{{ messages[1].content }} {{ mood }}", chat_template_kwargs={"mood": "!"}
    )
    assert output.prompt == "What turns the wheel? !"
    (output,) = llm.chat(
        [*TALK, {"role": "assistant", "content": "It is"}],
        GREEDY,
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert output.prompt is not None
    assert output.prompt.endswith("assistant: It is")


def test_an_empty_answer_is_explained(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    """The grammar allows the end token alone."""
    only_end = SamplingParams(temperature=0, max_tokens=4, allowed_token_ids=[EOS])
    with caplog.at_level(logging.WARNING, "penstock"):
        assert llm.generate("What turns the wheel?", only_end)[0].outputs[0].token_ids == [EOS]
        assert "first token was an end token ('</s>'); it is a chat model, which wants its template" in caplog.text
        llm.chat(TALK, only_end)
    assert "ask in other words" in caplog.text
