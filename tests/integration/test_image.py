"""The container image and compose.yaml, made and started without Docker: `make test-image`.

Each container is a network namespace of its own, with an address that the others call by its service's name.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests.image import ROOT, Image, Layer
from tests.namespaces import Namespace, network
from tests.unit.test_install import COMPOSE, SERVICES

pytestmark = [pytest.mark.image, pytest.mark.timeout(2400)]

READY_S: Final = 120.0
"""Seconds within which a server with the demo pair is to answer."""
ASKED: Final = {"model": "demo", "prompt": "def fibonacci(n):", "max_tokens": 16, "temperature": 0}
KEY: Final = "a key of sixteen letters"


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    if os.geteuid():
        pytest.skip("the image is made by root alone: its stages are mounted")
    folder = tmp_path_factory.mktemp("image")
    for one in (folder, *folder.parents):  # the image's user has to get in
        if one.is_relative_to(Path(str(tmp_path_factory.getbasetemp())).parent):
            one.chmod(0o755)
    yield Image(ROOT, folder)
    shutil.rmtree(folder)


@contextmanager
def started(layer: Layer, command: Sequence[str], host: Namespace) -> Iterator[subprocess.Popen[bytes]]:
    """A container that runs ``command``; the words that it has printed are shown by a test that fails."""
    process = subprocess.Popen([*host.enter, *layer.words(command)])
    try:
        yield process
    finally:
        process.kill()  # whoever entered the namespaces; all in them ends with it
        process.wait()


def answer(server: subprocess.Popen[bytes], address: str, **headers: str) -> dict[str, Any]:
    """A completion from the server at that address, once it answers."""
    last = time.monotonic() + READY_S
    while True:
        try:
            assert httpx.get(f"http://{address}/health").status_code == 200
            reply = httpx.post(f"http://{address}/v1/completions", json=ASKED, headers=headers, timeout=READY_S)
            break
        except (httpx.TransportError, AssertionError):
            assert server.poll() is None, "it has ended"
            assert time.monotonic() < last, "it does not answer"
            time.sleep(0.5)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def test_the_image_serves_as_it_is_started(image: Image, tmp_path: Path) -> None:
    with network(0.0) as (host,):
        container = image.container(tmp_path / "container")
        with started(container, [*image.entrypoint, *image.command], host) as server:
            told = answer(server, f"{host.address}:{image.port}")
            assert told["usage"]["completion_tokens"] == 16
            subprocess.run([*host.enter, *container.words(image.healthcheck)], check=True)


def test_compose_starts_a_head_and_two_workers(image: Image, tmp_path: Path) -> None:
    with network(0.0, 0.0, 0.0) as hosts, ExitStack() as running:
        secrets = made_secrets(image, tmp_path / "keys")
        processes: list[subprocess.Popen[bytes]] = []
        for number, (name, host) in enumerate(zip(("head", "worker", "worker"), hosts, strict=True)):
            service = SERVICES[name]
            container = image.container(tmp_path / str(number))
            container.put("/etc/hosts", f"127.0.0.1 localhost\n{hosts[0].address} head\n")
            owner = container.number_of(container.user)
            for secret in service["secrets"]:
                source, target = (secret, secret) if isinstance(secret, str) else (secret["source"], secret["target"])
                container.put(f"/run/secrets/{target}", secrets[COMPOSE["secrets"][source]["file"]], owner=owner)
            command = [*service.get("entrypoint", image.entrypoint), *map(filled, service["command"])]
            processes.append(running.enter_context(started(container, command, host)))
        address = f"{hosts[0].address}:{image.port}"
        told = answer(processes[0], address, Authorization=f"Bearer {KEY}")
        assert told["usage"]["completion_tokens"] == 16
        assert httpx.post(f"http://{address}/v1/completions", json=ASKED).status_code == 401


def made_secrets(image: Image, folder: Path) -> dict[str, str]:
    """The contents of compose.yaml's secrets by their files, made by the commands that it names."""
    layer = image.container(folder)
    layer.user = "root"
    layer.run(["penstock", "keys", "new", "--keys", "/secrets/keys"])
    keys = layer.file("/secrets/keys")
    return {"secrets/api-key": f"{KEY}\n", **{f"secrets/keys/{file.name}": file.read_text() for file in keys.iterdir()}}


def filled(word: str) -> str:
    """The word as compose fills it in where no variable is set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word)
