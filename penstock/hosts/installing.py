"""``penstock hosts setup``: over ssh, other hosts get the Penstock that runs here, and keys of this host's cluster.

What is installed there is a wheel of the very files that run here, checkout or not, since an engine refuses hosts with
another version. The host's key is made on the host and never leaves it: a request for a certificate comes back over
ssh, and the certificate goes there.
"""

from __future__ import annotations

import base64
import hashlib
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, distribution, version
from pathlib import Path
from typing import Final

import penstock
from penstock.config import FieldError
from penstock.core import ConfigError, PenstockError
from penstock.files import cache_folder
from penstock.hosts.keys import AUTHORITY_KEY, folder_of, membership_for
from penstock.hosts.messages import DEFAULT_PORT

# ---------------------------------------------------------------------------------------------------------------- wheel
# The wheel of this Penstock, packed anew from its files: that needs neither pip nor a build backend nor a network.

PURE: Final = "Wheel-Version: 1.0\nGenerator: penstock\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
"""The file that says that a wheel holds Python alone."""
LICENSES: Final = ".dist-info/licenses/"
"""The folder of licences in a distribution's metadata."""


def pack_wheel(folder: Path) -> Path:
    """Pack this Penstock into a wheel in ``folder``, and return its path. The manual page is left out.

    Raises ConfigError if the folder cannot be written.
    """
    found = distribution("penstock")
    stem = f"penstock-{found.version}"
    file = folder / f"{stem}-py3-none-any.whl"
    rows = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as wheel:
            for name, content in (*package_files(), *metadata_files(found, f"{stem}.dist-info")):
                wheel.writestr(name, content)
                digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
                rows.append(f"{name},sha256={digest},{len(content)}")
            record = f"{stem}.dist-info/RECORD"
            wheel.writestr(record, "\n".join([*rows, f"{record},,", ""]))
    except OSError as error:
        raise ConfigError(
            f"setup: {error.filename or file}: {error.strerror}; --wheel names a wheel of yours"
        ) from error
    return file


