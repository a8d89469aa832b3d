"""No path that a user gives may be a named pipe: opening one would wait for ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, AsyncLLM, ConfigError
from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.files import is_named_pipe
from penstock.text.tokenizer import load_tokenizer
from scripts.cli_docs import is_argument
from tests.checkpoints import make_checkpoint
from tests.unit.cli.invoke import invoke
from tests.unit.cli.paths import BESIDE, ENDINGS, OPTIONS


class Hangs(Exception):
    pass


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Raise Hangs in the block after so many seconds, also where it waits within the system."""

    def end(*_: object) -> None:
        raise Hangs

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_the_walk_finds_options_of_all_kinds() -> None:
    found = {(words, one.name) for words, one in OPTIONS}
    for known in (
        ("generate", "messages"),
        ("generate", "trace"),
        ("serve", "ssl_keyfile"),
        ("bench", "prompts"),
        ("bench", "report"),
        ("bench serve", "dataset"),
        ("generate", "draft_model"),
        ("keys add", "keys"),
        ("profile", "model"),
        ("run", "model"),
        ("serve", "cluster"),
        ("simulate", "clusters"),
        ("trace", "file"),
        ("train", "data"),
        ("worker", "cache"),
    ):
        assert known in found, sorted(found)


@pytest.mark.parametrize(("words", "option"), OPTIONS, ids=[f"{words}-{one.name}" for words, one in OPTIONS])
def test_a_named_pipe_is_refused_in_a_line_that_names_it(words: str, option: Any, tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / f"pipe{ENDINGS.get(option.name, '')}")
    arguments = [one for command, one in OPTIONS if command == words and is_argument(one)]
    given = (str(pipe),) * len(arguments) if is_argument(option) else (option.opts[0], str(pipe))
    with within(30):
        result = invoke(*words.split(), *BESIDE.get(words, ()), *given)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output
    assert result.stderr.startswith("penstock: error: ")
    assert str(pipe) in result.stderr


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
@pytest.mark.parametrize(
    ("ending", "given"),
    [
        ("", lambda pipe: {"model": pipe}),
        (".gguf", lambda pipe: {"model": pipe}),
        (".gguf", lambda pipe: {"speculative_config": {"method": "draft_model", "model": pipe}}),
        ("", lambda pipe: {"speculative_config": {"method": "eagle", "model": pipe}}),
        (".toml", lambda pipe: {"cluster": pipe}),
        ("", lambda pipe: {"keys": pipe, "hosts": "127.0.0.1"}),
    ],
)
def test_python_refuses_a_named_pipe(
    kind: Callable[..., Any], ending: str, given: Callable[[str], dict[str, Any]], tmp_path: Path
) -> None:
    os.mkfifo(pipe := tmp_path / f"pipe{ending}")
    with within(60), pytest.raises(ConfigError) as error:
        kind(**{"model": "demo"} | given(str(pipe)))
    assert str(pipe) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name",
    ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"],
)
def test_a_named_pipe_in_a_checkpoint_holds_nobody_up(name: str, tmp_path: Path) -> None:
    """It counts as a file that is missing; all but the generation's defaults are needed."""
    folder = make_checkpoint(tmp_path, "llama", tokenizer=True)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)

    def read() -> None:
        open_checkpoint(str(folder))
        load_tokenizer(folder).encode("a")

    with within(60):
        if name.startswith(("generation", "tokenizer_config")):
            read()
        else:
            with pytest.raises(ConfigError, match=str(tmp_path)):
                read()


def test_a_shells_own_pipe_is_read(tmp_path: Path) -> None:
    """``<(command)`` is a pipe without a name, whose other end is open."""
    program = "import sys; from pathlib import Path; from penstock.files import is_named_pipe as named; "
    program += "file = Path(sys.argv[1]); print(named(file), file.read_text())"
    command = ["bash", "-c", f"'{sys.executable}' -c '{program}' <(echo key)"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False key\n\n"
    os.mkfifo(pipe := tmp_path / "pipe")
    (link := tmp_path / "link").symlink_to(pipe)
    (circle := tmp_path / "circle").symlink_to(circle)
    assert is_named_pipe(pipe)
    assert is_named_pipe(link)
    assert not any(map(is_named_pipe, (circle, tmp_path, tmp_path / "none")))


@pytest.mark.parametrize(("words", "option"), OPTIONS, ids=[f"{words}-{one.name}" for words, one in OPTIONS])
def test_an_empty_path_is_refused_by_its_name(words: str, option: Any, tmp_path: Path) -> None:
    """A shell's variable that is not set gives one; to Python it is the current folder."""
    arguments = [one for command, one in OPTIONS if command == words and is_argument(one)]
    named = arguments if is_argument(option) else [option]
    given = ("",) * len(arguments) if is_argument(option) else (option.opts[0], "")
    with within(30):
        result = invoke(*words.split(), *BESIDE.get(words, ()), *given)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output
    assert result.stderr.startswith("penstock: error: ")
    # A list's error names one entry, and a small model that drafts is a field of ``speculative_config``.
    said = ["speculative_config.model", *(one.name.removesuffix("s") for one in named)]
    assert any(word in result.stderr for word in said), result.stderr
