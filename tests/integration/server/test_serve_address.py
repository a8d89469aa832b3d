"""``penstock serve`` over TLS and behind a proxy that takes a path off; and what it does not start for."""

from __future__ import annotations

import os
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import trustme

from penstock import LLM, SamplingParams
from tests.serving import PATIENCE, PENSTOCK, ServedProcess, served

pytestmark = pytest.mark.processes

CODE = "def fibonacci(n):\n"
SEED = 7


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A certificate for this machine's own address, its key, and the certificate of the authority that issued it."""
    folder = tmp_path_factory.mktemp("certificate")
    cert, key, ca = folder / "cert.pem", folder / "key.pem", folder / "ca.pem"
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(key)
    issued.cert_chain_pems[0].write_to_path(cert)
    authority.cert_pem.write_to_path(ca)
    return cert, key, ca


@pytest.fixture(scope="module")
def server(certificate: tuple[Path, Path, Path]) -> Iterator[ServedProcess]:
    cert, key, _ = certificate
    with served(
        *("demo", "--no-web", "--ssl-certfile", str(cert), "--ssl-keyfile", str(key)),
        *("--root-path", "/llm", "--api-key", "secret", "--seed", str(SEED)),
    ) as process:
        yield process


@pytest.fixture(scope="module")
def client(server: ServedProcess, certificate: tuple[Path, Path, Path]) -> Iterator[httpx.Client]:
    """Trusts that authority and no other."""
    trusted = ssl.create_default_context(cafile=certificate[2])
    headers = {"Authorization": "Bearer secret"}
    with httpx.Client(base_url=server.url, verify=trusted, headers=headers, timeout=PATIENCE) as client:
        yield client


def test_it_speaks_tls_and_nothing_else(server: ServedProcess, client: httpx.Client) -> None:
    assert server.url.startswith("https://")
    assert client.get("/health").status_code == 200
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{server.url}/health", timeout=PATIENCE)
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(f"{server.url.replace('https', 'http')}/health", timeout=PATIENCE)


def test_a_stream_over_tls_ends_as_it_should(client: httpx.Client) -> None:
    body = {"prompt": CODE, "max_tokens": 5, "temperature": 0, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as reply:
        *_, done = [line for line in reply.iter_lines() if line]
    assert done == "data: [DONE]"


def test_paths_are_those_that_the_proxy_leaves(client: httpx.Client) -> None:
    """The key is required, or not, by the path without the prefix as well."""
    bare = {"Authorization": ""}
    assert client.get("/health", headers=bare).status_code == 200
    assert client.get("/v1/models", headers=bare).status_code == 401
    assert client.get("/v1/models").status_code == 200
    assert client.get("/llm/v1/models").status_code == 404
    assert client.get("/openapi.json").json()["servers"] == [{"url": "/llm"}]


def test_requests_without_a_seed_have_the_servers(client: httpx.Client) -> None:
    body = {"prompt": CODE, "max_tokens": 16, "temperature": 1.0}
    bodies = [body, body, body | {"seed": None}, body | {"seed": SEED + 1}]
    texts = [client.post("/v1/completions", json=one).json()["choices"][0]["text"] for one in bodies]
    with LLM("demo", speculative_config=None) as llm:
        expected = [
            llm.generate(CODE, SamplingParams(max_tokens=16, temperature=1.0, seed=seed))[0].outputs[0].text
            for seed in (SEED, SEED + 1)
        ]
    assert expected[0] != expected[1]
    assert texts == [expected[0]] * 3 + [expected[1]]
    chat = {"messages": [{"role": "user", "content": CODE}], "max_tokens": 16, "temperature": 1.0}
    chats = [chat, chat | {"seed": SEED}]
    first, second = (client.post("/v1/chat/completions", json=one).json()["choices"] for one in chats)
    assert first == second


@pytest.mark.parametrize("command", [["serve", "demo", "--port", "0"], ["generate", "x", "--model", "demo"]])
def test_without_cuda_nothing_is_started(command: list[str]) -> None:
    done = subprocess.run(
        [PENSTOCK, *command, "--device", "cuda"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith("penstock: error: device is 'cuda', but ")
    assert "Traceback" not in done.stderr
