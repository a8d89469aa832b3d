"""The site that mkdocs.yml makes of docs/: every page is in its contents, and every link and anchor leads somewhere."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

import penstock

ROOT = Path(penstock.__file__).parents[1]


def test_the_site_is_built_without_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path))
    with caplog.at_level(logging.WARNING, logger="mkdocs"):
        build(config)
    assert [record.getMessage() for record in caplog.records] == []
    text = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "fonts.g" not in text, "a page asks nothing of other sites"
    assert (tmp_path / "start" / "install" / "index.html").is_file()
