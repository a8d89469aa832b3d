"""The commands that load a model: ``penstock generate``, ``run``, ``chat`` and ``serve``."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from penstock.cli import engine_args
from penstock.cli.engine_args import NamedModel, SpeculationOptions
from penstock.cli.options import command, new_app
from penstock.clients.chat import ChatOptions, run_chat
from penstock.config import OUTPUT, PROMPT, SAMPLING, FieldError, Option, check
from penstock.core import NO_TEXT, OUTLINE_MODES, SamplingParams, lone_surrogate
from penstock.engine.options import (
    MODEL_NAME,
    EngineOptions,
    ModelOptions,
    PipelineOptions,
    ReplicaOptions,
    SharingOptions,
    model_folder,
)
from penstock.environment import check_api_key_variable
from penstock.library.names import DEFAULT
from penstock.pipeline.forkserver import fork_from_here
from penstock.run import Asked
from penstock.server.settings import Listening, ServedNames, ServerSettings, name_of
from penstock.terminal import LineEditor
from penstock.text.chat import Conversation, read_conversation, read_template

# ------------------------------------------------------------------------------------------------------------- generate
# ``penstock generate``: one answer of a chat model, or one text continued, on the terminal or as JSON.

CHECKPOINTS: Final = "the checkpoint's"
"""The default of sampling parameters, as help shows it."""

generate_app = new_app()


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Options that replace the checkpoint's own sampling parameters; names are those of ``SamplingParams``."""

    max_tokens: Annotated[int, Option("Most tokens to generate.", SAMPLING)] = 128
    temperature: Annotated[
        float | None, Option("The logits are divided by it; 0 is greedy.", SAMPLING, default=CHECKPOINTS)
    ] = None
    top_p: Annotated[
        float | None,
        Option(
            "Keep the most probable tokens that together have this probability; 1 is off.",
            SAMPLING,
            default=CHECKPOINTS,
        ),
    ] = None
    top_k: Annotated[
        int | None, Option("Keep this many of the most probable tokens; 0 is off.", SAMPLING, default=CHECKPOINTS)
    ] = None
    min_p: Annotated[
        float | None,
        Option(
            "Keep tokens with at least this fraction of the most probable one's probability; 0 is off.",
            SAMPLING,
            default=CHECKPOINTS,
        ),
    ] = None
    seed: Annotated[
        int | None,
        Option(
            "Seed of sampling: the same one gives the same text, whatever the strategy and the stages.",
            SAMPLING,
            default="a fresh one",
        ),
    ] = None
    stop: Annotated[tuple[str, ...] | None, Option("End before this text. May be repeated.", SAMPLING, default="")] = (
        None
    )
    ignore_eos: Annotated[bool, Option("Go on after an end-of-text token.", SAMPLING, names=("--ignore-eos",))] = False

    @property
    def given(self) -> dict[str, Any]:
        """The parameters that were given, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """The text or conversation to answer or continue. Raises FieldError for options that exclude each other."""

    prompt: Annotated[
        str | None,
        Option(
            "Text that a chat model answers and any other model continues; '-' reads it from standard input. Without "
            "it a person is asked for it.",
            positional=True,
            default="",
        ),
    ] = None
    raw: Annotated[bool, Option("Continue PROMPT as it stands, with a chat model too.", PROMPT)] = False
    system_prompt: Annotated[
        str | None, Option("System message, which the model reads first.", PROMPT, default="none")
    ] = None
    messages: Annotated[
        Path | None,
        Option(
            "A conversation to answer, of which PROMPT is the next message: a JSON list of messages, or an object with "
            "messages and tools.",
            PROMPT,
            metavar="FILE.json",
            default="",
        ),
    ] = None
    chat_template: Annotated[
        Path | None,
        Option("Jinja template in place of the checkpoint's own.", PROMPT, metavar="FILE", default=""),
    ] = None
    outline_decoding: Annotated[
        str,
        Option(
            "on: the model writes an outline, then its points side by side, an answer that differs from the plain one; "
            "auto: only if the model calls the answer a list; off: never.",
            PROMPT,
        ),
    ] = "off"

    def __post_init__(self) -> None:
        check(self.outline_decoding in OUTLINE_MODES, "outline_decoding", self.outline_decoding, "off, auto or on")
        if self.raw:
            given = [name for name in ("system_prompt", "messages", "chat_template") if getattr(self, name) is not None]
            given += ["outline_decoding"] if self.outline_decoding != "off" else []
            for name in given:
                raise FieldError("raw", f"continues a text without a chat template; remove it, or {name}")


TraceFile = Annotated[
    Path | None,
    Option(
        "Write a trace for penstock trace and ui.perfetto.dev: every batch on every stage.",
        OUTPUT,
        metavar="FILE",
        default="",
    ),
]


@generate_app.command()
@command
def generate(
    *,
    prompt: PromptOptions,
    model: NamedModel,
    pipeline: PipelineOptions,
    replicas: ReplicaOptions,
    speculation: SpeculationOptions,
    sampling: SamplingOptions,
    as_json: Annotated[bool, Option("Print one JSON object at the end instead.", OUTPUT, names=("--json",))] = False,
    trace: TraceFile = None,
) -> None:
    check_engines(replicas.data_parallel_size, prompt, trace)
    asked = asked_of(prompt)
    SamplingParams(**sampling.given)  # refuses a bad value now rather than after the stages have started

    def options_for(name: str) -> EngineOptions:
        config = speculation.config(name)
        groups = (vars(replace(model, model=name)), vars(pipeline), vars(replicas))
        given = {field: value for group in groups for field, value in group.items()}
        return EngineOptions(**given, speculative_config=config)

    from penstock.engine.resolve import check_options
    from penstock.run import complete

    options = engine_args.prepared(model.model, options_for, check_options)
    complete(asked, options, sampling.given, as_json, trace)


def check_engines(count: int, prompt: PromptOptions, trace: Path | None) -> None:
    """Raise FieldError if several engines would have nothing to share."""
    if count <= 1:
        return
    if prompt.outline_decoding == "off":
        problem = f"is {count}, and there is one prompt, which one engine answers: leave it out"
        raise FieldError("data_parallel_size", f"{problem}, or spread an answer's points by outline_decoding")
    if trace is not None:
        raise FieldError("trace", f"follows one engine, and data_parallel_size is {count}: leave one of them out")


def asked_of(options: PromptOptions) -> Asked:
    """The prompt, with all files read by now. Raises UsageError without one, ConfigError for a file."""
    conversation = Conversation() if options.messages is None else read_conversation(options.messages)
    text = options.prompt if options.prompt is None and conversation.messages else read_prompt(options.prompt)
    if text is None and conversation.messages[-1]["role"] == "assistant":
        raise FieldError("messages", "end with the assistant's own turn, to which there is no answer; give a PROMPT")
    check_text("prompt", text)
    check_text("system_prompt", options.system_prompt)
    if options.system_prompt is not None:
        system = {"role": "system", "content": options.system_prompt}
        conversation = replace(conversation, messages=[system, *conversation.messages])
    return Asked(
        text=text,
        conversation=conversation,
        chat_template=None if options.chat_template is None else read_template(options.chat_template),
        raw=options.raw,
        outline_decoding=options.outline_decoding,
    )


def check_text(name: str, text: str | None) -> None:
    """Raise FieldError for a text that could not be decoded: half of a surrogate pair stands for each such byte."""
    if lone_surrogate(text):
        raise FieldError(name, f"{NO_TEXT} {sys.getfilesystemencoding()}")


def read_prompt(argument: str | None) -> str:
    """The prompt, unchanged: the argument, all of standard input, or the text that a person is asked for.

    Raises UsageError if there is none.
    """
    if argument is not None and argument != "-":
        return argument
    if argument is None and sys.stdin.isatty():
        text = asked_for() if sys.stderr.isatty() else ""
    else:
        text = sys.stdin.read()
    if not text:
        raise typer.BadParameter("give a text, or write one to standard input", param_hint="PROMPT")
    return text


def asked_for() -> str:
    """The prompt that a person types on the terminal; "" if the person leaves with Ctrl-D."""
    # On standard error, since standard output may be a file that shall hold nothing but the answer.
    editor = LineEditor(sys.stderr)
    while (text := editor.read("Prompt: ")) is not None:
        if text.strip():
            return text
    return ""


# ------------------------------------------------------------------------------------------------------------------ run
# ``penstock run``: load a model and chat with it, in one command.

run_app = new_app()


@dataclass(frozen=True, kw_only=True)
class ChattedModel(ModelOptions):
    """The model's options; here the model is an argument."""

    model: Annotated[str, replace(MODEL_NAME, positional=True, panel=None)] = DEFAULT


