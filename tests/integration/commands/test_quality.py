"""``penstock bench quality``: a model's answers in points beside its plain ones, by itself and by a judge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.text.tokenizer import load_tokenizer
from tests.checkpoints import make_checkpoint
from tests.judges import judge_server
from tests.openai_server import running
from tests.unit.cli.invoke import invoke

pytestmark = pytest.mark.processes

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role + ': ' + m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
QUESTIONS = ("What turns the wheel?", "What does water do?")


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(tmp_path_factory.mktemp("chat") / "model", tokenizer=True, max_position_embeddings=4096)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def likelihood(chat_model: Path, question: str, answer: str) -> float:
    """Log-likelihood per token, computed with transformers."""
    tokenizer = load_tokenizer(open_checkpoint(str(chat_model)).path)
    prompt = tokenizer.encode(f"<s>user: {question}\n<s>assistant: ", add_special_tokens=False)
    picked = tokenizer.encode(answer, add_special_tokens=False)
    model: Any = AutoModelForCausalLM.from_pretrained(chat_model, dtype=torch.float32)
    with torch.no_grad():
        logits_NV = model(torch.tensor([[*prompt, *picked]])).logits[0, len(prompt) - 1 : -1]
    return -float(torch.nn.functional.cross_entropy(logits_NV, torch.tensor(picked)))


def test_both_answers_are_measured_and_judged(chat_model: Path, tmp_path: Path) -> None:
    prompts, figures, answers = (tmp_path / name for name in ("set.jsonl", "figures.json", "answers.jsonl"))
    prompts.write_text("\n".join(json.dumps({"turns": [text], "category": "water"}) for text in QUESTIONS))
    with running(judge_server("points")) as judge:
        command = ["bench", "quality", "--model", str(chat_model), "--prompts", str(prompts), "-pp", "2"]
        files = ["--max-tokens", "40", "--json", str(figures), "--answers", str(answers)]
        result = invoke(*command, *files, "--judge", judge.url)
    assert result.exit_code == 0, result.stderr
    one, everything = json.loads(figures.read_text())["categories"]
    assert (one["category"], one["questions"], one["in_points"]) == ("set: water", 2, 2)
    assert (one["plain_rating"], one["points_rating"]) == (4, 7.5)
    assert one["preferred"] == {"plain": 0, "points": 2, "neither": 0}
    assert everything == {**one, "category": "all"}
    for question, line in zip(QUESTIONS, answers.read_text().splitlines(), strict=True):
        found = json.loads(line)
        assert found["text"] == question
        assert found["points"].startswith("1. **")
        for kind in ("plain", "points"):
            expected = likelihood(chat_model, question, found[kind])
            assert found[f"{kind}_nats"] == pytest.approx(expected, abs=1e-3)
