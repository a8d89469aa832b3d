"""The peers that can be compared, and the checkpoints that each can read."""

from __future__ import annotations

import re

import pytest

from penstock.cluster import load_cluster
from penstock.core import ConfigError
from penstock.lab.bench.peer_worker import check_peers, needs_of


def test_transformers_reads_both_and_llama_cpp_its_own_format() -> None:
    check_peers(["hf"], "folder", None)
    check_peers(["hf", "llama.cpp"], "x.gguf", load_cluster("local-2"))
    check_peers(["llama.cpp"], "smollm2", None)
    check_peers(["llama.cpp"], "some-one/tiny-GGUF:Q4_0", None)
    check_peers([], "folder", load_cluster("demo"))


@pytest.mark.parametrize(
    ("peer", "model", "cluster", "said"),
    [
        ("lama.cpp", "x.gguf", None, "did you mean 'llama.cpp'"),
        ("llama.cpp", "folder", None, "peer is 'llama.cpp', which reads GGUF files; the model is 'folder'"),
        ("hf", "folder", "demo", "cluster demo is emulated; use local-N"),
    ],
)
def test_what_cannot_be_compared_is_refused(peer: str, model: str, cluster: str | None, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        check_peers([peer], model, None if cluster is None else load_cluster(cluster))


def test_what_has_to_be_installed_is_named() -> None:
    assert [need.package for need in needs_of(["hf", "llama.cpp"])] == ["transformers", "xllamacpp"]
