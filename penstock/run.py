"""The work of ``penstock generate`` and ``penstock run`` after their flags are parsed: one answer, or a chat."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, cast

import httpx
import typer

from penstock.clients.api import Server
from penstock.clients.chat import ChatOptions, chat_over
from penstock.config import FieldError
from penstock.core import CompletionOutput, FinishReason, OutlineOutput, SamplingParams
from penstock.engine.completion import Prompt
from penstock.engine.loop import Observer
from penstock.engine.opening import loaded, watched
from penstock.engine.options import EngineOptions, model_folder
from penstock.engine.resolve import check_options
from penstock.files import naming
from penstock.hosts.fleet import FleetExecutor
from penstock.outlines.steps import Dialogue
from penstock.pipeline.forkserver import fork_from_here, shared_fork_server
from penstock.server.settings import ServerSettings
from penstock.terminal import CUT, EARLY, FULL, end_of, end_words, gain_words
from penstock.text.chat import ChatFormat, Conversation, Messages, chat_prompt, chat_sampling
from penstock.text.tokenizer import Tokenizer, load_tokenizer
from penstock.trace import EMULATED, trace_writer

if TYPE_CHECKING:
    from penstock.engine.completion import Completion
    from penstock.engine.llm import LLM
    from penstock.engine.resolve import Resolved
    from penstock.engine.scheduler import Advance
    from penstock.requests.request import Request


# ------------------------------------------------------------------------------------------------------------- generate
# The work of ``penstock generate`` after its flags are parsed: stream one answer or continuation, and report on it.

WAYS_ON: Final = {
    CUT: "--max-tokens allows more",
    FULL: "--max-model-len makes it longer where the model has room for that, or shorten the prompt",
    EARLY: "ask again",
}
"""The user's next step after an answer that did not end by itself."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The conversation to answer, or the text to continue as it stands."""

    text: str | None = None
    """The last message of ``conversation``, or the text to continue."""
    conversation: Conversation = field(default_factory=Conversation)
    chat_template: str | None = None
    """Jinja text that replaces the checkpoint's chat template; None: the checkpoint's own."""
    raw: bool = False
    """Whether the text is continued as it stands even by a chat model."""
    outline_decoding: str = "off"

    @property
    def messages(self) -> Messages:
        """All messages, ``text`` as the user's last one."""
        own = [] if self.text is None else [{"role": "user", "content": self.text}]
        return [*self.conversation.messages, *own]

    def is_chat(self, tokenizer: Tokenizer) -> bool:
        """Whether messages are answered rather than a text continued: for a chat model, and if messages are given."""
        given = bool(self.conversation.messages) or self.chat_template is not None
        return not self.raw and (given or tokenizer.is_of_chat)

    def prompt(self, tokenizer: Tokenizer) -> Prompt:
        """The prompt for the engine. Raises RequestError if a chat template is missing, or refuses the messages."""
        if not self.is_chat(tokenizer):
            return self.text or ""
        return chat_prompt(tokenizer, self.messages, self._format)

    def dialogue(self, tokenizer: Tokenizer) -> Dialogue:
        """The prompt as a dialogue, for an answer in points. Raises RequestError as ``prompt`` does."""
        if not self.is_chat(tokenizer):
            return Dialogue.of_text(tokenizer, self.text or "")
        return Dialogue(tokenizer, self.messages, self._format)

    @property
    def _format(self) -> ChatFormat:
        return ChatFormat(
            chat_template=self.chat_template,
            tools=self.conversation.tools,
            chat_template_kwargs=self.conversation.chat_template_kwargs,
        )


class Follower(Observer):
    """An observer of one request that prints its text as it is committed, and has its completion for the report."""

    def __init__(self, out: IO[str] | None) -> None:
        self.prompt_token_ids: list[int] = []
        self.completion: CompletionOutput | None = None
        self._out = out
        self._printed = 0

    def advanced(self, request: Request, done: Advance, at: float) -> None:
        self.prompt_token_ids = request.prompt
        self.completion = cast("Completion", request.output).output
        self._show()

    def finish(self) -> None:
        """Print the rest of the text, and on a terminal a line end, so that the shell's prompt has its own."""
        self._show()
        if self._out is not None and self._out.isatty():
            self._out.write("\n")

    def _show(self) -> None:
        if self._out is None or self.completion is None:
            return
        # A completion's text only grows: the text that has been printed remains its beginning.
        self._out.write(self.completion.text[self._printed :])
        self._out.flush()
        self._printed = len(self.completion.text)


