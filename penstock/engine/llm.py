"""``LLM``: the engine on the caller's thread."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Protocol

from penstock.core import CompletionOutput, FinishReason, PipelineError, RequestError, RequestOutput, SamplingParams
from penstock.drafters.base import Drafter
from penstock.engine.build import Engine as Decoder
from penstock.engine.build import learn_answers, make_loop
from penstock.engine.completion import (
    Completion,
    CompletionDelta,
    Job,
    Prompt,
    check_known,
    check_sampling,
    check_structure,
    ends_of,
    naming,
    prompts_of,
    resume,
    resumed_ids,
    sampling_of,
    token_ids_of,
    warn_of_empty_answers,
)
from penstock.engine.loop import EngineLoop, Observer, fresh_seed
from penstock.engine.opening import open_executor, resolve_on
from penstock.engine.options import check_single, options_of
from penstock.engine.parts import EngineParts
from penstock.engine.profile.store import PlannedPieces, StoredExperience
from penstock.engine.resolve import Resolved, check_options
from penstock.engine.stream import Joined, timed
from penstock.engine.turns import Turns
from penstock.files import EXACT, FAST
from penstock.outlines.steps import Answering, Ask, Dialogue, Forms, Step, Steps, check_outline
from penstock.pipeline.base import Executor
from penstock.pipeline.forkserver import shared_fork_server
from penstock.requests.request import Request
from penstock.speculation import SpeculativeConfig, make_strategy
from penstock.text.chat import ChatFormat, Messages, chat_prompt, conversations_of
from penstock.text.detokenizer import IncrementalDetokenizer
from penstock.text.tokenizer import Tokenizer, load_tokenizer

# -------------------------------------------------------------------------------------------------------------- offline
# Answers in points for ``LLM``: many questions at a time, step by step.


Tell = Callable[[int, CompletionDelta], None]
"""A callback, called with a job's index among those asked and the new output of its first completion."""


class Engine(Decoder, Protocol):
    """The part of ``LLM`` that answers in points need; its members are those of ``LLM``."""

    def complete(self, jobs: Sequence[Job], tell: Tell | None = None) -> list[RequestOutput]: ...


class Run:
    """One question on its way: the step that is due, and the answer once its last step is done."""

    def __init__(self, steps: Steps, prompt: dict[str, Any]) -> None:
        self._steps = steps
        self._prompt = prompt
        self.step: Step = next(steps)
        self.jobs: list[Job] = []

    def advance(self, outputs: list[RequestOutput]) -> RequestOutput | None:
        """Take the outputs of the step. Returns the answer if it was the last step, else None."""
        if not self.step.last:
            self.step = self._steps.send(outputs)
            return None
        joined = Joined(self.step.headings)
        for number, output in enumerate(outputs):
            joined.push(number, all_of(output.outputs[0]))
        whole, delta, report = CompletionOutput(0), joined.take(), self.step.report
        assert delta is not None
        delta.add_to(whole)
        timed(whole, report, outputs)
        report.points = outputs if report.used else []
        name, cached = outputs[0].request_id, outputs[0].num_cached_tokens
        text, ids = self._prompt["prompt"], self._prompt["prompt_token_ids"]
        return RequestOutput(name, text, ids, [whole], True, cached, report)


def all_of(one: CompletionOutput) -> CompletionDelta:
    """A whole completion as one delta."""
    return CompletionDelta(0, one.token_ids, one.text, one.logprobs, one.finish_reason, one.stop_reason)


class Teller:
    """Passes the text of an answer to ``tell`` as its points come, in order."""

    def __init__(self, headings: Sequence[str], tell: Callable[[str], None]) -> None:
        self._joined = Joined(headings)
        self._tell = tell

    def __call__(self, number: int, delta: CompletionDelta) -> None:
        self._joined.push(number, delta)
        if (new := self._joined.take()) is not None and new.text:
            self._tell(new.text)