def package_files() -> Iterator[tuple[str, bytes]]:
    """The package's files under their names in a wheel, without caches."""
    package = Path(penstock.__file__).parent
    for file in sorted(package.rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts:
            yield f"penstock/{file.relative_to(package).as_posix()}", file.read_bytes()


def metadata_files(found: Distribution, folder: str) -> Iterator[tuple[str, bytes]]:
    """The files of a distribution that say what it is, as they are named in a wheel."""
    yield f"{folder}/WHEEL", PURE.encode()
    for name, in_a_checkout in (("METADATA", "PKG-INFO"), ("entry_points.txt", "entry_points.txt")):
        # Beside a checkout Python finds what setuptools has left there, under the older name.
        content = found.read_text(name) or found.read_text(in_a_checkout)
        if content is None:
            raise ConfigError(f"setup: this Penstock was installed without {name}; --wheel names a wheel of yours")
        yield f"{folder}/{name}", content.encode()
    for one in found.files or ():
        _, licenses, name = one.as_posix().partition(LICENSES)
        if licenses:
            yield f"{folder}/licenses/{name}", Path(str(one.locate())).read_bytes()


# ---------------------------------------------------------------------------------------------------------------- steps
# The commands that set up one host, each with the words for an error.

PLACE: Final = ".local/share/penstock"
"""Where Penstock is on the host, from the user's home, in which ssh and scp begin."""
BIN: Final = f"{PLACE}/venv/bin"
"""The folder of its programs there."""
HOST: Final = re.compile(r"(?:\w[\w.-]*@)?\w[\w.-]*", re.ASCII)
"""Matches NAME and USER@NAME: nothing that ssh could take for an option."""
PROBE: Final = "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))"
"""A program that ends well where Python is new enough and can make environments."""
SAME: Final = ("torch", "transformers")
"""Packages that the host gets in this host's versions. An engine refuses hosts with another torch."""


@dataclass(frozen=True)
class Ssh:
    """The programs ssh and scp, with the configuration file that both are to read, if any."""

    config: Path | None = None

    def run(self, host: str, *words: str) -> list[str]:
        """The command that runs ``words`` on a host; the shell there takes each as one word."""
        return ["ssh", *self._options, "--", host, shlex.join(words)]

    def copy(self, file: str, host: str, to: str) -> list[str]:
        """The command that copies a file of this host to ``to`` there."""
        return ["scp", "-q", *self._options, "--", file, f"{host}:{to}"]

    def address(self, host: str) -> str:
        """The address behind a host's name, which may be one of ssh's configuration; without ssh the name itself."""
        if shutil.which("ssh") is not None:
            told = subprocess.run(["ssh", *self._options, "-G", "--", host], capture_output=True, text=True)
            found = re.search(r"^hostname (.+)$", told.stdout, re.MULTILINE)
            if found:
                return found[1]
        return host.rpartition("@")[2]

    @property
    def _options(self) -> list[str]:
        return [] if self.config is None else ["-F", str(self.config)]


@dataclass(frozen=True)
class Step:
    """A command of this host. ``doing`` says what it does, and ``remedy`` what to look at where it fails."""

    doing: str
    command: list[str]
    remedy: str


def steps_for(host: str, wheel: Path, python: str, pip: Sequence[str], ssh: Ssh) -> list[Step]:
    """The steps that install Penstock on a host. Each may be done again."""
    there = f"{PLACE}/{wheel.name}"
    install = [f"{BIN}/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    versions = [f"{name}=={version(name).partition('+')[0]}" for name in SAME]
    packages = "the host needs a package index and some gigabytes; --pip-args has options for its pip"
    return [
        Step("reaching it", ssh.run(host, "mkdir", "-p", PLACE), f"`ssh {host}` has to work"),
        Step(
            "finding Python",
            ssh.run(host, python, "-c", PROBE),
            "it has to be 3.11 or newer, with venv (Debian's python3-venv); --python names another one",
        ),
        Step("making an environment", ssh.run(host, python, "-m", "venv", f"{PLACE}/venv"), f"see ~/{PLACE} there"),
        Step("copying the wheel", ssh.copy(str(wheel), host, f"{PLACE}/"), "see the disk there"),
        # First without what it needs: pip takes one of the same version for installed, though its files are others.
        Step("installing Penstock", ssh.run(host, *install, "--no-deps", "--force-reinstall", there), packages),
        Step("installing what it needs", ssh.run(host, *install, *pip, *versions, there), packages),
        Step("running it", ssh.run(host, f"{BIN}/penstock", "--version"), "its line says what is missing"),
    ]


# ---------------------------------------------------------------------------------------------------------------- setup
# The command itself.


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The options. ``keys`` is the folder of this host's keys; the others get none if ``insecure``."""

    wheel: Path | None
    keys: str | None
    insecure: bool
    python: str
    pip_args: str
    ssh_config: Path | None


def set_up(hosts: Sequence[str], setup: Setup, only_print: bool) -> None:
    """Install Penstock on hosts, one after the other, or print the commands that do.

    Raises ConfigError for what is wrong here, PenstockError for a step that fails on a host.
    """
    for host in hosts:
        if not HOST.fullmatch(host):
            raise FieldError("hosts", f"is {host!r}; a host is NAME or USER@NAME, as ssh takes it")
    if not setup.insecure and not (folder_of(setup.keys) / AUTHORITY_KEY).exists():
        place = folder_of(setup.keys)
        raise ConfigError(f"keys: {place} is not where a cluster was made; `penstock keys new` makes one")
    if not only_print and (missing := [name for name in ("ssh", "scp") if shutil.which(name) is None]):
        raise ConfigError(f"setup: {missing[0]} is not on this host; install OpenSSH's client, or see --print")
    pip = words_of(setup.pip_args)
    wheel = pack_wheel(cache_folder() / "wheels") if setup.wheel is None else existing(setup.wheel)
    ssh = Ssh(setup.ssh_config)
    for host in hosts:
        steps = steps_for(host, wheel, setup.python, pip, ssh)
        if only_print:
            print_commands(host, steps, setup, ssh)
        else:
            for step in steps:
                said(host, step)
            if not setup.insecure:
                give_keys(host, setup.keys, ssh)
        print(start_line(host, setup, ssh), flush=True)


def words_of(pip_args: str) -> list[str]:
    """The words of ``--pip-args``. Raises FieldError for quotes that do not close."""
    try:
        return shlex.split(pip_args)
    except ValueError as error:
        raise FieldError("pip_args", f"is {pip_args!r}: {error}") from error


def existing(wheel: Path) -> Path:
    """A wheel that the user names. Raises FieldError if it is none."""
    if not wheel.is_file() or wheel.suffix != ".whl":
        raise FieldError("wheel", f"is {str(wheel)!r}, which is no wheel's file")
    return wheel


def said(host: str, step: Step) -> None:
    """Do a step, after a line that says so."""
    print(f"{host}: {step.doing}", file=sys.stderr, flush=True)
    done(host, step)


def done(host: str, step: Step, given: bytes = b"") -> bytes:
    """The output of a step's command. Raises PenstockError, in a line, if it fails."""
    ended = subprocess.run(step.command, input=given, capture_output=True)
    if ended.returncode:
        lines = [line.strip() for line in ended.stderr.decode(errors="replace").splitlines() if line.strip()]
        reason = f" ({lines[-1]})" if lines else ""
        raise PenstockError(f"host {host}: {step.doing} failed{reason}: {step.remedy}")
    return ended.stdout


def give_keys(host: str, keys: str | None, ssh: Ssh) -> None:
    """Make the host a member of this host's cluster, if it is of none."""
    remedy = "its keys are in ~/.config/penstock/keys"
    request = Step("making its key", ssh.run(host, f"{BIN}/penstock", "keys", "request"), remedy)
    print(f"{host}: {request.doing}", file=sys.stderr, flush=True)
    asked = done(host, request)
    if asked.strip():
        answer = Step("keeping its keys", ssh.run(host, f"{BIN}/penstock", "keys", "accept"), remedy)
        done(host, answer, membership_for(asked, keys))
    else:
        print(f"{host}: it has keys already, which stay", file=sys.stderr)


def print_commands(host: str, steps: Sequence[Step], setup: Setup, ssh: Ssh) -> None:
    """Print the commands that would set up a host."""
    for step in steps:
        print(shlex.join(step.command))
    if not setup.insecure:
        sign = ["penstock", "keys", "sign", *([] if setup.keys is None else ["--keys", setup.keys])]
        request, accept = (ssh.run(host, f"{BIN}/penstock", "keys", word) for word in ("request", "accept"))
        print(" | ".join(map(shlex.join, (request, sign, accept))))


def start_line(host: str, setup: Setup, ssh: Ssh) -> str:
    """The command that starts the host's worker, and the host's name for ``--hosts``."""
    address = ssh.address(host)
    worker = [f"{BIN}/penstock", "worker", "--listen", f"{address}:{DEFAULT_PORT}"]
    command = shlex.join(ssh.run(host, *worker, *(["--insecure"] if setup.insecure else [])))
    return f"{command}    # its worker, for --hosts {address}"
