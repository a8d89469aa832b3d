"""``penstock serve`` and its clients: the openai package, plain HTTP, and what goes wrong on the way."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, Field

from penstock import LLM, SamplingParams
from tests.serving import PATIENCE, ServedProcess, http, read_all, served, until

pytestmark = pytest.mark.processes

CODE = "def fibonacci(n):\n"
TEMPLATE = Path(__file__).parents[2] / "hermes.jinja"
ASKED: Any = [{"role": "user", "content": "What is the weather?"}]
TALK: Any = [{"role": "system", "content": "import os"}, {"role": "user", "content": "def main():"}]


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"enum": ["Oslo", "Rome"]},
                "days": {"type": "integer", "maximum": 9, "minimum": 1},
            },
            "required": ["place", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}
NAMED: Any = {"type": "function", "function": {"name": "calendar"}}


@pytest.fixture(scope="module")
def server() -> Iterator[ServedProcess]:
    with served("demo", "-pp", "2", "--max-body-size", "100000", "--chat-template", str(TEMPLATE)) as process:
        yield process


@pytest.fixture(scope="module")
def client(server: ServedProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM("demo", speculative_config={"strategy": "autoregressive"}) as llm:
        llm.get_tokenizer().use_chat_template(TEMPLATE.read_text())
        yield llm


def ids_of(choice: Any) -> list[int]:
    """The token ids that ``return_token_ids`` asks for."""
    found: list[int] = choice.token_ids
    return found


# --------------------------------------------------------------------------------------------------- the same tokens


@pytest.mark.parametrize(
    ("fields", "extra"),
    [
        ({"temperature": 0.0}, {}),
        ({"temperature": 1.0, "seed": 7, "n": 2}, {}),
        ({"temperature": 0.8, "seed": 3, "top_p": 0.9}, {"top_k": 20, "min_p": 0.01, "repetition_penalty": 1.2}),
        ({"temperature": 1.0, "seed": 5, "presence_penalty": 1.0, "frequency_penalty": 0.5}, {"min_tokens": 12}),
        ({"temperature": 0.0, "logit_bias": {"201": -100}}, {"ignore_eos": True}),
        ({"temperature": 0.0, "stop": ["return"]}, {"include_stop_str_in_output": True}),
    ],
)
def test_completions_are_what_plain_decoding_gives(
    client: openai.OpenAI, plain: LLM, fields: dict[str, Any], extra: dict[str, Any]
) -> None:
    reply = client.completions.create(
        model="demo", prompt=CODE, max_tokens=24, **fields, extra_body={**extra, "return_token_ids": True}
    )
    asked = fields | extra
    if "logit_bias" in asked:
        asked["logit_bias"] = {int(token): bias for token, bias in asked["logit_bias"].items()}
    (expected,) = plain.generate(CODE, SamplingParams(max_tokens=24, **asked))
    assert [ids_of(choice) for choice in reply.choices] == [one.token_ids for one in expected.outputs]
    assert [choice.text for choice in reply.choices] == [one.text for one in expected.outputs]
    assert [choice.finish_reason for choice in reply.choices] == [one.finish_reason for one in expected.outputs]


def test_a_chat_is_its_template_completed(client: openai.OpenAI, plain: LLM) -> None:
    reply = client.chat.completions.create(
        model="demo", messages=TALK, temperature=0, max_tokens=16, extra_body={"return_token_ids": True}
    )
    (choice,) = reply.choices
    prompt = plain.get_tokenizer().apply_chat_template(TALK)
    (expected,) = plain.generate({"prompt_token_ids": prompt}, SamplingParams(temperature=0, max_tokens=16))
    assert ids_of(choice) == expected.outputs[0].token_ids
    assert choice.message.role == "assistant"
    assert choice.message.content == expected.outputs[0].text
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len(prompt)
    assert reply.usage.total_tokens == len(prompt) + 16


def test_a_response_is_the_chat_in_other_words(client: openai.OpenAI) -> None:
    talk: Any = TALK
    chat = client.chat.completions.create(model="demo", messages=talk, temperature=0, max_tokens=16)
    asked: Any = {"model": "demo", "input": TALK, "temperature": 0, "max_output_tokens": 16}
    whole = client.responses.create(**asked)
    assert whole.output_text == chat.choices[0].message.content
    assert whole.status == "incomplete"
    assert whole.usage is not None
    assert chat.usage is not None
    assert whole.usage.total_tokens == chat.usage.total_tokens
    events = list(client.responses.create(**asked, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == whole.output_text


def test_a_response_refuses_what_it_would_have_to_remember(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="previous_response_id names an earlier response"):
        client.responses.create(model="demo", input="a", previous_response_id="resp_1")
    with pytest.raises(openai.BadRequestError, match="max_output_tokens is 100000; behind this prompt") as caught:
        client.responses.create(model="demo", input="a", max_output_tokens=100_000)
    assert caught.value.param == "max_output_tokens"
    with pytest.raises(openai.NotFoundError, match="none is kept here"):
        client.responses.retrieve("resp_1")
    with pytest.raises(openai.NotFoundError, match="an embedding model"):
        client.embeddings.create(model="demo", input="a")


def test_harmless_fields_are_named_in_a_header(client: openai.OpenAI) -> None:
    asked: Any = {"model": "demo", "messages": TALK, "max_tokens": 2, "metadata": {"a": "b"}, "store": True}
    for stream in (False, True):
        reply = client.chat.completions.with_raw_response.create(**asked, stream=stream)
        assert reply.headers["X-Penstock-Warning"] == "ignored here: metadata, store"


def test_several_prompts_keep_their_order(client: openai.OpenAI, plain: LLM) -> None:
    prompts = [CODE, "import re", "class A:"]
    params: dict[str, Any] = {"temperature": 1.0, "seed": 2, "n": 2, "max_tokens": 8}
    reply = client.completions.create(model="demo", prompt=prompts, **params)
    expected = plain.generate(prompts, SamplingParams(**params))
    assert [choice.index for choice in reply.choices] == list(range(6))
    assert [choice.text for choice in reply.choices] == [one.text for found in expected for one in found.outputs]
    by_ids = client.completions.create(model="demo", prompt=[one.prompt_token_ids for one in expected], **params)
    assert [choice.text for choice in by_ids.choices] == [choice.text for choice in reply.choices]


def test_a_stop_string_at_the_last_token_allowed_is_a_stop(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "demo", "prompt": CODE, "temperature": 0}
    (whole,) = client.completions.create(**asked, max_tokens=8, extra_body={"return_token_ids": True}).choices
    (before,) = client.completions.create(**asked, max_tokens=7).choices
    stop = whole.text.removeprefix(before.text)
    (cut,) = client.completions.create(**asked, max_tokens=8, stop=[stop]).choices
    first = whole.text.index(stop)
    assert (cut.text, cut.finish_reason) == (whole.text[:first], "stop")


def test_a_call_that_was_cut_off_ends_no_conversation(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "weather"}}
    asked: dict[str, Any] = {"model": "demo", "tools": [WEATHER], "max_tokens": 4, "temperature": 0}
    (cut,) = client.chat.completions.create(messages=ASKED, tool_choice=tool, **asked).choices
    (call,) = cut.message.tool_calls or []
    assert cut.finish_reason == "length"
    assert WEATHER["function"]["name"] == call.function.name
    turns = [*ASKED, cut.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "no JSON"}]
    assert client.chat.completions.create(messages=turns, **asked).choices
    item = {"type": "function_call", "call_id": call.id, "name": "weather", "arguments": call.function.arguments}
    output = {"type": "function_call_output", "call_id": call.id, "output": "no JSON"}
    items: Any = [*ASKED, item, output]
    assert client.responses.create(model="demo", input=items, max_output_tokens=4).output


@pytest.mark.parametrize("path", ["/health", "/v1/models"])
def test_head_and_a_target_with_its_host(server: ServedProcess, path: str) -> None:
    asked = httpx.head(f"{server.url}{path}", timeout=PATIENCE)
    assert (asked.status_code, asked.content) == (200, b"")
    with server.connect() as connection:
        connection.sendall(http("GET", f"{server.url}{path}", Connection="close"))
        assert read_all(connection).startswith(b"HTTP/1.1 200")


# ---------------------------------------------------------------------------------------------------------- streams


def test_a_stream_is_the_reply_in_pieces(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "demo", "messages": TALK, "temperature": 1, "seed": 4, "n": 2, "max_tokens": 20}
    whole = client.chat.completions.create(**asked)
    texts, ends, usage = {0: "", 1: ""}, {}, None
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        assert usage is None, "usage comes last"
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert ends == {choice.index: choice.finish_reason for choice in whole.choices}
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens == 40


def test_streamed_completions_echo_and_logprobs(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "demo", "prompt": [CODE, "import re"], "temperature": 0, "max_tokens": 8}
    whole = client.completions.create(**asked, echo=True)
    texts = ["", ""]
    for chunk in client.completions.create(**asked, echo=True, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]
    assert texts[0].startswith(CODE)
    found = client.completions.create(**asked, logprobs=2).choices[0].logprobs
    pieces = [
        choice.logprobs
        for chunk in client.completions.create(**asked, logprobs=2, stream=True)
        for choice in chunk.choices
        if choice.index == 0 and choice.logprobs
    ]
    assert found is not None
    assert [one for piece in pieces for one in piece.tokens or []] == found.tokens
    assert [one for piece in pieces for one in piece.text_offset or []] == found.text_offset
    # Floats differ in the last digits with the rows that were computed together.
    streamed = [one for piece in pieces for one in piece.token_logprobs or []]
    assert streamed == pytest.approx(found.token_logprobs, abs=1e-4)
    assert [set(one) for piece in pieces for one in piece.top_logprobs or []] == [
        set(one) for one in found.top_logprobs
    ]


def test_the_async_client_and_many_at_once(server: ServedProcess) -> None:
    async def ask(client: openai.AsyncOpenAI, seed: int) -> str:
        stream = await client.completions.create(
            model="demo", prompt=CODE, max_tokens=16, temperature=1, seed=seed, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def both() -> tuple[list[str], list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=PATIENCE) as client:
            together = await asyncio.gather(*(ask(client, seed) for seed in range(6)))
            return together, [await ask(client, seed) for seed in range(6)]

    together, alone = asyncio.run(both())
    assert together == alone
    assert len(set(alone)) > 1


def test_events_are_as_openai_sends_them(server: ServedProcess) -> None:
    body = {"prompt": CODE, "max_tokens": 3, "temperature": 0, "stream": True}
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE)
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = reply.text
    assert all(line.startswith("data: ") for line in events.strip().split("\n\n"))
    assert events.endswith("data: [DONE]\n\n")


# ------------------------------------------------------------------------------------------------- logprobs, figures


def test_chat_logprobs(client: openai.OpenAI) -> None:
    (choice,) = client.chat.completions.create(
        model="demo", messages=TALK, temperature=0, max_tokens=6, logprobs=True, top_logprobs=3
    ).choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert "".join(one.token for one in choice.logprobs.content) == choice.message.content
    for one in choice.logprobs.content:
        assert bytes(one.bytes or []).decode() == one.token
        assert len(one.top_logprobs) == 3
        assert one.top_logprobs[0].token == one.token, "greedy: the chosen one is the most probable"
        assert one.top_logprobs[0].logprob >= one.top_logprobs[1].logprob
        assert one.logprob <= 0


def test_usage_tells_of_speculation_and_of_the_prefix_cache(client: openai.OpenAI) -> None:
    long = "".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(20))
    first, again = (
        client.completions.create(model="demo", prompt=long, temperature=0, max_tokens=16) for _ in range(2)
    )
    for reply in (first, again):
        assert reply.usage is not None
        details = reply.usage.completion_tokens_details
        assert details is not None
        metrics = reply.model_dump()["metrics"]
        assert metrics["num_accepted_tokens"] == details.accepted_prediction_tokens
        assert metrics["mean_acceptance_length"] == pytest.approx(
            1 + metrics["num_accepted_tokens"] / max(metrics["num_drafts"], 1)
        )
        assert 0 < metrics["time_to_first_token"] < metrics["seconds"]
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens
    assert again.choices[0].text == first.choices[0].text


# ------------------------------------------------------------------------------------------------ structured outputs


class Point(BaseModel):
    x: int = Field(ge=0, le=99)
    label: Literal["left", "right"]


def test_structured_output(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(
        model="demo", messages=TALK, response_format=Point, temperature=1, seed=1, max_tokens=200
    )
    assert isinstance(parsed.choices[0].message.parsed, Point)
    found = client.chat.completions.create(
        model="demo", messages=TALK, response_format={"type": "json_object"}, temperature=0, seed=1, max_tokens=60
    ).choices[0]
    assert found.message.content is not None
    assert found.message.content.startswith("{")


@pytest.mark.parametrize(
    ("field", "value", "texts"),
    [
        ("guided_choice", ["yes", "no"], {"yes", "no"}),
        ("guided_regex", "(ab|cd)e", {"abe", "cde"}),
        ("guided_grammar", 'start: "up" | "down"', {"up", "down"}),
        ("structured_outputs", {"choice": ["one"]}, {"one"}),
    ],
)
def test_guided(client: openai.OpenAI, field: str, value: Any, texts: set[str]) -> None:
    reply = client.completions.create(model="demo", prompt=CODE, max_tokens=20, extra_body={field: value})
    assert reply.choices[0].text in texts
    assert reply.choices[0].finish_reason == "stop"


def test_a_grammar_that_is_too_dear_is_refused_in_the_same_words_each_time(client: openai.OpenAI) -> None:
    said, regex = set(), {"guided_regex": "(a{1000}){1000}"}
    for _ in range(2):
        with pytest.raises(openai.BadRequestError, match="guided_regex: it is exhausted") as refused:
            client.completions.create(model="demo", prompt="a", max_tokens=12, temperature=0, extra_body=regex)
        assert refused.value.param == "guided_regex"
        said.add(str(refused.value.message))
    assert len(said) == 1


def test_a_grammar_that_is_exhausted_on_its_way_ends_the_request_with_an_error(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "demo", "prompt": "a", "max_tokens": 64, "temperature": 0}
    asked["extra_body"] = {"guided_regex": "[a-z ]{20}(a{1000}){1000}"}
    said = set()
    for _ in range(2):
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(**asked)
        assert refused.value.param == "guided_regex"
        said.add(refused.value.body["message"])  # type: ignore[index]
    choices: list[Any] = []
    with pytest.raises(openai.APIError) as ended:
        choices.extend(chunk.choices[0] for chunk in client.completions.create(**asked, stream=True))
    said.add(ended.value.body["message"])  # type: ignore[index]
    (message,) = said
    assert re.match(r"guided_regex: after \d+ tokens it is exhausted, ", message)
    assert re.fullmatch("[a-z ]{20,}", "".join(choice.text for choice in choices))
    assert choices[-1].finish_reason == "error"


# ------------------------------------------------------------------------------------------------------------- tools


def test_a_forced_call(client: openai.OpenAI) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        asked: dict[str, Any] = {"model": "demo", "messages": ASKED, "tools": [WEATHER], "tool_choice": choice}
        asked |= {"temperature": 1, "seed": 3, "max_tokens": 300, "parallel_tool_calls": False}
        (whole,) = client.chat.completions.create(**asked).choices
        (call,) = whole.message.tool_calls or []
        arguments = json.loads(call.function.arguments)
        assert call.function.name == "weather"
        assert arguments["place"] in ("Oslo", "Rome")
        assert 1 <= arguments["days"] <= 9
        assert whole.finish_reason == "tool_calls"
        assert whole.message.content is None
        with client.chat.completions.stream(**asked) as stream:
            final = stream.get_final_completion().choices[0]
        (streamed,) = final.message.tool_calls or []
        assert streamed.function.name == "weather"
        assert json.loads(streamed.function.arguments) == arguments
        assert final.finish_reason == "tool_calls"


@pytest.mark.parametrize("stream", [True, False])
def test_calls_are_found_in_what_the_model_writes(client: openai.OpenAI, stream: bool) -> None:
    """The demo model would never call of itself: a grammar puts the words into its mouth."""
    call = '<tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call>'
    asked: dict[str, Any] = {"model": "demo", "messages": ASKED, "tools": [WEATHER, CLOCK], "max_tokens": 120}
    asked["extra_body"] = {"guided_choice": [f"Let me see.\n{call}\n{call}"]}
    if stream:
        with client.chat.completions.stream(**asked) as events:
            message = events.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.create(**asked).choices[0].message
    assert message.content == "Let me see.\n"
    calls = [one.function for one in message.tool_calls or []]
    assert [(one.name, json.loads(one.arguments)) for one in calls] == [("clock", {"zone": "UTC"})] * 2
    assert len({one.id for one in message.tool_calls or []}) == 2


def test_the_model_is_told_of_tools_and_of_what_they_answered(server: ServedProcess, client: openai.OpenAI) -> None:
    """The prompt is as long as the template makes it of all that; with tool_choice none it is told of no tools."""
    asked: dict[str, Any] = {
        "model": "demo",
        "tools": [CLOCK],
        "max_tokens": 200,
        "seed": 1,
        "parallel_tool_calls": False,
    }
    message = client.chat.completions.create(messages=ASKED, tool_choice="required", **asked).choices[0].message
    (call,) = message.tool_calls or []
    turns: Any = [*ASKED, message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "noon"}]
    choices: tuple[tuple[Literal["auto", "none"], Any], ...] = (("auto", [CLOCK]), ("none", None))
    for choice, tools in choices:
        reply = client.chat.completions.create(messages=turns, tool_choice=choice, **asked | {"max_tokens": 2})
        assert reply.usage is not None
        body = {"messages": turns, "tools": tools}
        prompt = httpx.post(f"{server.url}/tokenize", json=body, timeout=PATIENCE).json()
        text = httpx.post(f"{server.url}/detokenize", json={"tokens": prompt["tokens"]}, timeout=PATIENCE).json()
        assert reply.usage.prompt_tokens == prompt["count"]
        assert "noon" in text["prompt"]
        assert '<tool_call>{"name": "clock", "arguments": {}}</tool_call>' in text["prompt"]
        assert ("# tools:" in text["prompt"]) is (choice == "auto")


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "x " * 3000}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x " * 3000}]}, "messages"),
        ("/v1/responses", {"input": "x " * 3000}, "input"),
    ],
)
def test_a_prompt_that_is_too_long_has_the_code_that_programs_fall_back_on(
    server: ServedProcess, path: str, body: dict[str, Any], param: str
) -> None:
    reply = httpx.post(f"{server.url}{path}", json=body, timeout=PATIENCE)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["code"]) == (400, param, "context_length_exceeded")
    assert re.search(r"maximum context length is \d+ tokens", error["message"])


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"temperature": 3, "top_p": 2}, 400, "top_p"),
        ({"frequency_penalty": 3}, 400, "frequency_penalty"),
        ({"max_tokens": 5000}, 400, "max_tokens"),
        ({"prompt": "x " * 3000}, 400, "prompt"),
        ({"prompt": ""}, 200, None),
        ({"prompt": "", "add_special_tokens": False}, 400, "prompt"),
        ({"prompt": [99999]}, 400, "prompt"),
        ({"prompt": "\ud800"}, 400, "prompt"),
        ({"allowed_token_ids": [99999]}, 400, "allowed_token_ids"),
        ({"logit_bias": {"99999": 1}}, 400, "logit_bias"),
        ({"guided_json": "no json"}, 400, "guided_json"),
        ({"guided_json": {"type": "nothing"}}, 400, "guided_json"),
        ({"guided_regex": "("}, 400, "guided_regex"),
        ({"guided_grammar": "start: missing"}, 400, "guided_grammar"),
        ({"suffix": "x"}, 400, "suffix"),
        ({"best_of": 3}, 400, "best_of"),
        ({"prompt": ["a", "b"], "n": 65}, 400, "n"),
        ({"use_beam_search": True}, 400, "use_beam_search"),
        ({"model": "gpt"}, 404, "model"),
    ],
)
def test_a_refusal_names_the_field(
    server: ServedProcess, fields: dict[str, Any], status: int, param: str | None
) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 1} | fields)
    reply = httpx.post(
        f"{server.url}/v1/completions", content=body, headers={"content-type": "application/json"}, timeout=PATIENCE
    )
    assert reply.status_code == status, reply.text
    if status != 200:
        error = reply.json()["error"]
        assert error["param"] == param
        assert error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [CLOCK], "tool_choice": NAMED}, "tool_choice.function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": 3}}}},
         "response_format.json_schema.schema"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
        ({"max_completion_tokens": 5000}, "max_completion_tokens"),
    ],
)  # fmt: skip
def test_a_refused_chat_names_the_field(server: ServedProcess, fields: dict[str, Any], param: str) -> None:
    reply = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": TALK} | fields, timeout=PATIENCE)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param


NESTED = json.loads('{"a":' * 900 + "1" + "}" * 900)
"""A nesting that Python's JSON reader still reads, and that is too deep for the code behind it."""


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", b"{", 400),
        ("/v1/completions", b"[]", 400),
        ("/v1/completions", b"\xff", 400),
        ("/v1/completions", b"[" * 90_000, 400),
        ("/v1/completions", b'{"prompt": "a", "seed": ' + b"1" * 5000 + b"}", 400),
        (
            "/v1/chat/completions",
            json.dumps({"messages": TALK, "chat_template_kwargs": {"x": NESTED}}).encode(),
            400,
        ),
        ("/v1/completions", b'{"prompt": "' + b"a" * 100_001 + b'"}', 413),
        ("/v1/completions", [b'"' + b"a" * 100_001 + b'"'], 413),
        ("/v1/completions", [b'{"prompt": "a", ', b'"max_tokens": 1}'], 200),
    ],
)
def test_bodies(server: ServedProcess, path: str, body: bytes | list[bytes], status: int) -> None:
    """A list is sent in chunks, without saying how long they are together."""
    headers = {"Content-Type": "application/json"}
    check(httpx.post(f"{server.url}{path}", content=body, headers=headers, timeout=PATIENCE), status)


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("POST", "/v1/completions", {"Content-Type": "application/x-www-form-urlencoded"}, 400),
        ("GET", "/v1/completions", {}, 405),
        ("GET", "/v1/nothing", {}, 404),
        ("GET", "/v1/models", {"X-Request-Id": "a" * 200}, 400),
    ],
)
def test_heads(server: ServedProcess, method: str, path: str, headers: dict[str, str], status: int) -> None:
    content = b'{"prompt": "a"}' if method == "POST" else b""
    check(httpx.request(method, f"{server.url}{path}", headers=headers, content=content, timeout=PATIENCE), status)


