"""``LLM``: offline generation, shaped like vLLM's."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from penstock.config import SpeculativeConfig
from penstock.core import (
    FinishReason,
    PipelineError,
    RequestError,
    RequestOutput,
    SamplingParams,
    whole,
)
from penstock.drafters.base import Drafter
from penstock.engine.build import make_loop, start_drafter, start_pipeline
from penstock.engine.completion import Completion
from penstock.engine.loop import EngineLoop, Observer, fresh_seed
from penstock.engine.options import EngineOptions, Resolved, resolve_options
from penstock.engine.sampling import check_sampling, ends_of, sampling_of
from penstock.pipeline.base import Host
from penstock.pipeline.forkserver import shared_fork_server
from penstock.pipeline.processes import ProcessHost
from penstock.requests.request import Request
from penstock.strategies import make_strategy
from penstock.text.detokenizer import IncrementalDetokenizer
from penstock.text.tokenizer import Tokenizer, load_tokenizer

Prompt = str | Mapping[str, Any]
"""Text, or ``{"prompt_token_ids": [...]}``, or ``{"prompt": text}``."""


class LLM:
    """One model over a pipeline of stage processes. Use it in a ``with`` block, or call ``close``.

    Keyword arguments are the fields of ``EngineOptions``, and ``host``: what runs the stages in place of processes of
    their own; closing this closes it. Raises ConfigError before anything starts, and PipelineError when a stage cannot
    be started.
    """

    def __init__(self, model: str | Path = "demo", *, host: Host | None = None, **options: Any) -> None:
        known = EngineOptions.__dataclass_fields__
        for name in options:
            if name not in known:
                raise unknown_option(name, list(known))
        checked = EngineOptions(model=str(model), **options)
        if host is None:
            shared_fork_server()  # it imports torch while this process does
        self._setup: Resolved = resolve_options(checked)
        self._tokenizer: Tokenizer | None = None
        if not self._setup.options.skip_tokenizer_init:
            self._tokenizer = load_tokenizer(self._setup.checkpoint.path)
        self._numbers = itertools.count()
        self.plain_answers: dict[Any, Sequence[int]] = {}
        """What plain decoding gave, by request; only the synthetic drafter asks. Another LLM's may be added."""
        self._host: Host = ProcessHost(self._setup.options.transport) if host is None else host
        self._drafter: Drafter | None = None
        try:
            if self._setup.speculation is not None and self._setup.speculation.strategy != "autoregressive":
                self._drafter = start_drafter(self._setup, self._setup.speculation, self._host, self._answer)
            self._pipeline = start_pipeline(self._setup, self._host, self._drafter)
        except BaseException:
            self.close()
            raise
        self._loop: EngineLoop = make_loop(self._setup, self._pipeline, self._drafter, self._host)

    # ------------------------------------------------------------------------------------------ what users call

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete all prompts and return when the last one is done, in the prompts' order.

        ``sampling_params`` None takes the checkpoint's generation_config. Raises RequestError before anything starts
        if a prompt or its parameters cannot work, and PipelineError if a stage is lost.
        """
        if not isinstance(prompts, Iterable):
            raise RequestError(f"prompts is {prompts!r}; it has to be a prompt or a list of prompts")
        many = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        params = self._params(sampling_params, len(many))
        return self.run(many, params, self._setup.speculation)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """Yield the first completion's text as it is committed: always whole characters.

        The request is checked and queued at once; it advances whenever the iterator, or another call, steps the engine.
        """
        self.get_tokenizer()
        params = self._params(sampling_params, 1)
        self._learn_answers([prompt], params, self._setup.speculation)
        jobs = self._jobs([prompt], params, self._setup.speculation)
        self._start_all(jobs)
        return self._pieces(jobs, jobs[0].completions[0])

    def get_default_sampling_params(self) -> SamplingParams:
        """The checkpoint's generation_config as sampling parameters."""
        return SamplingParams(**self._setup.checkpoint.sampling_defaults)  # type: ignore[arg-type]

    def get_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError("there is no tokenizer: this LLM was made with skip_tokenizer_init=True")
        return self._tokenizer

    def close(self) -> None:
        """Abort what still runs, stop every stage process and wait for it. Safe to call twice."""
        if (loop := getattr(self, "_loop", None)) is not None:
            loop.end()
        for part in (getattr(self, "_pipeline", None), self._drafter):
            if part is not None:
                part.close()
        self._pipeline = self._drafter = None  # type: ignore[assignment]
        self._host.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------------------------------- for traces and services

    @property
    def setup(self) -> Resolved:
        return self._setup

    @property
    def loop(self) -> EngineLoop:
        return self._loop

    @property
    def drafter(self) -> Drafter | None:
        return self._drafter

    def observe(self, observer: Observer) -> None:
        """Have ``observer`` watch every step from now on."""
        self._loop.observers.append(observer)

    # ---------------------------------------------------------------------------------- for AsyncLLM: job by job

    @property
    def host(self) -> Host:
        return self._host

    def job(self, prompt: Prompt, params: SamplingParams | None = None, priority: int = 0, client: str = "") -> Job:
        """A checked request, not yet queued; from any thread. Raises RequestError if it can never run."""
        one = self._params(params, 1)[0]
        job = self._job(prompt, one, self._setup.speculation, priority, client)
        for request in job.requests:
            self._loop.scheduler.check(request)
        return job

    def check(self, params: SamplingParams) -> None:
        """Raise RequestError for what this model cannot be asked; from any thread. A new grammar may take seconds."""
        check_sampling(params, self._setup.checkpoint, has_tokenizer=self._tokenizer is not None)

    def start(self, job: Job) -> None:
        """Queue a job. Raises RequestError if it can never run, PipelineError if nothing runs any more."""
        for request in job.requests:
            self._loop.add(request)

    def abort(self, job: Job) -> None:
        """End what still runs of a job."""
        for request in job.requests:
            if request.number in self._loop.requests:
                self._loop.abort(request)

    def give_up(self, job: Job) -> None:
        """Give a job that cannot be queued any more its final reply."""
        for request in job.requests:
            if request.finished is None:
                request.finished = FinishReason.ERROR
                request.output.finish(FinishReason.ERROR, self._host.now())

    # ----------------------------------------------------------------------------------------------- for the bench

    def run(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], speculation: SpeculativeConfig | None
    ) -> list[RequestOutput]:
        """``generate`` with a strategy of the caller's choice over the same drafter and stages."""
        self._learn_answers(prompts, params, speculation)
        jobs = self._jobs(prompts, params, speculation)
        self._start_all(jobs)
        try:
            while any(request.finished is None for job in jobs for request in job.requests):
                self._loop.step()
            self._raise_if_lost(jobs)
        finally:
            self._abort_all(jobs)
        self._loop.audit()
        if speculation is None:
            self._remember(jobs)
        return [job.output() for job in jobs]

    # --------------------------------------------------------------------------------------------------- inside

    def _pieces(self, jobs: Sequence[Job], completion: Completion) -> Iterator[str]:
        try:
            while completion.output.finish_reason is None:
                self._loop.step()
                yield from text_of(completion)
            yield from text_of(completion)  # where another call's steps have ended it
            self._raise_if_lost(jobs)
        finally:
            self._abort_all(jobs)

    def _params(self, given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if given is None:
            return [self.get_default_sampling_params()] * count
        if isinstance(given, SamplingParams):
            return [given] * count
        if not isinstance(given, Sequence) or not all(isinstance(one, SamplingParams) for one in given):
            raise RequestError("sampling_params has to be a SamplingParams, or a list of one per prompt")
        if len(given) != count:
            raise RequestError(f"sampling_params has {len(given)} entries for {count} prompts")
        return list(given)

    def _jobs(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], speculation: SpeculativeConfig | None
    ) -> list[Job]:
        return [self._job(prompt, one, speculation) for prompt, one in zip(prompts, params, strict=True)]

    def _job(
        self,
        prompt: Prompt,
        params: SamplingParams,
        speculation: SpeculativeConfig | None,
        priority: int = 0,
        client: str = "",
    ) -> Job:
        text, ids = self._tokens_of(prompt)
        if params.stop and self._tokenizer is None:
            raise RequestError("stop strings need a tokenizer; use stop_token_ids with skip_tokenizer_init=True")
        seed = params.seed
        if seed is None:
            seed = fresh_seed() if params.temperature > 0 else 0
        self.check(params)
        ends = ends_of(params, self._setup.checkpoint)
        job = Job(text, ids)
        started = self._host.now()
        for index in range(params.n):
            completion = Completion(index, params, self._detokenizer(ids, params), started)
            sampling = sampling_of(params, seed, index, ends, len(ids))
            strategy = make_strategy(speculation, self._setup.stages)
            request = Request(
                next(self._numbers), ids, sampling, params.max_tokens, ends, strategy, completion, priority, client
            )
            completion.output.metrics = request.metrics
            job.requests.append(request)
            job.completions.append(completion)
        return job

    def _tokens_of(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """Text and token ids of a prompt. Raises RequestError naming what is wrong with it."""
        if isinstance(prompt, Mapping) and "prompt_token_ids" in prompt:
            return prompt.get("prompt"), token_ids_of(prompt["prompt_token_ids"], self._setup.checkpoint.vocab_size)
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        if not isinstance(text, str):
            raise RequestError('a prompt is a string or {"prompt_token_ids": [...]}')
        if self._tokenizer is None:
            raise RequestError('without a tokenizer (skip_tokenizer_init=True) give {"prompt_token_ids": [...]}')
        return text, self._tokenizer.encode(text)

    def _detokenizer(self, ids: list[int], params: SamplingParams) -> IncrementalDetokenizer | None:
        if self._tokenizer is None:
            return None
        return IncrementalDetokenizer(
            self._tokenizer,
            ids,
            skip_special_tokens=params.skip_special_tokens,
            stop=params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def _start_all(self, jobs: Sequence[Job]) -> None:
        """Queue all requests, or none of them if one is refused."""
        try:
            for job in jobs:
                self.start(job)
        except RequestError:
            self._abort_all(jobs)
            raise

    def _abort_all(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self.abort(job)

    def _raise_if_lost(self, jobs: Sequence[Job]) -> None:
        if any(request.finished is FinishReason.ERROR for job in jobs for request in job.requests):
            raise PipelineError(f"the request was lost ({self._loop.ended})")

    def _learn_answers(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], speculation: SpeculativeConfig | None
    ) -> None:
        """The synthetic drafter has to know what plain decoding gives: decode plainly first, where not yet known."""
        if speculation is None or speculation.method != "synthetic" or speculation.strategy == "autoregressive":
            return
        if any(one.seed is None and one.temperature > 0 for one in params):
            raise RequestError("seed is None: with the synthetic drafter sampled requests need a fixed seed")
        jobs = self._jobs(prompts, params, speculation)
        unknown = [
            i for i, job in enumerate(jobs) if any(answer_key(r) not in self.plain_answers for r in job.requests)
        ]
        if not unknown:
            return
        # Without stop strings: the answer is the same up to them, and known to requests with others.
        self.run([prompts[i] for i in unknown], [replace(params[i], stop=()) for i in unknown], None)

    def _remember(self, jobs: Sequence[Job]) -> None:
        """Keep what plain decoding gave, if the drafter is one that has to know it."""
        if self._setup.speculation is None or self._setup.speculation.method != "synthetic":
            return
        for job in jobs:
            for request, completion in zip(job.requests, job.completions, strict=True):
                if completion.output.stop_reason is None or isinstance(completion.output.stop_reason, int):
                    self.plain_answers[answer_key(request)] = completion.output.token_ids

    def _answer(self, request: Request) -> Sequence[int]:
        return self.plain_answers[answer_key(request)]


def text_of(completion: Completion) -> Iterator[str]:
    """The text that has come since the last call, as one piece or none."""
    new = completion.take()
    if new is not None and new.text:
        yield new.text


class Job:
    """One prompt with its ``n`` completions."""

    def __init__(self, prompt: str | None, ids: list[int]) -> None:
        self.prompt = prompt
        self.ids = ids
        self.requests: list[Request] = []
        self.completions: list[Completion] = []

    def output(self) -> RequestOutput:
        outputs = [completion.output for completion in self.completions]
        cached = max(request.cached for request in self.requests)
        return RequestOutput(str(self.requests[0].number), self.prompt, self.ids, outputs, True, cached)


def token_ids_of(given: Any, vocabulary: int) -> list[int]:
    """Token ids of a prompt, as Python's own integers. Raises RequestError naming what is none."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise RequestError(f"prompt_token_ids is {given!r}; it has to be a list of token ids")
    ids = [whole("a prompt's token id", token) for token in given]
    for token in ids:
        if not 0 <= token < vocabulary:
            raise RequestError(f"prompt_token_ids holds {token}; the model's token ids are 0 to {vocabulary - 1}")
    return ids


def answer_key(request: Request) -> Any:
    return tuple(request.prompt), request.sampling, request.max_tokens, request.stop_ids


def unknown_option(name: str, known: Sequence[str]) -> Exception:
    from penstock.config import FieldError, nearest

    return FieldError(name, f"is not an option of LLM; {nearest(name, known)}")
