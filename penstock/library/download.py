"""Downloads of models: resumed, checked, and of a hub repository only the files that the model needs."""

from __future__ import annotations

import errno
import hashlib
import logging
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any, Final

from rich.filesize import decimal

from penstock.checkpoint.look import GGUF, INDEX_FILE, MEDUSA_FILE, SINGLE_FILE, SMALL, has_weights, weights_of
from penstock.core import NO_HOST, ConfigError, PenstockError
from penstock.files import CONFIG_FILE, SPLIT_NAME, said
from penstock.library.names import HubModel, hint

# ------------------------------------------------------------------------------------------------------------- download
# Fetches a file with huggingface_hub's own client, resumes a download that was broken off, and compares the checksum.
#
# huggingface_hub discards the beginning of a file if the process ends. Here it stays, beside the place of the whole
# file, and the next process resumes from there.

PART: Final = ".penstock.incomplete"
"""Suffix of a file that is not yet whole."""
GIT_BLOB: Final = "git"
"""The checksum that git gives a file: SHA-1 of a header with the size, and of the content."""


@dataclass(frozen=True, kw_only=True)
class Download:
    """A file to fetch, and the place where it goes. ``typed`` is the model as the user wrote it, for errors."""

    typed: str
    url: str
    place: Path
    size: int | None = None
    """Bytes; None where the server does not say."""
    algorithm: str = ""
    """``sha256`` or ``git``; empty where nobody states a checksum."""
    checksum: str = ""

    @property
    def part(self) -> Path:
        """The file that receives the bytes until they are all there and checked."""
        return self.place.with_name(f"{self.place.name}{PART}")

    @property
    def there(self) -> int:
        """Bytes that have been received, in this process or an earlier one."""
        return next((file.stat().st_size for file in (self.place, self.part) if file.is_file()), 0)

    @property
    def missing(self) -> int:
        """Bytes that have to be received; 0 where the size is not known."""
        return max((self.size or 0) - self.there, 0)


