"""Other engines beside a bench: their processes, their answers to its questions, and the ratios of speeds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.core import PenstockError, RequestOutput
from penstock.environment import without_api_keys
from penstock.lab.bench.peer_worker import PEERS, Answer, Ask, Setup
from penstock.lab.bench.summary import StrategyRun
from penstock.lab.grid import WARM_UP, Question, Setting, place_of, token_ids_of
from penstock.lab.report import Ratio, paired_ratio

if TYPE_CHECKING:
    from penstock.engine.llm import LLM
    from penstock.engine.resolve import Resolved


# -------------------------------------------------------------------------------------------------------------- process
# The bench's side of a peer: it starts the process, asks it, and ends it.


class PeerError(PenstockError):
    """A peer cannot load the model, fails, or makes another number of tokens than it was asked for."""


class PeerProcess:
    """A peer as a context manager, which loads the model on entry. Raises PeerError."""

    def __init__(self, setup: Setup) -> None:
        self.name = setup.peer
        self.threads = setup.threads
        self._setup = setup
        self._stack = ExitStack()
        self.version = self.features = ""

    def __enter__(self) -> PeerProcess:
        # The module path of this process, so that the same packages are imported.
        code = f"import sys; sys.path[:] = {sys.path!r}; from penstock.lab.bench.peer_worker import work; work()"
        self._log = self._stack.enter_context(tempfile.TemporaryFile())
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**without_api_keys(os.environ), "OMP_NUM_THREADS": str(self.threads)},
            start_new_session=True,  # so that Ctrl-C in the terminal reaches only the bench
        )
        self._stack.callback(self._end)
        try:
            said = self._exchange(asdict(self._setup))
            self.version, self.features = said["version"], said["features"]
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def ask(self, ask: Ask) -> Answer:
        """Give it one request. Raises PeerError if it fails, or makes another number of tokens than asked for."""
        answer = Answer(**self._exchange(asdict(ask)))
        if answer.tokens != ask.tokens:
            raise PeerError(f"peer {self.name} has made {answer.tokens} tokens in place of {ask.tokens}")
        return answer

    def ask_together(self, asks: Sequence[Ask]) -> list[Answer]:
        """Give it several requests together, at most the setup's ``at_once``. Raises PeerError as ``ask`` does."""
        answers = [Answer(**one) for one in self._exchange([asdict(ask) for ask in asks])["answers"]]
        for ask, answer in zip(asks, answers, strict=True):
            if answer.tokens != ask.tokens:
                raise PeerError(f"peer {self.name} has made {answer.tokens} tokens in place of {ask.tokens}")
        return answers

    def _end(self) -> None:
        """Kill the process, which may be in the midst of an answer."""
        self._process.kill()
        self._process.communicate()

    def _exchange(self, question: dict[str, Any] | list[dict[str, Any]]) -> dict[str, Any]:
        """Send a message and return the answer. Raises PeerError."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            raise PeerError(f"peer {self.name} has ended: {self._last_words()}") from None
        line = process.stdout.readline()
        if not line:
            raise PeerError(f"peer {self.name} has ended: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(f"peer {self.name}: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        """The last line that the process wrote to standard error."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it says nothing"


# --------------------------------------------------------------------------------------------------------------- beside
# The peers' answers to the bench's questions, and the speed of each entry in proportion to theirs.


@dataclass(frozen=True)
class PeerSample:
    """A peer's answer to a question.

    ``parted``: the index of its first token that differs from plain decoding's; -1 if none does; None if tokens are not
    compared.
    """

    question: Question
    answer: Answer
    parted: int | None


@dataclass
class PeerRun:
    """One peer on all questions of one setting."""

    peer: str
    version: str
    features: str
    threads: int
    setting: Setting
    samples: list[PeerSample] = field(default_factory=list)
    ratios: dict[str, Ratio | None] = field(default_factory=dict)
    """Speed of each of the bench's entries over that of the peer, on the same requests."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first one of each request, over the seconds that they took."""
        seconds = sum(one.answer.seconds - one.answer.first_token_seconds for one in self.samples)
        return sum(one.answer.tokens - 1 for one in self.samples) / seconds if seconds else 0.0

    @property
    def mean_ttft_ms(self) -> float:
        """Mean milliseconds to the first token."""
        return 1e3 * sum(one.answer.first_token_seconds for one in self.samples) / len(self.samples)

    @property
    def identity(self) -> str:
        """Whether its tokens are plain decoding's: ``yes``, how far they are, or ``-`` if they are not compared."""
        for sample in self.samples:
            if sample.parted is None:
                return "-"
            if sample.parted >= 0:
                return f"until token {sample.parted + 1} of {place_of(sample.question)}"
        return "yes"

    def as_dict(self) -> dict[str, Any]:
        """The figures and the requests."""
        return {
            "peer": self.peer,
            "version": self.version,
            "features": self.features,
            "threads": self.threads,
            "prompt_set": self.setting.prompt_set,
            "temperature": self.setting.temperature,
            "tokens_per_second": self.tokens_per_second,
            "mean_ttft_ms": self.mean_ttft_ms,
            "identical_to_autoregressive": self.identity,
            "ratios": {entry: ratio and vars(ratio) for entry, ratio in self.ratios.items()},
            "requests": [
                {"prompt_sha256": one.question.prompt_sha256, "seed": one.question.params.seed, **vars(one.answer)}
                for one in self.samples
            ],
        }


