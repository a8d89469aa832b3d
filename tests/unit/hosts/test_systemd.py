"""A worker's unit says what was asked for, in systemd's own way of quoting."""

from __future__ import annotations

import sys

import pytest

from penstock.config import FieldError
from penstock.hosts.worker import print_unit, quoted


@pytest.mark.parametrize(
    ("word", "expected"),
    [("10.0.0.2:7700", "10.0.0.2:7700"), ("my keys", '"my keys"'), ("50%", '"50%%"'), ('$a"\\', '"$$a\\"\\\\"')],
)
def test_nothing_in_a_word_stands_for_anything_else(word: str, expected: str) -> None:
    assert quoted(word) == expected


def test_a_unit_runs_the_worker_that_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    print_unit({"listen": None, "join": "head:7701", "keys": "a b", "token": None, "cache_gb": 5.0, "insecure": True})
    words = f'ExecStart={sys.executable} -m penstock.cli worker --join head:7701 --keys "a b" --cache-gb 5.0 --insecure'
    assert words in capsys.readouterr().out.splitlines()


def test_a_token_is_not_for_every_start() -> None:
    with pytest.raises(FieldError, match="token works once"):
        print_unit({"token": "x"})
