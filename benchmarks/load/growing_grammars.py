"""Random schemas, regular expressions and Lark grammars of growing size: seconds and memory until refused or ready.

    python -m benchmarks.load.growing_grammars --seed S [--count 200] --plot FILE.png

Each is checked by a worker like a client's, while another client asks for small ones (canaries). It prints how many
were ready and refused, the most seconds and MiB, and how long the canaries waited. A grammar that takes more than its
limits allow, or a canary that fails, makes the exit code 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from penstock.core import RequestError, StructuredOutputsParams
from penstock.engine.options import DEMO
from penstock.text.grammar import SECONDS, check_grammar
from penstock.text.tokenizer import Tokenizer, load_tokenizer
from penstock.text.workers import ERRAND, PATIENCE, PROCESSES, Errand

KINDS: Final = ("json", "regex", "grammar")
LARGEST: Final = 60_000
"""Greatest number of characters of a grammar that is aimed at."""
VOCABULARY, EOS = 4096, 2


def schema(rng: random.Random, size: int) -> dict[str, Any]:
    """A JSON schema of about ``size`` characters."""
    if size < 60:
        number = rng.choice([3, 97, 1009, 9973, 99991, 999983, 99999989])
        return rng.choice(
            [
                {"type": "integer", "multipleOf": number},
                {"type": "string", "maxLength": number},
                {"type": "number", "minimum": -number, "maximum": number},
                {"type": "string", "pattern": regex(rng, 30)},
                {"enum": ["x", number, None]},
            ]
        )
    parts = rng.randint(2, 8)
    inner = [schema(rng, size // parts - 20) for _ in range(parts)]
    names = [f"field{number}" for number in range(parts)]
    return rng.choice(
        [
            {"type": "object", "properties": dict(zip(names, inner, strict=True)), "required": names[: parts // 2]},
            {"anyOf": inner},
            {"type": "array", "items": inner[0], "minItems": rng.choice([0, 1, 1000]), "prefixItems": inner[1:]},
            {"allOf": inner[:2], "title": "t" * (size // 3)},
        ]
    )


def regex(rng: random.Random, size: int) -> str:
    repeats = ("", "*", "+", "?", "{3}", "{0,50}", "{1000}", "{50,}")
    if size < 12:
        return rng.choice(["a", "[a-z]", ".", r"\d", r"\w", "[^x]", "(a|b)", "(ab|a)"]) + rng.choice(repeats)
    left = regex(rng, rng.randint(3, size - 8))
    right = regex(rng, max(3, size - len(left) - 6))
    return rng.choice([left + right, f"({left}|{right})", f"({left}){rng.choice(repeats)}{right}"])


def lark(rng: random.Random, size: int) -> str:
    rules = max(2, size // 60)
    lines = ["start: r0"]
    for number in range(rules):
        others = [f"r{rng.randrange(rules)}" for _ in range(rng.randint(0, 2))]
        terminal = rng.choice(['"a"', f"/{regex(rng, 14).replace('/', '')}/", f"%json {json.dumps(schema(rng, 40))}"])
        lines.append(f"r{number}: {' '.join([terminal, *others])} | {rng.choice(['x', 'y'])!r}".replace("'", '"'))
    return "\n".join(lines)


@dataclass
class Outcome:
    kind: str
    characters: int
    seconds: float
    mib: float
    problem: str


class Watch(threading.Thread):
    """Records the most memory that this process's workers hold while they are watched."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most = 0.0
        self.ended = threading.Event()

    def run(self) -> None:
        own = psutil.Process()
        while not self.ended.wait(0.02):
            with contextlib.suppress(psutil.Error):
                # A child that has yet to become a worker still counts as its parent.
                workers = [child for child in own.children() if "worker_tasks" in " ".join(child.cmdline())]
                self.most = max([self.most, *(worker.memory_info().rss / 2**20 for worker in workers)])


