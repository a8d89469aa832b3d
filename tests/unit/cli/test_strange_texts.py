"""Texts that no reader expects: nested without end, numbers of thousands of digits, halves of characters."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from penstock.engine.options import DEMO
from tests.unit.cli.invoke import invoke

DEEP: Final = "[" * 100_000 + "]" * 100_000
TYPED: Final = "[" * 20_000 + "]" * 20_000
DIGITS: Final = "9" * 5_000
JSON: Final[dict[str, Callable[[str], tuple[str, ...]]]] = {
    "compare": lambda file: ("compare", file, file),
    "bench": lambda file: ("bench", "--model", "demo", "--prompts", file),
    "bench quality": lambda file: ("bench", "quality", "--model", "demo", "--prompts", file),
    "train": lambda file: ("train", "draft", "--model", "demo", "--output", f"{file}.out", "--data", file),
    "generate": lambda file: ("generate", "--model", "demo", "--messages", file),
    "trace": lambda file: ("trace", file),
    "plan": lambda file: ("plan", "--doctor", file, "--model", "demo"),
}
"""Commands that read a JSON file, or one of JSON lines; `bench serve` reads the same prompts once a server answers."""


@pytest.mark.parametrize("content", [DEEP, f'{{"prompt": {DEEP}, "text": 1}}', DIGITS, "\ud800"], ids=len)
@pytest.mark.parametrize("command", JSON)
def test_a_strange_file_is_named(command: str, content: str, tmp_path: Path) -> None:
    file = tmp_path / "strange.jsonl"
    file.write_text(content, errors="surrogatepass")
    result = invoke(*JSON[command](str(file)))
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output[:300]
    assert result.stderr.startswith("penstock: error: ")
    assert str(file) in result.stderr


@pytest.mark.parametrize("content", [f"name = {'[' * 5000}{']' * 5000}", f'name = "a"\ntime_scale = {DIGITS}'])
def test_a_strange_cluster_file_is_named(content: str, tmp_path: Path) -> None:
    (file := tmp_path / "strange.toml").write_text(content)
    result = invoke("simulate", "--cluster", str(file))
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output[:300]
    assert result.stderr.startswith(f"penstock: error: {file}: is not TOML: ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("simulate", "--cluster", f"local-{DIGITS}"), "stages has 5,000 digits"),
        (("simulate", "--cluster", "local-100000"), "stages is 100000; it has to be at most 1024"),
        (("plan", "--cluster", "local-1000000"), "stages is 1000000"),
        (("generate", "x", "--model", "demo", "--cluster", "local-1000000"), "stages is 1000000"),
        (("simulate", "--cluster", f"random-{DIGITS}"), "seed has 5,000 digits"),
        (("simulate", "--cluster", f"random-1:{DIGITS}"), "stages has 5,000 digits"),
        (("generate", "x", "--model", "demo", "--speculative-config", TYPED), "speculative_config is not JSON"),
        (
            ("generate", "x", "--model", "demo", "--speculative-config", f'{{"tree_size": {TYPED}}}'),
            "speculative_config",
        ),
        (("bench", "--model", "demo", "--strategies", f"auto[width={TYPED}]"), "width"),
        (("generate", "\udcff", "--model", "demo"), "prompt holds half of a surrogate pair"),
        (("generate", "x", "--model", "demo", "--system-prompt", "\udcff"), "system_prompt holds half"),
        (("run", "demo", "--system-prompt", "\udcff"), "system_prompt holds half"),
    ],
    ids=lambda one: str(one)[:50],
)
def test_a_strange_value_is_refused_by_its_name(words: tuple[str, ...], said: str) -> None:
    result = invoke(*words)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output[:300]
    assert said in result.stderr


def test_half_a_character_in_a_prompt_file_is_named_with_its_line(tmp_path: Path) -> None:
    (file := tmp_path / "prompts.jsonl").write_text('{"prompt": "ok"}\n{"turns": ["a", "\\ud800"]}\n')
    result = invoke("bench", "--model", "demo", "--prompts", str(file), "--num-prompts", "2")
    assert result.exit_code == 2
    assert f"{file}, line 2: holds half of a surrogate pair" in result.stderr


@pytest.mark.parametrize(
    ("words", "closed", "code", "said"),
    [
        (("simulate", "--cluster", "demo", "--tokens", "100"), ">&-", 0, ""),
        (("simulate", "--cluster", "demo", "--tokens", "100"), "<&- >&- 2>&-", 0, ""),
        (("generate", "-", "--model", str(DEMO / "target")), "<&-", 2, "give a text"),
        (("keys", "sign", "--keys", "KEYS"), "<&-", 2, "penstock: error: "),
    ],
)
def test_standard_files_that_are_closed_are_empty(
    words: tuple[str, ...], closed: str, code: int, said: str, tmp_path: Path
) -> None:
    script = f'exec "$0" -m penstock.cli "$@" {closed}'
    done = subprocess.run(["sh", "-c", script, sys.executable, *words], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
