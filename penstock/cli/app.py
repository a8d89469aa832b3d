"""The program ``penstock``: a command's module is loaded only when it is called, so that help is quick."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

import penstock
from penstock.cli.options import new_app, report

COMMANDS: Final = {
    "run": "Load MODEL and chat with it in this terminal, or answer a pipe's lines one after the other.",
    "generate": "Answer PROMPT, or continue it where the model is no chat model, printing the text as it is committed.",
    "serve": "Serve MODEL over HTTP as the OpenAI API has it, with a web page.",
    "pull": "Fetch MODELs by short name, hub id or address, so that they are here when they are run.",
    "list": "List the models that are kept on this host, with their sizes.",
    "rm": "Remove MODELs from this host; those of the hub's cache are removed for other programs, too.",
    "worker": "Lend this host to engines on others, for as long as it runs.",
    "keys": "Make the keys with which the hosts of a cluster know each other: new begins one, add HOST lets one in.",
    "hosts": (
        "List HOSTS on which workers run: devices, memory, cores, versions, and how far away they are. 'hosts setup' "
        "installs Penstock on some over ssh."
    ),
    "doctor": "Measure this host, others and the links between them, and say what to change.",
    "rebalance": "Have a server's stages move back to hosts that are back now, not once no request runs.",
    "replicas": "Show the engines of a server with --data-parallel-size, drain or restart them.",
    "demo": "Watch the plain pipeline and Penstock write the same text on four emulated edge boards.",
    "chat": "Talk to a model behind an OpenAI-compatible server; a pipe's lines are answered one after the other.",
    "simulate": (
        "Compare strategies on modelled devices in virtual time: no model needed, thousands of tokens in seconds."
    ),
    "profile": "Measure what MODEL's layers take on this host or on others, and the links between them, for plans.",
    "plan": "Choose which devices hold which layers, in which order, from a cluster file's prices and by simulation.",
    "compare": "Two benches: which settings differ, and how much faster the second one is on the same requests.",
    "acceptance": "How often Penstock's rule and the papers' accept one of k candidates, from recorded distributions.",
    "trace": "Say why a run was slow: how busy each stage was, and what it waited for.",
    "train": "Train a drafter on a target's own hidden states, in the format that other engines load.",
    "help": "The help of COMMAND; --man shows the manual of all commands.",
    "bench": (
        "Compare strategies: the same prompts through the same stages, interleaved. 'bench serve' measures a server."
    ),
}
"""The commands with their help.

The app of a command, ``NAME_app``, is in the module of its name, or in the one that PLACES names.
"""
PLACES: Final = {
    "chat": "run",
    **dict.fromkeys(("pull", "list", "rm"), "library"),
    **dict.fromkeys(("worker", "keys", "hosts", "doctor", "profile", "rebalance", "replicas"), "hosts"),
    **dict.fromkeys(("bench", "simulate", "acceptance", "compare", "trace", "train", "plan", "demo"), "lab"),
}


class Commands(TyperGroup):
    """The group of all commands: listed from COMMANDS, loaded when called."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        # Stubs, so that listing the commands imports none of their modules.
        self.commands = {name: TyperCommand(name, help=about) for name, about in COMMANDS.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, found, rest = super().resolve_command(ctx, args)
        return name, found and loaded(found), rest


def loaded(listed: Any) -> Any:
    """The command with its options, from its module; the listed one is only a stub with its help."""
    module = import_module(f"penstock.cli.{PLACES.get(listed.name, listed.name)}")
    found = typer.main.get_command(getattr(module, f"{listed.name}_app"))
    found.help = listed.help
    return found


app = new_app(completion=True)


def show_version(wanted: bool) -> None:
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
    try:
        app()
    except OSError as error:  # of help, which no command reports
        report(error)
        sys.exit(1)
