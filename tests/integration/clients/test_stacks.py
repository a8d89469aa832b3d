"""Other projects' clients against ``penstock serve``: `make test-clients`, in environments of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.real_model import smollm2
from tests.serving import ServedProcess, served

pytestmark = [pytest.mark.stacks, pytest.mark.timeout(900)]

SCRIPTS = Path(__file__).parents[2] / "stacks"
HERMES = Path(__file__).parents[2] / "hermes.jinja"
STACKS: dict[str, list[str]] = {
    "openai_python.py": ["python"],
    "openai_agents.py": ["python"],
    "litellm_python.py": ["python"],
    "langchain_python.py": ["python"],
    "pydantic_ai_python.py": ["python"],
    "instructor_python.py": ["instructor"],
    "openai_node.mjs": ["node"],
    "ai_sdk.mjs chat": ["node"],
    "ai_sdk.mjs responses": ["node"],
    "ai_sdk.mjs compatible": ["node"],
}
"""Each script with its own argument, and the environment that it runs in."""
QUIET = {
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "LANGCHAIN_TRACING_V2": "false",
    "LANGSMITH_TRACING": "false",
    "LOGFIRE_SEND_TO_LOGFIRE": "false",
    "DO_NOT_TRACK": "1",
    "HTTPS_PROXY": "http://127.0.0.1:9",
    "HTTP_PROXY": "http://127.0.0.1:9",
    "NO_PROXY": "127.0.0.1",
    "OPENAI_API_KEY": "none",
}
"""Environment that turns traces and cost maps off and routes any request to other hosts nowhere."""
LONGEST = 600.0
"""Seconds until a stack is given up."""


@dataclass
class Tried:
    """Two servers of a model, one where hardly anybody may wait, and the result of each flow by stack.

    A test names the flows that failed; the table shows all.
    """

    model: str
    usual: ServedProcess
    busy: ServedProcess
    rows: dict[str, dict[str, str]] = field(default_factory=dict)

    def add(self, lines: list[dict[str, object]]) -> list[str]:
        """Take a script's lines and return the problems of the flows that failed."""
        head, *flows = lines
        versions = ", ".join(f"{name} {version}" for name, version in head["versions"].items())  # type: ignore[attr-defined]
        row = {str(flow["flow"]): "failed" if flow["problem"] else "ok" for flow in flows}
        self.rows[f"{head['stack']} ({versions})"] = row
        return [f"{flow['flow']}: {flow['problem']}" for flow in flows if flow["problem"]]

    def table(self) -> str:
        lines = [f"| stack, with {self.model} | flows |", "| --- | --- |"]
        for stack, flows in self.rows.items():
            told = ", ".join(name if said == "ok" else f"**{name} {said}**" for name, said in flows.items())
            lines.append(f"| {stack} | {told} |")
        return "\n".join([*lines, "", ""])


@pytest.fixture(scope="module")
def clients(request: pytest.FixtureRequest) -> Path:
    """Where `make test-clients` has installed them. Node looks for packages beside its scripts."""
    folder = Path(request.config.getoption("--stacks")).absolute()
    for script in SCRIPTS.glob("*.mjs"):
        shutil.copy(script, folder / "node")
    return folder


@pytest.fixture(scope="class")
def servers(request: pytest.FixtureRequest, clients: Path) -> Iterator[Tried]:
    """The first server has two stages. The table stands in the clients' folder in the end."""
    name = request.cls.MODEL
    model = "demo" if name == "demo" else str(smollm2())
    template = HERMES if name == "demo" else SCRIPTS / "chatml.jinja"
    flags = [model, "--served-model-name", "tried", "--no-web", "--chat-template", str(template)]
    with ExitStack() as both:
        usual = both.enter_context(served(*flags, "-pp", "2"))
        busy = both.enter_context(served(*flags, "--max-num-seqs", "1", "--max-queue", "1"))
        tried = Tried(name, usual, busy)
        yield tried
    (clients / f"table-{tried.model}.md").write_text(tried.table())


def command(clients: Path, stack: str, environment: str, addresses: list[str]) -> list[str]:
    script, *own = stack.split(" ")
    if environment == "node":
        return ["node", str(clients / "node" / script), *addresses, *own]
    return [str(clients / environment / "bin" / "python"), str(SCRIPTS / script), *addresses, *own]


class Stacks:
    """Tests of one model's servers, which `make test-clients` gives to one worker."""

    @pytest.mark.parametrize("stack", STACKS)
    def test_every_flow(self, servers: Tried, stack: str, clients: Path) -> None:
        (environment,) = STACKS[stack]
        asked = command(clients, stack, environment, [f"{servers.usual.url}/v1", f"{servers.busy.url}/v1", "tried"])
        done = subprocess.run(
            asked, env=os.environ | QUIET, stdout=subprocess.PIPE, text=True, timeout=LONGEST, check=True
        )
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        problems = servers.add(lines)
        assert len(lines) > 1
        assert not problems, "\n".join(problems)


class TestDemo(Stacks):
    MODEL = "demo"


class TestSmolLM2(Stacks):
    MODEL = "SmolLM2"
