"""Three hosts of unequal speed: layers as planned beside an even split, in wall-clock time.

    python -m benchmarks.strategies.planned_hosts MODEL [--repeats N] [--tokens N]

Each host is a network namespace with a worker of one thread. The first has a core to itself. The other two share a
second core with a process that never rests: one worker has its priority, so that it gets at most half of the core, and
the other a lower one (``nice``). `layer_split="auto"` measures them as they are. Both splits then answer the same
questions in turn, plainly and with `auto` and prompt lookup; the tokens have to be the same. Needs root and iproute2.
The figures are stored in benchmarks/measured/strategies/planned_hosts.json. Stop whatever else runs on the host, or
they mean little.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from benchmarks.shared.benchmark import Benchmark, show
from benchmarks.shared.burner import one_core_busy
from penstock import LLM, SamplingParams
from tests.namespaces import network
from tests.workers import Worker

NAME, HOW = "planned_hosts", "Measured on three namespaces of two cores, nothing emulated"
WORKERS: Final = (("taskset", "-c", "0"), ("taskset", "-c", "1"), ("taskset", "-c", "1", "nice", "-n", "4"))
RIVAL: Final = ("taskset", "-c", "1")
LENGTH: Final = 1024
PROMPTS: Final = (
    "List the planets of the solar system in order, and then list them once more.",
    "Write a Python function that returns the larger of two numbers.",
    "Explain in three sentences why the sky is blue.",
    "Repeat this line four times: the quick brown fox jumps over the lazy dog.",
)
WAYS: Final[dict[str, dict[str, Any] | None]] = {"plain": None, "auto": {"method": "ngram"}}


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of every prompt by way and split, and the layers of each stage."""
    params = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True)
    with ExitStack() as running:
        hosts = ",".join(running.enter_context(three_hosts()))
        running.enter_context(one_core_busy(*RIVAL))
        engines = {
            (way, split): running.enter_context(engine(options.model, hosts, layers, config))
            for way, config in WAYS.items()
            for split, layers in (("planned", "auto"), ("even", options.even))
        }
        seconds: dict[str, list[float]] = {f"{way}, {split}": [] for way, split in engines}
        for _ in range(options.repeats):
            for prompt in PROMPTS:
                texts = set()
                for (way, split), llm in engines.items():
                    begin = time.perf_counter()
                    (answer,) = llm.chat([{"role": "user", "content": prompt}], params)
                    seconds[f"{way}, {split}"].append(round(time.perf_counter() - begin, 4))
                    texts.add(tuple(answer.outputs[0].token_ids))
                assert len(texts) == 1, "the tokens differ"
        layers = {f"{way}, {split}": llm.setup.options.layer_split for (way, split), llm in engines.items()}
        places = {f"{way}, {split}": llm.setup.options.hosts for (way, split), llm in engines.items()}
    return {"tokens": options.tokens, "layers": layers, "hosts": places, "seconds": seconds}


def engine(model: str, hosts: str, layers: str, config: dict[str, Any] | None) -> LLM:
    return LLM(
        model,
        hosts=hosts,
        insecure=True,
        layer_split=layers,
        threads=1,
        max_model_len=LENGTH,
        speculative_config=config,
    )


@contextmanager
def three_hosts() -> Iterator[list[str]]:
    """Start workers in namespaces of their own. Yields their names for ``--hosts``."""
    with ExitStack() as running:
        found = []
        for host, slowed in zip(running.enter_context(network(*[0.0] * len(WORKERS))), WORKERS, strict=True):
            worker = Worker(f"{host.address}:7700", "--insecure", before=[*host.before, *slowed])
            running.callback(worker.close)
            found.append(worker.host)
        yield found


if __name__ == "__main__":
    benchmark = Benchmark(__file__, HOW)
    options = benchmark.parser(model=str, even="10,10,10", repeats=2, tokens=48).parse_args()
    figures = measured(options)
    benchmark.keep(figures, f"MODEL.gguf --repeats {options.repeats} --tokens {options.tokens}")
    show(figures)
