"""The versions of other projects' clients stand in the docs as they are pinned."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_docs_name_the_versions_that_are_tried() -> None:
    page = (ROOT / "docs" / "how-to" / "clients.md").read_text()
    lines = [file.read_text().splitlines() for file in sorted((ROOT / "tests" / "stacks").glob("requirements*.txt"))]
    pinned = [line.replace("[openai]", "").replace("==", " ") for file in lines for line in file if "==" in line]
    node = json.loads((ROOT / "tests" / "stacks" / "package.json").read_text())["dependencies"]
    pinned += [f"{name} {version}" for name, version in node.items() if name != "zod"]
    assert [one for one in pinned if one not in page] == []
    locked = json.loads((ROOT / "tests" / "stacks" / "package-lock.json").read_text())["packages"]
    assert {name: locked[f"node_modules/{name}"]["version"] for name in node} == node
