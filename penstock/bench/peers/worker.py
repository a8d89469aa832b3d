"""The process of a peer: reads questions from standard input and writes answers to what was standard output."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any, Protocol, TextIO

from penstock.bench.peers.names import PEERS


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A peer's first message: how to load the model. ``model`` is a folder or a GGUF file."""

    peer: str
    model: str
    threads: int
    dtype: str
    max_model_len: int


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request for exactly ``tokens`` tokens, whatever they are."""

    token_ids: list[int]
    tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Seconds from the request's start to its first token and to its last. Not every peer reports token ids."""

    tokens: int
    first_token_seconds: float
    seconds: float
    token_ids: list[int] | None = None


class Peer(Protocol):
    """Another engine with its model loaded."""

    version: str

    def generate(self, ask: Ask) -> Answer: ...


def work() -> None:
    """Answer until standard input ends. Output of libraries goes to standard error."""
    with os.fdopen(os.dup(1), "w") as out:
        # Libraries print to descriptor 1, which would garble the answers: send that to standard error.
        os.dup2(2, 1)
        peer: Peer | None = None
        for line in sys.stdin:
            try:
                table = json.loads(line)
                if peer is None:
                    setup = Setup(**table)
                    peer = import_module(PEERS[setup.peer].module).Peer(setup)
                    say(out, {"version": peer.version})
                else:
                    say(out, asdict(peer.generate(Ask(**table))))
            except Exception as error:
                say(out, {"error": f"{type(error).__name__}: {error}"})


def say(out: TextIO, answer: dict[str, Any]) -> None:
    out.write(json.dumps(answer) + "\n")
    out.flush()
