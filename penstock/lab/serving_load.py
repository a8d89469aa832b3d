"""Load on a server: options, the client, the server's counters, arrivals, prompts, and the figures of a level."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import httpx
import numpy as np
import numpy.typing as npt
from httpx_sse import EventSource
from prometheus_client.parser import text_string_to_metric_families

from penstock.clients.api import AnswerStream, Chunk, ServedModel, Server, ServerError, Usage, first_model, refused
from penstock.config import LOAD, OUTPUT, SAMPLING, SERVER, FieldError, Option, check, check_positive, nearest
from penstock.lab.grid import FiguresFile, check_written, read_prompts

# -------------------------------------------------------------------------------------------------------------- options
# The options of ``penstock bench serve``, checked before anything is sent.

PATHS: Final = {"completions": "/completions", "chat": "/chat/completions"}
"""The paths of endpoints below the server's address."""
RANDOM: Final = Path("random")
"""Value of ``dataset`` for random prompts."""
LATENCIES: Final = ("ttft", "tpot", "itl", "e2el")
"""Time to first token, time per output token, inter-token latency, end-to-end latency: vLLM's names."""
DEFAULT_INPUT: Final = 128
"""Tokens of a random prompt unless ``input_len`` is given. The answer's default is as long (``output_len``)."""
BOUNDED: Final = ("ttft", "tpot", "e2el")
"""Latencies of which a request has one value each, so that goodput can limit them."""


