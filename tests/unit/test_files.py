"""The content that a checkpoint's files may have, and the places where they may lie."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from penstock.core import ConfigError
from penstock.files import check_folder, eos_token_ids, generation_eos, read_json


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def test_a_table_is_read_and_a_missing_file_is_an_empty_one(folder: Path) -> None:
    (folder / "config.json").write_text('{"a": [1]}')
    assert read_json(folder / "config.json") == {"a": [1]}
    assert read_json(folder / "absent.json") == {}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[1]", r"config\.json holds no JSON object but \[1\]"),
        (b'"x"', r'config\.json holds no JSON object but "x"'),
        (b"{", r"config\.json is not valid JSON"),
        (b"\xff\xfe", r"config\.json is not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", r"config\.json is not valid JSON"),
        (b"[" * 100_000, r"config\.json is not valid JSON: it nests too deep"),
    ],
)
def test_any_other_content_is_refused(folder: Path, content: bytes, message: str) -> None:
    (folder / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_json(folder / "config.json")


@pytest.mark.parametrize(("stated", "ids"), [(None, ()), (0, (0,)), ([7, 9], (7, 9)), ([], ())])
def test_eos_is_none_one_or_several(folder: Path, stated: object, ids: tuple[int, ...]) -> None:
    assert eos_token_ids(stated, folder / "config.json") == ids


@pytest.mark.parametrize("stated", ['"x"', '["x"]', "1.5", "true", "-1", "[[1]]", '{"id": 1}', "NaN"])
def test_any_other_eos_is_refused(folder: Path, stated: str) -> None:
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": {stated}}}')
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id is .*a token id or a list of them"):
        generation_eos(folder)


def test_links_within_the_folder_are_followed(folder: Path) -> None:
    (folder / "other.json").symlink_to("config.json")
    (folder / "checkpoint").symlink_to(folder)
    check_folder(folder)


def test_a_folder_may_be_a_link_itself(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    (folder / "other.json").symlink_to("config.json")
    check_folder(tmp_path / "link")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja", "a"])
@pytest.mark.parametrize("absolute", [True, False])
def test_links_out_of_the_folder_are_refused(folder: Path, tmp_path: Path, name: str, absolute: bool) -> None:
    (tmp_path / "elsewhere").write_text("{}")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / "elsewhere" if absolute else "../elsewhere")
    with pytest.raises(ConfigError, match=f"{name} is a link to .*elsewhere, outside the checkpoint's folder"):
        check_folder(folder)


def test_templates_do_not_come_from_elsewhere(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "templates").mkdir()
    (folder / "additional_chat_templates").symlink_to(tmp_path / "templates")
    with pytest.raises(ConfigError, match="additional_chat_templates is a link"):
        check_folder(folder)
    (folder / "additional_chat_templates").unlink()
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").symlink_to(tmp_path / "anything")
    with pytest.raises(ConfigError, match=r"rag\.jinja is a link"):
        check_folder(folder)


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A folder in the hub's cache."""
    cache = tmp_path / "models--somebody--tiny"
    for made in ("snapshots/abc", "blobs", "refs"):
        (cache / made).mkdir(parents=True)
    (cache / "blobs" / "0123").write_text("{}")
    (cache / "refs" / "main").write_text("abc")
    (cache / "snapshots" / "abc" / "config.json").symlink_to("../../blobs/0123")
    return cache / "snapshots" / "abc"


def test_the_hubs_cache_links_to_its_blobs(snapshot: Path) -> None:
    check_folder(snapshot)
    (snapshot / "tokenizer.json").symlink_to("../../refs/main")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is a link to .*refs/main"):
        check_folder(snapshot)


def test_whatever_way_leads_to_it(snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(snapshot)
    check_folder(tmp_path / "link")
    monkeypatch.chdir(snapshot)
    check_folder(Path())
    check_folder(Path("../abc"))


def test_a_link_to_itself_leads_nowhere(folder: Path) -> None:
    (folder / "tokenizer.json").symlink_to("tokenizer.json")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is a link that leads nowhere"):
        check_folder(folder)


def test_what_may_not_be_read_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(file: Path, encoding: str) -> str:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))

    monkeypatch.setattr(Path, "read_text", forbidden)
    with pytest.raises(ConfigError, match=r"config\.json cannot be read: Permission denied"):
        read_json(folder / "config.json")
