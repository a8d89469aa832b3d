"""Files and folders: a checkpoint's, their number formats, caches, and temporary folders."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import re
import resource
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from penstock.core import ConfigError, from_json, lone_surrogate

# ---------------------------------------------------------------------------------------------------------------- files
# Checks of a checkpoint's files, which may come from strangers; named pipes; Penstock's cache folder; stamps of files.
#
# No code of a checkpoint ever runs, and no option allows it. A checkpoint's files lie in its folder, or where the hub's
# cache has them. Anything unexpected in a file is a ConfigError that names file and field.

CONFIG_FILE: Final = "config.json"
GENERATION_FILE: Final = "generation_config.json"
TOKENIZER_CONFIG_FILE: Final = "tokenizer_config.json"
"""Files of a checkpoint: the model's sizes, the defaults of sampling, and the tokenizer with its chat template."""

SPLIT_NAME: Final = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf")
"""llama.cpp's names for the files over which a GGUF model is split: prefix, number from 1, count."""
MOST_SPLITS: Final = 1000
"""Most files over which a GGUF model may be split. Their names are made from the first one's, which may state up to
99,999."""

MAY_NAME_KERNELS: Final = (
    CONFIG_FILE,
    GENERATION_FILE,
    TOKENIZER_CONFIG_FILE,
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "adapter_config.json",
)
"""Files from which transformers reads configuration, so that they could name code to load."""

CODE_FIELD: Final = "auto_map"
"""Field that maps transformers' Auto classes to classes in Python files of the checkpoint or of another repository. It
is ignored where transformers has the class itself: many checkpoints that once needed their own code still carry it."""

KERNEL_FIELDS: Final = frozenset(
    {"attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation"}
)
"""Fields that choose kernels. A value with a slash is a repository whose compiled code transformers would load."""

MEMORY_SAID: Final = re.compile(r"can(not|'t) allocate memory|bad_alloc", re.IGNORECASE)
THREADS_SAID: Final = re.compile(r"can(not|'t) start new thread|Resource temporarily unavailable", re.IGNORECASE)
"""Words of the system, Python, torch and safetensors where memory or a thread is refused."""

MORE_TEMPLATES: Final = "additional_chat_templates"
"""The only folder inside a checkpoint from which transformers reads files."""


NAMED_PIPE: Final = "is a named pipe; give a file or a folder"
"""Error text for a path that ``is_named_pipe``; its name goes in front."""


def is_named_pipe(path: Path) -> bool:
    """Whether a path, or what it links to, is a named pipe: opening one waits until somebody opens its other end.

    The pipes of a shell's ``<(command)`` have no name. They are open already, and are read like files.
    """
    try:
        return stat.S_ISFIFO(path.resolve().lstat().st_mode)
    except (OSError, RuntimeError, ValueError):  # there is nothing, a circle of links, or a null byte in the name
        return False


def split_files(first: Path) -> list[Path]:
    """The paths of all files of a GGUF model, by the name of the first; ``[first]`` unless that is a split's name."""
    named = SPLIT_NAME.fullmatch(first.name)
    if named is None or int(named[2]) != 1 or not 1 <= int(named[3]) <= MOST_SPLITS:
        return [first]
    return [first.with_name(f"{named[1]}-{number:05d}-of-{named[3]}.gguf") for number in range(1, int(named[3]) + 1)]


def check_folder(folder: Path) -> None:
    """Raise ConfigError if the checkpoint asks for kernels to be loaded, or a file of it leads out of ``folder``.

    Also if the folder's path is no text, which safetensors takes for a damaged file. Call it before any library is
    given the folder.
    """
    if lone_surrogate(str(folder)):
        raise ConfigError(f"model: the path {str(folder)!r} has bytes that are no UTF-8: rename the folder")
    try:
        files = [*folder.iterdir(), *(folder / MORE_TEMPLATES).glob("*")]
    except OSError as error:
        raise ConfigError(f"model: {folder} cannot be read: {error.strerror}") from error
    # Sorted, so that of several bad files it is always the same one that the error names.
    for file in sorted(files):
        if not file.is_dir() or file.name == MORE_TEMPLATES:
            check_inside(folder, file)
    for name in MAY_NAME_KERNELS:
        check_no_kernels(folder / name)


def check_inside(folder: Path, file: Path) -> None:
    """Raise ConfigError if ``file`` is a link that leads out of ``folder``.

    In the hub's cache a snapshot's files are links into the folder ``blobs`` of the same repository.
    """
    if not file.is_symlink():
        return
    allowed = [own := folder.resolve()]
    # The folder itself may be reached by a link: files are compared with the place where it really is.
    if own.parent.name == "snapshots":
        allowed.append((own.parent.parent / "blobs").resolve())
    try:
        place = file.resolve()
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"model: {file} is a link that leads nowhere: {error}") from error
    if not any(place.is_relative_to(root) for root in allowed):
        raise ConfigError(
            f"model: {file} is a link to {place}, outside the checkpoint's folder: put the file itself there"
        )


