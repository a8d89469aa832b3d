"""Jupiter's M-LM as it really decodes: tensor parallel ranks on hosts whose links have the paper's rates.

    python -m benchmarks.papers.megatron_links MODEL [--ranks 2 3] [--tokens 48] [--repeats 5]

Each rank is a `penstock worker` of one thread in a network namespace, with an equal share of all layers, and ``tc tbf``
limits what leaves it and what comes to it to 100, 500 and 1,000 Mbit/s. Plain decoding, every rate in turn. Bytes of a
token are those that a host's cable carries, headers included: of a long answer less those of a short one to the same
prompt. One rank alone is how the paper's SP decodes. It needs root and iproute2.

Beside it stands what is reckoned: the bytes by ``exchange_of``, and the time without a limit plus that of these bytes.

The figures are stored in benchmarks/measured/papers/megatron_links.json. The exit code is 1 where tokens differ from
those of one process. Stop whatever else runs on the host, or the times mean little; bytes stay what they are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from statistics import median
from typing import Any, Final, NamedTuple

from benchmarks.shared.benchmark import Benchmark, show
from penstock import LLM, SamplingParams
from penstock.cluster.spec import ModelPrice, llama
from penstock.cluster.timing import exchange_of
from penstock.core import CompletionOutput, ConfigError
from penstock.lab.plan import METHODS
from tests.namespaces import Namespace, network
from tests.workers import Worker

NAME, HOW = "megatron_links", "Measured over network namespaces on two cores, nothing emulated"
RATES: Final = (None, 1000, 500, 100)
"""Rates of every host's link in Mbit/s; None for one without a limit."""
PROMPT: Final = "def read_lines(path):"
SHORT: Final = 8
"""Tokens of the short answer, whose bytes and time are taken from the long one's."""
FLOAT_BITS: Final = 32
"""Bits of a number that ranks gather, whatever weights and states are held as."""


class Answer(NamedTuple):
    """An answer's tokens, the seconds after its first one, and the bytes that each host sent during all of it."""

    ids: Sequence[int]
    seconds: float
    sent: Sequence[int]


def measured(model: str, ranks: Sequence[int], tokens: int, repeats: int) -> dict[str, Any]:
    """A row by number of ranks and rate, each with the reckoned bytes and time beside the measured ones."""
    with LLM(model, speculative_config=None, max_model_len=512) as llm:
        expected = [*decoded(llm, tokens).token_ids]
        price = price_of(llm)
    rows: list[dict[str, Any]] = []
    for count in (1, *ranks):
        with joined(model, count) as (llm, hosts):
            answers = in_turn(llm, hosts, tokens, repeats, RATES if count > 1 else RATES[:1])
        rows += medians_by_rate(price, count, answers, expected)
    return {"model": model, "rows": rows}


@contextmanager
def joined(model: str, ranks: int) -> Iterator[tuple[LLM, list[Namespace]]]:
    """An engine on this host over so many hosts, each with a rank of the only stage."""
    own: dict[str, Any] = {"threads": 1, "insecure": True, "max_model_len": 512, "enable_prefix_caching": False}
    with (
        workers_on(ranks) as (hosts, names),
        LLM(model, hosts=",".join(names), tensor_parallel_size=ranks, speculative_config=None, **own) as llm,
    ):
        yield llm, hosts


@contextmanager
def workers_on(count: int) -> Iterator[tuple[list[Namespace], list[str]]]:
    """Hosts with a worker on each, and the workers' names for ``hosts=``."""
    with ExitStack() as running:
        hosts = running.enter_context(network(*[0.0] * count))
        workers = [
            running.enter_context(closing(Worker(f"{host.address}:7700", "--insecure", before=host.before)))
            for host in hosts
        ]
        yield hosts, [worker.host for worker in workers]


def in_turn(
    llm: LLM, hosts: Sequence[Namespace], tokens: int, repeats: int, rates: Sequence[int | None]
) -> dict[int | None, list[tuple[Answer, Answer]]]:
    """Short and long answers by rate; every repeat has all rates, so that what else the host does meets them alike.

    Raises ConfigError where a host was lost meanwhile.
    """
    answers: dict[int | None, list[tuple[Answer, Answer]]] = {rate: [] for rate in rates}
    decoded(llm, SHORT)
    for _ in range(repeats):
        for rate in rates:
            with limited(hosts, rate):
                answers[rate].append((answered(llm, hosts, SHORT), answered(llm, hosts, tokens)))
    check_none_lost(llm)
    return answers