@run_app.command()
@command
def run(
    *,
    model: ChattedModel,
    system_prompt: Annotated[str, Option("System message, which the model reads first.", PROMPT, default="none")] = "",
    chat_template: Annotated[
        Path | None, Option("Jinja template in place of the checkpoint's own.", PROMPT, metavar="FILE", default="")
    ] = None,
    pipeline: PipelineOptions,
    speculation: SpeculationOptions,
) -> None:
    check_text("system_prompt", system_prompt)
    template = None if chat_template is None else read_template(chat_template)
    from penstock import run as running
    from penstock.engine.resolve import check_options

    def options_for(name: str) -> EngineOptions:
        config = speculation.config(name)
        return EngineOptions(**vars(replace(model, model=name)), **vars(pipeline), speculative_config=config)

    options = engine_args.prepared(model.model, options_for, check_options)
    running.run(options, name_of(options.model), system_prompt, template)


# ----------------------------------------------------------------------------------------------------------------- chat
# ``penstock chat``: a conversation with a server.

chat_app = new_app()


@chat_app.command()
@command
def chat(*, options: ChatOptions) -> None:
    run_chat(options)


# ---------------------------------------------------------------------------------------------------------------- serve
# ``penstock serve``: an engine behind an OpenAI-compatible server.

serve_app = new_app()


