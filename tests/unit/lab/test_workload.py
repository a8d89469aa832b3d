"""The requests that ``penstock bench serve`` sends."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from penstock.clients.api import ServerError
from penstock.lab.serving_load import ServingOptions, Workload, make_workload, random_prompts


async def count(prompt: str) -> int:
    """A server whose words have three tokens, with seven around a prompt."""
    return 7 + 3 * len(prompt.split())


def made(options: ServingOptions) -> Workload:
    return asyncio.run(make_workload(options, "m", count))


def test_random_prompts_have_the_wanted_tokens_as_the_server_counts() -> None:
    found = made(ServingOptions(num_prompts=5, num_warmups=2, input_len=307, seed=10))
    assert [asyncio.run(count(body["prompt"])) for body in found.asked + found.warmups] == [307] * 7
    assert len({body["prompt"] for body in found.asked + found.warmups}) == 7
    assert [body["seed"] for body in found.asked] == [10, 11, 12, 13, 14]
    assert found.repeated is None


def test_a_count_that_says_nothing_is_refused() -> None:
    async def constant(prompt: str) -> int:
        return 7

    with pytest.raises(ServerError, match="does not grow with the prompt"):
        asyncio.run(make_workload(ServingOptions(), "m", constant))


def test_there_is_always_a_word() -> None:
    assert made(ServingOptions(num_prompts=1, input_len=1)).asked[0]["prompt"]


def test_a_seed_is_a_set_of_prompts() -> None:
    assert random_prompts(3, 8, seed=1) == random_prompts(3, 8, seed=1)
    assert not set(random_prompts(3, 8, seed=1)) & set(random_prompts(3, 8, seed=2))


def test_a_files_prompts_are_repeated_with_other_seeds(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": name}) for name in "ab"))
    found = made(ServingOptions(num_prompts=3, num_warmups=1, dataset=file))
    assert [(body["prompt"], body["seed"]) for body in found.asked] == [("a", 0), ("b", 1), ("a", 2)]
    assert [body["prompt"] for body in found.warmups] == ["b"]
    assert found.repeated == 2
    assert made(ServingOptions(num_prompts=2, dataset=file)).repeated is None


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_chat_request(ignore_eos: bool) -> None:
    options = ServingOptions(endpoint="chat", num_prompts=1, output_len=9, temperature=0.5, ignore_eos=ignore_eos)
    body = made(options).asked[0]
    assert body["messages"][0]["role"] == "user"
    assert "prompt" not in body
    assert (body["model"], body["max_tokens"], body["temperature"], body["stream"]) == ("m", 9, 0.5, True)
    assert body["stream_options"] == {"include_usage": True}
    assert body.get("ignore_eos", False) is ignore_eos
