"""A worker that dies and returns with an empty cache, again and again, over slow links: every token is compared.

    python -m benchmarks.load.returns [RETURNS] [SEED]

An engine runs on two workers, network namespaces with clocks of their own, neither of which has the checkpoint. One is
killed during answers, its cache is removed, and it returns over a link of 1 to 100 Mbit/s; every other time it is
killed again at a random moment of its transfer. Answers, greedy and at T = 0.8, are requested before, meanwhile and
afterwards, and again once stages have moved back. In every other return pieces are dropped, swapped, repeated and
changed in transit. It needs root.

The results are added to benchmarks/measured/load/returns.json, replacing those of the same seed. The exit code is 1 if
anything was wrong.
"""

from __future__ import annotations

import logging
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.shared.measured import kept_figures, store
from penstock import LLM, SamplingParams
from penstock.hosts import remote
from penstock.hosts.fetching import Courier, PartialCopy
from penstock.hosts.keys import make_cluster
from penstock.hosts.weights import split_digests
from tests.checkpoints import make_checkpoint
from tests.happening import AfterResults
from tests.namespaces import Namespace, network
from tests.workers import Worker

NAME, HOW = "returns", "Measured, with a random llama of 5 MB, hosts as network namespaces"
RETURNS: Final = 200
DAY: Final = 86_400.0
SIZE: Final[Mapping[str, Any]] = {"hidden_size": 256, "intermediate_size": 768}
PROMPTS: Final = ("def fibonacci(n):", "class Stack:\n", "import os\n", "for line in open(path):\n")
PARAMS: Final = [
    SamplingParams(temperature=temperature, seed=seed, max_tokens=24, ignore_eos=True)
    for seed, temperature in enumerate((0.0, 0.8, 0.0, 0.8))
]
RESULTS: Final = range(3, 40)
"""Numbers of results, counted from a call's beginning, at one of which the worker is killed."""
BACK_S: Final = 600.0
"""Seconds within which stages have to be back on the worker."""
DROPPED, SWAPPED, REPEATED, CHANGED = "dropped", "swapped", "repeated", "changed"
FAULTS: Final = {DROPPED: 0.004, SWAPPED: 0.1, REPEATED: 0.1, CHANGED: 0.1}
"""Fraction of the pieces that each fault happens to."""


class Faults:
    """Sits between a courier and its connection, and applies ``FAULTS`` to pieces while it is ``on``."""

    def __init__(self, rng: random.Random) -> None:
        self.on = False
        self.done: Counter[str] = Counter()
        self._rng = rng
        self._before = b""

    def between(self, outbox: Any) -> Any:
        faults = self

        class Between:
            def drain(self, most: int) -> None:
                outbox.drain(most)

            def send(self, header: bytes, content: bytes) -> None:
                for one in faults.made_of(content):
                    outbox.send(header, one)

        return Between()

    def made_of(self, content: bytes) -> list[bytes]:
        """The pieces that are sent in place of one."""
        kind = self._rng.choices([*FAULTS, ""], [*FAULTS.values(), 1 - sum(FAULTS.values())])[0] if self.on else ""
        other, self._before = self._before, content
        if kind == SWAPPED and other in (b"", content):
            kind = ""
        self.done[kind] += bool(kind)
        if kind == CHANGED:
            place = self._rng.randrange(len(content))
            return [content[:place] + bytes([content[place] ^ (1 + self._rng.randrange(255))]) + content[place + 1 :]]
        return {DROPPED: [], SWAPPED: [other], REPEATED: [content, content]}.get(kind, [content])


class Returning:
    """The worker that is killed, on a host of its own, with its cache."""

    def __init__(self, host: Namespace, keys: Path, checkpoint: Path, cache: Path) -> None:
        self._host, self._keys, self._checkpoint, self._cache = host, keys, checkpoint, cache
        self.said: Counter[str] = Counter()
        self.worker = self._begin()

    def _begin(self) -> Worker:
        """Start the worker, with an empty file system over the checkpoint."""
        hidden = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0"; exec "$@"', str(self._checkpoint)]
        options = ("--keys", str(self._keys), "--cache", str(self._cache))
        return Worker(f"{self._host.address}:7700", *options, before=[*self._host.before, *hidden])

    def kill(self) -> None:
        with suppress(psutil.NoSuchProcess, IndexError):
            self.worker.kill()

    def return_empty(self) -> None:
        self.worker.close()
        for line in self.worker.said:
            self.said["refused"] += "came with other bytes than its digest says" in line
            self.said["passed over"] += "was not asked for, or has come" in line
        shutil.rmtree(self._cache, ignore_errors=True)
        self.worker = self._begin()


def tokens(llm: LLM) -> list[list[int]]:
    return [one.outputs[0].token_ids for one in llm.generate(PROMPTS, PARAMS)]


