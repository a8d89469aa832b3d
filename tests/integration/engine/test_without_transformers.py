"""A GGUF file that has been loaded before, in processes of which none may import transformers.

This process is the one that loads it first; where its own caches are in the way, another one is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
from gguf import GGMLQuantizationType as Kind

from penstock import LLM, SamplingParams
from tests.gguf_files import make_gguf
from tests.real_model import smollm2
from tests.warm import popen

pytestmark = pytest.mark.processes

REFUSING: Final = """
import sys

class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "transformers":
            raise RuntimeError("transformers is imported")

sys.meta_path.insert(0, Refusing())
"""
"""Runs at the start of every interpreter, whose forks have it, too."""
PROGRAM: Final = """
import json, sys
from penstock import LLM, SamplingParams

path, stages, speculation = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
options = {"pipeline_parallel_size": stages, "speculative_config": speculation, "max_model_len": 256}
with LLM(path, **options) as llm:
    prompt = llm.get_tokenizer().render([{"role": "user", "content": "the th"}], True)
    outputs = llm.generate([prompt, {"prompt_token_ids": [40, 50, 60]}], params)
    print(json.dumps([[list(one.outputs[0].token_ids), one.outputs[0].text] for one in outputs]))
"""
ASKED: Final = "What is the capital of France?"


@pytest.fixture
def without(tmp_path: Path) -> dict[str, str]:
    """The environment of later starts: transformers cannot be imported."""
    folder = tmp_path / "refusing"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(REFUSING)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


def printed(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run(path: Path, stages: int, environment: dict[str, str], speculation: object = None) -> object:
    program = [sys.executable, "-c", PROGRAM, str(path), str(stages), json.dumps(speculation)]
    return json.loads(printed(program, environment))


def first_run(path: Path, stages: int, speculation: Any = None) -> object:
    """Like ``run``, by an engine of this process, which may import transformers."""
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    options = {"pipeline_parallel_size": stages, "speculative_config": speculation, "max_model_len": 256}
    with LLM(path, **options) as llm:
        prompt = llm.get_tokenizer().render([{"role": "user", "content": "the th"}], True)
        outputs = llm.generate([prompt, {"prompt_token_ids": [40, 50, 60]}], params)
    return [[list(one.outputs[0].token_ids), one.outputs[0].text] for one in outputs]


@pytest.mark.parametrize(
    "imports",
    [
        pytest.param("import transformers.utils", id="import"),
        pytest.param(PROGRAM, id="first start", marks=pytest.mark.whole),
    ],
)
def test_the_check_can_fail(imports: str, tmp_path: Path, without: dict[str, str]) -> None:
    path = make_gguf(tmp_path, kind=Kind.Q8_0)
    with pytest.raises(AssertionError, match="transformers is imported"):
        printed([sys.executable, "-c", imports, str(path), "1", "null"], without)


# The families differ in how a file is read, which needs no process (tests/unit/checkpoint/). Below is one of them, with
# a draft model beside its stages.
@pytest.mark.whole
@pytest.mark.parametrize(("family", "kind"), [("llama_tied", Kind.Q8_0), ("qwen2", Kind.Q4_0), ("qwen3", Kind.F16)])
def test_stages_give_the_same_tokens(family: str, kind: Kind, tmp_path: Path, without: dict[str, str]) -> None:
    path = make_gguf(tmp_path, family, kind=kind)
    assert first_run(path, 2) == run(path, 2, without)


def test_a_draft_model_does_without(tmp_path: Path, without: dict[str, str]) -> None:
    target, draft = (make_gguf(tmp_path / kind.name, kind=kind) for kind in (Kind.Q8_0, Kind.Q4_0))
    speculation = {"method": "draft_model", "model": str(draft), "strategy": "continuous"}
    assert first_run(target, 2, speculation) == run(target, 2, without, speculation) == first_run(target, 2)


@pytest.mark.parametrize("model", ["small", pytest.param("real", marks=pytest.mark.whole)])
def test_the_command_gives_the_same_answer(model: str, tmp_path: Path, without: dict[str, str]) -> None:
    """The real one with a cache of their own: this run's may have it already."""
    assets = {"HF_ASSETS_CACHE": str(tmp_path / "assets")} if model == "real" else {}
    path = smollm2() if model == "real" else make_gguf(tmp_path / "model", kind=Kind.Q8_0)
    options = ["--model", str(path), "--max-tokens", "12", "--json"]
    command = [sys.executable, "-m", "penstock.cli", "generate", ASKED, *options]
    began = popen(command, env={**os.environ, **assets}, stdout=subprocess.PIPE, text=True)
    first, later = json.loads(began.communicate()[0]), json.loads(printed(command, {**without, **assets}))
    assert later["text"] == first["text"]
    assert later["token_ids"] == first["token_ids"]