class Peers:
    """All peers of a bench, which are asked one after the other."""

    def __init__(self, processes: Sequence[PeerProcess], llm: LLM, begins: Callable[[str, Question], None]) -> None:
        """``begins`` is called before a peer is asked."""
        self._processes = processes
        self._llm = llm
        self._begins = begins
        self._runs: dict[tuple[str, Setting], PeerRun] = {}

    def warm_up(self, question: Question) -> None:
        """Have each peer answer a request that does not count."""
        for process in self._processes:
            process.ask(ask_of(self._llm, question, WARM_UP))

    def answer(self, question: Question, plain: RequestOutput) -> None:
        """Have each peer generate as many tokens as plain decoding did, unless that is one: it cannot be timed."""
        reference = plain.outputs[0].token_ids
        if len(reference) < 2:
            return
        for process in self._processes:
            self._begins(process.name, question)
            answer = process.ask(ask_of(self._llm, question, len(reference)))
            key = process.name, question.setting
            if key not in self._runs:
                self._runs[key] = PeerRun(
                    process.name, process.version, process.features, process.threads, question.setting
                )
            sample = PeerSample(question, answer, self._parted(process.name, question, answer, reference))
            self._runs[key].samples.append(sample)

    def runs(self, entries: Sequence[StrategyRun]) -> list[PeerRun]:
        """Each peer's run in each setting, with the ratios of the bench's entries."""
        found = []
        for setting in dict.fromkeys(run.setting for run in entries):
            for process in self._processes:
                run = self._runs[process.name, setting]
                own = [entry for entry in entries if entry.setting == setting]
                run.ratios = {entry.strategy: ratio_of(entry, run) for entry in own}
                found.append(run)
        return found

    def _parted(self, peer: str, question: Question, answer: Answer, reference: Sequence[int]) -> int | None:
        """The index of the first token that differs; -1 if none does; None if tokens need not agree.

        Only greedy tokens of the same arithmetic have to agree: not with fewer bits, and not where they are sampled.
        """
        setup = self._llm.setup
        exact = PEERS[peer].same_arithmetic and (setup.options.dtype, setup.quantization) == ("float32", "none")
        if answer.token_ids is None or not exact or question.params.temperature > 0:
            return None
        pairs = enumerate(zip(answer.token_ids, reference, strict=True))
        return next((i for i, (theirs, ours) in pairs if theirs != ours), -1)


@contextmanager
def peers_beside(names: Sequence[str], llm: LLM, begins: Callable[[str, Question], None]) -> Iterator[Peers]:
    """Start the peers with the engine's model, dtype and number of threads, and end them. Raises PeerError."""
    with ExitStack() as stack:
        yield Peers([stack.enter_context(PeerProcess(setup_of(name, llm.setup))) for name in names], llm, begins)


def setup_of(peer: str, setup: Resolved, at_once: int = 1) -> Setup:
    """A peer's first message. It has the threads of all stages together, as it computes by itself."""
    return Setup(
        peer=peer,
        model=str(setup.checkpoint.source),
        threads=sum(setup.threads[: setup.stages]),
        dtype=setup.options.dtype,
        max_model_len=setup.max_model_len,
        at_once=at_once,
    )


def ask_of(llm: LLM, question: Question, tokens: int) -> Ask:
    """A question as a request to a peer."""
    params = question.params
    return Ask(
        token_ids=token_ids_of(llm, question),
        tokens=tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        seed=params.seed or 0,
    )


def ratio_of(entry: StrategyRun, run: PeerRun) -> Ratio | None:
    """The ratio over the questions that both have timed, in pairs; None if there are none."""
    speeds = {key_of(one): speed for one in entry.requests if (speed := speed_of(one)) is not None}
    pairs = []
    for sample in run.samples:
        question, answer = sample.question, sample.answer
        own = speeds.get((question.prompt_sha256, question.params.seed or 0))
        if own is not None:
            pairs.append(own * (answer.seconds - answer.first_token_seconds) / (answer.tokens - 1))
    return paired_ratio(pairs)


def key_of(request: Mapping[str, Any]) -> tuple[str, int]:
    """The key of a request: its prompt's hash and its seed."""
    return request["prompt_sha256"], request["seed"]


def speed_of(request: Mapping[str, Any]) -> float | None:
    """Tokens per second of a request after its first token; None if there was no second one."""
    return request["tokens"] / request["seconds"] if request["tokens"] and request["seconds"] else None