@pytest.mark.parametrize(
    ("path", "length", "status"),
    [("/v1/nothing", 10, 404), ("/version", 10, 405), ("/v1/completions", 100_001, 413), ("/v1/completions", 10, 400)],
)
@pytest.mark.parametrize("late", [False, True])
def test_a_refusal_closes_no_connection_without_saying_so(
    server: ServedProcess, path: str, length: int, status: int, late: bool
) -> None:
    """Also where it comes before the body does; the next request on the connection is answered."""
    head = http("POST", path, Content_Type="application/json", Content_Length=str(length))
    with server.connect() as connection:
        connection.sendall(head)
        first = connection.recv(65536) if late and status != 400 else b""  # what is wrong with a body waits for it
        connection.sendall(b"x" * length + http("GET", "/version", Connection="close"))
        found = first + read_all(connection)
    statuses = [int(one[:3]) for one in found.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [status, 200]


def check(reply: httpx.Response, status: int) -> None:
    """Check a reply's status, and that every refusal has a message."""
    assert reply.status_code == status, reply.text
    if status != 200:
        assert reply.json()["error"]["message"]


# ------------------------------------------------------------------------------------------------------ other routes


def test_models_version_and_tokens(server: ServedProcess, client: openai.OpenAI, plain: LLM) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.model_dump()["max_model_len"]) == ("demo", 2048)
    assert client.models.retrieve("demo") == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt")
    assert httpx.get(f"{server.url}/version", timeout=PATIENCE).json()["version"]
    tokenizer = plain.get_tokenizer()
    asked = {"prompt": CODE, "return_token_strs": True}
    found = httpx.post(f"{server.url}/tokenize", json=asked, timeout=PATIENCE).json()
    assert found["tokens"] == tokenizer.encode(CODE)
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    talk = httpx.post(f"{server.url}/tokenize", json={"messages": TALK}, timeout=PATIENCE).json()
    assert talk["tokens"] == tokenizer.apply_chat_template(TALK)
    text = httpx.post(f"{server.url}/detokenize", json={"tokens": found["tokens"]}, timeout=PATIENCE).json()["prompt"]
    assert text == tokenizer.decode(found["tokens"], skip_special_tokens=False)
    for bad in ({}, {"prompt": "a", "messages": TALK}):
        assert httpx.post(f"{server.url}/tokenize", json=bad, timeout=PATIENCE).json()["error"]["param"] == "prompt"


