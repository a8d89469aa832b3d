"""Tokenizers that could make too much of a text: refused, naming file and field, or kept within their limits."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.load.attacking.trying import Fault, deadline
from penstock.core import ConfigError, RequestError
from penstock.engine.options import DEMO
from penstock.text.tokenizer import load_tokenizer
from penstock.text.tokenizer_bounds import MOST_GROWTH


def replacement(rng: random.Random) -> dict[str, Any]:
    pattern = {rng.choice(("String", "Regex")): rng.choice(("a", " ", "aa", "[a-z]", "a*", ""))}
    return {"type": "Replace", "pattern": pattern, "content": "a" * rng.choice((0, 1, 2, 3, 50, 10**6))}


def part(rng: random.Random, kind: str, depth: int = 3) -> dict[str, Any]:
    if depth and rng.random() < 0.4:
        return {"type": "Sequence", kind: [part(rng, kind, depth - 1) for _ in range(rng.choice((1, 2, 5, 40)))]}
    simple = {"type": "NFKC"} if kind == "normalizers" else {"type": "Fuse"}
    return replacement(rng) if rng.random() < 0.8 else simple


class Tokenizers:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._table = json.loads((DEMO / "target" / "tokenizer.json").read_text())

    def attempt(self, rng: random.Random) -> str:
        table = dict(self._table)
        if rng.random() < 0.7:
            table["normalizer"] = part(rng, "normalizers")
        if rng.random() < 0.7:
            table["decoder"] = part(rng, "decoders")
        (self._folder / "tokenizer.json").write_text(json.dumps(table))
        text = "a b" * rng.choice((1, 100, 5000, 100_000))
        with deadline(120.0, "a tokenizer"):
            try:
                tokenizer = load_tokenizer(self._folder)
                ids = tokenizer.encode(text)
                tokenizer.decode(ids[:1000])
            except ConfigError as error:
                if "tokenizer.json" not in str(error) and "no tokenizer that loads" not in str(error):
                    raise Fault(f"an error without its file: {error}") from error
                return "refused when opened"
            except RequestError:
                return "refused text"
        if len(ids) > len(text) * MOST_GROWTH * 4:
            raise Fault(f"{len(ids)} tokens of {len(text)} characters")
        return "taken"


@contextmanager
def attacked() -> Iterator[Tokenizers]:
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(DEMO / "target", Path(folder) / "checkpoint")
        yield Tokenizers(Path(folder) / "checkpoint")
