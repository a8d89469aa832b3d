"""Signals at any moment, several threads and forked children: an ``LLM`` goes on with the same tokens."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final

from benchmarks.load.attacking.trying import Fault, deadline
from penstock import LLM, PipelineError, SamplingParams

PROMPTS: Final = ("def f(", "import ", "class Stack:")
SHORT: Final = SamplingParams(temperature=0, max_tokens=12)
LONG: Final = SamplingParams(temperature=0, max_tokens=160, ignore_eos=True)
SECONDS: Final = 60.0


class Callers:
    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._right = self._ids()

    def attempt(self, rng: random.Random) -> str:
        kind = rng.choice(("interrupt", "interrupt", "threads", "fork"))
        with deadline(SECONDS, kind):
            {"interrupt": self._interrupt, "threads": self._threads, "fork": self._fork}[kind](rng)
            if self._ids() != self._right:
                raise Fault(f"after {kind}: other tokens")
            self._llm.loop.audit()
        return kind

    def _ids(self) -> list[list[int]]:
        return [output.outputs[0].token_ids for output in self._llm.generate(list(PROMPTS), SHORT)]

    def _interrupt(self, rng: random.Random) -> None:
        threading.Timer(rng.uniform(0, 0.3), os.kill, (os.getpid(), signal.SIGINT)).start()
        streams = rng.random() < 0.5
        try:
            while True:
                list(self._llm.stream(PROMPTS[0], LONG)) if streams else self._llm.generate(list(PROMPTS), LONG)
        except KeyboardInterrupt:
            return

    def _threads(self, rng: random.Random) -> None:
        with ThreadPoolExecutor(8) as threads:
            asked = [threads.submit(self._ids) for _ in range(rng.randint(2, 8))]
            if any(one.result() != self._right for one in asked):
                raise Fault("threads beside one another: other tokens")

    def _fork(self, rng: random.Random) -> None:
        call = rng.choice((self._llm.close, self._ids, lambda: self._llm.stream(PROMPTS[0], SHORT)))
        if (child := os.fork()) == 0:
            try:
                call()
            except PipelineError:
                os._exit(0)
            except BaseException:
                os._exit(2)
            os._exit(1)
        if (code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) != 0:
            raise Fault(f"a forked child was not refused: exit code {code}")


@contextmanager
def attacked() -> Iterator[Callers]:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts this in the background ignores it
    with LLM("demo", pipeline_parallel_size=2, max_model_len=256, speculative_config={"method": "ngram"}) as llm:
        yield Callers(llm)
