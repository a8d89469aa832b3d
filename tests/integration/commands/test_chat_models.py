"""Chat models on the command line: they answer, and benches follow their turns; ``--raw`` continues the text.

Commands are called in this process: what they are as processes is in test_cli.py and test_first_hour.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.real_model import smollm2
from tests.unit.cli.invoke import invoke

pytestmark = pytest.mark.processes

TEMPLATE = "{% for m in messages %}<s>{{ m.role + ': ' + m.content }}\n{% endfor %}<s>assistant: "
GREEDY = ["--temperature", "0", "--max-tokens", "8", "--ignore-eos"]


@pytest.fixture(scope="module")
def chat_model(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(target, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def report(model: Path, *arguments: str) -> dict[str, Any]:
    done = invoke("generate", "--model", str(model), *arguments, *GREEDY, "--json")
    assert done.exit_code == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_chat_model_answers_and_any_model_continues(chat_model: Path, target: Path, tmp_path: Path) -> None:
    answer = report(chat_model, "hi")
    assert answer["prompt"] == "<s>user: hi\n<s>assistant: "
    raw, base = report(chat_model, "hi", "--raw"), report(target, "hi")
    assert raw["prompt"] == base["prompt"] == "hi"
    assert raw["token_ids"] == base["token_ids"]
    talk = tmp_path / "talk.json"
    talk.write_text(json.dumps([{"role": "user", "content": "hi"}, {"role": "assistant", "content": answer["text"]}]))
    following = report(chat_model, "and?", "--messages", str(talk), "--system-prompt", "Be brief.")
    assert following["prompt"] == (
        f"<s>system: Be brief.\n<s>user: hi\n<s>assistant: {answer['text']}\n<s>user: and?\n<s>assistant: "
    )


def test_a_conversation_needs_a_template(target: Path) -> None:
    refused = invoke("generate", "hi", "--model", str(target), "--system-prompt", "Be brief.")
    assert refused.exit_code == 2
    assert "messages need a chat template, and the checkpoint has none" in refused.stderr


def test_a_bench_follows_turns_with_the_answers(chat_model: Path, tmp_path: Path) -> None:
    prompts, figures = tmp_path / "talks.jsonl", tmp_path / "bench.json"
    prompts.write_text(json.dumps({"turns": ["hi", "and?"]}) + "\n")
    bench = ["bench", "--model", str(chat_model), "--prompts", str(prompts), "--max-tokens", "8"]
    done = invoke(*bench, "--strategies", "auto", "--json", str(figures))
    assert done.exit_code == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "The chat template was applied; later turns follow plain decoding's answers" in said
    assert "Every entry began with a request of 4 tokens to warm up" in said
    plain, auto = json.loads(figures.read_text())["runs"]
    assert auto["identical_to_autoregressive"]
    assert [one["prompt_sha256"] for one in plain["requests"]] == [one["prompt_sha256"] for one in auto["requests"]]
    assert len({one["prompt_sha256"] for one in plain["requests"]}) == 2
    raw = invoke(*bench, "--strategies", "auto", "--raw")
    assert raw.exit_code == 0, raw.stderr
    assert "the first turn alone was asked, as it stands: --raw." in " ".join(raw.stdout.split())


@pytest.mark.slow
def test_a_real_model_answers_and_its_empty_answer_is_explained(caplog: pytest.LogCaptureFixture) -> None:
    model, question = smollm2(), "What is the capital of France?"
    assert report(model, question, "--quantization", "none")["text"] == "The capital of France is Paris."
    raw = invoke("generate", question, "--model", str(model), "--quantization", "none", "--raw", "--temperature", "0")
    assert (raw.exit_code, raw.stdout) == (0, "")
    assert "the model's first token was an end token ('<|im_end|>'); it is a chat model, which wants its" in caplog.text