def complete(
    asked: Asked, options: EngineOptions, sampling: Mapping[str, Any], as_json: bool, trace: Path | None
) -> None:
    """Start the stages, generate, and report. After Ctrl-C the tokens generated so far are still reported.

    ``sampling`` replaces fields of the sampling parameters: the checkpoint's own, or for a chat the usual ones.
    """
    check_options(options, sampling.get("max_tokens"))
    fork_from_here(model_folder(options.model, "target"))
    from penstock.engine.replicas.offline import LLM

    llm, start = watched(LLM, options)
    with llm:
        prompt = asked.prompt(llm.get_tokenizer())
        params = sampling_params(llm, asked, sampling)
        if not as_json and sys.stderr.isatty():
            typer.secho(loaded(llm.setup, start, llm.numerics), dim=True, err=True)
        if asked.outline_decoding != "off":
            complete_in_points(llm, asked, params, as_json, trace, start.seconds)
            return
        follower = Follower(None if as_json else sys.stdout)
        try:
            with llm.observing(follower), traced(llm, trace):
                llm.generate(prompt, params)
        finally:
            follower.finish()
            if follower.completion is not None:
                text = prompt if isinstance(prompt, str) else prompt["prompt"]
                report(llm, text, follower.prompt_token_ids, follower.completion, as_json, start.seconds)


def complete_in_points(
    llm: LLM, asked: Asked, params: SamplingParams, as_json: bool, trace: Path | None, load_seconds: float
) -> None:
    """Generate and report with ``outline_decoding``: the points are printed in their order, while they all grow."""
    from penstock.engine.llm import Run, answer_in_points

    def tell(text: str) -> None:
        """Print a piece of the answer."""
        sys.stdout.write(text)
        sys.stdout.flush()

    dialogue = asked.dialogue(llm.get_tokenizer())
    run = Run(llm.steps(dialogue, params, asked.outline_decoding), dialogue.plain())
    with traced(llm, trace):
        (answer,) = answer_in_points(llm, [run], None if as_json else tell)
    if not as_json and sys.stdout.isatty():
        sys.stdout.write("\n")
    report(llm, answer.prompt or "", answer.prompt_token_ids, answer.outputs[0], as_json, load_seconds, answer.outline)


def sampling_params(llm: LLM, asked: Asked, given: Mapping[str, Any]) -> SamplingParams:
    """The sampling parameters: the given fields, then those of the checkpoint, then for a chat the usual ones."""
    recommended = llm.setup.checkpoint.sampling_defaults
    base = chat_sampling(recommended) if asked.is_chat(llm.get_tokenizer()) else recommended
    return SamplingParams(**{**base, **given})


STANDARD_OUTPUT: Final = "-"
"""The name that stands for standard output among files to write."""


@contextmanager
def traced(llm: LLM, file: Path | None) -> Iterator[None]:
    """Trace the block and write the trace to ``file``, standard output for "-", also where the block ends in an error.

    The file keeps what it holds until then, so that nothing is lost where a request is refused.
    """
    if file is None:
        yield
        return
    errors = llm.host.fleet.clock_errors if isinstance(llm.host, FleetExecutor) else {}
    writer = trace_writer(llm.setup, llm.drafter, errors)
    try:
        with llm.observing(writer):
            yield
            # Batches that the last token made needless belong to the trace, too.
            while len(llm.loop.inflight):
                llm.loop.step()
    finally:
        if str(file) == STANDARD_OUTPUT:
            writer.write(sys.stdout)
        else:
            with naming(file), file.open("w", encoding="utf-8") as opened:
                writer.write(opened)


def report(
    llm: LLM,
    prompt: str,
    prompt_ids: list[int],
    completion: CompletionOutput,
    as_json: bool,
    load_seconds: float,
    outline: OutlineOutput | None = None,
) -> None:
    """Print one JSON object on stdout if ``as_json``, else a line of statistics on stderr if that is a terminal."""
    metrics = metrics_of(llm.setup, completion, load_seconds, llm.numerics)
    if as_json:
        result = {
            "prompt": prompt,
            "prompt_token_ids": prompt_ids,
            "text": completion.text,
            "token_ids": completion.token_ids,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "metrics": metrics,
        }
        if outline is not None:
            result["outline"] = {name: getattr(outline, name) for name in ("used", "reason", "kind", "titles")}
        typer.echo(json.dumps(result, ensure_ascii=False))
    elif sys.stderr.isatty():
        typer.secho(statistics_line(metrics), dim=True, err=True)
        longest = min(llm.setup.max_model_len, llm.setup.kv_slots)
        if (end := end_line(completion, len(prompt_ids), longest)) is not None:
            typer.secho(end, dim=True, err=True)
        if outline is not None:
            typer.secho(outline_line(outline), dim=True, err=True)


def outline_line(outline: OutlineOutput) -> str:
    """The line that says whether the answer was given in points, and why."""
    if not outline.used:
        return f"the plain answer: {outline.reason}"
    return f"{len(outline.titles)} points side by side, which is not the plain answer: {outline.reason}"


def end_line(completion: CompletionOutput, prompt_tokens: int, longest: int) -> str | None:
    """Why the completion did not end by itself, and what the user can do; None if it did, or the user pressed Ctrl-C.

    ``longest``: the most tokens that prompt and completion may have together.
    """
    reason, tokens = completion.finish_reason, len(completion.token_ids)
    end = end_of(reason, prompt_tokens, tokens, longest)
    if end is None or reason is FinishReason.ABORT:
        return None
    return f"{end_words(end, tokens, longest, reason)}; {WAYS_ON[end]}"


