"""Which peers there are, what each needs, and what cannot be compared with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

from penstock.cluster import Cluster
from penstock.config import FieldError, known_name
from penstock.core import ConfigError

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
    """Raise ConfigError for a peer that is unknown, not installed, or cannot be compared on this model or cluster."""
    for name in names:
        kind = PEERS[known_name(name, PEERS, "peer")]
        if find_spec(kind.package) is None:
            raise ConfigError(f"peer {name} needs {kind.package}: pip install 'penstock[peers]'")
        if name == "llama.cpp" and not model.endswith(GGUF):
            raise FieldError("peer", f"is {name!r}, which reads GGUF files; the model is {model!r}: give one")
    if names and cluster is not None and cluster.emulated:
        raise FieldError("peer", f"computes in this host's own time, cluster {cluster.name} is emulated; use local-N")
