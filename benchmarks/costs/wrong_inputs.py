"""Replies to wrong inputs: the message, and how long somebody waits for it.

    python -m benchmarks.costs.wrong_inputs [--rounds 3]

Each command is a process of its own; seconds are the median of its rounds, begin to end.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final


@dataclass(frozen=True)
class WrongInput:
    """A wrong command: ``words`` follow ``penstock``, and ``said`` is a part of the message."""

    words: tuple[str, ...]
    said: str


PORTS: Final = (
    ("generate", "x", "--model", "demo", "--insecure", "--hosts"),
    ("serve", "demo", "--insecure", "--hosts"),
    ("bench", "--model", "demo", "--insecure", "--hosts"),
    ("profile", "demo", "--insecure", "--hosts"),
    ("worker", "--insecure", "--listen"),
    ("worker", "--insecure", "--join"),
)
"""Commands, ended by an option that takes HOST:PORT."""


def wrong_inputs(folder: Path) -> list[WrongInput]:
    """All wrong inputs that are recognised by files and names, with the files that they need."""
    make_files(folder)
    return [*of_models(folder), *of_options(folder), *of_other_files(folder)]


def make_files(folder: Path) -> None:
    """Make checkpoints with everything that is looked at; their weights are empty files."""
    llama = {"model_type": "llama", "num_hidden_layers": 30, "vocab_size": 100, "max_position_embeddings": 64}
    checkpoint(folder / "model", {"config.json": llama})
    checkpoint(folder / "other", {"config.json": {**llama, "vocab_size": 99}})
    checkpoint(folder / "adapter", {"adapter_config.json": {"base_model_name_or_path": "some/llama"}})
    checkpoint(folder / "encoder", {"config.json": {"model_type": "bert", "architectures": ["BertForMaskedLM"]}})
    checkpoint(folder / "reranker", {"config.json": {**llama, "architectures": ["LlamaForSequenceClassification"]}})
    checkpoint(folder / "translator", {"config.json": {"model_type": "t5", "is_encoder_decoder": True}})
    checkpoint(folder / "onnx", {"config.json": llama}, "onnx/model.onnx")
    checkpoint(folder / "pickle", {"config.json": llama}, "pytorch_model.bin")
    checkpoint(folder / "empty", {}, "notes.txt")
    index = {"weight_map": {"a": "model-1.safetensors"}}
    checkpoint(folder / "torn", {"config.json": llama, "model.safetensors.index.json": index}, "notes.txt")
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_text("{")
    (folder / "text.gguf").write_text("no model at all")
    (folder / "cut.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 1))
    (folder / "notes.txt").write_text("a text")


def checkpoint(folder: Path, tables: dict[str, Any], weights: str = "model.safetensors") -> None:
    (folder / weights).parent.mkdir(parents=True)
    (folder / weights).write_bytes(b"")
    for name, table in tables.items():
        (folder / name).write_text(json.dumps(table))


def of_models(folder: Path) -> list[WrongInput]:
    said = {
        "nowhere": "there is no folder",
        "nowhere.gguf": "there is no file",
        "notes.txt": "is a file; give a checkpoint's folder",
        "text.gguf": "is no GGUF file",
        "cut.gguf": "is cut off by the end of the file",
        "empty": "holds no config.json",
        "broken": "is not valid JSON",
        "adapter": 'is an adapter (LoRA) for "some/llama"; merge it',
        "encoder": 'holds an encoder ("bert"), which reads text and writes none',
        "reranker": 'holds "LlamaForSequenceClassification", which reads text',
        "translator": 'holds an encoder-decoder ("t5")',
        "onnx": "holds a model for ONNX Runtime",
        "pickle": "has .bin weights only",
        "torn": "shard model-1.safetensors is missing",
    }
    found = [WrongInput(("generate", "x", "--model", str(folder / name)), words) for name, words in said.items()]
    found += [WrongInput(("serve", str(folder / name)), said[name]) for name in ("nowhere", "adapter")]
    found += [WrongInput(("run", str(folder / name)), said[name]) for name in ("nowhere", "encoder")]
    found += [WrongInput(("bench", "--model", str(folder / name)), said[name]) for name in ("nowhere", "cut.gguf")]
    train = ("train", "eagle", "--data", str(folder / "notes.txt"), "--output", str(folder / "out"), "--model")
    return [*found, *(WrongInput((*train, str(folder / name)), said[name]) for name in ("nowhere", "encoder"))]


def of_options(folder: Path) -> list[WrongInput]:
    model = ("--model", str(folder / "model"))
    train = ("train", "early-exit", "--data", str(folder / "notes.txt"), "--output", str(folder / "out"), *model)
    missing = str(folder / "nowhere")
    layers = "pipeline_parallel_size is 40; the model has 30 layers"
    return [
        WrongInput(("generate", "x", *model, "-pp", "40"), layers),
        WrongInput(("serve", str(folder / "model"), "-pp", "40"), layers),
        WrongInput(("bench", *model, "-pp", "40"), layers),
        WrongInput(("generate", "x", *model, "--layer-split", "9,9"), "adds up to 18 layers; the model has 30"),
        WrongInput(("generate", "x", *model, "--max-tokens", "64"), "max_tokens is 64; it has to be below 64"),
        WrongInput(("generate", "x", *model, "--max-model-len", "9", "--max-tokens", "9"), "max_tokens is 9; it has"),
        WrongInput(("bench", *model, "--max-tokens", "64"), "max_tokens is 64; it has to be below 64"),
        WrongInput(("generate", "x", *model, "--max-model-len", "65"), "max_model_len is 65; it has to be at most 64"),
        WrongInput(
            ("generate", "x", *model, "--draft-model", str(folder / "other")),
            "has a vocabulary of 99 tokens, the target 100",
        ),
        WrongInput(("generate", "x", *model, "--draft-model", missing), "speculative_config.model: there is no folder"),
        WrongInput(("generate", "x", "--speculative-config", '{"method": '), "speculative_config is not JSON"),
        WrongInput(
            ("generate", "x", *model, "--speculative-config", json.dumps({"method": "eagle", "model": missing})),
            "speculative_config.model: there is no folder",
        ),
        WrongInput((*train, "--exit-layer", "31"), "exit_layer is 31; the target has 30 layers"),
        WrongInput((*train, "--draft-vocab-size", "101"), "draft_vocab_size is 101; the target knows 100 tokens"),
    ]


def of_other_files(folder: Path) -> list[WrongInput]:
    missing, notes, report = str(folder / "nowhere.json"), str(folder / "notes.txt"), str(folder / "report")
    train = ("train", "eagle", "--output", str(folder / "out"))
    return [
        WrongInput(("generate", "x", "--messages", missing), "cannot be read"),
        WrongInput(("generate", "x", "--cluster", str(folder / "nowhere.toml")), "cannot be read"),
        WrongInput(("serve", "--ssl-certfile", missing, "--ssl-keyfile", missing), "No such file"),
        WrongInput(("bench", "--prompts", missing, "--report", report), "cannot be read"),
        WrongInput(("bench", "--prompts", notes, "--report", report), "is not JSON"),
        WrongInput(
            ("simulate", "--cluster", "demo", "--recording", missing, "--report", report), "there is no such file"
        ),
        WrongInput((*train, "--data", missing), "there is no file or folder"),
        WrongInput(("acceptance", missing), "there is no such file"),
        WrongInput(("acceptance", notes, "--model", str(folder / "nowhere")), "there is no folder"),
        WrongInput(("trace", missing), "cannot be read"),
        WrongInput(("trace", notes), "is not JSON"),
        WrongInput(("compare", missing, missing), "cannot be read"),
        WrongInput(("compare", notes, notes), "is not JSON"),
        WrongInput(("chat", "--url", "http://127.0.0.1:9/v1"), "127.0.0.1:9"),
        *(WrongInput((*words, "a:65536"), f"{words[-1].strip('-')} names 'a:65536'; a port") for words in PORTS),
        WrongInput(("hosts", "a:65536"), "names 'a:65536'; a port is a number from 1 to 65535"),
        WrongInput(("serve", "demo", "--hosts", "join://a:65536", "-pp", "2"), "names 'a:65536'; a port"),
        WrongInput(("serve", "demo", "--port", "65536"), "port is 65536; it has to be between 0 and 65535"),
        WrongInput(("help", "nothing"), "command is 'nothing'; 'penstock help' shows what there is"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as name:
        print("| command | message | s |\n| --- | --- | ---: |")
        for wrong in wrong_inputs(Path(name)):
            message, seconds = tried(wrong, rounds)
            words = " ".join(wrong.words)
            print(f"| `penstock {words} ` | {message} | {seconds:.2f} |".replace(f"{name}/", ""), flush=True)


def tried(wrong: WrongInput, rounds: int) -> tuple[str, float]:
    """The last line of the message, and the median number of seconds."""
    took, said = [], ""
    for _ in range(rounds):
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "penstock.cli", *wrong.words], stdin=subprocess.DEVNULL, capture_output=True
        )
        took.append(time.perf_counter() - began)
        said = re.sub(r"\s+", " ", done.stderr.decode()).strip()
    return said[-300:], statistics.median(took)


if __name__ == "__main__":
    main()