def parse_concurrency(text: str) -> tuple[int, ...]:
    """The numbers in ``1,2,4``. Raises FieldError for anything else."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise FieldError("concurrency", f"is {text!r}; it has to be whole numbers with commas between") from error


def parse_goodput(text: str) -> dict[str, float]:
    """The limits in ``ttft:500,tpot:50``: milliseconds by latency.

    Raises FieldError for an unknown latency and for a limit that is no number.
    """
    limits = {}
    for part in text.split(","):
        name, _, limit = part.strip().partition(":")
        if name not in BOUNDED:
            raise FieldError("goodput", f"names {name!r}; {nearest(name, BOUNDED)}")
        try:
            limits[name] = float(limit)
        except ValueError as error:
            raise FieldError("goodput", f"is {part!r}; it has to be like {name}:500, in milliseconds") from error
    return limits


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """The server, its load, and the figures. Raises FieldError for a value out of range."""

    server: Server = field(default_factory=Server)
    model: ServedModel = None
    endpoint: Annotated[str, Option("Interface that is measured: completions or chat.", SERVER)] = "completions"
    request_rate: Annotated[float, Option("Requests that arrive per second; inf: all at once.", LOAD)] = math.inf
    burstiness: Annotated[
        float,
        Option(
            "Shape of the times between requests: 1 is a Poisson process, below requests come in bursts, above more "
            "evenly.",
            LOAD,
        ),
    ] = 1.0
    concurrency: Annotated[
        tuple[int, ...],
        Option(
            "Most requests at a time; several are measured one after the other.",
            LOAD,
            metavar="K,K,...",
            default="no limit",
            parse=parse_concurrency,
        ),
    ] = ()
    num_prompts: Annotated[int, Option("Requests for each concurrency.", LOAD)] = 100
    num_warmups: Annotated[int, Option("Requests before them that do not count.", LOAD)] = 1
    dataset: Annotated[
        Path,
        Option(
            "Random words, or one JSON object a line with 'prompt' or 'turns'.",
            SAMPLING,
            metavar="random|FILE.jsonl",
        ),
    ] = RANDOM
    input_len: Annotated[
        int | None,
        Option("Tokens of a random prompt, on average and as the server counts.", SAMPLING, default=str(DEFAULT_INPUT)),
    ] = None
    output_len: Annotated[int, Option("Most tokens per request.", SAMPLING)] = 128
    temperature: Annotated[float, Option("The logits are divided by it; 0 is greedy.", SAMPLING)] = 0.0
    seed: Annotated[
        int, Option("Seed of the arrivals and of the first request; each further request has the next one.", SAMPLING)
    ] = 0
    ignore_eos: Annotated[bool, Option("Go on after EOS, so that every request has output-len tokens.", SAMPLING)] = (
        False
    )
    goodput: Annotated[
        Mapping[str, float],
        Option(
            "Count the requests per second that keep these limits, in milliseconds.",
            OUTPUT,
            metavar="ttft:MS,tpot:MS,e2el:MS",
            default="",
            parse=parse_goodput,
        ),
    ] = field(default_factory=dict)
    json: FiguresFile = None
    plot: Annotated[
        Path | None,
        Option("Draw throughput and latencies over concurrency.", OUTPUT, metavar="FILE.png", default=""),
    ] = None

    def __post_init__(self) -> None:
        check(self.endpoint in PATHS, "endpoint", self.endpoint, " or ".join(PATHS))
        check(self.request_rate > 0, "request_rate", self.request_rate, "above 0, or inf")
        check_positive(self, "burstiness")
        check(all(limit >= 1 for limit in self.concurrency), "concurrency", self.concurrency, "at least 1")
        different = len(set(self.concurrency)) == len(self.concurrency)
        check(different, "concurrency", self.concurrency, "different numbers")
        check(self.num_prompts >= 1, "num_prompts", self.num_prompts, "at least 1")
        check(self.num_warmups >= 0, "num_warmups", self.num_warmups, "0 or above")
        check(self.input_len is None or self.input_len >= 1, "input_len", self.input_len, "at least 1")
        check(self.output_len >= 1, "output_len", self.output_len, "at least 1")
        check_positive(self, "temperature", or_zero=True)
        if self.dataset != RANDOM and self.input_len is not None:
            raise FieldError("input_len", "is the length of random prompts, but the dataset is a file; remove one")
        check_written(self, "json", "plot")
        if self.plot is not None:
            check(len(self.concurrency) > 1, "concurrency", self.concurrency, "several, to be compared in a plot")


# --------------------------------------------------------------------------------------------------------------- client
# One request as a client sees it: the times at which its text came, and the token counts that the server states.


@dataclass
class Outcome:
    """The outcome of the request ``index``; times are seconds of the client's monotonic clock.

    ``first``: the first chunk with text; ``ended``: the last chunk with text or a finish reason. ``gaps``: seconds
    between chunks with text. ``error``: the kind of a failure; ``message``: its text.
    """

    index: int
    started: float
    first: float | None = None
    ended: float | None = None
    gaps: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    usage: Usage | None = None
    error: str | None = None
    message: str = ""
    _last_text: float = 0.0

    def add(self, chunk: Chunk, now: float) -> None:
        """Add a chunk that came at the time ``now``."""
        self.usage = chunk.usage or self.usage
        self.finish_reason = chunk.finish_reason or self.finish_reason
        if chunk.text:
            if self.first is None:
                self.first = now
            else:
                self.gaps.append(now - self._last_text)
            self._last_text = now
            self.text += chunk.text
        if chunk.text or chunk.finish_reason:
            self.ended = now

    @property
    def is_empty(self) -> bool:
        """Whether the model ended the answer before it wrote any text."""
        return self.finish_reason == "stop" and not self.text

    @property
    def ttft(self) -> float | None:
        """Seconds to the first text."""
        return None if self.first is None else self.first - self.started

    @property
    def e2el(self) -> float | None:
        """Seconds to the end of the answer."""
        return None if self.ended is None else self.ended - self.started

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None if the server counts no second one, or states no usage."""
        if self.first is None or self.ended is None or self.usage is None or self.usage.completion_tokens < 2:
            return None
        return (self.ended - self.first) / (self.usage.completion_tokens - 1)

    @property
    def text_sha256(self) -> str:
        """SHA-256 of the text, in hexadecimal digits."""
        return hashlib.sha256(self.text.encode(errors="surrogatepass")).hexdigest()


class Client:
    """Asks one server, over as many connections as there are requests at a time."""

    def __init__(self, client: httpx.AsyncClient, server: Server, endpoint: str) -> None:
        self._client = client
        self._server = server
        self._path = PATHS[endpoint]

    async def first_model(self) -> str:
        """The first model that the server names. Raises ServerError if it does not answer, or names none."""
        try:
            return first_model(await self._client.get("/models"))
        except httpx.HTTPError as error:
            raise self._server.lost(error) from error

    async def ask(self, index: int, body: dict[str, Any]) -> Outcome:
        """Send a request. Failures of the server are noted in the outcome, never raised."""
        outcome = Outcome(index, time.perf_counter())
        try:
            async for chunk in self._chunks(body):
                outcome.add(chunk, time.perf_counter())
        except ServerError as error:
            outcome.error, outcome.message = error.kind, str(error)
        return outcome

    async def _chunks(self, body: dict[str, Any]) -> AsyncIterator[Chunk]:
        """The chunks of an answer. Raises ServerError if the request is refused or broken off."""
        answer = AnswerStream()
        try:
            async with self._client.stream("POST", self._path, json=body) as response:
                if not response.is_success:
                    await response.aread()
                    raise refused(response)
                async for event in EventSource(response).aiter_sse():
                    for chunk in answer.take(event):
                        yield chunk
                answer.close()
        except httpx.HTTPError as error:
            raise self._server.lost(error) from error

    async def metrics(self) -> str:
        """The text of the server's /metrics; "" if it has none."""
        try:
            response = await self._client.get(f"{self._server.root}/metrics")
        except httpx.HTTPError:
            return ""
        return response.text if response.is_success else ""