def check(tokenizer: Tokenizer, client: str, **given: Any) -> str:
    """The error for a grammar that a client asks for; empty if it is ready."""

    def ask() -> str:
        ERRAND.set(Errand(client))
        try:
            check_grammar(StructuredOutputsParams(**given), tokenizer, VOCABULARY, (EOS,))
        except RequestError as error:
            return str(error)
        return ""

    return copy_context().run(ask)


class Canaries(threading.Thread):
    """Another client, whose small grammars have to be ready whatever goes on."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(daemon=True)
        self._tokenizer = tokenizer
        self.ended = threading.Event()
        self.seconds: list[float] = []
        self.problems: list[str] = []

    def run(self) -> None:
        for number in range(10**9):
            if self.ended.wait(0.2):
                return
            began = time.monotonic()
            problem = check(self._tokenizer, "canary", regex=f"[a-z]{{3}}{number}")
            self.seconds.append(time.monotonic() - began)
            self.problems += [problem] if problem else []


def grown(seed: int, count: int) -> Iterator[tuple[str, Any, int]]:
    """Kinds of grammars with values of growing size."""
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        size = int(20 * (LARGEST / 20) ** (number / max(1, count - 1)))
        kind = KINDS[number % 3]
        made: Any = {"json": schema, "regex": regex, "grammar": lark}[kind](rng, size)
        yield kind, made, len(made if isinstance(made, str) else json.dumps(made))


def tried(tokenizer: Tokenizer, seed: int, count: int) -> list[Outcome]:
    found = []
    for kind, made, characters in grown(seed, count):
        watch, began = Watch(), time.monotonic()
        watch.start()
        problem = check(tokenizer, "grower", **{kind: made})
        seconds = time.monotonic() - began
        watch.ended.set()
        watch.join()
        found.append(Outcome(kind, characters, seconds, watch.most, problem))
    return found


def plot(found: list[Outcome], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    for axes, name, what in zip(figure.subplots(2, 1), ("seconds", "mib"), ("seconds", "MiB of a worker"), strict=True):
        for kind, colour in zip(KINDS, ("tab:blue", "tab:orange", "tab:green"), strict=True):
            for ready, marker in ((True, "o"), (False, "x")):
                some = [one for one in found if one.kind == kind and (not one.problem) is ready]
                values = [getattr(one, name) for one in some]
                label = f"{kind}, {'ready' if ready else 'refused'}"
                axes.scatter([one.characters for one in some], values, c=colour, marker=marker, s=22, label=label)
        axes.set(xscale="log", yscale="log", xlabel="characters", ylabel=what)
        axes.grid(alpha=0.3)
    figure.axes[0].axhline(SECONDS, ls="--", c="grey", lw=1)
    figure.axes[0].legend(fontsize=7, ncols=3)
    figure.savefig(file, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    tokenizer = load_tokenizer(DEMO / "target")
    canaries = Canaries(tokenizer)
    canaries.start()
    found = tried(tokenizer, given.seed, given.count)
    canaries.ended.set()
    canaries.join()
    overrun = [one for one in found if "to compile it" in one.problem]
    ready = sum(not one.problem for one in found)
    waits = sorted(canaries.seconds)
    print(
        f"seed {given.seed}: {len(found)} grammars, {ready} ready, {len(found) - ready} refused, {len(overrun)} overran"
    )
    print(f"most: {max(one.seconds for one in found):.2f} s, {max(one.mib for one in found):.0f} MiB of a worker")
    failed, median = len(canaries.problems), waits[len(waits) // 2]
    print(f"canaries: {len(waits)}, {failed} failed, median {median:.3f} s, most {waits[-1]:.2f} s")
    reasons = Counter(" ".join(one.problem.split()[:9]) for one in found if one.problem)
    print(*(f"  {count:3} {reason}" for reason, count in reasons.most_common(12)), sep="\n")
    if given.plot:
        plot(found, given.plot)
    late = any(one.seconds > PATIENCE * SECONDS * PROCESSES for one in found)
    return 1 if late or canaries.problems else 0


if __name__ == "__main__":
    sys.exit(main())
