"""The examples of docs/reference/api.md do what stands there, on the demo model, one after the other in one process."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "api.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
MARK = "---- next ----"
RUN = f"""
import json, sys

for number, example in enumerate(json.load(sys.stdin)):
    exec(compile(example, f"<example {{number}}>", "exec"), {{"__name__": "__main__"}})
    print({MARK!r}, flush=True)
"""

pytestmark = pytest.mark.processes


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 5


def test_the_examples_run(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", RUN]
    done = subprocess.run(command, input=json.dumps(EXAMPLES), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *printed, rest = done.stdout.split(f"{MARK}\n")
    assert (len(printed), rest) == (len(EXAMPLES), "")
    silent = [example for example, words in zip(EXAMPLES, printed, strict=True) if not words.strip()]
    assert silent == [], "an example prints what it has found"
