"""The program ``penstock``: a command's module is loaded only when it is called, so that help is quick."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

import penstock
from penstock.cli.options import UNREAD, AsJson, command, new_app, open_standard_files, report
from penstock.config import FieldError, Option
from penstock.core import PenstockError

# ----------------------------------------------------------------------------------------------------------------- help
# ``penstock help``: the help of a command, or the whole manual.

PAGE: Final = "penstock.1"
"""The name of the manual page's file."""

help_app = new_app()


@help_app.command("help")
@command
def show_help(
    *,
    of: Annotated[
        tuple[str, ...],
        Option(
            "The command that is asked about, such as bench or bench serve.",
            metavar="COMMAND",
            positional=True,
            default="all",
        ),
    ] = (),
    man: Annotated[bool, Option("Show the manual of all commands, as man penstock does.")] = False,
) -> None:
    if man:
        show_manual()
        return

    refuse_unknown(of)
    app([*of, "--help"] if of else [], prog_name="penstock")


def refuse_unknown(words: tuple[str, ...]) -> None:
    """Raise FieldError if the words are no command; the error names the help that lists the commands."""

    found = typer.main.get_command(app)
    for known, word in enumerate(words):
        below = getattr(found, "commands", {})
        if word not in below:
            lists = " ".join(["penstock", "help", *words[:known]])
            raise FieldError("command", f"is {' '.join(words)!r}; {lists!r} shows what there is")
        found = below[word] if known else loaded(below[word])


def show_manual() -> None:
    """Show the manual page with ``man`` on a terminal, else print it. Raises PenstockError if it is not installed."""
    page = manual()
    if page is None:
        raise PenstockError(f"the manual ({PAGE}) has not been installed; penstock help COMMAND tells of each command")
    if sys.stdout.isatty() and shutil.which("man") is not None:
        raise typer.Exit(subprocess.run(["man", str(page)], check=False).returncode)
    typer.echo(page.read_text(encoding="utf-8"), nl=False)


def manual() -> Path | None:
    """The path of the manual page, installed with the package or in the checkout of an editable installation."""
    places = [Path(penstock.__file__).parents[1] / "docs" / "reference" / PAGE]
    try:
        found = distribution("penstock")
        places += [Path(str(found.locate_file(file))) for file in found.files or () if file.name == PAGE]
    except PackageNotFoundError:
        pass
    return next((place.resolve() for place in places if place.is_file()), None)


# ----------------------------------------------------------------------------------------------------------------- pull
# ``penstock pull``: fetch models before they are run.

pull_app = new_app()

Names = Annotated[
    tuple[str, ...],
    Option(
        "Short name (penstock list --names), hub id, OWNER/REPO:FORMAT for one of several GGUF files, or a GGUF file's "
        "address.",
        metavar="MODEL...",
        positional=True,
    ),
]


@pull_app.command()
@command
def pull(*, models: Names) -> None:
    from penstock.library.shelf import pull_models

    pull_models(models)


# ----------------------------------------------------------------------------------------------------------------- list
# ``penstock list``: the models on this host.

list_app = new_app()


@list_app.command("list")
@command
def list_kept(
    *,
    names: Annotated[bool, Option("List the short names that can be pulled, and what they stand for.")] = False,
    as_json: AsJson = False,
) -> None:
    from penstock.library.shelf import list_models

    list_models(as_json, names)


# ------------------------------------------------------------------------------------------------------------------- rm
# ``penstock rm``: remove models from this host.

rm_app = new_app()

KeptNames = Annotated[
    tuple[str, ...],
    Option("Models as penstock list shows them, or their short names.", metavar="MODEL...", positional=True),
]


@rm_app.command()
@command
def rm(*, models: KeptNames) -> None:
    from penstock.library.shelf import remove_models

    remove_models(models)