# ------------------------------------------------------------------------------------------------------------- counters
# The server's own counters of speculation, under the names of vLLM and of Penstock.

COUNTERS: Final = {
    f"{engine}:spec_decode_num_{name}_total": name
    for engine in ("vllm", "penstock")
    for name in ("drafts", "draft_tokens", "accepted_tokens")
}
"""The figure of each counter, by the counter's name."""


@dataclass(frozen=True)
class Speculation:
    """Counts over a period. ``drafts`` is None if only the usage of replies is known."""

    drafts: int | None
    draft_tokens: int
    accepted_tokens: int

    @property
    def acceptance_rate(self) -> float | None:
        """The share of drafted tokens that were accepted, 0 to 1; None if nothing was drafted."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else None

    @property
    def acceptance_length(self) -> float | None:
        """1 + accepted / drafts, which counts the target's own token, as vLLM defines it; None without drafts."""
        return 1 + self.accepted_tokens / self.drafts if self.drafts else None


def read_counters(metrics: str) -> Speculation | None:
    """The counters in a text of Prometheus, each summed over its series; None unless there are all three."""
    counts: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(metrics):
            for sample in family.samples:
                if name := COUNTERS.get(sample.name):
                    counts[name] = counts.get(name, 0.0) + sample.value
    except ValueError:
        return None  # another kind of page is at /metrics
    if len(counts) < 3:
        return None
    return Speculation(int(counts["drafts"]), int(counts["draft_tokens"]), int(counts["accepted_tokens"]))


def between(before: Speculation | None, after: Speculation | None) -> Speculation | None:
    """The counts between two readings; None if one of them is missing."""
    if before is None or after is None or before.drafts is None or after.drafts is None:
        return None
    return Speculation(
        after.drafts - before.drafts,
        after.draft_tokens - before.draft_tokens,
        after.accepted_tokens - before.accepted_tokens,
    )


def of_usages(usages: list[Usage]) -> Speculation | None:
    """The counts in the usage of replies; None if no reply has them."""
    known = [(usage.accepted, usage.rejected or 0) for usage in usages if usage.accepted is not None]
    accepted = sum(some for some, _ in known)
    return Speculation(None, accepted + sum(some for _, some in known), accepted) if known else None


# ----------------------------------------------------------------------------------------------------------------- load
# Sends requests when they arrive, with at most ``concurrency`` at a time.


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> npt.NDArray[np.float64]:
    """Arrival times [count] in seconds after the start, the first at 0; all 0 for an infinite rate.

    Times between arrivals are gamma distributed with mean 1 / ``rate`` and shape ``burstiness``: 1 is a Poisson
    process, below 1 requests come in bursts, above 1 they are more regular (vLLM's definition).
    """
    if math.isinf(rate):
        return np.zeros(count)
    # The first request arrives at 0, so there is one interval less than requests.
    between = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), count - 1)
    return np.concatenate(([0.0], np.cumsum(between)))


async def run_load(
    ask: Callable[[int], Awaitable[None]], arrivals: Sequence[float] | npt.NDArray[np.float64], concurrency: int | None
) -> None:
    """Ask request i once its time has come and fewer than ``concurrency`` are under way; return when all have ended.

    Waiting requests begin in the order of their arrival. Cancelling the call cancels all requests.
    """
    # asyncio's semaphore is fair: it wakes waiters in the order in which they came.
    limit = asyncio.Semaphore(concurrency) if concurrency is not None else nullcontext()
    start = asyncio.get_running_loop().time()

    async def one(index: int, at: float) -> None:
        await asyncio.sleep(start + at - asyncio.get_running_loop().time())
        async with limit:
            await ask(index)

    async with asyncio.TaskGroup() as group:
        for index, at in enumerate(arrivals):
            group.create_task(one(index, float(at)))


