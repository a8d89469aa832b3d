"""A reader of the Dockerfile, and a builder that does what it says without Docker.

A stage is a layer over this machine's own files (overlayfs), in namespaces that end with the command: nothing outside
the layer's folder is changed. In place of the base image stands what this machine has, its Python at /usr/local.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import string
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
SYSTEM_PATH: Final = "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
SOURCES_OF_PACKAGES: Final = re.compile(r"PIP_\w+|https?_proxy|no_proxy", re.IGNORECASE)
"""Variables that say where packages come from: as Docker's own build arguments, they are known to each RUN."""
ENTER: Final = """\
set -e
mount -t overlay penstock -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/merged"
mount --rbind /dev "$1/merged/dev"
mount -t proc proc "$1/merged/proc"
[ -z "$2" ] || mount --bind "$2" "$1/merged/usr/local"
cd "$1/merged"
shift 2
# The shell stays, as the first process of its namespace: a user that is changed to would not end with unshare.
chroot "$@"; exit "$?"
"""
PYTHON: Final = "" if sys.base_prefix in ("/usr", "/usr/local") else sys.base_prefix
"""This Python's folder, which a stage has as /usr/local; "" where it is there, or the system's own."""

Instruction = tuple[str, str]


@dataclass
class Stage:
    """The instructions between one FROM and the next: (word, rest of the line)."""

    name: str
    instructions: list[Instruction] = field(default_factory=list)

    def last(self, word: str) -> Any:
        """The last instruction of this kind; one in JSON as its list."""
        rest = next(rest for found, rest in reversed(self.instructions) if found == word)
        return json.loads(rest) if rest.startswith("[") else rest


def read(text: str) -> list[Stage]:
    """The stages of a Dockerfile, in order."""
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    stages: list[Stage] = []
    for line in filter(None, re.sub(r"\\\n\s*", "", lines).splitlines()):
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            stages.append(Stage(rest.rpartition(" AS ")[2] if " AS " in rest else ""))
        else:
            stages[-1].instructions.append((word, rest.strip()))
    return stages


@dataclass(frozen=True)
class Copy:
    """A COPY: of the build's folder, or of the stage ``source``."""

    source: str
    names: tuple[str, ...]
    to: str

    @property
    def into_folder(self) -> bool:
        return self.to.endswith("/") or self.to == "." or len(self.names) > 1


def copy_of(rest: str) -> Copy:
    words = shlex.split(rest)
    source = words.pop(0).removeprefix("--from=") if words[0].startswith("--from=") else ""
    return Copy(source, tuple(words[:-1]), words[-1])


def ignored(path: str, patterns: Sequence[str]) -> bool:
    """Whether a .dockerignore with these patterns leaves the path out: the last that fits it or a folder above says."""
    above = [path, *(str(one) for one in PurePosixPath(path).parents if str(one) != ".")]
    found = False
    for pattern in patterns:
        bare = pattern.removeprefix("!").strip("/")
        ways = {bare, bare.removeprefix("**/")}
        if any(fits(one, way) for one in above for way in ways):
            found = not pattern.startswith("!")
    return found


def fits(path: str, pattern: str) -> bool:
    """Whether a pattern fits a whole path; its ``*`` fits no slash, ``**`` any."""
    if "**" in pattern:
        return fnmatch(path, pattern.replace("**", "*"))
    return path.count("/") == pattern.count("/") and fnmatch(path, pattern)


def patterns_in(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]


def tracked() -> set[str]:
    """The files of the checkout under version control; in a copy without it, those that are there."""
    if not (ROOT / ".git").exists():
        return {file.relative_to(ROOT).as_posix() for file in ROOT.rglob("*") if file.is_file()}
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(listed.stdout.split("\0"))