class Following(Observer):
    """Passes new output of the jobs' first completions to ``tell``, whenever the engine waits."""

    def __init__(self, jobs: Sequence[Job], tell: Tell) -> None:
        self._jobs = jobs
        self._tell = tell

    def waits(self) -> None:
        for number, job in enumerate(self._jobs):
            if (delta := job.completions[0].take()) is not None:
                self._tell(number, delta)


def answer_in_points(
    engine: Engine, runs: Sequence[Run], tell: Callable[[str], None] | None = None
) -> list[RequestOutput]:
    """The answers to all questions, in order. With a single question ``tell`` gets its text as it comes.

    Raises as ``LLM.generate`` does.
    """
    answers: dict[int, RequestOutput] = {}
    while pending := [number for number in range(len(runs)) if number not in answers]:
        for number in pending:
            run = runs[number]
            prepare(engine, run.step.asks)
            run.jobs = [job_of(engine, ask) for ask in run.step.asks]
        outputs = iter(complete(engine, [runs[number] for number in pending], tell))
        for number in pending:
            answer = runs[number].advance([next(outputs) for _ in runs[number].jobs])
            if answer is not None:
                answers[number] = answer
    return [answers[number] for number in range(len(runs))]


def prepare(engine: Engine, asks: Sequence[Ask]) -> None:
    """Have a synthetic drafter know the answers to these requests."""
    learn_answers(engine, [ask.prompt for ask in asks], [ask.params for ask in asks])


def job_of(engine: Engine, ask: Ask) -> Job:
    """The job of one request. Raises RequestError if it can never run."""
    job = engine.job(ask.prompt, ask.params)
    job.pinned = ask.pinned
    return job


def complete(engine: Engine, runs: Sequence[Run], tell: Callable[[str], None] | None) -> list[RequestOutput]:
    """The outputs of all jobs of these questions' steps, which run together. ``tell`` gets the text of a last step."""
    jobs = [job for run in runs for job in run.jobs]
    step = runs[0].step
    return engine.complete(jobs, None if tell is None or not step.last else Teller(step.headings, tell))


# ------------------------------------------------------------------------------------------------------------------ llm
# ``LLM``: offline generation, shaped like vLLM's.