def test_health_metrics_and_the_log(server: ServedProcess, client: openai.OpenAI) -> None:
    before = server.gauges()
    reply = client.completions.with_raw_response.create(
        model="demo", prompt=CODE, max_tokens=5, temperature=0, extra_headers={"X-Request-Id": "my-own"}
    )
    assert reply.headers["x-request-id"] == "my-own"
    assert reply.parse().id == "cmpl-my-own"
    line = server.line_of("my-own")
    assert line["completion_tokens"] == 5
    assert line["status"] == 200
    assert line["finish_reasons"] == ["length"]
    assert 0 < line["time_to_first_token"] <= line["seconds"]
    assert CODE.strip() not in json.dumps(server.log), "prompts are not logged unless asked"
    health = httpx.get(f"{server.url}/health", timeout=PATIENCE)
    assert health.status_code == 200
    assert health.json()["status"] == "ok"
    assert len(health.json()["stages"]) == 2
    after = server.gauges()
    assert after["penstock:generation_tokens_total"] >= before["penstock:generation_tokens_total"] + 5
    assert after["penstock:engine_up"] == 1
    assert after["penstock:kv_slots"] > 0


# ------------------------------------------------------------------------------------------------------- disconnects


def idle(server: ServedProcess) -> bool:
    found = server.gauges()
    names = ("num_requests_running", "num_requests_waiting", "kv_slots_used", "speculative_slots_used")
    return not any(found[f"penstock:{name}"] for name in names)


