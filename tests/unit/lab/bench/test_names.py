"""The peers that can be compared, and the checkpoints that each can read."""

from __future__ import annotations

import re

import pytest

from penstock import environment
from penstock.cluster import load_cluster
from penstock.core import ConfigError
from penstock.lab.bench.peer_worker import check_peers, features_of, needs_of


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
        ("llama.cpp-native", "folder", None, "peer is 'llama.cpp-native', which reads GGUF files"),
        ("llama.cpp", "folder", None, "peer is 'llama.cpp', which reads GGUF files; the model is 'folder'"),
        ("hf", "folder", "demo", "cluster demo is emulated; use local-N"),
    ],
)
def test_what_cannot_be_compared_is_refused(peer: str, model: str, cluster: str | None, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        check_peers([peer], model, None if cluster is None else load_cluster(cluster))


def test_what_has_to_be_installed_is_named() -> None:
    assert [need.package for need in needs_of(["hf", "llama.cpp"])] == ["transformers", "xllamacpp"]


def test_the_native_llama_cpp_is_asked_for_with_the_command_that_builds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "find_spec", lambda package: None if "llama" in package else package)
    with pytest.raises(ConfigError, match=r"peer llama\.cpp-native needs llama_cpp") as raised:
        environment.require(needs_of(["llama.cpp", "llama.cpp-native"]))
    first, second = str(raised.value).split(" && ")
    assert "pip install 'xllamacpp" in first
    assert second.startswith("CMAKE_ARGS=-DGGML_NATIVE=ON ")


def test_the_features_that_llama_cpp_was_built_to_use() -> None:
    assert features_of("CPU : SSE3 = 1 | AVX512 = 1 | NEON = 0 | REPACK = 1 | ") == "SSE3, AVX512, REPACK"
    assert features_of("") == ""