def check_space(typed: str, downloads: Iterable[Download], folder: Path) -> None:
    """Raise PenstockError unless the disk of ``folder``, which need not exist, has room for all missing bytes."""
    needed = sum(one.missing for one in downloads)
    there = next(place for place in (folder, *folder.parents) if place.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise PenstockError(
            f"model: {typed!r} needs {decimal(needed)} in {folder}, where {decimal(free)} are free: free some space, "
            "as with penstock rm, or set HF_HOME to a folder on another disk"
        )


def fetch(download: Download, headers: Mapping[str, str] | None = None) -> None:
    """Fetch the file unless it is there. Raises PenstockError for a connection that ends early, or a wrong checksum."""
    from huggingface_hub.utils import WeakFileLock

    download.place.parent.mkdir(parents=True, exist_ok=True)
    lock = download.part.with_name(f"{download.part.name}.lock")
    with WeakFileLock(lock):  # another process may be fetching the same file
        if not download.place.is_file():
            receive(download, headers)
            # The final name appears only once the content is checked: a file under it is whole and right.
            check_sum(download)
            download.part.replace(download.place)
    lock.unlink(missing_ok=True)


def receive(download: Download, headers: Mapping[str, str] | None) -> None:
    """Fetch the missing bytes of the part. Raises PenstockError, with how many there are, where the connection ends."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError
    from huggingface_hub.file_download import http_get

    begun = download.there
    # Without a size from the server nobody can say whether the part is the beginning of this very file.
    if download.size is None or begun > download.size:
        download.part.unlink(missing_ok=True)
        begun = 0
    try:
        with quiet_retries(), download.part.open("ab") as file:
            http_get(
                download.url,
                file,
                resume_size=begun,
                headers=dict(headers or {}),
                expected_size=download.size,
                displayed_filename=download.url.rpartition("/")[2],
            )
    except HfHubHTTPError:
        if not begun:
            download.part.unlink()
        raise
    except (HTTPError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # an error of the operating system, as of a full disk: one_line says what to do
        whole = "" if download.size is None else f" of {decimal(download.size)}"
        raise PenstockError(
            f"model: {download.typed!r}: the connection ended after {decimal(download.there)}{whole} "
            f"({said(error, 120)}): type the same again, and it goes on from there"
        ) from error


@contextmanager
def quiet_retries() -> Iterator[None]:
    """A context in which huggingface_hub warns of no retries: the error at the end, if any, says what came of them."""
    log = logging.getLogger("huggingface_hub.file_download")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def check_sum(download: Download) -> None:
    """Raise PenstockError, and remove the part, unless it has the checksum that was stated. None stated: no check."""
    if not download.algorithm:
        return
    found = sum_of(download.part, download.algorithm)
    if found == download.checksum:
        return
    download.part.unlink()
    raise PenstockError(
        f"model: {download.typed!r}: {download.url.rpartition('/')[2]} came with the checksum {found[:12]}..., and "
        f"{download.checksum[:12]}... was stated: it has been removed; pull it again, and if that repeats, look for a "
        "proxy that changes files"
    )


def sum_of(file: Path, algorithm: str) -> str:
    """The checksum of a file in hexadecimal digits. ``algorithm``: GIT_BLOB, or a name that hashlib knows."""
    with file.open("rb") as content:
        if algorithm != GIT_BLOB:
            return hashlib.file_digest(content, algorithm).hexdigest()
        found = hashlib.sha1(f"blob {file.stat().st_size}\0".encode(), usedforsecurity=False)
        while piece := content.read(1 << 20):
            found.update(piece)
        return found.hexdigest()


# ------------------------------------------------------------------------------------------------------------- refusals
# Turns the errors of the hub, the network and the disk into one line each, with what was typed and the remedy.

ELSEWHERE: Final = "or download it elsewhere and give the path of its folder or file"
"""The end of errors about a server that does not answer."""


class Unreachable(PenstockError):
    """No server that has the model answers. ``typed`` is the model as the user wrote it."""

    def __init__(self, message: str, typed: str = "") -> None:
        super().__init__(message)
        self.typed = typed


@contextmanager
def one_line(typed: str) -> Iterator[None]:
    """A context that raises errors of the hub's client, the network and the disk as one line about ``typed``.

    Raises Unreachable where no server answers, ConfigError for a refusal, PenstockError for the disk.
    """
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, OfflineModeIsEnabled

    try:
        yield
    except PenstockError:
        raise
    except OfflineModeIsEnabled as error:
        words = f"model: {typed!r} is not on this host, and HF_HUB_OFFLINE is set: unset it{hint(typed)}"
        raise Unreachable(words, typed) from error
    except HFValidationError as error:
        raise ConfigError(
            f"model: {typed!r} is neither a place on this host nor a valid hub id: {said(error)}"
        ) from error
    except HfHubHTTPError as error:
        raise answered(typed, error) from error
    except (HTTPError, ConnectionError) as error:
        raise Unreachable(
            f"model: {typed!r} is not on this host, and its server does not answer ({said(error)}): check the network "
            f"and HF_ENDPOINT, {ELSEWHERE}{hint(typed)}",
            typed,
        ) from error
    except UnicodeError as error:  # Python encodes a host's name before it looks it up
        words = f"model: {typed!r} is not on this host, and as for its server, {NO_HOST}"
        raise Unreachable(f"{words}: check the address and HF_ENDPOINT", typed) from error
    except OSError as error:
        raise of_disk(typed, error) from error


def answered(typed: str, error: Any) -> PenstockError:
    """The error for an HTTP answer that refuses: ConfigError if the user can mend it, else Unreachable."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    response = getattr(error, "response", None)
    status = None if response is None else response.status_code
    if isinstance(error, GatedRepoError):
        return ConfigError(
            f"model: {typed!r} is gated: accept its licence on its page, then `hf auth login` or set HF_TOKEN"
        )
    if status == 404 and "://" in typed:
        return ConfigError(f"model: there is nothing at {typed!r} (status 404): check the address")
    if isinstance(error, RepositoryNotFoundError) or status == 404:
        return ConfigError(
            f"model: the hub has no {typed!r}, or shows it to nobody without a token: check the name, and for a "
            f"private model `hf auth login`{hint(typed)}"
        )
    if status in (401, 403):
        return ConfigError(
            f"model: the hub refuses {typed!r} to this token (status {status}): `hf auth login` with one that may "
            "read it"
        )
    return Unreachable(
        f"model: {typed!r} is not on this host, and its server answers with status {status}: try again later, "
        f"{ELSEWHERE}",
        typed,
    )


def of_disk(typed: str, error: OSError) -> PenstockError:
    """The error for a file that cannot be written."""
    place = f" in {Path(str(error.filename)).parent}" if error.filename else ""
    if error.errno == errno.ENOSPC:
        return PenstockError(
            f"model: {typed!r} does not fit: the disk is full{place}; free some space, as with penstock rm, and pull "
            "it again: it goes on from there"
        )
    return PenstockError(
        f"model: {typed!r} cannot be kept{place}: {error.strerror or said(error)}; set HF_HOME, or XDG_CACHE_HOME for "
        "what is not the hub's, to a folder that can be written to"
    )


# --------------------------------------------------------------------------------------------------------------- choice
# Chooses, by their names, the files of a repository that a model needs.

FORMAT: Final = re.compile(r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|T?Q\d_\d|BF16|F16|F32|MXFP4\w*|NVFP4))$", re.IGNORECASE)
"""The number format with which the name of a GGUF file ends, without suffix (group 1)."""
BESIDE: Final = ("mmproj", "imatrix")
"""Words in the names of GGUF files that hold no language model: a vision tower, or statistics."""


