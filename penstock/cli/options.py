"""Options of commands: fields of dataclasses as Typer's parameters, and errors as lines on stderr and exit codes."""

from __future__ import annotations

import dataclasses
import errno
import inspect
import io
import os
import shutil
import signal
import stat
import sys
import threading
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.config import OUTPUT, FieldError, Option, check_writable
from penstock.core import ConfigError, PenstockError, RequestError
from penstock.files import NAMED_PIPE, is_named_pipe, said, shortage

if TYPE_CHECKING:
    from sys import UnraisableHookArgs


# ------------------------------------------------------------------------------------------------------------ parameter
# Turns a field's annotation into Typer's parameter, and the value that Typer has read into the field's.

REQUIRED: Final = inspect.Parameter.empty
"""Mark of a field without a default, as ``inspect`` has it for parameters."""
FOLDER: Final = "FOLDER"
"""Metavar of options that take a folder's path as text."""
FILE, DIR = "FILE", "DIR"
"""Words in the metavars of options under OUTPUT that name what a command writes."""
WRITTEN: Final = (str, int, float, bool, Path)
"""Types that an argument on the command line can have."""


@dataclass(frozen=True)
class Field:
    """A field of a group, or a parameter of a command. ``default`` is ``REQUIRED`` if it has none."""

    name: str
    hint: Any
    default: Any

    @property
    def option(self) -> Option | None:
        """The field's ``Option``; None if its annotation has none."""
        return next((one for one in typing.get_args(self.hint)[1:] if isinstance(one, Option)), None)


def parameter_of(field: Field) -> inspect.Parameter:
    """Typer's parameter for a field. A field without an ``Option`` is annotated for Typer already."""
    option = field.option
    if option is None:
        return parameter(field.name, field.default, field.hint)
    settings: dict[str, Any] = {
        "help": option.help,
        "rich_help_panel": option.panel,
        "metavar": option.metavar,
        "envvar": option.envvar,
        "show_default": True if option.default is None else option.default or False,
        "autocompletion": completion_of(option.values) if option.values else None,
    }
    info = typer.Argument(**settings) if option.positional else typer.Option(*names_of(field, option), **settings)
    default = written_default(field, option)
    hint = written_type(field, option)
    return parameter(field.name, default, Annotated[hint if default is not None else hint | None, info])


