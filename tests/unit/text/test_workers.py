"""Workers: what a stranger can make expensive is bounded, cancelled with whom it is for, and holds up nobody else."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import Any, Final

import pytest

from penstock.core import QueueFull, RequestError
from penstock.engine.options import DEMO
from penstock.text import workers as module
from penstock.text.tokenizer import LONG, load_tokenizer
from penstock.text.workers import ERRAND, Cancelled, Errand, Failed, Job, Overrun, Vocabulary, Workers, aside, workers

TOKENIZER = load_tokenizer(DEMO / "target")
ENDLESS = '{"type": "integer", "multipleOf": 99999989}'


def grammar_job(grammar: str, seconds: float = 1.0, memory: int = 8 << 30) -> Job:
    from penstock.core import StructuredOutputsParams
    from penstock.text.grammar import grammar_of

    kind = "json" if grammar.startswith("{") else "regex"
    given = {
        "grammar": grammar_of(StructuredOutputsParams(**{kind: grammar})),
        "vocab_size": 4096,
        "eos_token_ids": [2],
    }
    return Job("check_grammar", given, seconds, TOKENIZER.vocabulary, memory)


def template_job(template: str, seconds: float = 1.0) -> Job:
    return Job("render", {"conversations": [[{"role": "user", "content": "a"}]], "chat_template": template}, seconds)


def text_job(text: str, seconds: float = 1.0, vocabulary: Vocabulary | None = None) -> Job:
    given = {"text": text, "add_special_tokens": False, "literal": False}
    return Job("encode", given, seconds, vocabulary or TOKENIZER.vocabulary)


FINE = {"grammar": grammar_job("[a-z]+"), "template": template_job("fine"), "text": text_job("fine")}
DEAR = {
    "grammar": grammar_job(ENDLESS, 0.3),
    "template": template_job("{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3, 0.3),
    "text": text_job("a b" * 2_000_000, 0.3),
}


@pytest.fixture(scope="module")
def pool() -> Workers:
    return Workers()


def on_behalf_of(client: str, work: Any) -> Any:
    context = copy_context()
    context.run(ERRAND.set, Errand(client))
    return context.run(work)


@pytest.mark.parametrize("kind", list(FINE))
def test_every_kind_of_work_is_bounded_in_time(pool: Workers, kind: str) -> None:
    with pytest.raises(Overrun, match=r"^did not end within 0\.3 s$"):
        pool.run(DEAR[kind])
    assert pool.run(FINE[kind])


@pytest.mark.parametrize("kind", list(FINE))
def test_every_kind_of_work_is_bounded_in_memory(pool: Workers, kind: str) -> None:
    greedy = {
        "grammar": grammar_job(ENDLESS, 30),
        "template": template_job("{{ 'a' * 100000000 }}", 30),
        "text": text_job("a b" * 2_000_000, 30),
    }
    with pytest.raises(Overrun, match=r"^needs more memory than it may have$"):
        pool.run(replace(greedy[kind], memory=1 << 22))
    assert pool.run(FINE[kind])


LIMITS: Final = """
import json, resource
from penstock.text.worker_tasks import limit_memory
most = 1 << 36
resource.setrlimit(resource.RLIMIT_AS, (most, most))
found = []
for size in (1 << 32, None, 1 << 40):
    limit_memory(size)
    found.append(resource.getrlimit(resource.RLIMIT_AS))