def small_files(names: Iterable[str]) -> list[str]:
    """The names of configuration, tokenizer, chat template and index files."""
    return [name for name in names if any(fnmatch(name, pattern) for pattern in SMALL)]


def has_safetensors(names: Iterable[str]) -> bool:
    """Whether there are weights as safetensors, in one file or several, or as Medusa's heads."""
    return not {SINGLE_FILE, INDEX_FILE, MEDUSA_FILE}.isdisjoint(names)


def gguf_models(names: Iterable[str]) -> dict[str, list[str]]:
    """The GGUF models among the names: the first file of each, with all files over which it is split, in order."""
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        path = PurePosixPath(name)
        if path.suffix.lower() != GGUF or any(word in path.name.lower() for word in BESIDE):
            continue
        # All files of a split model come under its first one's name, even where that one is missing.
        split = SPLIT_NAME.fullmatch(path.name)
        first = name if split is None else str(path.with_name(f"{split[1]}-00001-of-{split[3]}{GGUF}"))
        models.setdefault(first, []).append(name)
    return models


def stem_of(name: str) -> str:
    """A GGUF file's name without its suffix and without the numbers of a split model."""
    path = PurePosixPath(name)
    split = SPLIT_NAME.fullmatch(path.name)
    return path.stem if split is None else split[1]


def format_of(name: str) -> str:
    """The format with which a GGUF file's name ends, else its whole name."""
    found = FORMAT.search(stem_of(name))
    return found[1] if found else PurePosixPath(name).name


def gguf_named(names: Iterable[str], wanted: str) -> list[str]:
    """The first files of the GGUF models whose file name, or format, is ``wanted``."""
    models = gguf_models(names)
    if wanted.lower().endswith(GGUF):
        return [first for first in models if wanted in (first, PurePosixPath(first).name)]
    end = re.compile(rf"(?:^|[-._]){re.escape(wanted)}$", re.IGNORECASE)
    found = [first for first in models if end.search(stem_of(first))]
    # Some repositories hold the same weights in one file and in a split model: the single file is taken.
    return [first for first in found if models[first] == [first]] or found


def chosen_gguf(model: HubModel, sizes: Mapping[str, int]) -> list[str]:
    """The files of the GGUF model that ``model`` names. Raises ConfigError, which lists all, unless it names one."""
    models = gguf_models(sizes)
    found = gguf_named(sizes, model.file) if model.file else list(models)
    if len(found) == 1:
        return models[found[0]]
    if not models:
        raise ConfigError(f"model: {model.typed!r}: {model.repo} has no {GGUF} files; give {model.repo} for all it has")
    total = {first: decimal(sum(sizes[name] for name in files)) for first, files in models.items()}
    there = [f"{format_of(first)} ({size})" for first, size in total.items()]
    example = f"{model.repo}:{format_of(next(iter(models)))}"
    which = f"has no {model.file}" if not found and model.file else f"has {len(found)} GGUF models"
    raise ConfigError(
        f"model: {model.typed!r}: {model.repo} {which}; name one, like {example}. There are {', '.join(there)}"
    )


def no_weights(model: HubModel, names: Iterable[str]) -> ConfigError:
    """The error for a repository that has neither safetensors nor GGUF."""
    other = sorted({PurePosixPath(name).suffix for name in names} & {".bin", ".pt", ".pth", ".onnx", ".h5", ".msgpack"})
    has = f"only {', '.join(other)}" if other else "no weights"
    return ConfigError(
        f"model: {model.typed!r}: {model.repo} has {has}, and Penstock reads safetensors and GGUF alone: give a "
        "repository that has these"
    )


# ------------------------------------------------------------------------------------------------------------------ hub
# Pulls models into huggingface_hub's own cache, where every library finds them.

ANSWER_S: Final = 10.0
"""Seconds in which the hub has to say what a repository holds. A hub that is out of reach holds up a start no
longer."""


@dataclass(frozen=True, kw_only=True)
class HubFile:
    """A file as the hub lists it: ``size`` in bytes, and ``sha256``, or for small files only git's ``blob`` id."""

    name: str
    size: int
    blob: str
    sha256: str = ""

    @property
    def etag(self) -> str:
        """The file's name in the cache: its checksum, by which huggingface_hub finds it."""
        return self.sha256 or self.blob


