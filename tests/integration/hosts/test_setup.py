"""`penstock hosts setup` by a real sshd on this host, whose user's home is a folder of the test's.

What Penstock needs is there already, as links to the tests' own packages, so that nothing is fetched.
"""

from __future__ import annotations

import getpass
import json
import os
import shlex
import shutil
import socket
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from penstock.hosts.installing import Ssh, give_keys
from tests.serving import PENSTOCK
from tests.warm import popen
from tests.workers import LISTENING

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

SSHD: Final = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
SFTP: Final = "/usr/lib/openssh/sftp-server"
READY_S: Final = 20.0
SETUP_S: Final = 250.0
"""Seconds for a command, of which setting up a host makes an environment there and has pip install the wheel."""
CONFIG: Final = """\
ListenAddress {address}:{port}
HostKey {folder}/host-key
PidFile none
AuthorizedKeysFile {folder}/user-key.pub
StrictModes no
UsePAM no
PermitRootLogin yes
Subsystem sftp {sftp}
ForceCommand cd {home} && export HOME={home} PYTHONPATH={packages} PATH={path} && eval "$SSH_ORIGINAL_COMMAND"
"""
CLIENT: Final = """\
Host second
    HostName {address}
    Port {port}
    User {user}
    IdentityFile {folder}/user-key
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known
    StrictHostKeyChecking accept-new
    BatchMode yes
Host nobody
    HostName {address}
    Port 1
"""


@dataclass(frozen=True)
class Sshd:
    """A running sshd: its address, the user's home there, and the configuration for ssh."""

    address: str
    home: Path
    config: Path


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    if SSHD is None:
        pytest.skip("OpenSSH's server is not installed: apt-get install openssh-server")
    folder = tmp_path_factory.mktemp("sshd")
    (home := folder / "home").mkdir()
    (packages := folder / "packages").mkdir()
    for one in Path(sysconfig.get_path("purelib")).iterdir():
        if "penstock" not in one.name:
            (packages / one.name).symlink_to(one)
    for name in ("host-key", "user-key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    address = f"127.{os.getpid() >> 8 & 255}.{os.getpid() & 255}.7"
    with closing(socket.create_server((address, 0))) as free:
        port = free.getsockname()[1]
    said = {"address": address, "port": port, "folder": folder, "home": home, "packages": packages}
    (folder / "sshd").write_text(CONFIG.format(**said, sftp=SFTP, path=os.environ["PATH"]))
    (folder / "ssh").write_text(CLIENT.format(**said, user=getpass.getuser()))
    if not os.geteuid():
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    process = subprocess.Popen([SSHD, "-D", "-e", "-f", folder / "sshd"])
    try:
        wait_for(address, port)
        yield Sshd(address, home, folder / "ssh")
    finally:
        process.terminate()
        process.wait()


def wait_for(address: str, port: int) -> None:
    last = time.monotonic() + READY_S
    while True:
        try:
            socket.create_connection((address, port)).close()
            return
        except ConnectionRefusedError:
            assert time.monotonic() < last
            time.sleep(0.05)


def penstock(*words: str) -> subprocess.CompletedProcess[str]:
    with popen([PENSTOCK, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        said, errors = process.communicate(timeout=SETUP_S)
    return subprocess.CompletedProcess(words, process.returncode, said, errors)


def test_a_host_is_set_up_and_its_worker_used(sshd: Sshd, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = ("--keys", str(tmp_path / "keys"))
    penstock("keys", "new", *keys)
    first = penstock("hosts", "setup", "--ssh-config", str(sshd.config), *keys, "second")
    assert first.returncode == 0, first.stderr
    assert first.stderr.splitlines()[-1] == "second: making its key"
    give_keys("second", keys[1], Ssh(sshd.config))
    assert capsys.readouterr().err.splitlines()[-1] == "second: it has keys already, which stay"
    assert not (sshd.home / ".config/penstock/keys/authority.key").exists()
    line = shlex.split(first.stdout, comments=True)
    worker = subprocess.Popen([line[0], "-tt", *line[1:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert worker.stdout is not None
        assert any(f"{LISTENING}{sshd.address}:7700" in one for one in worker.stdout)
        listed = penstock("hosts", sshd.address, "--json", *keys)
        assert json.loads(listed.stdout)[0]["facts"]["versions"]["penstock"], listed.stderr
    finally:
        worker.terminate()  # the terminal that ssh asked for hangs up, which ends the worker
        worker.communicate()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("nobody",), "host nobody: reaching it failed ("),
        (("second", "--python", "python2.7"), "host second: finding Python failed ("),
    ],
)
def test_a_step_that_fails_is_named(sshd: Sshd, words: tuple[str, ...], error: str, tmp_path: Path) -> None:
    (never_copied := tmp_path / "never-copied.whl").touch()
    given = ("--insecure", "--ssh-config", str(sshd.config), "--wheel", str(never_copied))
    told = penstock("hosts", "setup", *given, *words)
    assert told.returncode == 1
    last = told.stderr.splitlines()[-1]
    assert last.startswith(f"penstock: error: {error}"), told.stderr
    assert last.rpartition("): ")[2]
