"""Figures that the papers state, from benchmarks/published."""

from __future__ import annotations

import tomllib
from typing import Any

from benchmarks.shared.root import ROOT


def published(paper: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / "benchmarks" / "published" / f"{paper}.toml").read_text(encoding="utf-8"))
