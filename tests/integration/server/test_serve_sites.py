"""A keyless server and its users' web pages: over the wire, by curl, behind a proxy and as the image starts it."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

import penstock
from penstock.server.app import make_app
from penstock.server.settings import ServerSettings
from tests.serving import PATIENCE, PENSTOCK, ServedProcess, served, until
from tests.unit.server.live.test_routes import Engine

pytestmark = pytest.mark.processes

SIMPLE = ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=b", "application/jsonx"]
"""Content types that a page may send to another site without asking it first; and none."""
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
    "/rebalance": {},
}


@pytest.fixture(scope="module")
def server() -> Iterator[ServedProcess]:
    with served("demo") as process:
        yield process


def every_path(server: ServedProcess) -> dict[str, list[str]]:
    paths = httpx.get(f"{server.url}/openapi.json", timeout=PATIENCE).json()["paths"]
    return {path: [method.upper() for method in methods] for path, methods in paths.items()}


def own_routes() -> Iterator[tuple[str, str]]:
    """Method and path of every route that the application has, in its schema or not; and of one that it has not."""

    def walk(routes: Iterable[Any]) -> Iterator[tuple[str, str]]:
        for route in routes:
            if (included := getattr(route, "original_router", None)) is not None:
                yield from walk(included.routes)
            else:
                yield from ((method, re.sub(r"{.*?}", "x", route.path)) for method in sorted(route.methods))

    engine = Engine()
    engine.setup.kv_slots = 64
    settings = ServerSettings(served_model_name=("demo",))
    yield from walk(make_app(engine, settings).routes)  # type: ignore[arg-type]
    yield "GET", "/none"


ROUTES = sorted(set(own_routes()))


def status_of(server: ServedProcess, method: str, path: str, version: str, headers: dict[str, str]) -> int:
    """The status of a request with these headers and no others, as it stands in the reply's first line."""
    lines = [f"{method} {path} HTTP/{version}", *(f"{name}: {value}" for name, value in headers.items())]
    with server.connect() as connection, connection.makefile("rb") as reply:
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        return int(reply.readline().split()[1])


def test_the_list_of_routes_is_whole() -> None:
    known = {("GET", "/"), ("GET", "/live"), ("GET", "/docs"), ("GET", "/openapi.json"), ("GET", "/page/x")}
    known |= {("GET", "/health"), ("GET", "/v1/models/x"), ("POST", "/rebalance"), ("POST", "/v1/embeddings")}
    assert known | {("POST", path) for path in BODIES} <= set(ROUTES)


@pytest.mark.parametrize(
    ("version", "headers", "status"),
    [
        ("1.0", {}, None),
        ("1.1", {}, 400),
        ("1.1", {"Host": "localhost"}, None),
        ("1.1", {"Host": "localhost", "Origin": "http://localhost"}, None),
        ("1.1", {"Host": "evil.example"}, 421),
        ("1.0", {"Host": "evil.example"}, 421),
        ("1.1", {"Host": "evil.example:80", "Origin": "http://evil.example:80"}, 421),
        ("1.1", {"Host": "evil.example", "Origin": "http://localhost"}, 421),
        ("1.1", {"Host": "localhost", "Origin": "https://evil.example"}, 403),
        ("1.1", {"Host": "localhost", "Origin": "null"}, 403),
        ("1.1", {"Host": "localhost", "Origin": ""}, 403),
        ("1.0", {"Origin": "https://evil.example"}, 403),
        ("1.0", {"Origin": "null"}, 403),
    ],
)
def test_every_route_refuses_foreign_hosts_and_origins_and_no_others(
    server: ServedProcess, version: str, headers: dict[str, str], status: int | None
) -> None:
    """``status`` None: the route itself answers, with whatever it has to say to a request without a body."""
    wrong = []
    for method, path in [*ROUTES, *(("OPTIONS", path) for _, path in ROUTES)]:
        found = status_of(server, method, path, version, headers)
        if found != status if status is not None else found in (403, 421):
            wrong.append((method, path, found))
    assert wrong == []


