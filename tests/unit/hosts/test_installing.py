"""Setting hosts up: what is packed, and which commands would run."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import shlex
import zipfile
from importlib.metadata import Distribution
from pathlib import Path

import pytest

import penstock
from penstock.config import FieldError
from penstock.core import ConfigError, PenstockError
from penstock.hosts import installing, keys
from penstock.hosts.installing import Setup, Ssh, Step, done, metadata_files, pack_wheel, set_up
from tests.unit.cli.invoke import invoke

PACKAGE = Path(penstock.__file__).parent
HERE = Setup(wheel=None, keys=None, insecure=True, python="python3", pip_args="", ssh_config=None)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack_wheel(tmp_path_factory.mktemp("packed"))


@pytest.fixture
def cluster(tmp_path: Path) -> str:
    keys.make_cluster(tmp_path / "keys", "first")
    return str(tmp_path / "keys")


def test_a_packed_wheel_has_the_package_and_says_so(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        content = {name: packed.read(name) for name in packed.namelist()}
    info = f"{wheel.name.removesuffix('-py3-none-any.whl')}.dist-info"
    files = [one.relative_to(PACKAGE) for one in PACKAGE.rglob("*") if one.is_file()]
    here = {f"penstock/{one}" for one in files if "__pycache__" not in one.parts}
    assert {name for name in content if name.startswith("penstock/")} == here
    assert b"penstock = penstock.cli:main" in content[f"{info}/entry_points.txt"]
    assert f"Version: {penstock.__version__}\n".encode() in content[f"{info}/METADATA"]
    rows = list(csv.reader(io.StringIO(content[f"{info}/RECORD"].decode())))
    assert {row[0] for row in rows} == set(content)
    for name, digest, size in rows:
        if digest:
            expected = base64.urlsafe_b64encode(hashlib.sha256(content[name]).digest()).decode().rstrip("=")
            assert (digest, int(size)) == (f"sha256={expected}", len(content[name]))


@pytest.mark.parametrize("kind", ["egg-info", "dist-info"])
def test_what_says_what_it_is_may_be_a_checkouts(tmp_path: Path, kind: str) -> None:
    """In a checkout that has been installed as editable, Python finds what setuptools left there first."""
    folder = tmp_path / f"penstock.{kind}"
    folder.mkdir()
    for name in ("PKG-INFO" if kind == "egg-info" else "METADATA", "entry_points.txt"):
        (folder / name).write_text(f"{name} of Penstock")
    found = dict(metadata_files(Distribution.at(folder), "info"))
    assert found["info/METADATA"].endswith(b" of Penstock")
    assert found["info/entry_points.txt"] == b"entry_points.txt of Penstock"
    (folder / "entry_points.txt").unlink()
    with pytest.raises(ConfigError, match=r"installed without entry_points\.txt"):
        dict(metadata_files(Distribution.at(folder), "info"))


def test_the_commands_are_printed_and_none_is_run(
    wheel: Path, cluster: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    told = invoke("hosts", "setup", "me@b", "c", "--print", "--wheel", str(wheel), "--keys", cluster, width=200)
    assert told.exit_code == 0, told.stderr
    lines = told.stdout.splitlines()
    of_b, of_c = ([line for line in lines if re.search(rf" {host}[ :]", line)] for host in ("me@b", "c"))
    assert len(lines) == len(of_b) + len(of_c)
    assert shlex.split(of_b[0]) == ["ssh", "--", "me@b", "mkdir -p .local/share/penstock"]
    assert f"scp -q -- {shlex.quote(str(wheel))} me@b:.local/share/penstock/" in of_b
    request, sign, accept = of_b[-2].split(" | ")
    assert request.endswith("keys request'")
    assert sign == f"penstock keys sign --keys {cluster}"
    assert accept.endswith("keys accept'")
    assert of_b[-1].endswith("penstock worker --listen b:7700'    # its worker, for --hosts b")


def test_hosts_get_the_versions_of_this_one(wheel: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = Setup(**{**vars(HERE), "wheel": wheel, "pip_args": "--index-url 'http://a b'", "python": "py 3"})
    set_up(["b"], options, only_print=True)
    lines = [shlex.split(line, comments=True) for line in capsys.readouterr().out.splitlines()]
    there = [shlex.split(line[-1]) for line in lines if line[0] == "ssh"]
    (install,) = (words for words in there if "--index-url" in words)
    assert install[install.index("--index-url") + 1] == "http://a b"
    assert any(word.startswith("torch==2") and "+" not in word for word in install)
    assert there[1][:2] == ["py 3", "-c"]
    assert "--insecure" in there[-1]
    assert not any("keys" in words for words in there)


@pytest.mark.parametrize("host", ["-oProxyCommand=x", "me@-b", "a b", "me@b:22", "", "a@b@c", "$(x)", "b\n"])
def test_what_is_no_hosts_name_is_refused(host: str) -> None:
    with pytest.raises(FieldError, match="a host is NAME or USER@NAME"):
        set_up([host], HERE, only_print=True)


def test_what_is_missing_here_is_said_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cluster: str
) -> None:
    without = Setup(**{**vars(HERE), "insecure": False, "keys": str(tmp_path)})
    with pytest.raises(ConfigError, match="`penstock keys new` makes one"):
        set_up(["b"], without, only_print=True)
    with pytest.raises(FieldError, match="no wheel's file"):
        set_up(["b"], Setup(**{**vars(HERE), "wheel": Path("nowhere.whl")}), only_print=True)
    with pytest.raises(FieldError, match="pip_args is "):
        set_up(["b"], Setup(**{**vars(HERE), "pip_args": "'"}), only_print=True)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="ssh is not on this host"):
        set_up(["b"], HERE, only_print=False)


def test_a_failed_step_is_one_line() -> None:
    step = Step("trying", ["sh", "-c", "echo one >&2; echo two >&2; exit 3"], "look there")
    with pytest.raises(PenstockError, match=r"^host b: trying failed \(two\): look there$"):
        done("b", step)
    assert done("b", Step("asking", ["cat"], ""), b"text") == b"text"


def test_a_wheel_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--wheel names a wheel of yours"):
        pack_wheel(tmp_path / "file" / "wheels")


def test_a_hosts_name_may_be_one_of_sshs_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "ssh"
    program.write_text('#!/bin/sh\n[ "$*" = "-F file -G -- me@b" ] && echo "user me\nhostname 10.0.0.2\nport 22"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert Ssh(Path("file")).address("me@b") == "10.0.0.2"
    assert Ssh().address("me@b") == "b"
    monkeypatch.setattr(installing.shutil, "which", lambda name: None)
    assert Ssh(Path("file")).address("me@b") == "b"


def test_hosts_may_still_be_listed_by_their_names() -> None:
    listed = invoke("hosts", "127.0.0.1:1", "--insecure", "--json")
    assert '"host": "127.0.0.1:1"' in listed.stdout
    assert "HOSTS have commas between" in invoke("hosts", "a", "b", width=200).stderr
    assert "Missing argument" in invoke("hosts", "setup", width=200).stderr