def check_no_kernels(file: Path) -> None:
    """Raise ConfigError, saying what the file wants, if it names kernels that are not transformers' own."""
    for path, key, value in fields_of(read_json(file)):
        if key in KERNEL_FIELDS and "/" in shown(value):
            raise problem_in(
                file, path, f"asks to load code from {shown(value)}, which Penstock never does; take it out"
            )


def code_refusal(file: Path, asked: object, missing: str) -> ConfigError:
    """The error for a file whose CODE_FIELD asks for code; ``missing`` names what transformers itself lacks."""
    return problem_in(
        file,
        CODE_FIELD,
        f"asks to run the checkpoint's own code ({shown(asked)}), which Penstock never does, and transformers "
        f"itself has no {missing}: use a checkpoint that needs no code, or a transformers that has it",
    )


def fields_of(table: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Every field of a table and of the tables in it: its path with dots, its own name and its value."""
    left = [("", table)]
    while left:
        where, inner = left.pop()
        for key, value in inner.items():
            path = f"{where}.{key}" if where else key
            yield path, key, value
            if isinstance(value, dict):
                left.append((path, value))


@contextmanager
def naming(file: Path | str) -> Iterator[None]:
    """Have errors of the operating system within the block name the file: those of writing to a full disk name none."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(file)
        raise


def read_json(file: Path) -> dict[str, Any]:
    """The table in ``file``; empty where there is no such file. Raises ConfigError for anything but a JSON object."""
    if not file.is_file():
        return {}
    try:
        content = from_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"model: {file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"model: {file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"model: {file} holds no JSON object but {shown(content)}")
    return content


def eos_token_ids(stated: object, file: Path) -> tuple[int, ...]:
    """The token ids in ``stated``, the field ``eos_token_id`` of ``file``: none, one or several.

    Raises ConfigError, naming the file, for anything else.
    """
    if stated is None:
        return ()
    ids = tuple(stated) if isinstance(stated, list | tuple) else (stated,)
    # ``type(one) is int``, not isinstance: true is no token id.
    if not all(type(one) is int and one >= 0 for one in ids):
        raise problem_in(file, "eos_token_id", f"is {shown(stated)}; it has to be a token id or a list of them")
    return ids


def generation_eos(folder: Path) -> tuple[int, ...]:
    """The EOS token ids of generation_config.json: chat models end their turns with one that the tokenizer lacks."""
    file = folder / GENERATION_FILE
    return eos_token_ids(read_json(file).get("eos_token_id"), file)


def problem_in(file: Path, field: str, problem: str) -> ConfigError:
    """The error that refuses a field of a checkpoint's file."""
    return ConfigError(f"model: {file}: {printable(field)} {problem}")


def shown(value: object, most: int = 200) -> str:
    """A value of a file as JSON for an error message, cut to ``most`` characters."""
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= most else f"{text[:most]}..."


def said(error: BaseException, most: int = 400) -> str:
    """A library's error about a file as one line, cut to ``most`` characters."""
    text = printable(" ".join(f"{type(error).__name__}: {error}".split()))
    return text if len(text) <= most else f"{text[:most]}..."


def shortage(error: BaseException) -> str:
    """The remedy where the system has refused memory or a thread, whatever library says so; empty for other errors."""
    if isinstance(error, MemoryError) or MEMORY_SAID.search(str(error)):
        return "this process may not have more memory: raise its limit (ulimit -v, a container's), or free some"
    if THREADS_SAID.search(str(error)):
        return "this user may not have more threads: raise the limit (ulimit -u, a container's pids)"
    return ""


def printable(text: str) -> str:
    """A file's text for an error message: control characters and what cannot be encoded are escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def allow_open_files(needed: int) -> int:
    """Raise this process's soft limit on open files to ``needed``, or as far as the hard one lets it.

    Returns how many it may open now.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return needed
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed


def cache_folder() -> Path:
    """Penstock's folder in the user's cache folder. Raises RuntimeError where the user has no home."""
    place = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(place) / "penstock"


CHANGED: Final = "has changed since the engine started; start it again to use what is there now"
"""Error text for a file whose stamp has changed; the file's name goes in front."""


class FileStamps:
    """Stamps of files, by which later changes are seen: every ordinary write changes the stamp.

    Links are followed, as in reading.
    """

    def __init__(self, stamps: dict[Path, tuple[int, ...]]) -> None:
        self._stamps = stamps

    @classmethod
    def of(cls, files: Iterable[Path]) -> FileStamps:
        """Take the files' stamps now. Raises OSError for a file that cannot be looked at."""
        return cls({file: stamp_of(file) for file in files})

    @property
    def changed(self) -> Path | None:
        """A file that has changed or can no longer be looked at; None if there is none."""
        for file, before in self._stamps.items():
            try:
                now = stamp_of(file)
            except OSError:
                return file
            if now != before:
                return file
        return None


def stamp_of(file: Path) -> tuple[int, ...]:
    """A file's device, inode number, size in bytes and time of last change in nanoseconds.

    Raises OSError if there is no such file.
    """
    found = file.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


# --------------------------------------------------------------------------------------------------------------- dtypes
# The number formats of weights and hidden states, under the names that options, messages and checkpoints use.

DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Each format in which a model can compute, with the bytes of one number."""
DTYPES: Final = ("auto", *DTYPE_BYTES)
"""Values of the option ``dtype``: auto is the checkpoint's own format, where the device is good at it."""
QUANTIZATIONS: Final = ("auto", "none", "int8", "int4")
"""Values of the option ``quantization``: the form in which weights are held."""

AUTO, EXACT, FAST, REFERENCE = "auto", "exact", "fast", "reference"
NUMERICS: Final = (AUTO, EXACT, FAST)
"""Values of the option ``numerics``: whether a row's bits depend on nothing but what it sees.

auto is exact where a model's layers can have that, else fast. REFERENCE, transformers' own modules without any of ours,
is for tests and no option.
"""
PROMISES: Final = {
    EXACT: "a text depends on no drafts, stages or other requests, to the last bit.",
    FAST: "where two tokens are nearly tied, rounding may decide by what is computed together.",
}
"""The promise about texts for each value of ``numerics`` with which layers compute."""


def torch_dtype(name: str) -> Any:
    """torch's dtype of a format's name. Raises ConfigError for an unknown one."""
    import torch

    if name not in DTYPE_BYTES:
        raise ConfigError(f"dtype is {name!r}; it has to be one of {', '.join(DTYPE_BYTES)}")
    return getattr(torch, name)


# -------------------------------------------------------------------------------------------------------------- scratch
# Temporary folders. A process that is killed leaves its own behind, and the next process removes it.

PREFIX: Final = "penstock-"
"""The beginning of the names of temporary folders."""
LOCK: Final = "in-use"
"""The lock file in each folder. The owner holds a lock on it, which the kernel releases however the owner ends."""
SETTLED_S: Final = 60.0
"""Age in seconds below which an unlocked folder may belong to a process that has not locked it yet."""

_held: dict[Path, int] = {}
"""This process's folders, each with the open file descriptor of its lock."""


@contextmanager
def scratch_folder(prefix: str = PREFIX, parent: Path | None = None) -> Iterator[Path]:
    """A new folder that only this user can open, until the block ends; in ``parent``, or the system's own folder."""
    folder = make_scratch(prefix, Path(tempfile.gettempdir()) if parent is None else parent)
    try:
        yield folder
    finally:
        remove_scratch(folder)


def lasting_scratch(prefix: str) -> Path:
    """A new folder that only this user can open, until ``remove_scratch`` or the end of this process."""
    folder, owner = make_scratch(prefix, Path(tempfile.gettempdir())), os.getpid()

    def end() -> None:
        if os.getpid() == owner:  # a forked child has the same functions to call at its end
            remove_scratch(folder)

    atexit.register(end)
    return folder


def remove_scratch(folder: Path) -> None:
    """Unlock and remove a folder of this process. A second call does nothing."""
    let_go(folder)
    shutil.rmtree(folder, ignore_errors=True)


def make_scratch(prefix: str, parent: Path) -> Path:
    """A new folder, locked until ``let_go``. Folders that killed processes left in ``parent`` are removed."""
    clear(prefix, parent)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    lock = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    # Kept open: closing the descriptor would release the lock.
    _held[folder] = lock
    return folder


def let_go(folder: Path) -> None:
    """Release the folder's lock. A second call does nothing."""
    if (lock := _held.pop(folder, None)) is not None:
        os.close(lock)


def clear(prefix: str, parent: Path) -> None:
    """Remove folders that processes left in ``parent`` when they ended without doing so themselves."""
    for folder in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # another process clears it, too, or it is another user's
            if is_left(folder):
                shutil.rmtree(folder)


def is_left(folder: Path) -> bool:
    """Whether a folder is this user's and unlocked. Raises OSError where it has no lock file, or a process locks it."""
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        return False
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        # Between making the lock file and locking it, an owner's folder looks as if it had been left.
        if time.time() - os.fstat(lock).st_mtime < SETTLED_S:
            return False
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(lock)
    return True
