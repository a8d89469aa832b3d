"""Answers in points through ``LLM``: each point is what transformers gives for that point's prompt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock import LLM, RequestError, RequestOutput, SamplingParams
from penstock.requests.slots import BLOCK
from tests.checkpoints import EOS, make_checkpoint

pytestmark = pytest.mark.processes

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role + ': ' + m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
QUESTION = [{"role": "user", "content": "What turns the wheel?"}]
GREEDY = SamplingParams(temperature=0, max_tokens=60)
# The tokenizer has a token for each byte, so that a guide alone is hundreds of them.


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(tmp_path_factory.mktemp("chat") / "model", tokenizer=True, max_position_embeddings=4096)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def llm(chat_model: Path) -> Iterator[LLM]:
    with LLM(chat_model, pipeline_parallel_size=2, max_model_len=4096, kv_slots=8192) as llm:
        yield llm


@pytest.fixture(scope="module")
def answer(llm: LLM) -> RequestOutput:
    (output,) = llm.chat(QUESTION, GREEDY, outline_decoding="on")
    return output


def test_each_point_is_plain_decoding_of_its_own_prompt(llm: LLM, chat_model: Path, answer: RequestOutput) -> None:
    outline = answer.outline
    assert outline is not None
    assert outline.used, outline.reason
    assert len(outline.points) == len(outline.titles) >= 2
    model: Any = AutoModelForCausalLM.from_pretrained(chat_model, dtype=torch.float32)
    for point in outline.points:
        ids = torch.tensor([point.prompt_token_ids])
        most = len(point.outputs[0].token_ids)
        expected = model.generate(ids, do_sample=False, max_new_tokens=most, eos_token_id=EOS)
        assert point.outputs[0].token_ids == expected[0, ids.shape[1] :].tolist()


def test_the_answer_is_its_points_in_order(answer: RequestOutput) -> None:
    assert answer.outline is not None
    whole, points = answer.outputs[0], [point.outputs[0] for point in answer.outline.points]
    assert whole.token_ids == [token for point in points for token in point.token_ids]
    assert len(whole.token_ids) <= GREEDY.max_tokens
    assert whole.text == "\n\n".join(
        f"{number}. **{title}**:{point.text}"
        for number, (title, point) in enumerate(zip(answer.outline.titles, points, strict=True), 1)
    )
    assert answer.prompt == "<s>user: What turns the wheel?\n<s>assistant: "


def test_points_share_question_and_outline_and_the_guide_stays_pinned(llm: LLM, answer: RequestOutput) -> None:
    assert answer.outline is not None
    (written,) = answer.outline.guides
    shared = len(written.prompt_token_ids) + len(written.outputs[0].token_ids)
    assert all(point.num_cached_tokens > shared - 2 * BLOCK for point in answer.outline.points)
    longest = llm.setup.kv_slots - 20
    llm.generate({"prompt_token_ids": [5] * min(longest, 4000)}, SamplingParams(max_tokens=1, temperature=0))
    llm.generate({"prompt_token_ids": [6] * min(longest, 4000)}, SamplingParams(max_tokens=1, temperature=0))
    (again,) = llm.chat([{"role": "user", "content": "Why?"}], GREEDY, outline_decoding="on")
    assert again.outline is not None
    assert again.outline.guides[0].num_cached_tokens > 100, "the guide is still there; all else has given way"


def test_auto_decides_and_several_conversations_are_answered_at_a_time(llm: LLM, answer: RequestOutput) -> None:
    asked = [QUESTION, [{"role": "user", "content": "Solve 3x = 6."}]]
    outputs = llm.chat(asked, GREEDY, outline_decoding="auto")
    for output in outputs:
        assert output.outline is not None
        assert output.outline.kind in ("list", "code", "math", "short", "text")
        assert output.outline.used == (output.outline.kind == "list")
        if not output.outline.used:
            (plain,) = llm.generate({"prompt_token_ids": output.prompt_token_ids}, GREEDY)
            assert output.outputs[0].token_ids == plain.outputs[0].token_ids


def test_what_does_not_go_together_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="n is 2"):
        llm.chat(QUESTION, SamplingParams(n=2), outline_decoding="on")
    with pytest.raises(RequestError, match="token ids"):
        llm.generate({"prompt_token_ids": [5]}, GREEDY, outline_decoding="on")
    with pytest.raises(RequestError, match="tools"):
        llm.chat(QUESTION, GREEDY, outline_decoding="on", tools=[{"type": "function", "function": {"name": "f"}}])
    with pytest.raises(RequestError, match="outline_decoding"):
        llm.chat(QUESTION, GREEDY, outline_decoding="yes")