def metrics_of(setup: Resolved, completion: CompletionOutput, load_seconds: float, numerics: str) -> dict[str, Any]:
    """Figures of one completion, by name. Its speed (tokens per second) counts from the first token, without prefill.

    ``load_seconds``: the time until all stages had started. ``numerics``: ``LLM.numerics``.
    """
    speculation = setup.speculation
    drafts = speculation is not None and speculation.drafts
    return {
        "tokens": len(completion.token_ids),
        "load_seconds": load_seconds,
        "seconds": completion.seconds or 0.0,
        "first_token_seconds": completion.first_token_seconds or 0.0,
        "tokens_per_second": completion.tokens_per_second,
        "speed_up": completion.speed_up,
        "mean_acceptance_length": completion.metrics.mean_acceptance_length,
        **asdict(completion.metrics),
        "strategy": speculation.strategy if speculation else "autoregressive",
        "method": " + ".join(speculation.methods) if speculation and drafts else None,
        "stages": setup.stages,
        "engines": setup.options.engines_here,
        "numerics": numerics,
        "cluster": setup.cluster.name if setup.cluster else None,
        "emulated": setup.emulated,
    }


def statistics_line(metrics: Mapping[str, Any]) -> str:
    """The line of statistics: ``48 tokens, 9.9 tokens/s, 1.6 times plain · 31 of 47 had been drafted``, and more."""
    decided = metrics["accepted"] + metrics["misses"]
    parts = [f"{metrics['tokens']} tokens"]
    if metrics["tokens_per_second"] is not None:
        parts[0] += f", {metrics['tokens_per_second']:.1f} tokens/s"
    if metrics["speed_up"] is not None:
        parts[0] += f", {gain_words(metrics['speed_up'])}"
    if decided:
        parts.append(f"{metrics['accepted']} of {decided} had been drafted")
    parts.append(f"first token after {metrics['first_token_seconds']:.2f} s")
    parts.append(metrics["strategy"])
    if metrics["method"] == "synthetic":
        parts.append("synthetic drafter: it knows the answer")
    if metrics["emulated"]:
        parts.append(f"cluster {metrics['cluster']} is {EMULATED}")
    return " · ".join(parts)


# ------------------------------------------------------------------------------------------------------------------ run
# The work of ``penstock run`` after its flags are parsed: load a model and chat with it in this terminal.
#
# Engine, server and chat are one process. The chat is that of ``penstock chat``, over a Unix socket that only this user
# can open: nothing listens on the network.

LONGEST_ANSWER: Final = 86_400.0
"""Seconds that an answer may take: a day, since the person can end it with Ctrl-C."""
HERE: Final = "http://penstock"
"""The server's URL on its Unix socket; any host's name would do there."""
CONTINUES: Final = "is no chat model: it goes on with what you type. 'penstock run NAME' takes another model"
"""The words, after a model's name, for one that is no chat model."""


def run(options: EngineOptions, name: str, system_prompt: str = "", template: str | None = None) -> None:
    """Chat with the model, called ``name``, until the input ends. Every process of it has ended when this returns.

    ``template``: Jinja text that replaces the checkpoint's own. Raises ConfigError before anything starts.
    """
    check_options(options)
    fork_from_here(model_folder(options.model, "target"))
    words = introduction_of(options, name, template)
    from penstock.engine.async_llm import AsyncLLM
    from penstock.server.command import served_at

    llm, start = watched(AsyncLLM, options)
    with closing(llm):
        if template is not None:
            llm.get_tokenizer().use_chat_template(template)
        settings = ServerSettings(served_model_name=(name,), web=False, request_timeout=LONGEST_ANSWER)
        socket = Path(shared_fork_server().folder) / "http"  # a folder that is removed even if this process is killed
        server = Server(url=HERE)
        with (
            served_at(socket, llm, settings),
            httpx.Client(**server.client_options, transport=httpx.HTTPTransport(uds=str(socket))) as client,
        ):
            chat = ChatOptions(server=server, model=name, system=system_prompt)
            chat_over(client, chat, "\n".join([*words, loaded(llm.setup, start, llm.numerics)]))


def introduction_of(options: EngineOptions, name: str, template: str | None) -> list[str]:
    """Lines that introduce a model that is no chat model; [] for others. Raises FieldError without a chat template."""
    if template is not None:
        return []
    tokenizer = tokenizer_of(options)
    if tokenizer.tool_template is None:
        problem = "has no chat template: continue texts with penstock generate, or give one with --chat-template"
        raise FieldError("model", f"is {name!r}, which {problem}")
    return [] if tokenizer.is_of_chat else [f"{name} {CONTINUES}"]


def tokenizer_of(options: EngineOptions) -> Tokenizer:
    """The model's tokenizer, without its weights. Raises ConfigError if it has none that loads."""
    from penstock.checkpoint.checkpoint import open_checkpoint

    return load_tokenizer(open_checkpoint(model_folder(options.model, "target")).path)
