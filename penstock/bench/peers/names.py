"""The known peers, the packages that they need, and the models that they cannot be compared on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from penstock.cluster import Cluster
from penstock.config import FieldError, known_name
from penstock.extras import Need
from penstock.library.reference import is_gguf


@dataclass(frozen=True)
class Kind:
    """A kind of peer: the ``module`` with its class ``Peer``, and the ``package`` that this imports.

    ``same_arithmetic``: in float32 its tokens have to be ours.
    """

    module: str
    package: str
    same_arithmetic: bool


PEERS: Final = {
    "hf": Kind("penstock.bench.peers.hf", "transformers", same_arithmetic=True),
    "llama.cpp": Kind("penstock.bench.peers.llama_cpp", "xllamacpp", same_arithmetic=False),
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
