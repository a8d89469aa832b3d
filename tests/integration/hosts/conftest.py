"""A cluster's keys, for workers and heads alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.hosts.keys import make_cluster


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cluster") / "keys"
    make_cluster(folder, "host")
    return folder
