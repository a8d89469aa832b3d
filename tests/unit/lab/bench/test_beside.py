"""A bench's entries beside a peer's answers: what is asked, compared and reckoned."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.core import CompletionOutput, RequestOutput, SamplingParams
from penstock.lab.bench.peer_worker import Answer, Ask
from penstock.lab.bench.peers import PeerRun, Peers
from penstock.lab.bench.report import peers_markdown, peers_remarks
from penstock.lab.grid import Question, Setting
from tests.unit.lab.bench.runs import a_request, a_run

CHAT = Setting("chat", 0.0)
QUESTIONS = [
    Question(CHAT, number, {"prompt": "a", "prompt_token_ids": [number]}, SamplingParams(seed=number, temperature=0))
    for number in (0, 1)
]


class Peer:
    """A peer that takes a second for the first token and half a second for each other; ``made`` are its tokens."""

    version, features, threads = "peer 1.0", "AVX2", 2

    def __init__(self, name: str, *made: list[int]) -> None:
        self.name = name
        self.asked: list[Ask] = []
        self._made = iter(made)

    def ask(self, ask: Ask) -> Answer:
        self.asked.append(ask)
        seconds = 1.0 + 0.5 * (ask.tokens - 1)
        return Answer(
            tokens=ask.tokens, first_token_seconds=1.0, seconds=seconds, token_ids=next(self._made, [0] * ask.tokens)
        )


def asked(
    peer: Peer, *plain: list[int], dtype: str = "float32", quantization: str = "none", temperature: float = 0.0
) -> Peers:
    setup = SimpleNamespace(options=SimpleNamespace(dtype=dtype), quantization=quantization)
    llm: Any = SimpleNamespace(setup=setup)
    told: list[str] = []
    processes: Any = [peer]
    peers = Peers(processes, llm, lambda name, question: told.append(name))
    for question, tokens in zip(QUESTIONS, plain, strict=False):
        sampled = Question(
            Setting("chat", temperature),
            question.number,
            question.prompt,
            SamplingParams(seed=question.number, temperature=temperature),
        )
        peers.answer(sampled, RequestOutput("0", "a", [1], [CompletionOutput(0, tokens)], True))
    assert told == [peer.name] * len(peer.asked)
    return peers


def run_of(peers: Peers, temperature: float = 0.0) -> PeerRun:
    requests = [{**a_request(one.number, 6.0), "prompt_sha256": one.prompt_sha256} for one in QUESTIONS]
    (run,) = peers.runs([a_run("auto", 6.0, requests=requests, temperature=temperature)])
    return run


def test_a_peer_makes_as_many_tokens_as_plain_decoding() -> None:
    peer = Peer("hf")
    run = run_of(asked(peer, [4, 5, 6], [7, 8]))
    assert [(one.token_ids, one.tokens) for one in peer.asked] == [([0], 3), ([1], 2)]
    assert run.tokens_per_second == pytest.approx(2.0)
    assert run.mean_ttft_ms == pytest.approx(1000.0)
    ratio = run.ratios["auto"]
    assert ratio is not None
    assert (ratio.mean, ratio.pairs) == (pytest.approx(3.0), 2)


def test_a_request_without_a_token_to_time_is_not_asked() -> None:
    peer = Peer("hf")
    run = run_of(asked(peer, [4], [7, 8]))
    assert len(peer.asked) == 1
    assert run.ratios["auto"] is not None
    assert run.ratios["auto"].bounds is None, "of a single pair"


@pytest.mark.parametrize(
    ("made", "options", "expected"),
    [
        (([4, 5], [6, 7]), {}, "yes"),
        (([4, 5], [6, 8]), {}, "until token 2 of prompt 2 of chat"),
        (([4, 5], [6, 8]), {"dtype": "bfloat16"}, "-"),
        (([4, 5], [6, 8]), {"quantization": "int8"}, "-"),
        (([4, 5], [6, 8]), {"temperature": 1.0}, "-"),
    ],
)
def test_tokens_are_compared_where_they_have_to_be_the_same(made: Any, options: Any, expected: str) -> None:
    run = run_of(asked(Peer("hf", *made), [4, 5], [6, 7], **options), options.get("temperature", 0.0))
    assert run.identity == expected
    said = " ".join(peers_remarks([run]))
    assert ("NOT IDENTICAL" in said) is (expected.startswith("until"))
    assert run.as_dict()["identical_to_autoregressive"] == expected


def test_of_other_arithmetic_nothing_is_compared() -> None:
    assert run_of(asked(Peer("llama.cpp"), [4, 5])).identity == "-"


def test_the_table_has_every_entry_beside_every_peer() -> None:
    run = run_of(asked(Peer("hf"), [4, 5, 6], [7, 8]))
    lines = peers_markdown([run], [a_run("auto", 6.0)]).splitlines()
    assert lines[-1].startswith("| auto / hf | 6.00 | 2.00 | 3.00x |")
    assert "peer 1.0, built to use AVX2, in a process of its own, 2 threads" in peers_remarks([run])[0]