# ------------------------------------------------------------------------------------------------------------------ app
# The program itself, which knows the commands' names and help without importing their modules.
COMMANDS: Final = {
    "run": "Load MODEL and chat with it in this terminal, or answer a pipe's lines one after the other.",
    "generate": "Answer PROMPT, or continue it where the model is no chat model, printing the text as it is committed.",
    "serve": "Serve MODEL over HTTP as the OpenAI API has it, with a web page.",
    "pull": "Fetch MODELs by short name, hub id or address, so that they are here when they are run.",
    "list": "List the models that are kept on this host, with their sizes.",
    "rm": "Remove MODELs from this host; those of the hub's cache are removed for other programs, too.",
    "worker": "Lend this host to engines on other hosts, until the command ends.",
    "keys": "Make the keys with which a cluster's hosts know each other: 'new' begins a cluster, 'add' lets a host in.",
    "hosts": (
        "List HOSTS on which workers run: devices, memory, cores, versions, and how far away they are. 'hosts setup' "
        "installs Penstock on some over ssh."
    ),
    "doctor": "Measure this host, others and the links between them, and say what to change.",
    "rebalance": "Move a server's stages back to hosts that have returned now, without waiting until no request runs.",
    "replicas": "Show the engines of a server with --data-parallel-size, drain or restart them.",
    "demo": "Watch the plain pipeline and Penstock write the same text on four emulated edge boards.",
    "chat": "Talk to a model behind an OpenAI-compatible server; a pipe's lines are answered one after the other.",
    "simulate": (
        "Compare strategies on modelled devices in virtual time: no model needed, thousands of tokens in seconds."
    ),
    "profile": "Measure for plans how long MODEL's layers take on this host or others, and the links between them.",
    "plan": "Choose which devices hold which layers, in which order, from a cluster file's prices and by simulation.",
    "compare": "Compare two benches: which settings differ, and how much faster the second is on the same requests.",
    "acceptance": "Say how often Penstock's rule and the papers' accept one of k candidates, as recorded.",
    "trace": "Say why a run was slow: how busy each stage was, and what it waited for.",
    "train": "Train a drafter on a target's own hidden states, in the format that other engines load.",
    "help": "Show the help of COMMAND; --man shows the manual of all commands.",
    "bench": (
        "Compare strategies: the same prompts through the same stages, interleaved. 'bench serve' measures a server."
    ),
}
"""The commands with their help.

The app of a command, ``NAME_app``, is in the module of its name, or in the module that PLACES names.
"""
PLACES: Final = {
    **dict.fromkeys(("chat", "generate", "serve"), "run"),
    **dict.fromkeys(("pull", "list", "rm", "help"), "app"),
    **dict.fromkeys(("worker", "keys", "hosts", "doctor", "profile", "rebalance", "replicas"), "hosts"),
    **dict.fromkeys(("bench", "simulate", "acceptance", "compare", "trace", "train", "plan", "demo"), "lab"),
}
"""The modules, in ``penstock.cli``, of commands that have no module of their name."""


class Commands(TyperGroup):
    """The group of all commands: listed from COMMANDS, each loaded when it is called."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        # Stubs, so that listing the commands imports none of their modules.
        self.commands = {name: TyperCommand(name, help=about) for name, about in COMMANDS.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the arguments name, with its options."""
        name, found, rest = super().resolve_command(ctx, args)
        return name, found and loaded(found), rest


def loaded(listed: Any) -> Any:
    """The command with its options, from its module; ``listed`` is a stub that has only its help."""
    module = import_module(f"penstock.cli.{PLACES.get(listed.name, listed.name)}")
    found = typer.main.get_command(getattr(module, f"{listed.name}_app"))
    found.help = listed.help
    return found


app = new_app(completion=True)


def show_version(wanted: bool) -> None:
    """Print the version and exit, if it is wanted."""
    if wanted:
        typer.echo(f"penstock {penstock.__version__}")
        raise typer.Exit


@app.callback(
    cls=Commands,
    no_args_is_help=True,
    help="Penstock: one language model over several devices, kept full with speculated tokens. Same text, sooner.",
)
def top(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """The entry point ``penstock``."""
    open_standard_files()
    try:
        app(prog_name="penstock")
    except OSError as error:  # raised while help is printed: commands report their own errors
        report(error)
        sys.exit(1)
    except SystemExit as end:
        # Rich, which prints tables, and Typer, which prints help, have another code where nobody reads any more.
        if isinstance(end.__context__, BrokenPipeError):
            sys.exit(UNREAD)
        raise
    finally:
        # Python ends now what the command has begun, which takes moments: another Ctrl-C would leave some of it behind.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
