"""Numbers that no command expects: they are followed, or refused in a line that names the option."""

from __future__ import annotations

from typing import Any, Final

import pytest

from scripts.cli_docs import commands, is_argument
from tests.unit.cli.invoke import invoke
from tests.unit.cli.paths import BESIDE

NOWHERE: Final = "nowhere/model/at/all"
SERVER: Final = ("--url", "http://127.0.0.1:1")
SHORT: Final[dict[str, tuple[str, ...]]] = {
    **BESIDE,
    "bench": ("--model", NOWHERE),
    "bench quality": ("--model", NOWHERE, *BESIDE["bench quality"]),
    "bench serve": SERVER,
    "chat": SERVER,
    "generate": ("x", "--model", NOWHERE),
    "plan": ("--cluster", "demo", "--tokens", "0"),
    "profile": (NOWHERE,),
    "rebalance": SERVER,
    "replicas": SERVER,
    "run": (NOWHERE,),
    "serve": (NOWHERE,),
    "simulate": ("--cluster", "demo", "--tokens", "4", "--tokens-per-request", "2", "--strategies", "autoregressive"),
    "train": (*BESIDE["train"], "--model", NOWHERE),
    "worker": ("--listen", "192.0.2.1:1"),
}
"""Words beside which a command ends soon, whatever the number: where a model or a server is missing."""
NUMBERS: Final = {
    float: ("inf", "nan", "1e300", "-1", "0"),
    int: ("-1", "0", "9" * 30, "9" * 5000),
}
OPTIONS: Final = [
    (name.removeprefix("penstock "), option, kind)
    for name, command in commands()
    for option in command.params
    for kind in NUMBERS
    if kind.__name__ in str(option.type_descriptor.annotation) and not is_argument(option)
]


@pytest.mark.parametrize(("words", "option", "kind"), OPTIONS, ids=[f"{words}-{one.name}" for words, one, _ in OPTIONS])
def test_any_number_is_followed_or_refused_in_words(words: str, option: Any, kind: type) -> None:
    for number in NUMBERS[kind]:
        result = invoke(*words.split(), *SHORT.get(words, ()), option.opts[0], number)
        assert result.exception is None or isinstance(result.exception, SystemExit), (number, result.exception)
        assert result.exit_code in (0, 1, 2), number
        assert "Traceback" not in result.output, number
        assert result.exit_code == 0 or "error: " in result.stderr or option.opts[0] in result.stderr, number