# ------------------------------------------------------------------------------------------------------------- workload
# The requests of a serving bench, with the prompts of a file, or random ones of a given length.

NOUNS: Final = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city name"
)
WORDS: Final = NOUNS.split()
"""The words of random prompts: in most vocabularies most of them are one or two tokens."""

CountTokens = Callable[[str], Awaitable[int]]
"""Function that returns the tokens that the server counts in a request with this prompt."""


@dataclass(frozen=True)
class Workload:
    """``asked``: the bodies of requests in order of arrival; ``warmups``: those sent before, with other prompts.

    ``repeated``: the number of different prompts if there are fewer than requests, else None.
    """

    asked: list[dict[str, Any]]
    warmups: list[dict[str, Any]]
    repeated: int | None


async def make_workload(options: ServingOptions, model: str, count_tokens: CountTokens) -> Workload:
    """The requests. Raises ConfigError for a file that cannot be used, ServerError if the server counts no tokens."""
    wanted = options.num_prompts + options.num_warmups
    if options.dataset != RANDOM:
        prompts = read_prompts(options.dataset, wanted)
    else:
        length = await words_for(options.input_len or DEFAULT_INPUT, count_tokens)
        prompts = random_prompts(wanted, length, options.seed)
    bodies = [body_of(options, model, prompts[i % len(prompts)], options.seed + i) for i in range(wanted)]
    repeated = len(prompts) if len(prompts) < options.num_prompts else None
    return Workload(bodies[: options.num_prompts], bodies[options.num_prompts :], repeated)


def body_of(options: ServingOptions, model: str, prompt: str, seed: int) -> dict[str, Any]:
    """One request's JSON. ``ignore_eos`` is an extension of vLLM, so that it is only sent if it is wanted."""
    text = {"prompt": prompt} if options.endpoint == "completions" else {"messages": [user(prompt)]}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    body = {"model": model, **text, "max_tokens": options.output_len, "temperature": options.temperature, "seed": seed}
    return {**body, **stream, **({"ignore_eos": True} if options.ignore_eos else {})}


def user(prompt: str) -> dict[str, str]:
    """A user's message."""
    return {"role": "user", "content": prompt}


async def words_for(tokens: int, count_tokens: CountTokens) -> int:
    """The number of random words that have ``tokens`` tokens on average, by the server's count, without its tokenizer.

    A prompt with all words twice has more tokens than one with all words once, by exactly those of all words; the rest
    of the count is what the server adds, for example by a chat template.
    """
    once, twice = [await count_tokens(" ".join(times * WORDS)) for times in (1, 2)]
    if twice <= once:
        raise ServerError("no usage", "the server's usage does not grow with the prompt, so use a file")
    per_word = (twice - once) / len(WORDS)
    # once = added + words, twice = added + 2 * words
    added = 2 * once - twice
    return max(1, round((tokens - added) / per_word))


def random_prompts(count: int, words: int, seed: int) -> list[str]:
    """Prompts of ``words`` words each. A prompt of another length has the same words as far as both go."""
    return [" ".join(np.random.default_rng((seed, i)).choice(WORDS, size=words)) for i in range(count)]


# -------------------------------------------------------------------------------------------------------------- metrics
# The figures of one level of load, from the outcomes of its requests. Their names are those of ``vllm bench serve``.


@dataclass
class Level:
    """The results at one ``concurrency`` (None: no limit); times are seconds of the client's clock.

    ``asked``: the number of requests planned; those without an outcome were interrupted. ``counted``: the server's
    counters.
    """

    concurrency: int | None
    asked: int
    started: float
    ended: float = math.nan
    outcomes: list[Outcome] = field(default_factory=list)
    counted: Speculation | None = None

    @property
    def name(self) -> str:
        """The concurrency in words."""
        return "no limit" if self.concurrency is None else str(self.concurrency)

    @property
    def completed(self) -> list[Outcome]:
        """The outcomes that did not fail."""
        return [outcome for outcome in self.outcomes if outcome.error is None]


