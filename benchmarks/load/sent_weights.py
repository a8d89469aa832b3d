"""Bytes sent to hosts that lack the checkpoint: at first, after a restart, and after one of their bytes changed.

    python -m benchmarks.load.sent_weights MODEL

Two `penstock worker`, each in a network namespace in which an empty file system lies over the folder of MODEL, have
half of its layers each. All bytes that they receive until an answer is complete are counted and compared with the bytes
that their stages hold. MODEL is a checkpoint in float32, which stages hold as it is stored. It needs root.

The results are stored in benchmarks/measured/load/sent_weights.json. The exit code is 1 if anything was wrong.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Final

from benchmarks.shared.measured import kept_figures, store
from penstock import LLM, SamplingParams
from penstock.engine.options import model_folder
from penstock.hosts.keys import make_cluster
from tests.namespaces import Namespace, network
from tests.workers import Worker

NAME, HOW = "sent_weights", "Measured, hosts as network namespaces"
PARAMS: Final = SamplingParams(temperature=0.8, seed=1, max_tokens=16, ignore_eos=True)
PROMPT: Final = "def fibonacci(n):"
MOST: Final = 1.1
"""Greatest ratio of the bytes that a host receives to those that its stage holds."""


@contextmanager
def workers(hosts: Sequence[Namespace], folder: Path, keys: Path, caches: Path) -> Iterator[list[Worker]]:
    hidden = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0"; exec "$@"', str(folder)]
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                closing(
                    Worker(
                        f"{one.address}:7700",
                        *("--keys", str(keys), "--cache", str(caches / one.address)),
                        before=[*one.before, *hidden],
                    )
                )
            )
            for one in hosts
        ]


def started(hosts: Sequence[Namespace], found: Sequence[Worker], model: str, keys: Path) -> dict[str, Any]:
    """An answer over these workers: its tokens, bytes received by each host meanwhile, and bytes held by its stage."""
    before = [one.received() for one in hosts]
    with LLM(model, max_model_len=256, hosts=",".join(one.host for one in found), keys=str(keys)) as llm:
        tokens = llm.generate([PROMPT], PARAMS)[0].outputs[0].token_ids
        pipeline: Any = llm.loop.pipeline
        held = [pipeline.started[stage].weight_bytes for stage in range(len(hosts))]
    received = [one.received() - bytes_before for one, bytes_before in zip(hosts, before, strict=True)]
    return {"tokens": tokens, "received": received, "held": held}


def change_a_byte(cache: Path) -> None:
    """Change a byte in the middle of the largest file, or of the stored part of it."""
    file = max((one for one in cache.rglob("*") if one.is_file()), key=lambda one: one.stat().st_blocks)
    with file.open("r+b") as opened:
        place = first_stored(file)
        opened.seek(place)
        byte = opened.read(1)
        opened.seek(place)
        opened.write(bytes([byte[0] ^ 1]))


def first_stored(file: Path) -> int:
    """Offset of a byte that is not 0, in the second half of a file with holes."""
    with file.open("rb") as opened:
        place = file.stat().st_size // 2
        opened.seek(place)
        while block := opened.read(1 << 20):
            if stripped := block.lstrip(b"\0"):
                return place + len(block) - len(stripped)
            place += len(block)
    return 0


def main(model: str) -> int:
    folder = Path(model_folder(model, "target"))
    with LLM(model, max_model_len=256) as llm:
        expected = llm.generate([PROMPT], PARAMS)[0].outputs[0].token_ids
    with tempfile.TemporaryDirectory() as made, network(0, 0) as hosts:
        keys, caches = Path(made) / "keys", Path(made) / "caches"
        make_cluster(keys, "head")
        with workers(hosts, folder, keys, caches) as found:
            first = started(hosts, found, model, keys)
        with workers(hosts, folder, keys, caches) as found:
            again = started(hosts, found, model, keys)
        change_a_byte(caches / hosts[1].address)
        with workers(hosts, folder, keys, caches) as found:
            mended = started(hosts, found, model, keys)
            noticed = any("are damaged" in line for line in found[1].said)
    runs = {"first": first, "again": again, "a byte changed": mended}
    factors = {
        name: [round(got / held, 4) for got, held in zip(one["received"], one["held"], strict=True)]
        for name, one in runs.items()
    }
    problems = [f"{name}: other tokens" for name, one in runs.items() if one["tokens"] != expected]
    if max(factors["first"]) > MOST or max(factors["again"]) > MOST - 1:
        problems.append("too much was sent")
    if not noticed:
        problems.append("the changed byte was not noticed")
    figures = {"held_bytes": first["held"], "received_by_held": factors, "noticed": noticed, "problems": problems}
    print(json.dumps(figures, indent=1))
    store(NAME, HOW, (["python -m benchmarks.load.sent_weights MODEL"], kept_figures(NAME) | {folder.name: figures}))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