@dataclass(frozen=True, kw_only=True)
class ServedModel(ModelOptions):
    """The model's options; here the model is an argument."""

    model: Annotated[str, replace(MODEL_NAME, positional=True, panel=None)] = DEFAULT


@serve_app.command()
@command
def serve(
    *,
    listening: Listening,
    served_model_name: ServedNames = (),
    settings: ServerSettings,
    sharing: SharingOptions,
    model: ServedModel,
    pipeline: PipelineOptions,
    replicas: ReplicaOptions,
    speculation: SpeculationOptions,
) -> None:
    def engine_for(name: str) -> EngineOptions:
        groups = (vars(sharing), vars(replace(model, model=name)), vars(pipeline), vars(replicas))
        given = {field: value for group in groups for field, value in group.items()}
        return EngineOptions(**given, speculative_config=speculation.config(name))

    from penstock.engine import resolve

    def check(engine: EngineOptions) -> None:
        """Refuse what the server would refuse, before anything else is printed."""
        listening.check_certificate()
        resolve.check_options(engine)

    engine = engine_args.prepared(model.model, engine_for, check)
    resolve.check_options(engine)
    check_api_key_variable(os.environ)
    listening.allow_open_files()
    with listening.bind() as bound:
        if not settings.api_keys and settings.api_key_file is None:  # stages are forked from no process that has keys
            fork_from_here(model_folder(engine.model, "target"))
        from penstock.server.command import run_serve

        names = served_model_name or (name_of(engine.model),)
        run_serve(engine, replace(settings, served_model_name=names), listening, bound)
