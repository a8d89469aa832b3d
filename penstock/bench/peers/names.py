"""Which peers there are, what each needs, and what cannot be compared with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from penstock.cluster import Cluster
from penstock.config import FieldError, known_name
from penstock.extras import Need

GGUF: Final = ".gguf"


@dataclass(frozen=True)
class Kind:
    """``module`` has the class ``Peer``; ``package`` is what it imports. ``same_arithmetic`` holds in float32."""

    module: str
    package: str
    same_arithmetic: bool


PEERS: Final = {
    "hf": Kind("penstock.bench.peers.hf", "transformers", same_arithmetic=True),
    "llama.cpp": Kind("penstock.bench.peers.llama_cpp", "xllamacpp", same_arithmetic=False),
}
"""llama.cpp rounds activations to 8 bits wherever weights are quantised, so that its tokens may be others."""


def check_peers(names: Sequence[str], model: str, cluster: Cluster | None) -> None:
    """Raise ConfigError for a peer that is unknown, or cannot be compared on this model or cluster."""
    for name in names:
        known_name(name, PEERS, "peer")
        if name == "llama.cpp" and not model.endswith(GGUF):
            raise FieldError("peer", f"is {name!r}, which reads GGUF files; the model is {model!r}: give one")
    if names and cluster is not None and cluster.emulated:
        raise FieldError("peer", f"computes in this host's own time, cluster {cluster.name} is emulated; use local-N")


def needs_of(names: Sequence[str]) -> list[Need]:
    """What has to be installed for these peers."""
    return [Need(f"peer {name} needs", PEERS[name].package, "peers") for name in names]