def holes(llm: Any, host: str, cache: Path) -> list[tuple[str, int]]:
    """Pieces of a host's cache that are wrong although it says that it holds them."""
    search = llm.host.fleet.hosts[host]._search
    question = search.offer.question(search.layers, 0)
    digests = split_digests(question.asked.files, question.digests)
    with PartialCopy(cache / question.asked.digest, question.asked.files, digests) as copy:
        return copy.missing(lambda: False, lambda count: None)


def one_return(
    llm: Any, returning: Returning, cache: Path, expected: list[list[int]], rng: random.Random, again: bool
) -> dict[str, Any]:
    """Kill the worker during answers, let it return empty, perhaps kill it again, until stages are back in place."""
    problems: list[str] = []
    answers = 0

    def come_back() -> None:
        returning.return_empty()
        if again:
            time.sleep(rng.uniform(0.0, 6.0))
            returning.kill()
            returning.return_empty()

    with llm.observing(AfterResults(rng.choice(RESULTS), returning.kill)):
        if tokens(llm) != expected:
            problems.append("other tokens as it died")
    returning.kill()
    begun, coming = time.monotonic(), threading.Thread(target=come_back)
    coming.start()
    while coming.is_alive() or not returning.worker.stages():
        answers += 1
        if tokens(llm) != expected:
            problems.append("other tokens meanwhile")
        if time.monotonic() - begun > BACK_S:
            problems.append("stages have not moved back")
            break
    coming.join()
    if found := holes(llm, returning.worker.host, cache):
        problems.append(f"{len(found)} pieces are not what they have to be")
    if tokens(llm) != expected:
        problems.append("other tokens afterwards")
    llm.loop.audit()
    return {"answers": answers + 2, "back_s": round(time.monotonic() - begun, 1), "problems": problems}


@contextmanager
def setting(folder: Path) -> Iterator[tuple[Path, list[Namespace], Path]]:
    """A checkpoint, two hosts, and a cluster's keys."""
    checkpoint = make_checkpoint(folder / "checkpoint", "llama", seed=2, tokenizer=True, **SIZE)
    keys = folder / "keys"
    make_cluster(keys, "head")
    with network(10 * DAY, 20 * DAY) as hosts:
        yield checkpoint, hosts, keys


def main(returns: int = RETURNS, seed: int = 0) -> int:
    remote.LOSSES_WITHIN_S = 1.0  # type: ignore[misc]
    remote.TRY_AGAIN_S = 1.0  # type: ignore[misc]
    logging.disable()
    rng, begun, found = random.Random(seed), time.monotonic(), list[dict[str, Any]]()
    faults = Faults(rng)

    class FaultyCourier(Courier):
        def __init__(self, offer: Any, question: Any, outbox: Any, *others: Any) -> None:
            super().__init__(offer, question, faults.between(outbox), *others)

    remote.Courier = FaultyCourier  # type: ignore[assignment, attr-defined, misc]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        checkpoint, hosts, keys = stack.enter_context(setting(folder))
        with LLM(checkpoint, max_model_len=256) as llm:
            expected = tokens(llm)
        caches = [folder / f"cache-{i}" for i in range(2)]
        steady = stack.enter_context(closing(Returning(hosts[0], keys, checkpoint, caches[0]).worker))
        returning = Returning(hosts[1], keys, checkpoint, caches[1])
        stack.callback(lambda: returning.worker.close())
        names = f"{steady.host},{returning.worker.host}"
        llm = stack.enter_context(LLM(checkpoint, max_model_len=256, hosts=names, keys=str(keys)))
        while len(found) < returns:
            mbit, faults.on = 10 ** rng.uniform(0, 2), len(found) % 2 == 1
            hosts[1].receive_at(f"{mbit:.2f}mbit")
            again = len(found) % 4 in (1, 2)
            one = one_return(llm, returning, caches[1], expected, rng, again)
            found.append({"mbit": round(mbit, 2), "faults": faults.on, "killed": 1 + again, **one})
            print(len(found), found[-1], dict(faults.done), dict(returning.said), flush=True)
        returning.return_empty()
        recovery = llm.loop.recovery
        assert recovery is not None
    figures = {
        "returns": len(found),
        "kills": sum(one["killed"] for one in found),
        "answers": sum(one["answers"] for one in found) * len(PROMPTS),
        "seconds": round(time.monotonic() - begun),
        "recoveries": recovery.recoveries,
        "back_s": sorted(one["back_s"] for one in found),
        "mbit": [min(one["mbit"] for one in found), max(one["mbit"] for one in found)],
        "faults": {kind: faults.done[kind] for kind in FAULTS},
        "refused": returning.said["refused"],
        "passed_over": returning.said["passed over"],
        "problems": [problem for one in found for problem in one["problems"]],
    }
    wrong = faults.done[SWAPPED] + faults.done[CHANGED]
    if returning.said["refused"] > wrong:
        figures["problems"].append(f"{returning.said['refused']} pieces were refused, {wrong} were wrong")
    store(NAME, HOW, (["python -m benchmarks.load.returns RETURNS SEED"], kept_figures(NAME) | {str(seed): figures}))
    print(figures)
    return 1 if figures["problems"] else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