print(json.dumps(found))
"""


def test_a_hard_limit_of_the_users_stays_what_it_is() -> None:
    """A user who may not raise it again (`ulimit -v`) would lose every worker."""
    said = subprocess.run([sys.executable, "-c", LIMITS], stdout=subprocess.PIPE, text=True, check=True).stdout
    assert json.loads(said) == [[1 << 32, 1 << 36], [1 << 36, 1 << 36], [1 << 36, 1 << 36]]


def test_a_job_that_is_given_no_processor_is_bounded_on_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.1)
    with pytest.raises(Overrun, match=r"^did not end within 0\.3 s$"):
        Workers().run(grammar_job(ENDLESS, 3.0))


def test_one_client_leaves_workers_to_the_others() -> None:
    """Other clients are served while all jobs of one client go on, whatever they are and however many."""
    pool, mean = Workers(), Errand("mean")
    context = copy_context()
    context.run(ERRAND.set, mean)
    with ThreadPoolExecutor(8) as threads:
        jobs = [grammar_job(ENDLESS.replace("989", f"{number}03"), 600.0) for number in range(8)]
        sent = [threads.submit(context.copy().run, partial(pool.run, job)) for job in jobs]
        while pool._busy["mean"] + len(pool._waiting.get("mean", ())) < len(sent):
            time.sleep(0.01)
        for client in ("other", "third"):
            for job in FINE.values():
                assert on_behalf_of(client, partial(pool.run, job))
        assert pool._busy["mean"] == 3
        assert not any(one.done() for one in sent)
        mean.cancel()
        assert all(isinstance(one.exception(), Cancelled) for one in sent)


def test_a_client_may_have_only_so_many_jobs_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_WAITING", 1)
    pool, errand = Workers(), Errand("mean")
    context = copy_context()
    context.run(ERRAND.set, errand)
    with ThreadPoolExecutor(4) as threads:
        running = []
        for _ in range(4):
            running.append(threads.submit(context.copy().run, partial(pool.run, grammar_job(ENDLESS, 60))))
            while pool._busy["mean"] + len(pool._waiting.get("mean", ())) < len(running):
                time.sleep(0.01)
        with pytest.raises(QueueFull, match="of this client wait"):
            on_behalf_of("mean", partial(pool.run, FINE["grammar"]))
        assert on_behalf_of("other", partial(pool.run, FINE["grammar"])) == {"problem": ""}
        errand.cancel()
        for one in running:
            assert isinstance(one.exception(), Cancelled)


def test_work_ends_with_whom_it_is_for() -> None:
    """Running or waiting, when the caller is cancelled; and what comes after is refused."""

    async def main() -> None:
        tasks = [asyncio.create_task(aside(partial(workers().run, grammar_job(ENDLESS, 600)))) for _ in range(6)]
        while workers()._busy[""] < 3:
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert await aside(partial(workers().run, FINE["grammar"])) == {"problem": ""}
        while workers()._busy or workers()._waiting:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(main(), 60))
    errand = Errand()
    errand.cancel()
    with pytest.raises(Cancelled):
        copy_context().run(lambda: (ERRAND.set(errand), threads_run(FINE["grammar"])))


def threads_run(job: Job) -> Any:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(copy_context().run, partial(workers().run, job)).result()


def test_an_interrupt_ends_the_job_and_leaves_the_workers_whole() -> None:
    pool = Workers()
    for _ in range(2 * module.PROCESSES):
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            pool.run(grammar_job(ENDLESS, 600))
        timer.join()
    assert pool.run(FINE["grammar"]) == {"problem": ""}


def test_a_forked_child_has_workers_of_its_own() -> None:
    """Its end, and what it asks, leave the parent's alone."""
    ours = workers()
    assert ours.run(FINE["template"])["text"] == "fine"
    child = os.fork()
    if child == 0:
        theirs = workers()
        os._exit(0 if theirs is not ours and theirs.run(template_job("theirs"))["text"] == "theirs" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert workers() is ours
    assert ours.run(template_job("ours"))["text"] == "ours"


AMID_A_JOB = """
import threading
from penstock.text.workers import Job, Workers

def job(template, seconds):
    return Job("render", {"conversations": [[]], "chat_template": template}, seconds)

pool = Workers()
pool.run(job("a", 2.0))
process = next(one._process for one in pool._all if one._process is not None)
dear = job("{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3, 2.0)
thread = threading.Thread(target=pool.run, args=(dear,))
thread.start()
print(process.pid, flush=True)
thread.join()
"""


def test_workers_end_with_a_process_that_is_killed_amid_a_job() -> None:
    with subprocess.Popen([sys.executable, "-c", AMID_A_JOB], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        worker = os.pidfd_open(int(process.stdout.readline()))
        process.kill()
    ended, _, _ = select.select([worker], [], [], 60)
    os.close(worker)
    assert ended


def test_what_a_library_raises_is_told(pool: Workers) -> None:
    with pytest.raises(Failed, match="Exception"):
        pool.run(text_job("a", vocabulary=Vocabulary("strange", "{}")))
    with pytest.raises(RequestError, match="not JSON"):
        pool.run(Job("render", {"strange": object()}, 1.0))


@pytest.mark.parametrize("text", ["hello wörld </s> ", "def f(x):\n    return x  # 水\n", "\x00\u200b e\u0301"])
def test_long_texts_have_the_same_tokens_as_short_ones(text: str) -> None:
    long = text * (LONG // len(text) + 1)
    assert TOKENIZER.encode(long) == TOKENIZER._inner.encode(long)
    hidden = TOKENIZER.literal.hide(long, "text")
    assert TOKENIZER.encode_literal(hidden) == TOKENIZER.literal.encode(hidden)