class Layer:
    """A stage's files, and the settings that its instructions have made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("upper", "work", "merged"):
            (folder / name).mkdir(parents=True)
            (folder / name).chmod(0o755)  # whoever the stage's user is has to get in
        # The base image's linker knows its Python's library; here a system's own could come first.
        self.environment = {"PATH": SYSTEM_PATH, **({"LD_LIBRARY_PATH": "/usr/local/lib"} if PYTHON else {})}
        self.user, self.where = "root", "/"

    @property
    def upper(self) -> Path:
        return self.folder / "upper"

    def file(self, path: str) -> Path:
        """The place in this layer of a path in the stage, which may be relative to its folder."""
        return self.upper / os.path.normpath(os.path.join(self.where, path)).lstrip("/")

    def put(self, path: str, content: str, *, owner: int = 0) -> None:
        file = self.file(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
        file.chmod(0o600 if owner else 0o644)
        os.chown(file, owner, owner)

    def number_of(self, user: str) -> int:
        """The number of a user that the stage has added."""
        rows = self.file("/etc/passwd").read_text().splitlines()
        return next(int(row.split(":")[2]) for row in rows if row.startswith(f"{user}:"))

    def words(self, command: Sequence[str], extra: Mapping[str, str] | None = None) -> list[str]:
        """The command line that runs a command in the stage, as its user and in its folder."""
        home = "/root" if self.user == "root" else f"/home/{self.user}"
        variables = {"HOME": home, **self.environment, **(extra or {})}
        apart = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", ENTER, "enter"]
        inside = ["env", "-i", "-C", self.where, *(f"{name}={value}" for name, value in variables.items())]
        return [*apart, str(self.folder), PYTHON, f"--userspec={self.user}", ".", *inside, *command]

    def run(self, command: Sequence[str], extra: Mapping[str, str] | None = None) -> str:
        done = subprocess.run(self.words(command, extra), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}"
        return done.stdout


class Image:
    """The image that a Dockerfile makes of a folder: each stage is built in ``folder``, the last is the image."""

    def __init__(self, context: Path, folder: Path) -> None:
        self._context = context
        self._patterns = patterns_in((context / ".dockerignore").read_text())
        self._stages: dict[str, Layer] = {}
        stages = read((context / "Dockerfile").read_text())
        for number, stage in enumerate(stages):
            self.layer = self._stages[stage.name] = Layer(folder / f"stage-{number}")
            self._arguments = {name: value for name, value in os.environ.items() if SOURCES_OF_PACKAGES.fullmatch(name)}
            for word, rest in stage.instructions:
                self._do(word, rest)
        self.entrypoint: list[str] = stages[-1].last("ENTRYPOINT")
        self.command: list[str] = stages[-1].last("CMD")
        self.healthcheck: list[str] = json.loads(stages[-1].last("HEALTHCHECK").partition("CMD ")[2])
        self.port = int(stages[-1].last("EXPOSE"))

    def _do(self, word: str, rest: str) -> None:
        layer = self.layer
        if word == "RUN":
            layer.run(["/bin/sh", "-c", rest], self._arguments)
        elif word == "COPY":
            self._copy(copy_of(rest))
        elif word == "ENV":
            layer.environment |= {name: value for name, _, value in self._settings(rest)}
        elif word == "ARG":
            self._arguments |= {name: value for name, _, value in self._settings(rest)}
        elif word == "WORKDIR":
            layer.where = os.path.join(layer.where, rest)
            layer.file(".").mkdir(parents=True, exist_ok=True)
        elif word == "USER":
            layer.user = rest
        else:
            assert word in ("EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"), f"{word} is not known here"

    def _settings(self, rest: str) -> Iterator[tuple[str, str, str]]:
        known = {**self._arguments, **self.layer.environment}
        yield from (string.Template(word).substitute(known).partition("=") for word in shlex.split(rest))

    def _copy(self, copy: Copy) -> None:
        for name in copy.names:
            to = self.layer.file(copy.to) / (Path(name).name if copy.into_folder else "")
            source = self._stages[copy.source].file(name) if copy.source else self._context / name
            to.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                whole = self.layer.file(copy.to)
                shutil.copytree(source, whole, symlinks=True, dirs_exist_ok=True, ignore=self._left_out)
            else:
                assert copy.source or not ignored(name, self._patterns), f".dockerignore leaves {name} out"
                shutil.copy(source, to)

    def _left_out(self, folder: str, names: list[str]) -> set[str]:
        """The names in a folder that .dockerignore leaves out, which says nothing about another stage's files."""
        if not Path(folder).is_relative_to(self._context):
            return set()
        where = Path(folder).relative_to(self._context)
        return {name for name in names if ignored((where / name).as_posix(), self._patterns)}

    def container(self, folder: Path) -> Layer:
        """A layer of its own with the image's files, which are linked, and the image's settings."""
        made = Layer(folder)
        subprocess.run(["cp", "--archive", "--link", f"{self.layer.upper}/.", made.upper], check=True)
        made.environment, made.user, made.where = self.layer.environment, self.layer.user, self.layer.where
        return made