class LLM:
    """One model over a pipeline of stage processes.

    ```python
    from penstock import LLM, SamplingParams

    with LLM("demo", pipeline_parallel_size=2, speculative_config={"method": "draft_model"}) as llm:
        outputs = llm.generate(["def fibonacci(n):", "class Stack:"], SamplingParams(temperature=0, max_tokens=24))
    for output in outputs:
        print(output.prompt, output.outputs[0].text)
    ```

    The keyword arguments are the fields of ``EngineOptions``, and ``host``: what runs the stages, in place of processes
    of their own; closing the LLM closes it. With ``data_parallel_size`` above 1 the prompts of a call are spread over
    so many engines, and the tokens are those of one; ``replicas()`` says how the engines are. The constructor returns
    when every stage has loaded its layers. It raises ConfigError before anything starts, and PipelineError if a stage
    cannot be started.

    Use it in a ``with`` block, or call ``close``: that stops the processes. Afterwards each call that needs them raises
    PipelineError. Several threads may call an LLM: a call waits until those of other threads have ended, and ``close``
    does. Streams take turns token by token. ``AsyncLLM`` is for requests that come and go. Within a running event loop,
    a notebook's for example, a call holds up the loop until it returns. In a child that the process forks, each call
    raises PipelineError, ``close`` included; the parent's engine is unharmed.

    Ctrl-C, or whatever else a signal handler raises, comes out of the call that is under way at the end of the engine's
    step, within milliseconds. That call's requests are aborted, and the next call works as before. The stages
    themselves never see Ctrl-C. They end with the ``with`` block, or with the process that made them, even if that is
    killed.
    """

    of_several: ClassVar[type[LLM] | None] = None
    """The class of an LLM over several engines. ``engine/replicas/offline.py``, which needs this module, sets it."""

    def __new__(cls, *given: Any, **options: Any) -> LLM:
        count = options.get("data_parallel_size", 1)
        several = cls is LLM and isinstance(count, int) and count > 1
        return super().__new__(cls.of_several if several and cls.of_several is not None else cls)

    def __init__(self, model: str | Path = "demo", *, host: Executor | None = None, **options: Any) -> None:
        checked = options_of(model, options)
        check_single(checked.data_parallel_size)
        if host is None:
            check_options(checked)
            shared_fork_server()  # it imports torch while this process does
        self._executor: Executor = open_executor(checked) if host is None else host
        self._turns = Turns(self._executor.wake)
        try:
            self._setup: Resolved = resolve_on(checked, self._executor)
            self._tokenizer: Tokenizer | None = None
            if not self._setup.options.skip_tokenizer_init:
                self._tokenizer = load_tokenizer(self._setup.checkpoint.path)
            self._numbers = itertools.count()
            self._parts = EngineParts(self._setup, self._executor)
            self._parts.start_all()
        except BaseException:
            self.close()
            raise
        self._forms = Forms()
        self._planned = PlannedPieces.of(self._setup)
        pieces = self._planned.table if self._planned is not None else None
        self._loop: EngineLoop = make_loop(self._setup, self._parts, self._executor, pieces)
        self._experience = StoredExperience.of(self._setup, self._loop)

    # ------------------------------------------------------------------------------------------ what users call

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        outline_decoding: str = "off",
    ) -> list[RequestOutput]:
        """Complete all prompts and return when the last one is done, in the prompts' order.

        ```python
        from penstock import LLM, SamplingParams

        with LLM("demo") as llm:
            text, tokens = llm.generate(
                ["import os", {"prompt_token_ids": [1, 2, 3]}],
                [SamplingParams(n=2, seed=1, max_tokens=8), SamplingParams(temperature=0, logprobs=1)],
            )
        print([completion.text for completion in text.outputs])
        print(tokens.outputs[0].token_ids, tokens.outputs[0].logprobs[0])
        ```

        A prompt is a text, ``{"prompt": text}`` or ``{"prompt_token_ids": [...]}``. ``sampling_params`` is one for all
        prompts or a list with one for each; None takes the checkpoint's generation_config. ``outline_decoding`` is
        that of ``chat``; the texts are then questions. Raises RequestError before anything starts if a prompt or its
        parameters cannot work, with its place (``prompts[1]``) where there are several. Raises RequestError in the end
        if a structured output could not go on, and PipelineError if the engine is closed, or a stage is lost and not
        replaced within ``recovery_timeout`` seconds.
        """
        with self._turns.turn():  # also while tokenizers work: their errors are told as errors of the prompt
            many = prompts_of(prompts)
            params = self._params(sampling_params, len(many))
            if outline_decoding != "off":
                tokenizer = self.get_tokenizer()
                return self._in_points(
                    [Dialogue.of_text(tokenizer, text_of_prompt(one)) for one in many], params, outline_decoding
                )
            learn_answers(self, many, params)
            jobs = []
            for place, (prompt, one) in enumerate(zip(many, params, strict=True)):
                with naming(place, len(many)):
                    jobs.append(self.job(prompt, one))
            outputs = self.complete(jobs)
            warn_of_empty_answers(outputs, many, self._tokenizer)
            return outputs

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        outline_decoding: str = "off",
    ) -> list[RequestOutput]:
        """Answer one conversation or several: ``generate`` with prompts that the chat template makes of messages.

        ```python
        from penstock import LLM, SamplingParams

        conversation = [
            {"role": "system", "content": "# Answer in Python."},
            {"role": "user", "content": "def is_even(number):"},
        ]
        with LLM("demo") as llm:  # whose template writes the messages one below the other
            (output,) = llm.chat(conversation, SamplingParams(temperature=0, max_tokens=16))
        print(output.prompt)
        print(output.outputs[0].text)
        ```

        A message is ``{"role": ..., "content": ...}`` as the OpenAI API has it. Content is text or a list of text
        parts, and what it holds is never read as a special token. ``chat_template`` is Jinja text in place of the
        checkpoint's own, ``tools`` are functions that it describes to the model, ``chat_template_kwargs`` its further
        variables. ``continue_final_message``, with ``add_generation_prompt=False``, has the model go on with the last
        message. With ``outline_decoding`` "on" the model writes an outline first, then its points side by side, as
        requests of their own (Jupiter, section V): the answer differs from the plain one, and comes sooner. "auto" does
        so only if the model itself calls the answer a list. ``RequestOutput.outline`` says what became of it. Raises
        RequestError for messages that are none or that the template refuses, where there is no template, and for what
        does not go with an outline (``n`` above 1, structured outputs, tools), besides what ``generate`` raises.
        """
        chat = ChatFormat(
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        tokenizer, conversations = self.get_tokenizer(), conversations_of(messages)
        with self._turns.turn():
            if outline_decoding != "off":
                params = self._params(sampling_params, len(conversations))
                dialogues = [Dialogue(tokenizer, one, chat) for one in conversations]
                return self._in_points(dialogues, params, outline_decoding)
            return self.generate([chat_prompt(tokenizer, one, chat) for one in conversations], sampling_params)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Generator[str]:
        """Iterate over the first completion's text as it comes, in whole characters.

        ```python
        from penstock import LLM, PipelineError, SamplingParams

        with LLM("demo") as llm:
            try:
                for piece in llm.stream("def quicksort(xs):", SamplingParams(temperature=0, max_tokens=32)):
                    print(piece, end="", flush=True)
            except PipelineError as error:
                print(error)  # a stage was lost: make a new LLM
        ```

        The request is checked and queued at once. It advances whenever the iterator, or another call, steps the engine;
        an iterator that is left, or closed by ``close()``, aborts it. Raises what ``generate`` raises, and RequestError
        without a tokenizer.
        """
        self.get_tokenizer()
        (params,) = self._params(sampling_params, 1)
        pieces: Generator[str] | None = None
        try:
            with self._turns.turn():
                learn_answers(self, [prompt], [params])
                job = self.job(prompt, params)
                pieces = self._pieces(job)
                next(pieces)
                self.start(job)
        except BaseException:  # at the turn's end a signal's handler raises, when the request is queued already
            if pieces is not None:
                pieces.close()
            raise
        return pieces

    def get_default_sampling_params(self) -> SamplingParams:
        """The checkpoint's generation_config as sampling parameters, which apply where none are given."""
        return SamplingParams(**self._setup.checkpoint.sampling_defaults)  # type: ignore[arg-type]

    def get_tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer: ``encode``, ``decode``, ``apply_chat_template``.

        Raises RequestError if there is none.
        """
        if self._tokenizer is None:
            raise RequestError("there is no tokenizer: this LLM was made with skip_tokenizer_init=True")
        return self._tokenizer

    def close(self) -> None:
        """Abort what still runs, stop every stage process and wait for it. Safe to call twice.

        Raises PipelineError in a forked child: the processes are its parent's.
        """
        with self._turns.turn():
            self._close()

    def _close(self) -> None:
        # The constructor calls this when it fails, so any of these attributes may be missing.
        for kept in (getattr(self, "_planned", None), getattr(self, "_experience", None)):
            if kept is not None:
                kept.keep()
        if (loop := getattr(self, "_loop", None)) is not None:
            loop.end()
        if (parts := getattr(self, "_parts", None)) is not None:
            parts.close()
        self._executor.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------------------------------- for traces and services

    @property
    def setup(self) -> Resolved:
        """The options with every default filled in, and the files that they name."""
        return self._setup

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The checkpoint's tokenizer; None with ``skip_tokenizer_init``."""
        return self._tokenizer

    @property
    def numerics(self) -> str:
        """ "exact": tokens and log-probabilities depend on no drafts, stages or other requests, to the last bit.

        "fast": where two tokens are nearly tied, rounding may decide between them by what is computed together.
        """
        return EXACT if self._parts.exact else FAST

    @property
    def loop(self) -> EngineLoop:
        """The loop that steps the engine."""
        return self._loop

    @property
    def turns(self) -> Turns:
        """The turns that threads take in stepping the engine."""
        return self._turns

    @property
    def drafter(self) -> Drafter | None:
        """The drafter; None where nothing drafts."""
        return self._parts.drafter

    @contextmanager
    def observing(self, observer: Observer) -> Iterator[None]:
        """Have ``observer`` watch every step of the block."""
        self._turns.check_owner()
        self._loop.observers.append(observer)
        try:
            yield
        finally:
            self._loop.observers.remove(observer)

    # ------------------------------------------------------------------- job by job: for AsyncLLM, and for a bench

    @property
    def host(self) -> Executor:
        """The executor that runs the stages and keeps the engine's clock."""
        return self._executor

    def number_from(self, first: int) -> None:
        """Number requests from ``first`` on, which observers of several engines tell them apart by."""
        self._numbers = itertools.count(first)

    def job(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        priority: int = 0,
        client: str = "",
        *,
        speculation: SpeculativeConfig | None = None,
        resumed: Sequence[Sequence[int]] | None = None,
        vouched: bool = False,
    ) -> Job:
        """A checked request, not yet queued; may be called from any thread. Raises RequestError if it can never run.

        ``speculation`` decodes it with another strategy over the engine's drafter and stages; None: with the engine's.
        ``resumed`` are the token ids that each completion begins with, as ``AsyncLLM.resume`` has them; ``vouched``: an
        engine with this model has brought them, so that no grammar has to read them once more, which can take seconds.
        """
        self._turns.check_owner()
        (one,) = self._params(params, 1)
        text, ids = self.tokens_of(prompt)
        if one.stop and self._tokenizer is None:
            raise RequestError("stop strings need a tokenizer; use stop_token_ids with skip_tokenizer_init=True")
        self.check(one)
        came = self._resumed(resumed, one, vouched)
        seed, ends = one.seed, ends_of(one, self._setup.checkpoint)
        if seed is None:
            seed = fresh_seed() if one.temperature > 0 else 0  # greedy decoding draws nothing
        job, started = Job(text, ids, one), self._executor.now()
        job.seed = seed
        for index in range(one.n):
            completion = Completion(index, one, self._detokenizer(ids, one), started)
            sampling = sampling_of(one, seed, index, ends, len(ids))
            strategy = make_strategy(speculation or self._setup.speculation, self._setup.stages)
            request = Request(
                next(self._numbers),
                ids,
                sampling,
                one.max_tokens,
                ends,
                strategy,
                completion,
                priority,
                client,
                came[index],
            )
            completion.output.metrics = request.metrics
            self._loop.scheduler.check(request)
            resume(request, completion, started)
            job.requests.append(request)
            job.completions.append(completion)
        return job

    def complete(self, jobs: Sequence[Job], tell: Tell | None = None) -> list[RequestOutput]:
        """Queue jobs together and step until the last one has ended. ``tell`` gets what comes as it does.

        Raises RequestError if one could not go on, once all have ended, and PipelineError if the engine is lost.
        """
        following = Observer() if tell is None else Following(jobs, tell)
        with self._turns.turn(), self.observing(following):
            try:
                for job in jobs:
                    self.start(job)
                for job in jobs:  # each is looked at until it has ended, and never again
                    while not job.ended:
                        self._loop.step()
                        self._turns.take_signals()  # between two steps, where an exception does the engine no harm
                for job in jobs:
                    job.raise_if_failed(self._loop.ended)
            finally:
                self._abort_all(jobs)  # after an exception nothing of this call runs on
                following.waits()  # what the last step has brought
            self._loop.audit()
            return [job.output() for job in jobs]

    def check(self, params: SamplingParams) -> None:
        """Raise RequestError for parameters that this model cannot serve. A new grammar may take seconds.

        May be called from any thread.
        """
        check_sampling(params, self._setup.checkpoint, self._tokenizer)

    def start(self, job: Job) -> None:
        """Queue a job. Raises RequestError if it can never run, PipelineError if nothing runs any more."""
        if job.pinned:
            self._loop.pool.cache.pin(job.ids[: job.pinned])
        for request in job.requests:
            if request.finished is None:  # else it was resumed with all of its tokens
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
                request.output.finish(FinishReason.ERROR, self._executor.now())

    def steps(self, dialogue: Dialogue, params: SamplingParams, mode: str) -> Steps:
        """The steps of an answer with ``outline_decoding``. Raises RequestError for parameters that do not fit it."""
        check_outline(mode, params)
        self.check(params)
        longest = min(self._setup.max_model_len, self._setup.kv_slots)
        return Answering(dialogue, params, self._forms, longest).steps(mode)

    # --------------------------------------------------------------------------------------------------- inside

    def _in_points(
        self, dialogues: Sequence[Dialogue], params: Sequence[SamplingParams], mode: str
    ) -> list[RequestOutput]:
        runs = [
            Run(self.steps(dialogue, one, mode), dialogue.plain())
            for dialogue, one in zip(dialogues, params, strict=True)
        ]
        return answer_in_points(self, runs)

    def _pieces(self, job: Job) -> Generator[str]:
        """Iterate over the text of a job after an empty piece, which comes before the job is queued.

        A generator that has not begun would not abort the job where it is left.
        """
        completion = job.completions[0]
        try:
            yield ""
            while completion.output.finish_reason is None:
                with self._turns.turn():
                    if completion.output.finish_reason is None:  # another thread's steps may have ended it meanwhile
                        self._loop.step()
                    pieces = [*text_of(completion)]
                yield from pieces
            yield from text_of(completion)  # the rest, if another call's steps have ended the request
            job.raise_if_failed(self._loop.ended)
            if completion.output.finish_reason == FinishReason.ABORT:  # not by this iterator, which ends without this
                raise PipelineError("the engine was closed before the text was complete")
        finally:
            if self._turns.is_owner:  # a forked child drops its copy of the iterator
                with self._turns.turn():
                    self.abort(job)

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

    def _resumed(self, given: Sequence[Sequence[int]] | None, params: SamplingParams, vouched: bool) -> list[list[int]]:
        """The checked tokens that each completion begins with, none by default."""
        if given is None:
            return [[] for _ in range(params.n)]
        checkpoint = self._setup.checkpoint
        found = resumed_ids(given, params, checkpoint.vocab_size)
        if params.structured_outputs is not None and self._tokenizer is not None and not vouched:
            check_structure(found, params, self._tokenizer, checkpoint.vocab_size, checkpoint.eos_token_ids)
        return found

    def tokens_of(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """Text and token ids of a prompt; may be called from any thread. Raises RequestError saying what is wrong."""
        if isinstance(prompt, Mapping) and "prompt_token_ids" in prompt:
            return prompt.get("prompt"), token_ids_of(prompt["prompt_token_ids"], self._setup.checkpoint.vocab_size)
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        if not isinstance(text, str):
            raise RequestError('a prompt is a string or {"prompt_token_ids": [...]}')
        if self._tokenizer is None:
            raise RequestError('without a tokenizer (skip_tokenizer_init=True) give {"prompt_token_ids": [...]}')
        ids = self._tokenizer.encode(text)
        check_known(self._tokenizer, ids, self._setup.checkpoint.vocab_size)
        return text, ids

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

    def _abort_all(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self.abort(job)


def text_of_prompt(prompt: Prompt) -> str:
    """The text of a prompt. Raises RequestError for token ids, around which no question for an outline can be put."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    if not isinstance(text, str) or (isinstance(prompt, Mapping) and "prompt_token_ids" in prompt):
        raise RequestError("outline_decoding needs the question as a text, not as token ids")
    return text


def text_of(completion: Completion) -> Iterator[str]:
    """The text that has come since the last call, as one piece or none."""
    new = completion.take()
    if new is not None and new.text:
        yield new.text
