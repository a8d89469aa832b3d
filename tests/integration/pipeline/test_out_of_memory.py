"""Stages, processes of their own, whose device has memory for a few rows: requests get the tokens that they would get.

Theirs is a process of its own, since its fork server, with which the stages share their code, is its process's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from tests.scarce_memory import ROOT, scarce

pytestmark = pytest.mark.processes

ENGINE = """
import json, sys
from tests.integration.pipeline.test_out_of_memory import answers

if __name__ == "__main__":
    print(json.dumps(answers(sys.argv[1])))
"""


def answers(target: Path | str) -> list[list[Any]]:
    prompts: list[Any] = [{"prompt_token_ids": [40 + i, 50, 60, 70] * 8} for i in range(3)]
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=24, ignore_eos=True) for i in range(3)]
    with LLM(target, pipeline_parallel_size=2, max_model_len=128, stage_timeout=60) as llm:
        found = [answer.outputs[0] for answer in llm.generate(prompts, params)]
    return [[answer.token_ids, answer.finish_reason] for answer in found]


def answers_with(target: Path, environment: Mapping[str, str]) -> Any:
    ran = subprocess.run(
        [sys.executable, "-c", ENGINE, str(target)],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(ran.stdout)


@pytest.mark.whole  # tests/unit/models/test_out_of_memory.py has the same device in stages of one process
def test_a_batch_too_large_is_computed_in_halves(target: Path, tmp_path: Path) -> None:
    failures = tmp_path / "failures"
    plain = answers(target)
    assert answers_with(target, scarce(tmp_path / "site", 5, failures)) == plain
    assert [reason for _, reason in plain] == ["length"] * 3
    assert len(failures.read_text().splitlines()) > 10
