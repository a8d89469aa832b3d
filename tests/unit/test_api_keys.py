"""Files of API keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config import FieldError
from penstock.environment import read_api_keys, without_api_keys


def test_a_file_has_a_key_a_line(tmp_path: Path) -> None:
    (file := tmp_path / "keys").write_text("first\n\n  second  \r\n")
    assert read_api_keys(file) == ("first", "second")


@pytest.mark.parametrize("content", [None, b"\n \n", b"\xff\xfe"])
def test_a_file_without_a_key_is_named_and_not_quoted(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(FieldError, match=r"^api_key_file is '.*/keys', which ") as caught:
        read_api_keys(file)
    assert "xff" not in str(caught.value)


def test_children_get_everything_else() -> None:
    assert without_api_keys({"PENSTOCK_API_KEY": "secret", "PATH": "/bin"}) == {"PATH": "/bin"}