@dataclass(frozen=True)
class Latency:
    """Latencies in milliseconds; percentiles are interpolated between the two nearest values, as numpy does."""

    mean: float
    median: float
    p90: float
    p99: float


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The figures of one level. Throughputs are per second, from the first arrival to the last end.

    Figures of tokens are those of requests with ``usage``; ``without_usage`` counts the other requests.
    ``tokens_per_chunk``: the mean over chunks with text. ``request_goodput``: requests per second within all limits.
    ``duration``: seconds.
    """

    concurrency: int | None
    completed: int
    failed: int
    unfinished: int
    without_usage: int
    errors: Mapping[str, int]
    finish_reasons: Mapping[str, int]
    duration: float
    total_input_tokens: int
    total_output_tokens: int
    cached_tokens: int | None
    request_throughput: float
    output_throughput: float
    total_token_throughput: float
    request_goodput: float | None
    tokens_per_chunk: float | None
    latencies: Mapping[str, Latency | None]
    """Latencies by the names in ``LATENCIES``; None for one that no request has."""
    speculation: Speculation | None

    def as_dict(self) -> dict[str, Any]:
        """All figures in one table, with latencies as ``mean_ttft_ms`` and so on."""
        flat = asdict(self)
        for name, latency in flat.pop("latencies").items():
            figures = latency or dict.fromkeys(("mean", "median", "p90", "p99"))
            flat |= {f"{figure}_{name}_ms": value for figure, value in figures.items()}
        return flat


def summarize(level: Level, goodput: Mapping[str, float]) -> Summary:
    """The figures of a level. ``goodput``: limits in milliseconds by latency; without any there is no goodput."""
    done = level.completed
    usages = [outcome.usage for outcome in done if outcome.usage is not None]
    output = sum(usage.completion_tokens for usage in usages)
    both = output + sum(usage.prompt_tokens for usage in usages)
    cached = [usage.cached_tokens for usage in usages if usage.cached_tokens is not None]
    seconds = level.ended - level.started
    return Summary(
        concurrency=level.concurrency,
        completed=len(done),
        failed=len(level.outcomes) - len(done),
        unfinished=level.asked - len(level.outcomes),
        without_usage=len(done) - len(usages),
        errors=dict(Counter(outcome.error for outcome in level.outcomes if outcome.error is not None)),
        finish_reasons=dict(Counter(outcome.finish_reason or "none" for outcome in done)),
        duration=seconds,
        total_input_tokens=both - output,
        total_output_tokens=output,
        cached_tokens=sum(cached) if cached else None,
        request_throughput=len(done) / seconds,
        output_throughput=output / seconds,
        total_token_throughput=both / seconds,
        request_goodput=sum(is_good(outcome, goodput) for outcome in done) / seconds if goodput else None,
        tokens_per_chunk=tokens_per_chunk(done),
        latencies={name: latency_of(seconds_of(done, name)) for name in LATENCIES},
        speculation=level.counted or of_usages(usages),
    )


def seconds_of(outcomes: Sequence[Outcome], name: str) -> list[float]:
    """All values of a latency in seconds: inter-token latency has one for each gap, others one for each request."""
    if name == "itl":
        return [gap for outcome in outcomes for gap in outcome.gaps]
    values = [getattr(outcome, name) for outcome in outcomes]
    return [value for value in values if value is not None]


def latency_of(seconds: Sequence[float]) -> Latency | None:
    """Mean and percentiles of a latency; None without any values."""
    if not seconds:
        return None
    values = 1e3 * np.asarray(seconds)
    median, p90, p99 = np.percentile(values, (50, 90, 99))
    return Latency(float(values.mean()), float(median), float(p90), float(p99))


def is_good(outcome: Outcome, goodput: Mapping[str, float]) -> bool:
    """Whether a request kept all limits. A latency that it does not have (a single token) is within its limit."""
    times = ((getattr(outcome, name), limit) for name, limit in goodput.items())
    return all(value is None or 1e3 * value <= limit for value, limit in times)


def tokens_per_chunk(outcomes: Sequence[Outcome]) -> float | None:
    """Mean tokens of a chunk with text; None if no request has usage."""
    known = [outcome for outcome in outcomes if outcome.usage is not None and outcome.first is not None]
    chunks = sum(1 + len(outcome.gaps) for outcome in known)
    return sum(outcome.usage.completion_tokens for outcome in known if outcome.usage) / chunks if chunks else None


def same_texts(level: Level, first: Level) -> tuple[int, int]:
    """The number of requests that have the same text in both levels, and of those that both answered."""
    texts = {outcome.index: outcome.text for outcome in first.completed}
    pairs = [(outcome.text, texts[outcome.index]) for outcome in level.completed if outcome.index in texts]
    return sum(one == other for one, other in pairs), len(pairs)