def completion_of(values: tuple[str, ...]) -> Callable[[str], list[str]]:
    """A function from the text typed so far to the values that begin with it; of a list, with its last entry."""

    def completed(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{value}" for value in values if value.startswith(last)]

    return completed


def names_of(field: Field, option: Option) -> tuple[str, ...]:
    """The option's names; () leaves the name to Typer. A bool that is off by default has none to switch it off."""
    own = f"--{field.name.replace('_', '-')}"
    return option.names or ((own,) if field.default is False else ())


def parameter(name: str, default: Any, hint: Any) -> inspect.Parameter:
    """A keyword parameter of a signature."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def value_of(field: Field, given: Any) -> Any:
    """The field's value, from the value that Typer read.

    Raises FieldError for an empty path, and for the path of a named pipe.
    """
    option = field.option
    if option is None:
        return given
    if option.parse is not None:
        return option.parse(given)
    if kind(field) is Path or option.metavar == FOLDER:
        for one in several(given):
            check_path(field.name, one)
    if is_tuple(field):
        return tuple(map(kind(field), given))
    return not given if switches_off(field, option) else kind(field)(given)


def check_path(name: str, path: str) -> None:
    """Raise FieldError for a path that is empty, or that of a named pipe."""
    # A shell's variable that is not set gives an empty text, and Python would take it for the current folder.
    if not path:
        raise FieldError(name, "is empty; name a place, or leave it out")
    # Opening a named pipe would wait for its other end, without a word to the user.
    if is_named_pipe(Path(path)):
        raise FieldError(name, f"is {path!r}, which {NAMED_PIPE}")


def written_type(field: Field, option: Option) -> Any:
    """The type that Typer reads: the field's own, in a list for a tuple.

    It is text for an option that parses it itself, and for paths: an empty one has to be told from the current folder.
    """
    if option.parse is not None:
        return str
    read = str if kind(field) is Path else kind(field)
    return list[read] if is_tuple(field) else read  # type: ignore[valid-type]


def written_default(field: Field, option: Option) -> Any:
    """The default that Typer is given; None where it shows none, and the field's own default holds."""
    if field.default is REQUIRED:
        return REQUIRED
    if switches_off(field, option):
        return False
    if option.parse is not None:
        return text_of(field.default) if field.default and option.default is None else None
    return None if is_tuple(field) else field.default


def text_of(value: Any) -> str:
    """A value as it is typed on the command line: a tuple with commas, floats as short as possible."""
    if isinstance(value, tuple):
        return ",".join(map(text_of, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def switches_off(field: Field, option: Option) -> bool:
    """Whether giving the option turns off a bool that is on by default."""
    return field.default is True and bool(option.names)


def is_tuple(field: Field) -> bool:
    """Whether the option may be repeated: its field is a tuple."""
    return typing.get_origin(plain(field)) is tuple


def kind(field: Field) -> Any:
    """The type of the field's value, or of each of its values."""
    return typing.get_args(plain(field))[0] if is_tuple(field) else plain(field)


def plain(field: Field) -> Any:
    """The field's type without ``Annotated``; in a union, the alternative that can be written on a command line."""
    hint = typing.get_args(field.hint)[0]
    parts = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return next(part for part in parts if part in WRITTEN or typing.get_origin(part) is tuple)


# --------------------------------------------------------------------------------------------------------------- errors
# Errors on the command line: one line on stderr, and an exit code.

INTERRUPTED: Final = 130
"""Exit code after Ctrl-C: 128 + SIGINT."""
UNREAD: Final = 141
"""Exit code if nobody reads the output any more: 128 + SIGPIPE."""
REMEDIES: Final = {
    errno.ENOSPC: "free some space there",
    errno.EDQUOT: "free some space there",
    errno.EROFS: "choose a folder that can be written to",
    errno.EACCES: "change its rights, or choose another place",
    errno.EPERM: "change its rights, or choose another place",
    errno.ENOENT: "make it, or choose another place",
    errno.ENOTDIR: "choose another place: a part of the path is a file",
    errno.EISDIR: "choose another place: it is a folder",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENOMEM: "free some memory, or raise the limit (ulimit -v, a container's)",
    errno.EAGAIN: "raise the limit on processes and threads (ulimit -u, a container's pids)",
}
"""The remedy for each kind of failure of the operating system, by ``errno``."""
AGAIN_S: Final = 0.05
"""Seconds after which a Ctrl-C that Python dropped is sent again. The hook runs inside a deletion, where Python would
drop it again; nobody notices so short a wait."""


def open_standard_files() -> None:
    """Open /dev/null for each of the standard files that whoever started this process has closed, as daemons do.

    Python has None in their place, and the next file that is opened would have their number. What cannot be decoded or
    encoded is no error of Python's: input is refused in words, and output has a question mark in its place.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))
        file, errors = getattr(sys, name), "surrogateescape" if mode == "r" else "replace"
        if isinstance(file, io.TextIOWrapper) and file.errors == "strict":
            file.reconfigure(errors=errors)


@contextmanager
def reported() -> Iterator[None]:
    """A context that reports errors of Penstock and of files in one line on stderr, and turns them into exit codes.

    Ctrl-C becomes an exit code, too. With PENSTOCK_DEBUG set, errors of files show their traceback.
    """
    hook, sys.unraisablehook = sys.unraisablehook, interrupt_again
    try:
        yield
        sys.stdout.flush()  # here and not at Python's exit, so that an error of the output is reported
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except PenstockError as error:
        typer.echo(f"penstock: error: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, ConfigError | RequestError) else 1) from None
    except BrokenPipeError:
        # At its exit Python would try to write the rest once more, and complain: it goes to /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(UNREAD) from None
    except OSError as error:
        report(error)
        raise typer.Exit(1) from None
    except (MemoryError, RuntimeError) as error:
        if not (lack := shortage(error)):
            raise
        typer.echo(f"penstock: error: {said(error).rstrip(': ')}: {lack}", err=True)
        raise typer.Exit(1) from None
    finally:
        sys.unraisablehook = hook


def report(error: OSError) -> None:
    """Print an error of the operating system in one line on stderr; with PENSTOCK_DEBUG set raise it."""
    if os.environ.get("PENSTOCK_DEBUG"):
        raise error
    typer.echo(f"penstock: error: {words_of(error)}", err=True)


def words_of(error: OSError) -> str:
    """The file, its problem and the remedy; for an error without a file, the error's own words and the remedy."""
    remedy = REMEDIES.get(error.errno or 0, "PENSTOCK_DEBUG=1 shows where it came from")
    if error.filename is None:
        return f"{error.strerror or error}; {remedy}"
    return f"{error.filename}: {error.strerror}; {remedy}"


def interrupt_again(dropped: UnraisableHookArgs) -> None:
    """Send Ctrl-C again if Python dropped it: errors raised while an object is deleted go to this hook and are lost."""
    # Later, not at once: this hook runs inside the deletion, where Python would drop the new Ctrl-C again.
    if issubclass(dropped.exc_type, KeyboardInterrupt):
        threading.Timer(AGAIN_S, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(dropped)


# -------------------------------------------------------------------------------------------------------------- command
# Typer commands made from groups of options, so that each option is defined once, in its group.
#
# ::
#
#     @command
#     def generate(prompt: Prompt, model: ModelOptions, pipeline: PipelineOptions) -> None: ...
#
# A group is a dataclass. Each of its fields with an ``Option`` becomes an option of the command; a field that is itself
# a group contributes its own. A command's other parameters have an ``Option`` too, or are Typer's own.


NARROW: Final = 60
"""Columns of a terminal below which help is a plain list. Typer's tables cut off the names of options in a narrower
one."""


def new_app(*, completion: bool = False) -> typer.Typer:
    """An app of one command, or of several under one name. ``completion`` adds the options for shell completion."""
    return typer.Typer(
        add_completion=completion,
        # In a narrow terminal Typer's tables cut off the names of options.
        rich_markup_mode="rich" if shutil.get_terminal_size().columns >= NARROW else None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def command(function: Callable[..., None]) -> Callable[..., None]:
    """``function`` as a Typer command: options in place of groups, and Penstock's errors reported in one line."""

    def run(**given: Any) -> None:
        with reported():
            check_files(fields, given)
            call(function, given)

    fields = [*options_of(function)]
    parameters = [parameter_of(field) for field in fields]
    run.__name__, run.__doc__ = function.__name__, function.__doc__
    # Typer reads the signature to find the options; ``run`` itself takes whatever Typer has parsed.
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def check_files(fields: Sequence[Field], given: Mapping[str, Any]) -> None:
    """Raise FieldError for a file to write that cannot be written, or that another option names, too.

    Such a file would be lost before it is read, or would keep only the later of two outputs. Nothing is changed.
    """
    named = [(field, Path(one)) for field in fields for one in several(given[field.name]) if is_place(one)]
    for number, (field, file) in enumerate(named):
        if not writes(field):
            continue
        for other, place in (*named[:number], *named[number + 1 :]):
            if is_same(file, place) and (writes(other) or place.exists()):
                raise FieldError(field.name, f"is {str(file)!r}, which {other.name} names, too; choose another place")
        if field.option is not None and FILE in (field.option.metavar or ""):
            check_writable(field.name, file)


def several(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else (value,)


def is_place(value: Any) -> bool:
    """Whether an option's value may name a file that could be lost: no standard file, and no device."""
    if not isinstance(value, str) or value in ("", "-") or "\0" in value:
        return False
    try:
        mode = os.stat(value).st_mode
    except OSError:  # there is none, or the text is no path
        return True
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)


def writes(field: Field) -> bool:
    """Whether the option names a file or folder that the command writes."""
    option = field.option
    return option is not None and option.panel == OUTPUT and any(word in (option.metavar or "") for word in (FILE, DIR))


def is_same(one: Path, other: Path) -> bool:
    """Whether both paths lead to one file, or will."""
    try:
        return one.samefile(other)
    except OSError:
        return os.path.realpath(one) == os.path.realpath(other)


def options_of(owner: Any) -> Iterator[Field]:
    """The options of a command or a group; a group within it stands for its own options."""
    for field in fields_of(owner):
        if is_group(field.hint):
            yield from options_of(field.hint)
        else:
            yield field


def call(owner: Any, given: dict[str, Any]) -> Any:
    """Call a command, or make a group, with the given options; the others have their defaults."""
    arguments = {}
    for field in fields_of(owner):
        if is_group(field.hint):
            arguments[field.name] = call(field.hint, given)
        # None means that the option was not given: the default of the dataclass holds, which Typer does not know.
        elif given[field.name] is not None:
            arguments[field.name] = value_of(field, given[field.name])
    return owner(**arguments)


def fields_of(owner: Any) -> Iterator[Field]:
    """A command's parameters, or the fields of a group that are groups or have an ``Option``."""
    hints = typing.get_type_hints(owner, include_extras=True)
    if is_group(owner):
        found = (Field(one.name, hints[one.name], default_of(one)) for one in dataclasses.fields(owner))
        yield from (field for field in found if field.option is not None or is_group(field.hint))
    else:
        for parameter in inspect.signature(owner).parameters.values():
            yield Field(parameter.name, hints[parameter.name], parameter.default)


def is_group(hint: Any) -> bool:
    """Whether a type is a group of options: a dataclass."""
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def default_of(field: dataclasses.Field[Any]) -> Any:
    """The field's default; None if a factory makes it, REQUIRED if it has none."""
    if field.default is not MISSING:
        return field.default
    return REQUIRED if field.default_factory is MISSING else None


# -------------------------------------------------------------------------------------------------------------- outputs
# Options about output that several commands have.

AsJson = Annotated[bool, Option("Print JSON and nothing else.", names=("--json",))]
