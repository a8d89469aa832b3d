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
class Table:
    """The result of each flow by stack and server: the test names those that failed, a table shows all."""

    rows: dict[str, dict[str, dict[str, str]]] = field(default_factory=dict)

    def add(self, server: str, lines: list[dict[str, object]]) -> list[str]:
        """Take a script's lines and return the problems of the flows that failed."""
        head, *flows = lines
        versions = ", ".join(f"{name} {version}" for name, version in head["versions"].items())  # type: ignore[attr-defined]
        row = self.rows.setdefault(f"{head['stack']} ({versions})", {})
        row[server] = {str(flow["flow"]): "failed" if flow["problem"] else "ok" for flow in flows}
        return [f"{flow['flow']}: {flow['problem']}" for flow in flows if flow["problem"]]

    def text(self) -> str:
        lines = ["| stack | server | flows |", "| --- | --- | --- |"]
        for stack, servers in self.rows.items():
            for server, flows in servers.items():
                told = ", ".join(name if said == "ok" else f"**{name} {said}**" for name, said in flows.items())
                lines.append(f"| {stack} | {server} | {told} |")
        return "\n".join([*lines, ""])


@pytest.fixture(scope="module")
def clients(request: pytest.FixtureRequest) -> Path:
    """Where `make test-clients` has installed them. Node looks for packages beside its scripts."""
    folder = Path(request.config.getoption("--stacks")).absolute()
    for script in SCRIPTS.glob("*.mjs"):
        shutil.copy(script, folder / "node")
    return folder


@pytest.fixture(scope="module")
def table(clients: Path) -> Iterator[Table]:
    found = Table()
    yield found
    (clients / "table.md").write_text(found.text())


@pytest.fixture(scope="module", params=["demo", "SmolLM2"])
def servers(request: pytest.FixtureRequest) -> Iterator[tuple[str, ServedProcess, ServedProcess]]:
    """A server over two stages, and one where hardly anybody may wait."""
    model = "demo" if request.param == "demo" else str(smollm2())
    template = HERMES if request.param == "demo" else SCRIPTS / "chatml.jinja"
    flags = [model, "--served-model-name", "tried", "--no-web", "--chat-template", str(template)]
    with ExitStack() as both:
        usual = both.enter_context(served(*flags, "-pp", "2"))
        yield request.param, usual, both.enter_context(served(*flags, "--max-num-seqs", "1", "--max-queue", "1"))


def command(clients: Path, stack: str, environment: str, addresses: list[str]) -> list[str]:
    script, *own = stack.split(" ")
    if environment == "node":
        return ["node", str(clients / "node" / script), *addresses, *own]
    return [str(clients / environment / "bin" / "python"), str(SCRIPTS / script), *addresses, *own]


@pytest.mark.parametrize("stack", STACKS)
def test_every_flow_of_a_stack(
    servers: tuple[str, ServedProcess, ServedProcess], stack: str, clients: Path, table: Table
) -> None:
    name, usual, busy = servers
    (environment,) = STACKS[stack]
    asked = command(clients, stack, environment, [f"{usual.url}/v1", f"{busy.url}/v1", "tried"])
    done = subprocess.run(asked, env=os.environ | QUIET, stdout=subprocess.PIPE, text=True, timeout=LONGEST, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    problems = table.add(name, lines)
    assert len(lines) > 1
    assert not problems, "\n".join(problems)
