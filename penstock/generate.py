"""What ``penstock generate`` does once its flags are understood: stream one answer or continuation, report on it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import IO, TYPE_CHECKING, Any, cast

import typer

from penstock.core import CompletionOutput, OutlineOutput, SamplingParams
from penstock.engine.job import Prompt
from penstock.engine.loop import Observer
from penstock.engine.options import EngineOptions
from penstock.engine.places.starting import watched
from penstock.engine.resolve import check_options
from penstock.hosts.host import FleetHost
from penstock.outlines.dialogue import Dialogue
from penstock.text.chat import ChatFormat, Messages, chat_prompt, chat_sampling
from penstock.text.conversation_files import Conversation
from penstock.text.tokenizer import Tokenizer
from penstock.trace import EMULATED, trace_writer

if TYPE_CHECKING:
    from penstock.engine.commit import Advance
    from penstock.engine.completion import Completion
    from penstock.engine.llm import LLM
    from penstock.engine.resolve import Resolved
    from penstock.requests.request import Request


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is to be answered, or continued as it stands."""

    text: str | None = None
    """The last message of ``conversation``, or the text to continue."""
    conversation: Conversation = field(default_factory=Conversation)
    chat_template: str | None = None
    """Jinja text in place of the checkpoint's own."""
    raw: bool = False
    """Whether a chat model continues the text, too."""
    outline_decoding: str = "off"

    @property
    def messages(self) -> Messages:
        own = [] if self.text is None else [{"role": "user", "content": self.text}]
        return [*self.conversation.messages, *own]

    def is_chat(self, tokenizer: Tokenizer) -> bool:
        """Whether messages are answered: those of chat models, and where somebody has given more than a text."""
        given = bool(self.conversation.messages) or self.chat_template is not None
        return not self.raw and (given or tokenizer.is_of_chat)

    def prompt(self, tokenizer: Tokenizer) -> Prompt:
        """Raises RequestError where there is no template, and for messages that it refuses."""
        if not self.is_chat(tokenizer):
            return self.text or ""
        return chat_prompt(tokenizer, self.messages, self._format)

    def dialogue(self, tokenizer: Tokenizer) -> Dialogue:
        """The same for an answer in points. Raises RequestError as ``prompt`` does."""
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
    """Watches one request: prints its text as it is committed, and keeps what the report needs."""

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
        """Print what was held back, and leave the shell's prompt a line of its own."""
        self._show()
        if self._out is not None and self._out.isatty():
            self._out.write("\n")

    def _show(self) -> None:
        if self._out is None or self.completion is None:
            return
        self._out.write(self.completion.text[self._printed :])
        self._out.flush()
        self._printed = len(self.completion.text)


def complete(
    asked: Asked, options: EngineOptions, sampling: Mapping[str, Any], as_json: bool, trace: IO[str] | None
) -> None:
    """Start the stages, generate, report. After Ctrl-C what there is by then is reported all the same.

    ``sampling`` replaces fields of the checkpoint's own sampling parameters, or of a chat's where it names none.
    """
    check_options(options)
    from penstock.engine.llm import LLM

    llm, start = watched(LLM, options)
    with llm:
        prompt = asked.prompt(llm.get_tokenizer())
        params = sampling_params(llm, asked, sampling)
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
    llm: LLM, asked: Asked, params: SamplingParams, as_json: bool, trace: IO[str] | None, load_seconds: float
) -> None:
    """The same with ``outline_decoding``: the points are printed in order as they grow."""
    from penstock.engine.outlined.offline import Run, answer_in_points

    def tell(text: str) -> None:
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
    """What is given, over what the checkpoint recommends; a chat with one that recommends nothing has its own."""
    recommended = llm.setup.checkpoint.sampling_defaults
    base = chat_sampling(recommended) if asked.is_chat(llm.get_tokenizer()) else recommended
    return SamplingParams(**{**base, **given})


@contextmanager
def traced(llm: LLM, file: IO[str] | None) -> Iterator[None]:
    """Write a trace of what happens inside to ``file``, also when that ends in an error."""
    if file is None:
        yield
        return
    errors = llm.host.fleet.clock_errors if isinstance(llm.host, FleetHost) else {}
    writer = trace_writer(llm.setup, llm.drafter, errors)
    try:
        with llm.observing(writer):
            yield
            while len(llm.loop.inflight):  # what the last token made needless belongs to the picture
                llm.loop.step()
    finally:
        writer.write(file)


def report(
    llm: LLM,
    prompt: str,
    prompt_ids: list[int],
    completion: CompletionOutput,
    as_json: bool,
    load_seconds: float,
    outline: OutlineOutput | None = None,
) -> None:
    """One JSON object on stdout; else one line of statistics where a person watches stderr."""
    metrics = metrics_of(llm.setup, completion, load_seconds, llm.loop.estimates.plain_s)
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
        if outline is not None:
            typer.secho(outline_line(outline), dim=True, err=True)


def outline_line(outline: OutlineOutput) -> str:
    if not outline.used:
        return f"the plain answer: {outline.reason}"
    return f"{len(outline.titles)} points side by side, which is not the plain answer: {outline.reason}"


def metrics_of(
    setup: Resolved, completion: CompletionOutput, load_seconds: float, plain_s: float = 0.0
) -> dict[str, Any]:
    """Figures of one completion. The speed counts from the first token on: before it lies the prompt.

    ``load_seconds`` passed until all stages had started. ``plain_s`` is what a plain token takes, 0 if that was not
    measured.
    """
    speculation = setup.speculation
    drafts = speculation is not None and speculation.drafts
    tokens, seconds, first = len(completion.token_ids), completion.seconds or 0.0, completion.first_token_seconds or 0.0
    speed = (tokens - 1) / (seconds - first) if tokens > 1 and seconds > first else None
    return {
        "tokens": tokens,
        "load_seconds": load_seconds,
        "seconds": seconds,
        "first_token_seconds": first,
        "tokens_per_second": speed,
        "speed_up": speed * plain_s if speed is not None and plain_s and drafts else None,
        "mean_acceptance_length": completion.metrics.mean_acceptance_length,
        **asdict(completion.metrics),
        "strategy": speculation.strategy if speculation else "autoregressive",
        "method": " + ".join(speculation.methods) if speculation and drafts else None,
        "stages": setup.stages,
        "cluster": setup.cluster.name if setup.cluster else None,
        "emulated": setup.emulated,
    }


def statistics_line(metrics: Mapping[str, Any]) -> str:
    """For example: ``48 tokens, 9.9 tokens/s, about 1.6x plain decoding · 31 of 47 had been drafted · ...``."""
    decided = metrics["accepted"] + metrics["misses"]
    parts = [f"{metrics['tokens']} tokens"]
    if metrics["tokens_per_second"] is not None:
        parts[0] += f", {metrics['tokens_per_second']:.1f} tokens/s"
    if metrics["speed_up"] is not None:
        parts[0] += f", about {metrics['speed_up']:.2f}x plain decoding"
    if decided:
        parts.append(f"{metrics['accepted']} of {decided} had been drafted")
    parts.append(f"first token after {metrics['first_token_seconds']:.2f} s")
    parts.append(f"loaded in {metrics['load_seconds']:.1f} s")
    parts.append(f"{metrics['strategy']}, {metrics['stages']} stage{'s' * (metrics['stages'] > 1)}")
    if metrics["method"] == "synthetic":
        parts.append("synthetic drafter: it knows the answer")
    if metrics["emulated"]:
        parts.append(f"cluster {metrics['cluster']} is {EMULATED}")
    return " · ".join(parts)