def test_a_reply_to_a_foreign_page_cannot_be_read_there(server: ServedProcess) -> None:
    for method, path in ROUTES:
        reply = httpx.request(method, server.url + path, headers={"Origin": "https://evil.example"}, timeout=PATIENCE)
        assert (path, reply.status_code) == (path, 403)
        assert "access-control-allow-origin" not in reply.headers


def test_nothing_changes_by_what_a_page_may_send_unasked(server: ServedProcess) -> None:
    posts = [path for path, methods in every_path(server).items() if "POST" in methods and path in BODIES]
    assert set(posts) == set(BODIES)
    for path in posts:
        content = json.dumps(BODIES[path])
        for kind in SIMPLE:
            headers = {"Content-Type": kind} if kind else {}
            reply = httpx.post(server.url + path, content=content, headers=headers, timeout=PATIENCE)
            assert (path, kind, reply.status_code // 100) == (path, kind, 4)
        own = {"Content-Type": "application/json; charset=utf-8", "Origin": server.url}
        assert httpx.post(server.url + path, content=content, headers=own, timeout=PATIENCE).status_code == 200


def test_our_own_command_rebalances(server: ServedProcess) -> None:
    done = subprocess.run(
        [PENSTOCK, "rebalance", "--url", server.url], capture_output=True, text=True, timeout=PATIENCE
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("No stage moves")


def test_a_path_with_a_slash_more_leads_nowhere_else(server: ServedProcess) -> None:
    for path in ("/health/", "/v1/models/", "/docs/", "/v1/completions/"):
        reply = httpx.get(server.url + path, timeout=PATIENCE, headers={"Host": "localhost"})
        assert (path, reply.status_code, reply.headers.get("location")) == (path, 404, None)


def curl(*arguments: str) -> str:
    """The status of a reply, as curl tells it."""
    done = subprocess.run(
        ["curl", "--silent", "--output", "/dev/null", "--write-out", "%{http_code}", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    return done.stdout


def test_curl(server: ServedProcess) -> None:
    port = server.address[1]
    for name in ("127.0.0.1", "localhost"):
        assert curl(f"http://{name}:{port}/health") == "200"
    rebound = ("--resolve", f"evil.example:{port}:127.0.0.1", f"http://evil.example:{port}/health")
    assert curl(*rebound) == "421"
    assert curl("-X", "POST", f"{server.url}/rebalance") == "415"
    assert curl("-H", "Content-Type: application/json", "-X", "POST", f"{server.url}/rebalance") == "200"
    assert curl("--http1.0", "-H", "Host:", f"{server.url}/health") == "200", "it is no browser's"


def test_behind_a_proxy() -> None:
    """One that passes the Host on needs it named; with one that does not, its pages' Origin is another."""
    flags = ("--allowed-hosts", "llm.example.org", "--allowed-origins", "https://pages.example.org")
    with served("demo", *flags) as server:

        def status(host: str, origin: str | None = None) -> int:
            headers = {"Host": host} | ({} if origin is None else {"Origin": origin})
            return httpx.get(f"{server.url}/v1/models", headers=headers, timeout=PATIENCE).status_code

        upstream = f"127.0.0.1:{server.address[1]}"
        assert status("llm.example.org") == status("llm.example.org", "https://llm.example.org") == 200
        assert status(upstream) == status(upstream, "https://pages.example.org") == 200
        assert status("other.example.org") == 421
        assert status(upstream, "https://llm.example.org") == status("llm.example.org", "https://evil.example") == 403
        preflight = {"Origin": "https://pages.example.org", "Access-Control-Request-Method": "POST"}
        reply = httpx.options(f"{server.url}/v1/completions", headers=preflight, timeout=PATIENCE)
        assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (200, "https://pages.example.org")


NGINX = """
daemon off;
worker_processes 1;
pid {folder}/pid;
error_log stderr;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    server {{
        listen 127.0.0.1:{passing};
        location / {{
            proxy_pass http://{upstream};
            proxy_http_version 1.1;
            proxy_set_header Host $host;
        }}
    }}
    server {{
        listen 127.0.0.1:{replacing};
        location / {{ proxy_pass http://{upstream}; }}
    }}
}}
"""
"""One that passes the Host on, and one with nginx's defaults: the upstream's own name, and HTTP/1.0."""


@contextmanager
def nginx(folder: Path, upstream: str) -> Iterator[tuple[str, str]]:
    """The addresses of both."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        passing, replacing = one.getsockname()[1], other.getsockname()[1]
    config = folder / "nginx.conf"
    config.write_text(NGINX.format(folder=folder, upstream=upstream, passing=passing, replacing=replacing))
    command = [shutil.which("nginx") or "nginx", "-p", str(folder), "-c", str(config), "-e", "stderr"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            until(lambda: connects(passing) and connects(replacing))
            yield f"http://127.0.0.1:{passing}", f"http://127.0.0.1:{replacing}"
        finally:
            process.terminate()


def connects(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=PATIENCE):
        return True
    return False


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
def test_behind_nginx(tmp_path: Path) -> None:
    with (
        served("demo", "--allowed-hosts", "llm.example.org") as server,
        nginx(tmp_path, f"127.0.0.1:{server.address[1]}") as (passing, replacing),
    ):

        def status(proxy: str, host: str, origin: str | None = None) -> int:
            headers = {"Host": host} | ({} if origin is None else {"Origin": origin})
            return httpx.get(f"{proxy}/v1/models", headers=headers, timeout=PATIENCE).status_code

        assert status(passing, "llm.example.org") == 200
        assert status(passing, "llm.example.org", "http://llm.example.org") == 200
        assert status(passing, "evil.example") == 421
        assert status(passing, "llm.example.org", "https://evil.example") == 403
        assert status(replacing, "evil.example") == 200, "who may be asked for is the proxy's to say"
        assert status(replacing, "evil.example", "http://evil.example") == 403
        body = {"prompt": "def f(", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        whole = {"prompt": "def f(", "max_tokens": 20, "temperature": 0}
        for proxy in (passing, replacing):
            with httpx.stream(
                "POST", f"{proxy}/v1/completions", json=body, headers={"Host": "llm.example.org"}, timeout=PATIENCE
            ) as reply:
                assert reply.status_code == 200
                assert next(reply.iter_lines()).startswith("data: {"), "it does not wait for the end"
            direct = httpx.post(f"{server.url}/v1/completions", json=whole, timeout=PATIENCE).json()["choices"]
            headers = {"Host": "llm.example.org"}
            through = httpx.post(f"{proxy}/v1/completions", json=whole, headers=headers, timeout=PATIENCE)
            assert through.json()["choices"] == direct
        until(lambda: len([line for line in server.log if line.get("stream")]) == 2)
        assert all(line["completion_tokens"] < 1500 for line in server.log if line.get("stream")), "their readers left"


def test_as_the_image_starts_it() -> None:
    image = (Path(penstock.__file__).parents[1] / "Dockerfile").read_text()
    entry = json.loads(re.search(r"^ENTRYPOINT (.*)$", image, re.MULTILINE).group(1))  # type: ignore[union-attr]
    check = json.loads(re.search(r"^    CMD (.*)$", image, re.MULTILINE).group(1))  # type: ignore[union-attr]
    assert entry[:2] == ["penstock", "serve"]
    with served("demo", *entry[2:]) as server:
        port = server.address[1]
        command = [sys.executable, *(one.replace(":8000", f":{port}") for one in check[1:])]
        assert subprocess.run(command, timeout=PATIENCE).returncode == 0, shlex.join(command)
        for host, status in ((f"localhost:{port}", 200), ("10.1.2.3", 200), ("evil.example", 421)):
            reply = httpx.get(f"http://127.0.0.1:{port}/v1/models", headers={"Host": host}, timeout=PATIENCE)
            assert (host, reply.status_code) == (host, status)