@dataclass(frozen=True, kw_only=True)
class Repository:
    """A repository at a commit, as the hub lists it: its files by name."""

    model: HubModel
    commit: str
    files: dict[str, HubFile]

    def downloads(self, names: Iterable[str]) -> list[Download]:
        """The downloads of the named files into the cache; for a file that is there already, one that ends at once."""
        from huggingface_hub import hf_hub_url

        model, blobs = self.model, folder_of(self.model) / "blobs"
        found = (self.files[name] for name in names)
        return [
            Download(
                typed=model.typed,
                url=hf_hub_url(model.repo, file.name, revision=self.commit),
                place=blobs / file.etag,
                size=file.size,
                algorithm="sha256" if file.sha256 else GIT_BLOB,
                checksum=file.etag,
            )
            for file in found
        ]

    def pull(self, names: Sequence[str]) -> Path:
        """The snapshot's folder, with the named files in it. Raises PenstockError as ``fetch`` does."""
        from huggingface_hub import hf_hub_download
        from huggingface_hub.utils import build_hf_headers

        for one in self.downloads(names):
            fetch(one, build_hf_headers())
        # The contents lie in the cache: hf_hub_download only links them into the snapshot under their names.
        for name in names:
            hf_hub_download(self.model.repo, name, revision=self.commit)
        self._name_commit()
        return folder_of(self.model) / "snapshots" / self.commit

    def _name_commit(self) -> None:
        """Record in the cache, as huggingface_hub does, at which commit the branch is."""
        if self.model.revision != self.commit:
            ref = folder_of(self.model) / "refs" / self.model.revision
            ref.parent.mkdir(parents=True, exist_ok=True)
            ref.write_text(self.commit)


def folder_of(model: HubModel) -> Path:
    """The repository's folder in the cache, which need not exist."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE) / str(repo_folder_name(repo_id=model.repo, repo_type="model"))


def stored_place(model: HubModel) -> Path | None:
    """The path of the model's GGUF file or folder in the cache; None unless all of it is there."""
    folder = folder_of(model)
    ref = folder / "refs" / model.revision
    # A revision that is no branch is a commit, and names its snapshot itself.
    commit = ref.read_text().strip() if ref.is_file() else model.revision
    snapshot = folder / "snapshots" / commit
    if not snapshot.is_dir():
        return None
    if model.file:
        names = [str(file.relative_to(snapshot)) for file in snapshot.rglob("*.gguf") if file.is_file()]
        found = gguf_named(names, model.file)
        return snapshot / found[0] if len(found) == 1 and is_whole(found[0], gguf_models(names)[found[0]]) else None
    return snapshot if (snapshot / CONFIG_FILE).is_file() and has_weights(snapshot) else None


def is_whole(first: str, files: Sequence[str]) -> bool:
    """Whether ``files`` are as many as the GGUF model is split over, by the name of its first file."""
    from penstock.files import split_files

    return len(split_files(Path(first))) == len(files)


def look_up(model: HubModel) -> Repository:
    """The repository and its files. Raises Unreachable where the hub does not answer, ConfigError for a refusal."""
    from huggingface_hub import HfApi

    with one_line(model.typed):
        found = HfApi().model_info(model.repo, revision=model.revision, files_metadata=True, timeout=ANSWER_S)
    files = {
        one.rfilename: HubFile(
            name=one.rfilename,
            size=one.size or 0,
            blob=one.blob_id or "",
            sha256=one.lfs.sha256 if one.lfs is not None else "",
        )
        for one in found.siblings or ()
    }
    return Repository(model=model, commit=found.sha, files=files)


def pull(model: HubModel, announce: Callable[[int, Path], None]) -> Path:
    """Fetch the model's GGUF file or its folder, and return its path.

    ``announce`` is told the number of missing bytes and the folder. Raises PenstockError, in one line.
    """
    repository = look_up(model)
    check_pinned(model, repository)
    names = list(repository.files)
    sizes = {name: file.size for name, file in repository.files.items()}

    def told(wanted: Sequence[str]) -> Path:
        """Fetch the files, after checking the disk and announcing them."""
        downloads = repository.downloads(wanted)
        check_space(model.typed, downloads, folder_of(model))
        announce(sum(one.missing for one in downloads), folder_of(model))
        return repository.pull(wanted)

    with one_line(model.typed):
        if model.file or (not has_safetensors(names) and gguf_models(names)):
            files = chosen_gguf(model, sizes)
            return told(files) / files[0]
        if not has_safetensors(names):
            raise no_weights(model, names)
        # The index, among the small files, names the files of the weights: it has to be there before they are chosen.
        snapshot = repository.pull(small_files(names))
        return told([*(name for name in weights_of(snapshot) if name in sizes), *small_files(names)])


def check_pinned(model: HubModel, repository: Repository) -> None:
    """Raise OtherFile if the hub's file has another checksum than the one pinned for a short name."""
    if model.package is not None:
        (name, *_) = chosen_gguf(model, {name: file.size for name, file in repository.files.items()})
        if repository.files[name].sha256 != model.package.sha256:
            raise OtherFile(f"model: {model.typed!r}: the hub has another file as {name}")


class OtherFile(PenstockError):
    """The hub's file is not the one that is pinned for a short name."""