def check_none_lost(llm: LLM) -> None:
    """Raise ConfigError if a host was lost meanwhile: a neighbour then had its share, and links carried other bytes."""
    recovery = llm.loop.recovery
    if recovery is not None and recovery.recoveries:
        raise ConfigError("a host was lost amid the answers, so that they tell nothing: stop what else runs here")


@contextmanager
def limited(hosts: Sequence[Namespace], rate: int | None) -> Iterator[None]:
    if rate is None:
        yield
        return
    for host in hosts:
        host.send_at(f"{rate}mbit")
        host.receive_at(f"{rate}mbit")
    try:
        yield
    finally:
        for host in hosts:
            host.unlimited()
            host.receives_unlimited()


def answered(llm: LLM, hosts: Sequence[Namespace], tokens: int) -> Answer:
    before = [host.sent() for host in hosts]
    found = decoded(llm, tokens)
    sent = [host.sent() - was for host, was in zip(hosts, before, strict=True)]
    assert found.seconds is not None
    assert found.first_token_seconds is not None
    return Answer([*found.token_ids], found.seconds - found.first_token_seconds, sent)


def decoded(llm: LLM, tokens: int) -> CompletionOutput:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return llm.generate([PROMPT], params)[0].outputs[0]


def medians_by_rate(
    price: ModelPrice,
    ranks: int,
    answers: Mapping[int | None, Sequence[tuple[Answer, Answer]]],
    expected: Sequence[int],
) -> Iterator[dict[str, Any]]:
    """Medians by rate, in milliseconds and bytes per token, of the host that sends most."""
    row_bytes, rings = exchange_of(price, (1.0,) * ranks, price.layers, head=True).row_bytes, ring_bytes(price, ranks)
    free_ms = median(map(ms_per_token, answers[None]))
    for rate, pairs in answers.items():
        yield {
            "ranks": ranks,
            "mbit": rate,
            "bytes": median(max(bytes_per_token(pair)) for pair in pairs),
            "priced_bytes": row_bytes,
            "ms": median(map(ms_per_token, pairs)),
            "reckoned_ms": free_ms + wire_ms(row_bytes, rate),
            "rings_bytes": rings,
            "rings_ms": free_ms + wire_ms(rings, rate),
            "hidden_ms": max(free_ms, wire_ms(rings, rate)),
            "same_tokens": all(one.ids == expected[: len(one.ids)] for pair in pairs for one in pair),
        }


def price_of(llm: LLM) -> ModelPrice:
    """The model as ranks exchange its rows."""
    config = llm.setup.checkpoint.config
    heads = config.num_key_value_heads
    return llama(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        key_value=heads * config.head_dim,
        key_value_heads=heads,
        vocabulary=config.vocab_size,
        bits=FLOAT_BITS,
    )


def ms_per_token(pair: tuple[Answer, Answer]) -> float:
    _, long = pair
    return 1e3 * long.seconds / (len(long.ids) - 1)


def bytes_per_token(pair: tuple[Answer, Answer]) -> list[float]:
    """Each host's bytes. Both answers have the same prompt, whose bytes fall out."""
    short, long = pair
    more = len(long.ids) - len(short.ids)
    return [(most - least) / more for least, most in zip(short.sent, long.sent, strict=True)]


def wire_ms(size: float, mbit: int | None) -> float:
    return 0.0 if mbit is None else size * 8 / (mbit * 1e3)


def ring_bytes(price: ModelPrice, ranks: int) -> float:
    """Bytes of 16-bit numbers that cross a link for a token in rings of Megatron's two all-reduces a layer."""
    return METHODS["M-LM"].elements * price.layers * price.hidden_size * 2 * (ranks - 1) / ranks


def main() -> int:
    benchmark = Benchmark(__file__, HOW)
    parser = benchmark.parser(model=str, tokens=48, repeats=5)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 3])
    options = parser.parse_args()
    with benchmark.refusing():
        figures = measured(options.model, options.ranks, options.tokens, options.repeats)
    ranks = " ".join(map(str, options.ranks))
    benchmark.keep(figures, f"{options.model} --ranks {ranks} --tokens {options.tokens} --repeats {options.repeats}")
    show(figures)
    return 0 if all(one["same_tokens"] for one in figures["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
