"""Install: one line everywhere; what the Dockerfile copies and compose.yaml starts is there."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from penstock.cli.app import COMMANDS
from scripts.cli_docs import commands
from tests.image import ROOT, copy_of, fits, ignored, patterns_in, read, tracked

LINE: Final = "pip install --constraint constraints.txt --editable ."
PAGES: Final = ("README.md", "docs/start/install.md")
LOOPBACK: Final = "127.0.0.1:"

DOCKERFILE: Final = read((ROOT / "Dockerfile").read_text())
COMPOSE: Final[dict[str, Any]] = yaml.safe_load((ROOT / "compose.yaml").read_text())
PROJECT: Final = tomllib.loads((ROOT / "pyproject.toml").read_text())
SERVICES: Final[dict[str, Any]] = COMPOSE["services"]


def make(*arguments: str) -> str:
    """The lines that make would run."""
    return subprocess.run(["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("name", PAGES)
def test_pages_have_the_line_of_the_makefile(name: str, tmp_path: Path) -> None:
    assert f"bin/{LINE} " in make("install", f"VENV={tmp_path / 'made'}")
    assert f"    {LINE}\n" in (ROOT / name).read_text()


def test_there_is_no_other_editable_install_of_penstock() -> None:
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    lines = [line for file in files for line in file.read_text().splitlines() if "pip install" in line]
    editable = [line for line in lines if "--editable" in line or " -e " in line]
    other = [line for line in editable if LINE.removesuffix(" .") not in line]
    assert [line for line in other if "without constraints.txt" not in line] == []


def test_an_editable_install_is_a_path_and_no_finder() -> None:
    """tests/integration/commands/test_wheel.py makes one."""
    assert PROJECT["tool"]["distutils"]["editable_wheel"] == {"mode": "compat"}


def copied() -> list[str]:
    """The files and folders that the Dockerfile copies from the checkout."""
    copies = [copy_of(rest) for stage in DOCKERFILE for word, rest in stage.instructions if word == "COPY"]
    return [name for one in copies if not one.source for name in one.names]


def test_what_the_image_copies_is_tracked_and_not_ignored() -> None:
    patterns, known = patterns_in((ROOT / ".dockerignore").read_text()), tracked()
    for name in copied():
        inside = [file for file in known if file == name or file.startswith(f"{name}/")]
        assert inside, f"{name} is not in the checkout"
        assert [file for file in inside if ignored(file, patterns)] == []


def test_the_image_copies_all_that_the_wheel_is_made_of() -> None:
    project = PROJECT["project"]
    pages = [page for files in PROJECT["tool"]["setuptools"]["data-files"].values() for page in files]
    needed = ["pyproject.toml", project["readme"], *project["license-files"], *pages, "penstock/__init__.py"]
    there = copied()
    assert [name for name in needed if not any(name == one or name.startswith(f"{one}/") for one in there)] == []


def test_the_image_serves() -> None:
    last = DOCKERFILE[-1]
    assert last.last("ENTRYPOINT")[:2] == ["penstock", "serve"]
    assert last.last("USER") != "root"
    assert f":{last.last('EXPOSE')}/health" in last.last("HEALTHCHECK")


def test_compose_has_a_head_and_two_workers() -> None:
    replicas = {name: service.get("deploy", {}).get("replicas", 1) for name, service in SERVICES.items()}
    assert replicas == {"head": 1, "worker": 2}
    head = typed(SERVICES["head"])
    assert head[head.index("-pp") + 1] == "2"
    join = SERVICES["worker"]["entrypoint"]
    assert f"join://{join[join.index('--join') + 1]}" in head


def test_compose_publishes_nothing_beyond_loopback() -> None:
    published = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert published == [f"{LOOPBACK}8000:{DOCKERFILE[-1].last('EXPOSE')}"]
    assert not any(name in service for service in SERVICES.values() for name in ("network_mode", "privileged"))


def test_composes_keys_are_secrets() -> None:
    known = COMPOSE["secrets"]
    for service in SERVICES.values():
        names = [one if isinstance(one, str) else one["source"] for one in service["secrets"]]
        assert {"authority", "certificate", "key"} <= set(names) <= set(known)
        assert "--insecure" not in typed(service)
    assert "api-key" in SERVICES["head"]["secrets"]
    assert not any("authority.key" in secret["file"] for secret in known.values())
    assert all(secret["file"].startswith("secrets/") for secret in known.values())
    assert "secrets/" in (ROOT / ".gitignore").read_text().splitlines()


@pytest.mark.parametrize("name", SERVICES)
def test_composes_options_are_the_commands(name: str) -> None:
    words = typed(SERVICES[name])
    assert words[0] == "penstock"
    assert words[1] in COMMANDS
    command = dict(commands())[f"penstock {words[1]}"]
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    assert {word for word in words if word.startswith("-")} <= known


def typed(service: dict[str, Any]) -> list[str]:
    """The whole command of a service, from the image's entry point or its own."""
    return [*service.get("entrypoint", DOCKERFILE[-1].last("ENTRYPOINT")), *service["command"]]


def test_a_dockerfile_is_read_by_stages() -> None:
    first, last = read('FROM a AS b\n# no\nRUN x \\\n    # no\n    && y\nFROM c\nCOPY --from=b /d /d\nCMD ["e"]\n')
    assert (first.name, first.instructions) == ("b", [("RUN", "x && y")])
    assert (last.name, last.last("CMD")) == ("", ["e"])
    copy = copy_of(last.last("COPY"))
    assert (copy.source, copy.names, copy.to, copy.into_folder) == ("b", ("/d",), "/d", False)


@pytest.mark.parametrize(
    ("path", "left_out"),
    [
        ("a.txt", True),
        ("docs/b.txt", True),
        ("docs/c.txt", False),
        ("code/d.py", False),
        ("code/e/__pycache__/d.pyc", True),
        ("__pycache__/d.pyc", True),
    ],
)
def test_the_last_pattern_that_fits_says_what_is_left_out(path: str, left_out: bool) -> None:
    assert ignored(path, ["*", "!docs/c.txt", "!code", "**/__pycache__"]) is left_out


@pytest.mark.parametrize(("path", "pattern", "fitting"), [("a/b", "*", False), ("a", "*", True), ("a/b", "**/b", True)])
def test_a_star_fits_no_slash(path: str, pattern: str, fitting: bool) -> None:
    assert fits(path, pattern) is fitting
