"""``penstock bench --peer``: transformers and llama.cpp in processes of their own, on the same file."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from penstock.lab.bench.peer_worker import PEERS, Ask, Setup
from penstock.lab.bench.peers import PeerProcess
from tests.gguf_files import make_gguf
from tests.unit.cli.invoke import invoke

pytestmark = pytest.mark.processes


def figures(model: Path, folder: Path, peers: str) -> dict[str, Any]:
    prompts, file = folder / "talks.jsonl", folder / "bench.json"
    prompts.write_text(json.dumps({"turns": ["hi", "and?"]}) + "\n" + json.dumps({"prompt": "what?"}) + "\n")
    asked = ["--prompts", str(prompts), "--max-tokens", "8", "--strategies", "auto", "--peer", peers]
    done = invoke("bench", "--model", str(model), *asked, "--threads", "1", "--json", str(file))
    assert done.exit_code == 0, done.stderr
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def check(peer: dict[str, Any], name: str) -> None:
    assert (peer["peer"], peer["threads"]) == (name, 1)
    assert peer["tokens_per_second"] > 0
    assert set(peer["ratios"]) == {"autoregressive", "auto"}
    assert all(ratio["mean"] > 0 for ratio in peer["ratios"].values())


@pytest.mark.whole  # the test of both peers has transformers with a GGUF file
def test_transformers_has_the_same_tokens_of_a_folder(target: Path, tmp_path: Path) -> None:
    (peer,) = figures(target, tmp_path, "hf")["peers"]
    check(peer, "hf")
    assert peer["identical_to_autoregressive"] == "yes"


@pytest.mark.skipif(find_spec("llama_cpp") is None, reason="no llama.cpp for this processor is built: make peers")
def test_a_llama_cpp_for_this_processor_says_what_it_was_built_to_use(tmp_path: Path) -> None:
    (native,) = figures(make_gguf(tmp_path / "model"), tmp_path, "llama.cpp-native")["peers"]
    check(native, "llama.cpp-native")
    assert native["features"]
    assert all(len(one["token_ids"]) == one["tokens"] for one in native["requests"])


@pytest.mark.skipif(find_spec("xllamacpp") is None, reason="llama.cpp is not installed: pip install 'penstock[peers]'")
def test_both_on_the_same_gguf_file(tmp_path: Path) -> None:
    found = figures(make_gguf(tmp_path / "model"), tmp_path, "hf,llama.cpp")
    hf, llama = found["peers"]
    check(hf, "hf")
    check(llama, "llama.cpp")
    assert hf["identical_to_autoregressive"] == "yes"
    assert [one["tokens"] for one in hf["requests"]] == [one["tokens"] for one in llama["requests"]]


@pytest.mark.parametrize("peer", ["llama.cpp", "llama.cpp-native"])
def test_requests_that_are_put_together_have_all_their_tokens(peer: str, tmp_path: Path) -> None:
    if find_spec(PEERS[peer].package) is None:
        pytest.skip(f"{peer} is not installed: {PEERS[peer].build or 'pip install penstock[peers]'}")
    model = make_gguf(tmp_path / "model")
    asks = [Ask(token_ids=[5, 6, 7 + i], tokens=4 + i, temperature=0, top_p=1, top_k=0, seed=0) for i in range(3)]
    setup = Setup(peer=peer, model=str(model), threads=1, dtype="float32", max_model_len=64, at_once=3)
    with PeerProcess(setup) as process:
        answers = process.ask_together(asks)
        alone = process.ask(asks[0])
    assert [one.tokens for one in answers] == [4, 5, 6]
    assert alone.tokens == 4
    assert all(0 < one.first_token_seconds <= one.seconds for one in answers)


def test_a_peer_that_fails_is_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "model.gguf"
    broken.write_bytes(b"GGUF")
    done = invoke("bench", "--model", str(broken), "--peer", "lama.cpp")
    assert done.exit_code == 2
    assert "did you mean 'llama.cpp'?" in done.stderr
