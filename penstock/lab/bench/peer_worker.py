"""Another engine in a process of its own, which answers a bench's questions."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any, Final, Protocol, TextIO

from penstock.cluster import Cluster
from penstock.config import FieldError, known_name
from penstock.extras import Need
from penstock.library.names import is_gguf

# ---------------------------------------------------------------------------------------------------------------- names
# The known peers, the packages that they need, and the models that they cannot be compared on.


@dataclass(frozen=True)
class Kind:
    """A kind of peer: the ``module`` with its class ``Peer``, and the ``package`` that this imports.

    ``same_arithmetic``: in float32 its tokens have to be ours.
    """

    module: str
    package: str
    same_arithmetic: bool


PEERS: Final = {
    "hf": Kind("penstock.lab.bench.hf", "transformers", same_arithmetic=True),
    "llama.cpp": Kind("penstock.lab.bench.llama_cpp", "xllamacpp", same_arithmetic=False),
}
"""The peers by name. llama.cpp rounds activations to 8 bits wherever weights are quantised, so its
tokens may differ."""


def check_peers(names: Sequence[str], model: str, cluster: Cluster | None) -> None:
    """Raise ConfigError for a peer that is unknown, or cannot be compared on this model or cluster."""
    for name in names:
        known_name(name, PEERS, "peer")
        if name == "llama.cpp" and not is_gguf(model):
            raise FieldError("peer", f"is {name!r}, which reads GGUF files; the model is {model!r}: give one")
    if names and cluster is not None and cluster.emulated:
        raise FieldError("peer", f"computes in this host's own time, cluster {cluster.name} is emulated; use local-N")


def needs_of(names: Sequence[str]) -> list[Need]:
    """The packages that have to be installed for these peers."""
    return [Need(f"peer {name} needs", PEERS[name].package, "peers") for name in names]


# --------------------------------------------------------------------------------------------------------------- worker
# The process of a peer: reads questions from standard input and writes answers to what was standard output.


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