LONG: Any = {"max_tokens": 2000, "ignore_eos": True}
ENDLESS: dict[str, tuple[str, Any]] = {
    "completions": ("/v1/completions", {"prompt": CODE, **LONG}),
    "two choices": ("/v1/completions", {"prompt": CODE, "n": 2, **LONG}),
    "chat": ("/v1/chat/completions", {"messages": TALK, **LONG}),
    "outline": ("/v1/chat/completions", {"messages": TALK, "outline_decoding": "on", **LONG}),
    "responses": ("/v1/responses", {"input": CODE, "max_output_tokens": 2000, "temperature": 9}),
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("kind", ENDLESS)
def test_a_client_that_leaves_frees_its_slots(server: ServedProcess, kind: str, stream: bool) -> None:
    path, body = ENDLESS[kind]
    name = f"leaves-{kind.replace(' ', '-')}-{stream}"
    with httpx.Client(timeout=PATIENCE) as client:
        request = client.build_request(
            "POST", f"{server.url}{path}", json=body | {"stream": stream}, headers={"X-Request-Id": name}
        )
        if stream:
            reply = client.send(request, stream=True)
            assert reply.status_code == 200
            next(reply.iter_lines())
            reply.close()
        else:
            with server.connect() as connection:
                head = [f"POST {path} HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: {name}\r\n"]
                head += [f"{key}: {value}\r\n" for key, value in request.headers.items() if key.startswith("content")]
                connection.sendall("".join([*head, "\r\n"]).encode() + request.content)
                until(lambda: server.gauges()["penstock:num_requests_running"])
    line = server.line_of(name)
    assert line["error"] == "client_gone"
    assert line["completion_tokens"] < 2000
    until(lambda: idle(server))
